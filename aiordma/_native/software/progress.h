/* Progress in the program's own thread. */
#ifndef AIORDMA_SOFTWARE_PROGRESS_H
#define AIORDMA_SOFTWARE_PROGRESS_H

#include "engine.h"

/* Something that is kept back for the program's next post to take along. */
struct sw_held {
    void (*release)(struct sw_held *held, int is_late); /* nothing took it along */
    struct sw_held *next, **link;                       /* link NULL: it is not held */
    uint32_t tick;
};

/*
 * The sockets whose packets make completions on one channel (or on one queue without a channel),
 * in an epoll of their own. While the program looks at its queues all the time they are lent to
 * its thread: the channel's descriptor is readable when they are, and a look reads them. As soon
 * as it has not looked for a while the engine serves them, until it looks often again.
 */
struct sw_progress {
    int outer;             /* the channel's descriptor, an epoll; -1: there is none */
    struct sw_watch watch; /* of the sockets' epoll, by the engine while they are not lent */
    struct sw_member *members;
    int is_lent;
    struct sw_timer timer; /* runs while they are */
    uint32_t looks, looks_before, tick;
    uint32_t pace; /* of the looks while they are not */
    uint64_t pace_since;
    struct sw_held *held;
    int has_polled; /* since something was held */
    uint32_t looks_in_vain;
    int serves; /* they are being served, in the program's thread */
};

/* A socket that may be among them. */
struct sw_member {
    struct sw_watch *watch;
    struct sw_progress *progress; /* NULL: the engine's */
    struct sw_member *next, **link;
};

void sw_progress_begin(struct sw_progress *progress, int outer);
/* No socket is in it any more. */
void sw_progress_end(struct sw_progress *progress);
/*
 * A socket comes, or goes back to the engine. If it cannot, for want of memory, it stays where it
 * is, and is served there.
 */
void sw_progress_join(struct sw_progress *progress, struct sw_member *member);
void sw_progress_leave(struct sw_member *member);
/* It goes in any case: what it is in may be destroyed. It may not be watched from then on. */
void sw_progress_part(struct sw_member *member);
/* The program looks for an event, or polls an empty queue. Whether there was something to serve. */
int sw_progress_look(struct sw_progress *progress, int is_poll);
/* It has taken an event, or completions. */
void sw_progress_took_event(struct sw_progress *progress);
void sw_progress_took_completions(struct sw_progress *progress);
/* Hold something back until the program has had its chance. */
void sw_hold(struct sw_progress *progress, struct sw_held *held);
void sw_unhold(struct sw_held *held); /* nothing if it is not held */

#endif
