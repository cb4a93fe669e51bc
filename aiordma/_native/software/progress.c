/*
 * Progress in the program's own thread. If the engine's thread reads a packet, the program learns
 * of it after two changes between threads: one to the engine, and one to the program. While the
 * program polls often, has just made a call, or waits in the device, the packet wakes the program's
 * own thread, which reads it. The engine only checks each millisecond whether the program still
 * polls: peers must not wait for a program that computes.
 */
#include "progress.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

/* The time that a thread has to poll. A held answer waits for two ticks at most. */
enum { TICK_MILLISECONDS = 1, EARLY_MICROSECONDS = 250 };
/* So many polls within a tick are often. Taking an event counts as several polls. */
enum { LOOKS = 8, LOOKS_OF_EVENT = 4 };
/* After so many polls of other queues, another queue's polls serve the sockets. */
enum { PASSES = 64 };
/* After so many looks that served a socket and made no event, the engine serves them. */
enum { MOST_VAIN = 16 };

static struct sw_progress *lent; /* those whose sockets are lent */

const struct sw_state sw_progress_state = {&lent, sizeof(lent)};

/* -- held answers ------------------------------------------------------------------------------ */

void sw_hold(struct sw_progress *progress, struct sw_held *held)
{
    if (held->link)
        return;
    held->progress = progress;
    progress->held_count++;
    held->tick = progress->tick;
    held->next = progress->held;
    if (held->next)
        held->next->link = &held->next;
    held->link = &progress->held;
    progress->held = held;
    progress->has_polled = 0;
    progress->looks_in_vain = 0;
}

void sw_unhold(struct sw_held *held)
{
    if (!held->link)
        return;
    *held->link = held->next;
    if (held->next)
        held->next->link = held->link;
    held->link = NULL;
    held->progress->held_count--;
}

/* Find one of an earlier tick, or any. */
static struct sw_held *find_held(const struct sw_progress *progress, int any)
{
    struct sw_held *held = progress->held;

    while (held && !any && held->tick == progress->tick)
        held = held->next;
    return held;
}

/* Release those of earlier ticks, or all. The release of one can end others. */
static void release(struct sw_progress *progress, int is_late, int all)
{
    struct sw_held *held;

    while ((held = find_held(progress, all))) {
        sw_unhold(held);
        held->release(held, is_late);
    }
}

/*
 * A program that has taken the completions, and polls again and again, has had time to post. It can
 * poll a few times before: an event loop makes a turn or two until the waiting task has its
 * message. If several tasks have messages, each of them polls when it has posted, and waits again.
 */
static void release_after_turn(struct sw_progress *progress)
{
    if (!progress->held || !progress->has_polled)
        return;
    if (++progress->looks_in_vain >= LOOKS * progress->held_count)
        release(progress, 0, 1);
}

/* -- lending ----------------------------------------------------------------------------------- */

/* Whether the channel's descriptor is readable when a socket is. */
static void show(struct sw_progress *progress, int is_shown)
{
    struct epoll_event event = {.events = is_shown ? EPOLLIN : 0};

    if (progress->outer < 0 || progress->is_shown == is_shown)
        return;
    progress->is_shown = is_shown;
    if (sw_system->epoll_ctl(progress->outer, EPOLL_CTL_MOD, progress->watch.fd, &event)) {
        /* This cannot fail: the descriptor is in that epoll. */
    }
}

/*
 * The sockets' epoll is always in the engine's epoll and in the channel's, and is muted in one of
 * them. Adding it each time would take as long as there are sockets: the kernel goes through all of
 * them to rule out that epolls watch each other.
 */
static void hand_out(struct sw_progress *progress)
{
    sw_mute(&progress->watch, 1);
    progress->is_lent = 1;
    progress->thread = pthread_self();
    progress->next_lent = lent;
    progress->lent_link = &lent;
    if (lent)
        lent->lent_link = &progress->next_lent;
    lent = progress;
}

static void unlist(struct sw_progress *progress)
{
    *progress->lent_link = progress->next_lent;
    if (progress->next_lent)
        progress->next_lent->lent_link = progress->lent_link;
    progress->is_lent = 0;
}

static void take_back(struct sw_progress *progress)
{
    sw_cancel(&progress->timer);
    sw_mute(&progress->watch, 0);
    show(progress, 0);
    unlist(progress);
    release(progress, 1, 1);
}

static void tick(struct sw_timer *timer)
{
    struct sw_progress *progress = SW_CONTAINER(timer, struct sw_progress, timer);

    int has_looked = progress->looks != progress->looks_before;
    progress->looks_before = progress->looks;
    if (!has_looked && progress->waiters) {
        release(progress, 1, 1); /* the ticks end: these threads serve the sockets */
        return;
    }
    if (!has_looked || !progress->members) {
        take_back(progress);
        return;
    }
    if (sw_call_later(timer, TICK_MILLISECONDS)) {
        /* This cannot fail: the engine runs, and it makes this call. */
    }
    release(progress, 1, 0);
    progress->tick++;
}

