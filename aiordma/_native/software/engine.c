/*
 * The engine: one thread that waits for sockets and timers, and serves them with the device's lock
 * held. It starts with the first watch or timer, and runs until the process ends.
 */
#include "engine.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64, PART_OF_TURN = 8, FIRST_SLOTS = 64, RELIEF_NANOSECONDS = 10000000 };

/*
 * epoll returns a slot's number and generation. An event for a watch that has been removed since
 * then has an older generation, and is ignored.
 */
struct slot {
    struct sw_watch *watch; /* NULL: free */
    uint32_t generation;
    uint32_t next_free;
};

static struct {
    int runs;
    int epoll, bell;    /* bell: an eventfd that wakes the thread */
    struct slot *slots; /* slot 0 belongs to the bell */
    uint32_t slot_count, first_free;
    struct sw_timers timers;
    int is_turning; /* a thread of the program's does the engine's work */
} engine;

const struct sw_state sw_engine_state = {&engine, sizeof(engine)};

/* What the thread uses without the lock. */
static struct {
    pthread_t id;
    int epoll, bell;
    uint64_t next_deadline; /* of the timers; atomic: the thread sleeps again without the lock */
    uint64_t sleeps_until;  /* 0: it is awake; atomic */
    uint64_t relieved_at;   /* when a thread of the program's has served last; atomic */
} thread;

/* The watch of an event; NULL: it has been removed, or it is the bell. */
static struct sw_watch *watch_of(const struct epoll_event *event)
{
    const struct slot *slot = &engine.slots[(uint32_t)event->data.u64];

    return slot->generation == (uint32_t)(event->data.u64 >> 32) ? slot->watch : NULL;
}

static void serve(const struct epoll_event *event)
{
    struct sw_watch *watch = watch_of(event);

    sw_add_work(SW_FRAME_WORK);
    if (!(uint32_t)event->data.u64) {
        sw_system->quiet(engine.bell);
        return;
    }
    if (watch)
        watch->ready(watch, event->events);
}

int sw_serve(int epoll)
{
    struct epoll_event events[PART_OF_TURN];
    int count, served = 0;

    /* Serve all events that epoll_wait returned, or it would return the same ones again. */
    do {
        count = sw_system->epoll_wait(epoll, events, PART_OF_TURN, 0);
        for (int last = 0; last < 2; last++)
            for (int i = 0; i < count; i++) {
                const struct sw_watch *watch = watch_of(&events[i]);
                if (!watch || watch->is_last != last)
                    continue;
                serve(&events[i]);
                served = 1;
            }
    } while (count == PART_OF_TURN && !sw_turn_is_over());
    return served;
}

/* Publish the deadline of the first timer. */
static void publish_deadline(void)
{
    if (!sw_system->is_simulated)
        __atomic_store_n(&thread.next_deadline, sw_engine_deadline(), __ATOMIC_SEQ_CST);
}

static void expire(void)
{
    /* Timers that are set here wait for the next round, so that sockets are served first. */
    uint64_t time = sw_system->now();
    for (;;) {
        sw_give_way();
        struct sw_timer *timer = engine.timers.first;
        if (!timer || timer->deadline > time)
            break;
        sw_begin_turn();
        sw_timers_remove(&engine.timers, timer);
        publish_deadline();
        timer->expired(timer);
    }
}

static int patience(uint64_t deadline)
{
    if (deadline == UINT64_MAX)
        return -1;
    uint64_t time = sw_operating_system.now();
    if (deadline <= time)
        return 0;
    uint64_t left = (deadline - time + 999999) / 1000000;
    return left > 60000 ? 60000 : (int)left;
}

/*
 * Whether a thread of the program's does this work (sw_relieve). Packets that woke this one would
 * only delay that one. But it may have ended, or compute: look for them each millisecond.
 */
static int is_relieved(void)
{
    uint64_t since = __atomic_load_n(&thread.relieved_at, __ATOMIC_RELAXED);

    return since && sw_operating_system.now() - since < RELIEF_NANOSECONDS;
}

/*
 * Sleep until a descriptor is ready or a timer is due, with the lock released. The program's thread
 * can set the first timer anew meanwhile (progress.c). This then takes no lock. A simulation, in
 * which the thread has no part, can begin and end meanwhile.
 */
