/* The engine: one thread that waits for sockets and timers. */
#ifndef AIORDMA_SOFTWARE_ENGINE_H
#define AIORDMA_SOFTWARE_ENGINE_H

#include "device.h"
#include "timers.h"

/* A descriptor that the engine's thread waits for. ready runs there, with the lock held. */
struct sw_watch {
    void (*ready)(struct sw_watch *watch, uint32_t events); /* EPOLLIN, ... */
    int fd;
    uint32_t events;
    uint32_t slot; /* the engine's; 0: not watched */
    int epoll;     /* the one that it is in: the engine's, or one that a program's thread serves */
};

/* Start watching; the engine's thread is started by the first. The watch is the caller's memory. */
int sw_watch(struct sw_watch *watch, int fd, uint32_t events);
/*
 * Change what is waited for; 0 events: nothing for now. Only from nothing to something can fail, for
 * want of memory: then nothing is waited for, and the caller must try again later, or do without.
 */
int sw_rewatch(struct sw_watch *watch, uint32_t events);
/* ready is not called any more; before the descriptor is closed. Nothing if not watched. */
void sw_unwatch(struct sw_watch *watch);
/*
 * Have it wait in another epoll, which sw_serve is called for; -1: in the engine's own. If that has
 * no memory for it, it waits where it did.
 */
int sw_move(struct sw_watch *watch, int epoll);
/* Serve what is ready in such an epoll. */
void sw_serve(int epoll);

/* Run once, milliseconds from now: 0 as soon as the engine can. One that runs is set anew. */
int sw_call_later(struct sw_timer *timer, uint32_t milliseconds);
void sw_cancel(struct sw_timer *timer); /* nothing if it does not run */

/*
 * In a fork's child: its thread is the parent's. Close what was watched (the sockets go on in the
 * parent, and hear nothing of it), forget all watches and timers; begin anew.
 */
void sw_engine_forked(void);

#endif
