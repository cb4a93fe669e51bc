/* Timers in the order of their deadlines: a pairing heap, whose links are in the timers. */
#ifndef AIORDMA_SOFTWARE_TIMERS_H
#define AIORDMA_SOFTWARE_TIMERS_H

#include <stdint.h>

struct sw_timer {
    void (*expired)(struct sw_timer *timer); /* on the engine's thread, with the lock held */
    uint64_t deadline;                       /* 0: not running */
    /* Of the heap: */
    uint64_t number; /* of timers with the same deadline, the lowest is first */
    struct sw_timer *child, *next, **link;
};

struct sw_timers {
    struct sw_timer *first; /* the next to expire, or NULL */
    uint64_t count;         /* timers that were ever added */
};

/*
 * Neither function allocates memory or fails. The added timer is not running, and has its deadline.
 */
void sw_timers_add(struct sw_timers *timers, struct sw_timer *timer);
/* Remove a running timer, and set its deadline to 0. Takes logarithmic time on average. */
void sw_timers_remove(struct sw_timers *timers, struct sw_timer *timer);

#endif
