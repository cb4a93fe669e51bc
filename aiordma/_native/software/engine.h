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
    int epoll;     /* that has fd: the engine's, or one that the program's thread serves */
    int is_last;   /* served after others of that epoll: a new peer came after what these have */
};

/*
 * Start watching, in an epoll that the caller passes to sw_serve; -1: in the engine's own. The first
 * watch starts the engine's thread. The caller owns the watch.
 */
int sw_watch_in(int epoll, struct sw_watch *watch, int fd, uint32_t events);
int sw_watch(struct sw_watch *watch, int fd, uint32_t events); /* in the engine's own */
/*
 * Change the events to wait for; 0: none for now. Only a change from none to some can fail, for
 * lack of memory. Then nothing is watched, and the caller must try again later, or do without.
 */
int sw_rewatch(struct sw_watch *watch, uint32_t events);
/*
 * Stop reporting events of a watched epoll, or report them again. The epoll stays watched: adding an
 * epoll takes as long as it has descriptors. Not for sockets, which report errors in any case.
 */
void sw_mute(struct sw_watch *watch, int is_muted);
/* Stop watching, before the descriptor is closed. Do nothing if it is not watched. */
void sw_unwatch(struct sw_watch *watch);
/* Move a watch to another epoll, or -1. If there is no memory for that, it stays where it is. */
int sw_move(struct sw_watch *watch, int epoll);
/* Serve the ready descriptors of such an epoll. Returns whether there was one. */
int sw_serve(int epoll);
/*
 * A thread of the program's polls and finds nothing: it serves what the engine's thread would wake
 * for, which then only looks each millisecond. Takes the lock. Returns whether there was something.
 */
int sw_relieve(void);
/*
 * In a simulation, which has no thread: serve what is ready, and the timers that are due. Returns
 * the engine's epoll; -1: it has not begun. sw_engine_deadline: of the next timer; UINT64_MAX: none.
 */
int sw_engine_turn(void);
uint64_t sw_engine_deadline(void);
extern const struct sw_state sw_engine_state;
/* Whether the engine's thread makes this call, and not the program. */
int sw_is_engine(void);

/* Run a timer once, after this time; 0: as soon as possible. A running timer is set again. */
int sw_call_later(struct sw_timer *timer, uint32_t milliseconds);
void sw_cancel(struct sw_timer *timer); /* does nothing if it is not running */
/* Whether the timer is running, and runs out within this time. */
int sw_is_due(const struct sw_timer *timer, uint32_t microseconds);

/*
 * In a fork's child: the thread is the parent's. Close the watched descriptors (the parent's
 * sockets are not affected), and forget all watches and timers.
 */
void sw_engine_forked(void);

#endif
