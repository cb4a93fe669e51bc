/*
 * Tests timers: the next one to expire is always first, after any series of calls that set and
 * cancel timers. With many timers, these calls are about as fast as with a few. Prints nothing and
 * returns 0, or prints the error and returns 1.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "software/engine.h"

enum {
    FEW = 50,
    DEADLINES = 20, /* fewer than timers, so that some timers have the same deadline */
    STEPS = 200000,
    MANY = 300000, /* a search through all timers for each of them would take an hour */
    PRIME = 7919,
};

static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    printf("%s\n", what);
    exit(1);
}

static uint32_t random_below(uint32_t limit)
{
    static uint64_t state = 1;

    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % limit;
}

static const struct sw_timer *earliest(const struct sw_timer *all)
{
    const struct sw_timer *first = NULL;

    for (const struct sw_timer *each = all; each < all + FEW; each++)
        if (each->deadline && (!first || each->deadline < first->deadline ||
                               (each->deadline == first->deadline && each->number < first->number)))
            first = each;
    return first;
}

static void compare_with_a_search(void)
{
    static struct sw_timer all[FEW];
    struct sw_timers timers = {0};

    for (int i = 0; i < STEPS; i++) {
        struct sw_timer *one = &all[random_below(FEW)];
        if (!random_below(4))
            one = timers.first ? timers.first : one; /* as if it had expired */
        if (one->deadline) {
            sw_timers_remove(&timers, one);
            check(!one->deadline, "a timer that was removed has a deadline");
        } else {
            one->deadline = 1 + random_below(DEADLINES);
            sw_timers_add(&timers, one);
        }
        check(timers.first == earliest(all), "another timer is the next one");
    }
}

static void never(struct sw_timer *timer)
{
    (void)timer;
    check(0, "a timer that was cancelled has expired");
}

static void set_and_cancel_many(void)
{
    struct sw_timer *all = calloc(MANY, sizeof(*all));

    check(all != NULL, "no memory");
    for (uint32_t i = 0; i < MANY; i++) {
        all[i].expired = never;
        sw_lock();
        check(!sw_call_later(&all[i], 3600000), "a timer cannot be set");
        sw_unlock();
    }
    for (uint64_t i = 0; i < MANY; i++) {
        sw_lock();
        sw_cancel(&all[i * PRIME % MANY]);
        sw_unlock();
    }
    free(all);
}

int main(void)
{
    compare_with_a_search();
    set_and_cancel_many();
    return 0;
}
