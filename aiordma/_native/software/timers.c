/*
 * Timers: a heap in which each timer comes before its children, which are in a list. Ten thousand
 * connections have as many timers: searching through them would hold the device's lock for seconds.
 */
#include "timers.h"

#include <stddef.h>

static int is_before(const struct sw_timer *one, const struct sw_timer *other)
{
    if (one->deadline != other->deadline)
        return one->deadline < other->deadline;
    return one->number < other->number;
}

/* Merge two heaps. Neither has a next, and either can be NULL. */
static struct sw_timer *merge(struct sw_timer *one, struct sw_timer *other)
{
    if (!one || !other)
        return one ? one : other;
    if (is_before(other, one)) {
        struct sw_timer *first = other;
        other = one;
        one = first;
    }
    other->next = one->child;
    if (other->next)
        other->next->link = &other->next;
    other->link = &one->child;
    one->child = other;
    return one;
}

/* Remove the first timer from a list. */
static struct sw_timer *pop(struct sw_timer **list)
{
    struct sw_timer *first = *list;

    if (first) {
        *list = first->next;
        first->next = NULL;
    }
    return first;
}

/* Merge a list to one heap: first in pairs, which keeps the heap flat, then all pairs. */
static struct sw_timer *merge_all(struct sw_timer *list)
{
    struct sw_timer *pairs = NULL, *whole = NULL;

    while (list) {
        struct sw_timer *one = pop(&list);
        struct sw_timer *pair = merge(one, pop(&list));
        pair->next = pairs;
        pairs = pair;
    }
    while (pairs)
        whole = merge(whole, pop(&pairs));
    return whole;
}

static void set_first(struct sw_timers *timers, struct sw_timer *first)
{
    timers->first = first;
    if (first)
        first->link = &timers->first;
}

void sw_timers_add(struct sw_timers *timers, struct sw_timer *timer)
{
    timer->number = timers->count++;
    timer->child = timer->next = NULL;
    set_first(timers, merge(timers->first, timer));
}

void sw_timers_remove(struct sw_timers *timers, struct sw_timer *timer)
{
    *timer->link = timer->next;
    if (timer->next)
        timer->next->link = timer->link;
    set_first(timers, merge(timers->first, merge_all(timer->child)));
    timer->child = timer->next = NULL;
    timer->link = NULL;
    timer->deadline = 0;
}
