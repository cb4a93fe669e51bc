/* Timers in the order of their deadlines: a pairing heap, whose links are in the timers. */
#ifndef AIORDMA_SOFTWARE_TIMERS_H
#define AIORDMA_SOFTWARE_TIMERS_H

#include <stdint.h>

struct sw_timer {
    void (*expired)(struct sw_timer *timer); /* on the engine's thread, with the lock held */
    uint64_t deadline;                       /* 0: not running */
    /* The heap's: */
    uint64_t number; /* of those with the same deadline the lowest is first */
    struct sw_timer *child, *next, **link;
};

struct sw_timers {
    struct sw_timer *first; /* the next to expire; NULL: there are none */
    uint64_t count;         /* of those that were ever set */
};

/* Neither needs memory, so neither can fail. The timer is not running, and has its deadline. */
void sw_timers_add(struct sw_timers *timers, struct sw_timer *timer);
/* Its deadline is 0 then. Takes the logarithm of how many there are, as adding does, on average. */
void sw_timers_remove(struct sw_timers *timers, struct sw_timer *timer);

#endif
