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
 * The sockets whose packets make completions on one channel (or on one queue without a channel), in
 * an epoll. While the program polls its queues often, they are lent to its thread: the channel's
 * descriptor is readable when they are, and a poll reads them. When it has not polled for a while,
 * the engine serves them, until it polls often again.
 */
struct sw_progress {
    int outer;             /* the channel's descriptor, an epoll; -1: none */
    struct sw_watch watch; /* of the sockets' epoll; the engine serves it while they are not lent */
    struct sw_member *members; /* also read without the lock */
    int is_lent;
    struct sw_timer timer; /* runs while they are lent */
    uint32_t looks, looks_before, tick;
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

/* A socket that can be lent. */
struct sw_member {
    struct sw_watch *watch;
    struct sw_progress *progress; /* NULL: the engine has it */
    struct sw_member *next, **link;
};

void sw_progress_begin(struct sw_progress *progress, int outer);
/* End a progress without sockets. */
void sw_progress_end(struct sw_progress *progress);
/*
 * Add a socket, or give it back to the engine. Without memory for that, it stays where it is, and
 * is served there.
 */
void sw_progress_join(struct sw_progress *progress, struct sw_member *member);
void sw_progress_leave(struct sw_member *member);
/* Take a socket out in any case: its progress may be destroyed. It can then be unwatched. */
void sw_progress_part(struct sw_member *member);
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

#endif