static int await_work(struct epoll_event *events)
{
    struct pollfd bell = {.fd = thread.bell, .events = POLLIN};
    int count = 0;

    while (!count) {
        uint64_t deadline = __atomic_load_n(&thread.next_deadline, __ATOMIC_SEQ_CST);
        __atomic_store_n(&thread.sleeps_until, deadline, __ATOMIC_SEQ_CST);
        /* A timer that was set before does not ring the bell. One that is set later does. */
        if (__atomic_load_n(&thread.next_deadline, __ATOMIC_SEQ_CST) < deadline)
            continue;
        int milliseconds = patience(deadline);
        if (milliseconds && is_relieved()) {
            sw_operating_system.poll(&bell, 1, 1);
            milliseconds = 0;
        }
        count = sw_operating_system.epoll_wait(thread.epoll, events, BATCH, milliseconds);
        if (sw_operating_system.now() >= __atomic_load_n(&thread.next_deadline, __ATOMIC_SEQ_CST))
            break;
    }
    __atomic_store_n(&thread.sleeps_until, 0, __ATOMIC_SEQ_CST);
    return count;
}

static void *run(void *unused)
{
    struct epoll_event events[BATCH];

    (void)unused;
    if (prctl(PR_SET_NAME, "aiordma-engine")) {
        /* The thread then keeps the program's name. */
    }
    sw_lock_engine();
    for (;;) {
        sw_unlock();
        int count = await_work(events);
        sw_lock_engine();
        for (int i = 0; i < count; i++) {
            sw_give_way();
            sw_begin_turn();
            serve(&events[i]);
        }
        expire();
    }
    return NULL;
}

int sw_relieve(void)
{
    int has_served = 0;

    sw_lock();
    if (engine.runs) {
        engine.is_turning = 1;
        has_served = sw_serve(engine.epoll);
        engine.is_turning = 0;
        __atomic_store_n(&thread.relieved_at, sw_operating_system.now(), __ATOMIC_RELAXED);
    }
    sw_unlock();
    return has_served;
}

int sw_engine_turn(void)
{
    struct epoll_event events[BATCH];

    if (!engine.runs)
        return -1;
    engine.is_turning = 1;
    int count = sw_system->epoll_wait(engine.epoll, events, BATCH, 0);
    for (int i = 0; i < count; i++) {
        sw_begin_turn();
        serve(&events[i]);
    }
    expire();
    engine.is_turning = 0;
    return engine.epoll;
}

uint64_t sw_engine_deadline(void)
{
    return engine.timers.first ? engine.timers.first->deadline : UINT64_MAX;
}

static int grow(void)
{
    uint32_t count = engine.slot_count ? 2 * engine.slot_count : FIRST_SLOTS;
    struct slot *slots = realloc(engine.slots, count * sizeof(*slots));

    if (!slots)
        return ENOMEM;
    for (uint32_t i = engine.slot_count ? engine.slot_count : 1; i < count; i++) {
        slots[i].watch = NULL;
        slots[i].generation = 0;
        slots[i].next_free = i + 1 < count ? i + 1 : 0;
    }
    if (!engine.slot_count)
        memset(&slots[0], 0, sizeof(slots[0]));
    engine.first_free = engine.slot_count ? engine.slot_count : 1;
    engine.slots = slots;
    engine.slot_count = count;
    return 0;
}

static int spawn(void)
{
    sigset_t all, before;
    pthread_attr_t attributes;

    thread.epoll = engine.epoll;
    thread.bell = engine.bell;
    /* Signals are for the program's own threads. */
    sigfillset(&all);
    int error = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error)
        return error;
    error = pthread_attr_init(&attributes);
    if (!error) {
        error = pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        if (!error)
            error = pthread_create(&thread.id, &attributes, run, NULL);
        pthread_attr_destroy(&attributes);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static int start(void)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
    int error = 0;

    if (engine.runs)
        return 0;
    if (!engine.slot_count && grow())
        return ENOMEM;
    engine.epoll = sw_system->epoll_create1(EPOLL_CLOEXEC);
    if (engine.epoll < 0)
        return errno;
    engine.bell = sw_system->eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine.bell < 0)
        error = errno;
    else if (sw_system->epoll_ctl(engine.epoll, EPOLL_CTL_ADD, engine.bell, &event))
        error = errno;
    if (!error && !sw_system->is_simulated)
        error = spawn();
    if (error) {
        if (engine.bell >= 0)
            sw_system->close(engine.bell);
        sw_system->close(engine.epoll);
        return error;
    }
    engine.runs = 1;
    publish_deadline();
    return 0;
}