static int start_ticks(struct sw_progress *progress)
{
    progress->looks_before = progress->looks;
    progress->timer.expired = tick;
    return sw_call_later(&progress->timer, TICK_MILLISECONDS);
}

void sw_progress_lend(struct sw_progress *progress)
{
    progress->vain = 0;
    if (progress->is_lent || !progress->members || start_ticks(progress))
        return;
    show(progress, 1);
    hand_out(progress);
}

/* A look served a socket and made no event: a peer decides what it sends. */
static void in_vain(struct sw_progress *progress)
{
    if (++progress->vain < MOST_VAIN && !sw_turn_is_over())
        return;
    progress->vain = MOST_VAIN;
    if (progress->is_lent)
        take_back(progress);
}

/* Count polls while the engine serves the sockets. Lend them if there are many. */
static void keep_pace(struct sw_progress *progress, uint32_t looks)
{
    progress->pace += looks;
    if (progress->pace < LOOKS || !progress->members)
        return;
    uint64_t time = sw_system->now();
    int is_often = time - progress->pace_since < TICK_MILLISECONDS * 1000000u;
    progress->pace = 0;
    progress->pace_since = time;
    if (is_often)
        sw_progress_lend(progress);
}

int sw_progress_look(struct sw_progress *progress, int is_poll)
{
    progress->looks++;
    progress->thread = pthread_self();
    if (!progress->is_lent) {
        if (is_poll)
            keep_pace(progress, 1);
        return 0;
    }
    /* If the engine did this, it would take the lock. */
    if (sw_is_due(&progress->timer, EARLY_MICROSECONDS))
        tick(&progress->timer);
    release_after_turn(progress);
    struct sw_member *only = progress->members;
    if (!only)
        return 0;
    progress->serves = 1;
    uint64_t before = sw_device.reads;
    /* A single socket is read without asking epoll first. */
    if (!only->next && only->watch->events == EPOLLIN)
        only->watch->ready(only->watch, EPOLLIN);
    else
        sw_serve(progress->watch.fd);
    int served = sw_device.reads != before;
    progress->serves = 0;
    return served;
}

int sw_progress_has_members(const struct sw_progress *progress)
{
    return __atomic_load_n(&progress->members, __ATOMIC_RELAXED) != NULL;
}

int sw_progress_is_looker(struct sw_progress *progress, const void *queue)
{
    const void *looker = __atomic_load_n(&progress->looker, __ATOMIC_RELAXED);

    if (looker && looker != queue &&
        __atomic_add_fetch(&progress->passed_over, 1, __ATOMIC_RELAXED) < PASSES)
        return 0;
    /* The other queue is not polled any more, or does not exist any more. */
    if (looker != queue)
        __atomic_store_n(&progress->looker, queue, __ATOMIC_RELAXED);
    __atomic_store_n(&progress->passed_over, 0, __ATOMIC_RELAXED);
    return 1;
}

void sw_progress_took_event(struct sw_progress *progress)
{
    progress->vain = 0;
    if (!progress->is_lent)
        keep_pace(progress, LOOKS_OF_EVENT);
}

void sw_progress_took_completions(struct sw_progress *progress)
{
    progress->has_polled = 1;
}

/* -- waiting in the device --------------------------------------------------------------------- */

/* The ticks release what is held. */
static void keep_ticking(struct sw_progress *progress)
{
    if (progress->held && !progress->timer.deadline && start_ticks(progress))
        release(progress, 1, 1);
}

static void wait_also(struct sw_wait *wait, struct sw_progress *progress)
{
    struct sw_waited *each = &wait->each[wait->count++];

    *each = (struct sw_waited){.progress = progress, .next = progress->waiters};
    if (each->next)
        each->next->link = &each->next;
    each->link = &progress->waiters;
    progress->waiters = each;
    keep_ticking(progress);
}

void sw_begin_wait(struct sw_wait *wait, struct sw_progress *own, int fd, int blocks)
{
    wait->fd = fd;
    wait->is_ready = wait->count = 0;
    if (blocks && !own->is_lent && own->members && own->vain < MOST_VAIN)
        hand_out(own);
    if (own->is_lent)
        wait_also(wait, own);
    struct sw_progress *each = blocks ? lent : NULL;
    for (; each && wait->count < SW_MOST_WAITED; each = each->next_lent)
        if (each != own && pthread_equal(each->thread, pthread_self()))
            wait_also(wait, each);
}

