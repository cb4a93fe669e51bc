/*
 * Replaces the engine by one without a thread and without a clock. The fuzzer serves the sockets
 * and expires the timers, so that each run of an input does the same. For the same reason, the
 * device's random bytes are a fixed series.
 */
#include "world.h"

#include "software/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

enum { MOST_WATCHES = 64, MOST_ROUNDS = 20000 };

static struct sw_watch *watches[MOST_WATCHES]; /* by slot; slot 0 is not used */
static int has_hung_up[MOST_WATCHES];          /* the edge was reported (EPOLLET) */
static struct sw_timers timers;
static uint64_t clock_milliseconds = 1;
static uint64_t drawn;

void fail(const char *reason)
{
    fprintf(stderr, "oracle: %s\n", reason);
    abort();
}

int sw_watch(struct sw_watch *watch, int fd, uint32_t events)
{
    for (uint32_t slot = 1; slot < MOST_WATCHES; slot++)
        if (!watches[slot]) {
            watches[slot] = watch;
            has_hung_up[slot] = 0;
            watch->fd = fd;
            watch->events = events;
            watch->slot = slot;
            return 0;
        }
    return ENOMEM;
}

int sw_rewatch(struct sw_watch *watch, uint32_t events)
{
    if (!watch->slot || watch->events == events)
        return 0;
    watch->events = events;
    has_hung_up[watch->slot] = 0;
    return 0;
}

void sw_unwatch(struct sw_watch *watch)
{
    watches[watch->slot] = NULL;
    watch->slot = 0;
}

void sw_cancel(struct sw_timer *timer)
{
    if (timer->deadline)
        sw_timers_remove(&timers, timer);
}

int sw_call_later(struct sw_timer *timer, uint32_t milliseconds)
{
    sw_cancel(timer);
    timer->deadline = clock_milliseconds + milliseconds;
    sw_timers_add(&timers, timer);
    return 0;
}

void sw_engine_forked(void)
{
}

/* -- in place of progress.c: this engine serves all sockets, then releases held objects -------- */

static struct sw_held *held;

void sw_progress_begin(struct sw_progress *progress, int outer)
{
    progress->outer = outer;
    progress->serves = 1;
}

void sw_progress_end(struct sw_progress *progress)
{
    progress->serves = 0;
}

void sw_progress_join(struct sw_progress *progress, struct sw_member *member)
{
    member->progress = progress;
}

void sw_progress_leave(struct sw_member *member)
{
    member->progress = NULL;
}

int sw_progress_watch(struct sw_progress *progress, struct sw_member *member, int fd,
                      uint32_t events)
{
    member->progress = progress;
    return sw_watch(member->watch, fd, events);
}

void sw_progress_unwatch(struct sw_member *member)
{
    member->progress = NULL;
    sw_unwatch(member->watch);
}

void sw_progress_lend(struct sw_progress *progress)
{
    (void)progress;
}

int sw_is_engine(void)
{
    return 1;
}

void sw_begin_wait(struct sw_wait *wait, struct sw_progress *own, int fd, int blocks)
{
    (void)own;
    (void)blocks;
    wait->fd = fd;
    wait->is_ready = wait->count = 0;
}

int sw_serve_waited(struct sw_wait *wait, const int *has_event)
{
    (void)wait;
    (void)has_event;
    return 0;
}

int sw_wait_for(struct sw_wait *wait)
{
    (void)wait;
    fail("a call blocks");
}

void sw_end_wait(struct sw_wait *wait)
{
    (void)wait;
}

int sw_relieve(void)
{
    return 0;
}

int sw_progress_look(struct sw_progress *progress, int is_poll)
{
    (void)progress;
    (void)is_poll;
    return 0;
}

int sw_progress_has_members(const struct sw_progress *progress)
{
    (void)progress;
    return 0;
}

int sw_progress_is_looker(struct sw_progress *progress, const void *queue)
{
    (void)progress;
    (void)queue;
    return 1;
}

void sw_progress_took_event(struct sw_progress *progress)
{
    (void)progress;
}

void sw_progress_took_completions(struct sw_progress *progress)
{
    (void)progress;
}

void sw_progress_forked(void)
{
}

void sw_hold(struct sw_progress *progress, struct sw_held *what)
{
    (void)progress;
    if (what->link)
        return;
    what->next = held;
    if (held)
        held->link = &what->next;
    what->link = &held;
    held = what;
}

void sw_unhold(struct sw_held *what)
{
    if (!what->link)
        return;
    *what->link = what->next;
    if (what->next)
        what->next->link = what->link;
    what->link = NULL;
}

static int release_one(void)
{
    struct sw_held *first = held;

    if (!first)
        return 0;
    sw_unhold(first);
    first->release(first, 0);
    return 1;
}

/* Serve each ready socket once. 1: a socket was ready. */
static int serve_once(void)
{
    int served = 0;

    for (uint32_t slot = 1; slot < MOST_WATCHES; slot++) {
        struct sw_watch *watch = watches[slot];
        if (!watch || !watch->events)
            continue;
        uint32_t events = socket_events(watch->fd) & (watch->events | EPOLLERR | EPOLLHUP);
        if (!events)
            continue;
        if (watch->events & (uint32_t)EPOLLET) {
            if (has_hung_up[slot])
                continue;
            has_hung_up[slot] = 1;
        }
        sw_begin_turn();
        watch->ready(watch, events);
        served = 1;
    }
    return served;
}

/* Expire the next timer that is due. 1: there was one. */
static int expire_one(void)
{
    struct sw_timer *timer = timers.first;

    if (!timer || timer->deadline > clock_milliseconds)
        return 0;
    sw_timers_remove(&timers, timer);
    sw_begin_turn();
    timer->expired(timer);
    return 1;
}

void serve(void)
{
    sw_lock();
    for (int round = 0; serve_once() || expire_one() || release_one(); round++)
        if (round == MOST_ROUNDS)
            fail("a socket is ready for ever, and nobody sees to it");
    sw_unlock();
}

void pass(uint32_t milliseconds)
{
    sw_lock();
    clock_milliseconds += milliseconds;
    for (int round = 0; expire_one(); round++)
        if (round == MOST_ROUNDS)
            fail("a timer is set anew for ever");
    sw_unlock();
}

void begin_anew(void)
{
    drawn = 0;
    sw_lock_forked(); /* forgets the random numbers that are left */
}

ssize_t __wrap_getrandom(void *bytes, size_t size, unsigned int flags);

ssize_t __wrap_getrandom(void *bytes, size_t size, unsigned int flags)
{
    unsigned char *at = bytes;

    (void)flags;
    for (size_t i = 0; i < size; i++) {
        /* splitmix64 */
        uint64_t mixed = drawn++ * 0x9e3779b97f4a7c15u + 0x1234567;
        mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
        mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
        at[i] = (unsigned char)(mixed >> 40);
    }
    return (ssize_t)size;
}
