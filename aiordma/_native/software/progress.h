/* Progress in the program's own thread. */
#ifndef AIORDMA_SOFTWARE_PROGRESS_H
#define AIORDMA_SOFTWARE_PROGRESS_H

#include "engine.h"

/* Something that is held, to be sent with the program's next post. */
struct sw_held {
    void (*release)(struct sw_held *held, int is_late); /* no post came */
    struct sw_held *next, **link;                       /* link NULL: it is not held */
    struct sw_progress *progress;
    uint32_t tick;
};

/*
 * The sockets whose packets make events on one channel (or completions on one queue without a
 * channel), in an epoll. They are lent to the program's thread while it polls often, or while it
 * waits for an event in the device: it then reads them itself. When it has not polled for a while,
 * the engine serves them, until they are lent again.
 */
struct sw_progress {
    int outer;             /* the channel's descriptor, an epoll; -1: none */
    struct sw_watch watch; /* of the sockets' epoll; the engine serves it while they are not lent */
    struct sw_member *members; /* also read without the lock */
    int is_lent;
    int is_shown; /* the channel's descriptor is readable when they are */
    struct sw_progress *next_lent, **lent_link;
    pthread_t thread;          /* that they are lent to: it has looked last */
    struct sw_waited *waiters; /* threads that serve them while they wait */
    struct sw_timer timer;     /* runs while they are lent, except while a thread waits for long */
    uint32_t looks, looks_before, tick;
    uint32_t vain; /* looks that served a socket, since the last event */
    uint32_t pace; /* polls while they are not lent */
    uint64_t pace_since;
    struct sw_held *held;
    uint32_t held_count;
    int has_polled; /* the program took completions since something was held */
    uint32_t looks_in_vain;
    int serves;           /* the program's thread is serving them */
    const void *looker;   /* the queue whose polls serve them; atomic */
    uint32_t passed_over; /* polls of other queues since then; atomic */
};

/* A thread that looks for an event and waits for it, and serves sockets meanwhile. */
enum { SW_MOST_WAITED = 8 };
struct sw_wait {
    int fd, is_ready; /* the descriptor that it waits for */
    int count;
    struct sw_waited {
        struct sw_progress *progress;   /* NULL: it has ended */
        struct sw_waited *next, **link; /* in progress->waiters */
    } each[SW_MOST_WAITED];
};

/* A socket that can be lent. */
struct sw_member {
    struct sw_watch *watch;       /* set by the owner */
    struct sw_progress *progress; /* NULL: the engine has it */
    struct sw_member *next, **link;
};

void sw_progress_begin(struct sw_progress *progress, int outer);
/* End it. The engine serves the sockets that are still in it. */
void sw_progress_end(struct sw_progress *progress);
/* Start watching a socket in the progress. The engine has it if that is NULL, or finds no memory. */
int sw_progress_watch(struct sw_progress *progress, struct sw_member *member, int fd,
                      uint32_t events);
/* Stop watching it, before it is closed. Does nothing if it is not watched. */
void sw_progress_unwatch(struct sw_member *member);
/*
 * Move a watched socket here, or give it back to the engine. Without memory for that, it stays where
 * it is, and is served there.
 */
void sw_progress_join(struct sw_progress *progress, struct sw_member *member);
void sw_progress_leave(struct sw_member *member);
/* Lend the sockets: the program can be expected to poll its descriptor or its queue soon. */
void sw_progress_lend(struct sw_progress *progress);
/*
 * The calling thread is going to look for an event: at the sockets of `own` if they are lent, and
 * then maybe wait for the descriptor. If it is going to block, it serves all sockets that are lent
 * to it, and those of `own` are.
 */
void sw_begin_wait(struct sw_wait *wait, struct sw_progress *own, int fd, int blocks);
/* Serve the sockets. has_event: set by an event. Returns whether a socket had something. */
int sw_serve_waited(struct sw_wait *wait, const int *has_event);
/* Wait with the lock released, until the descriptor or a socket is ready. Returns an errno. */
int sw_wait_for(struct sw_wait *wait);
void sw_end_wait(struct sw_wait *wait);
/* The program polls for an event, or an empty queue. Returns whether a socket had something. */
int sw_progress_look(struct sw_progress *progress, int is_poll);
/* Whether a poll can serve a socket. Needs no lock: a socket that joins meanwhile is served later. */
int sw_progress_has_members(const struct sw_progress *progress);
/*
 * Whether a poll of this queue serves the sockets. A program that polls several queues of a channel,
 * one after the other, serves them once in each round. Needs no lock.
 */
int sw_progress_is_looker(struct sw_progress *progress, const void *queue);
/* The program has taken an event, or completions. */
void sw_progress_took_event(struct sw_progress *progress);
void sw_progress_took_completions(struct sw_progress *progress);
/* Hold something until the program has had time to post. */
void sw_hold(struct sw_progress *progress, struct sw_held *held);
void sw_unhold(struct sw_held *held); /* does nothing if it is not held */

void sw_progress_forked(void);
extern const struct sw_state sw_progress_state;

#endif