void sw_end_wait(struct sw_wait *wait)
{
    for (int i = 0; i < wait->count; i++) {
        struct sw_waited *each = &wait->each[i];
        struct sw_progress *progress = each->progress;
        if (!progress)
            continue;
        *each->link = each->next;
        if (each->next)
            each->next->link = each->link;
        if (!progress->waiters && progress->is_lent && !progress->timer.deadline)
            take_back(progress);
    }
}

static void cancelled(void *wait)
{
    sw_lock();
    sw_end_wait(wait);
    sw_unlock();
}

int sw_wait_for(struct sw_wait *wait)
{
    struct pollfd wanted[1 + SW_MOST_WAITED] = {{.fd = wait->fd, .events = POLLIN}};
    int error;

    for (int i = 0; i < wait->count; i++) {
        const struct sw_progress *progress = wait->each[i].progress;
        wanted[1 + i].fd = progress && progress->is_lent ? progress->watch.fd : -1;
        wanted[1 + i].events = POLLIN;
    }
    sw_unlock();
    pthread_cleanup_push(cancelled, wait);
    error = sw_system->poll(wanted, 1 + (nfds_t)wait->count, -1) < 0 ? errno : 0;
    pthread_cleanup_pop(0);
    sw_lock();
    wait->is_ready = wanted[0].revents != 0;
    return error;
}

int sw_serve_waited(struct sw_wait *wait, const int *has_event)
{
    int has_served = 0;

    for (int i = 0; i < wait->count; i++) {
        struct sw_progress *progress = wait->each[i].progress;
        if (!progress || !progress->is_lent)
            continue;
        int served = sw_progress_look(progress, 0);
        has_served |= served;
        keep_ticking(progress);
        if (served && !*has_event)
            in_vain(progress);
    }
    return has_served;
}

/* -- sockets ----------------------------------------------------------------------------------- */

static void serve(struct sw_watch *watch, uint32_t events)
{
    (void)events;
    sw_serve(watch->fd);
}

static int open_epoll(struct sw_progress *progress)
{
    struct epoll_event muted = {.events = 0};
    int error = 0, fd = sw_system->epoll_create1(EPOLL_CLOEXEC);

    if (fd < 0)
        return errno;
    progress->watch.ready = serve;
    if (progress->outer >= 0 && sw_system->epoll_ctl(progress->outer, EPOLL_CTL_ADD, fd, &muted))
        error = errno;
    if (!error)
        error = sw_watch(&progress->watch, fd, EPOLLIN);
    if (error)
        sw_system->close(fd);
    return error;
}

void sw_progress_begin(struct sw_progress *progress, int outer)
{
    progress->outer = outer;
}

static void put_in(struct sw_progress *progress, struct sw_member *member)
{
    member->progress = progress;
    member->next = progress->members;
    if (member->next)
        member->next->link = &member->next;
    member->link = &progress->members;
    __atomic_store_n(&progress->members, member, __ATOMIC_RELAXED);
}

static void take_out(struct sw_member *member)
{
    __atomic_store_n(member->link, member->next, __ATOMIC_RELAXED);
    if (member->next)
        member->next->link = member->link;
    member->progress = NULL;
}

/* Give a socket back to the engine in any case. Without memory for that, it is not watched. */
static void part(struct sw_member *member)
{
    sw_progress_leave(member);
    if (!member->progress)
        return;
    (void)sw_rewatch(member->watch, 0);
    if (sw_move(member->watch, -1)) {
        /* This cannot fail: nothing is watched. */
    }
    take_out(member);
}

void sw_progress_end(struct sw_progress *progress)
{
    if (!progress->watch.slot)
        return;
    release(progress, 1, 1);
    while (progress->members)
        part(progress->members);
    for (struct sw_waited *each = progress->waiters; each; each = each->next)
        each->progress = NULL;
    if (progress->is_lent)
        unlist(progress);
    sw_cancel(&progress->timer);
    sw_unwatch(&progress->watch);
    sw_system->close(progress->watch.fd);
}

int sw_progress_watch(struct sw_progress *progress, struct sw_member *member, int fd,
                      uint32_t events)
{
    int is_in = progress && (progress->watch.slot || !open_epoll(progress));
    int error = sw_watch_in(is_in ? progress->watch.fd : -1, member->watch, fd, events);

    if (!error && is_in)
        put_in(progress, member);
    return error;
}

void sw_progress_unwatch(struct sw_member *member)
{
    if (member->progress)
        take_out(member);
    sw_unwatch(member->watch);
}

void sw_progress_join(struct sw_progress *progress, struct sw_member *member)
{
    if (member->progress == progress || (!progress->watch.slot && open_epoll(progress)) ||
        sw_move(member->watch, progress->watch.fd))
        return;
    if (member->progress)
        take_out(member);
    put_in(progress, member);
}

void sw_progress_leave(struct sw_member *member)
{
    if (member->progress && !sw_move(member->watch, -1))
        take_out(member);
}

void sw_progress_forked(void)
{
    lent = NULL;
}