void sw_engine_forked(void)
{
    for (uint32_t i = 0; i < engine.slot_count; i++)
        if (engine.slots[i].watch)
            sw_system->close(engine.slots[i].watch->fd);
    if (engine.runs) {
        sw_system->close(engine.epoll);
        sw_system->close(engine.bell);
    }
    free(engine.slots);
    memset(&engine, 0, sizeof(engine));
    if (!sw_system->is_simulated) /* a simulated host has no thread: it is the program's own */
        memset(&thread, 0, sizeof(thread));
}

static struct epoll_event event_of(const struct sw_watch *watch)
{
    struct epoll_event event = {.events = watch->events};

    event.data.u64 = (uint64_t)engine.slots[watch->slot].generation << 32 | watch->slot;
    return event;
}

int sw_is_engine(void)
{
    if (engine.is_turning || sw_system->is_simulated)
        return engine.is_turning;
    return engine.runs && pthread_equal(thread.id, pthread_self());
}

int sw_watch_in(int epoll, struct sw_watch *watch, int fd, uint32_t events)
{
    int error = start();

    if (!error && !engine.first_free)
        error = grow();
    if (error)
        return error;
    uint32_t slot = engine.first_free;
    watch->fd = fd;
    watch->events = events;
    watch->slot = slot;
    watch->epoll = epoll < 0 ? engine.epoll : epoll;
    struct epoll_event event = event_of(watch);
    if (events && sw_system->epoll_ctl(watch->epoll, EPOLL_CTL_ADD, fd, &event)) {
        watch->slot = 0;
        return errno;
    }
    engine.first_free = engine.slots[slot].next_free;
    engine.slots[slot].watch = watch;
    return 0;
}

int sw_watch(struct sw_watch *watch, int fd, uint32_t events)
{
    return sw_watch_in(-1, watch, fd, events);
}

int sw_rewatch(struct sw_watch *watch, uint32_t events)
{
    if (!watch->slot || watch->events == events)
        return 0;
    /* Remove it if there is no event to wait for: epoll always reports errors and hang-ups. */
    int operation = !events ? EPOLL_CTL_DEL : watch->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    watch->events = events;
    struct epoll_event event = event_of(watch);
    if (!sw_system->epoll_ctl(watch->epoll, operation, watch->fd, &event) ||
        operation != EPOLL_CTL_ADD)
        return 0;
    watch->events = 0;
    return errno;
}

void sw_mute(struct sw_watch *watch, int is_muted)
{
    struct epoll_event event = event_of(watch);

    if (is_muted)
        event.events = 0;
    if (sw_system->epoll_ctl(watch->epoll, EPOLL_CTL_MOD, watch->fd, &event)) {
        /* This cannot fail: the descriptor is in that epoll. */
    }
}

int sw_move(struct sw_watch *watch, int epoll)
{
    struct epoll_event event = event_of(watch);

    if (epoll < 0)
        epoll = engine.epoll;
    if (epoll == watch->epoll)
        return 0;
    /* Add it before removing it, so that a failure changes nothing. */
    if (watch->events && sw_system->epoll_ctl(epoll, EPOLL_CTL_ADD, watch->fd, &event))
        return errno;
    if (watch->events && sw_system->epoll_ctl(watch->epoll, EPOLL_CTL_DEL, watch->fd, NULL)) {
        /* This cannot fail: the descriptor is in that epoll. */
    }
    watch->epoll = epoll;
    return 0;
}

void sw_unwatch(struct sw_watch *watch)
{
    uint32_t slot = watch->slot;

    if (!slot)
        return;
    if (watch->events)
        sw_system->epoll_ctl(watch->epoll, EPOLL_CTL_DEL, watch->fd, NULL);
    engine.slots[slot].watch = NULL;
    engine.slots[slot].generation++;
    engine.slots[slot].next_free = engine.first_free;
    engine.first_free = slot;
    watch->slot = 0;
}

void sw_cancel(struct sw_timer *timer)
{
    if (!timer->deadline)
        return;
    sw_timers_remove(&engine.timers, timer);
    publish_deadline();
}

int sw_is_due(const struct sw_timer *timer, uint32_t microseconds)
{
    return timer->deadline && timer->deadline <= sw_system->now() + (uint64_t)microseconds * 1000u;
}

int sw_call_later(struct sw_timer *timer, uint32_t milliseconds)
{
    sw_cancel(timer);
    int error = start();
    if (error)
        return error;
    timer->deadline = sw_system->now() + (uint64_t)milliseconds * 1000000u;
    sw_timers_add(&engine.timers, timer);
    publish_deadline();
    if (!sw_system->is_simulated &&
        __atomic_load_n(&thread.sleeps_until, __ATOMIC_SEQ_CST) > timer->deadline)
        sw_system->ring(engine.bell);
    return 0;
}
