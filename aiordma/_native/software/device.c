/*
 * The device's state: its lock, the turns of the threads that hold it, and its random numbers.
 */
#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct sw_device sw_device = {
    .ibv = {.node_type = IBV_NODE_RNIC,
            .transport_type = IBV_TRANSPORT_IWARP,
            .name = SW_NAME,
            .dev_name = SW_NAME},
    .roce = {.node_type = IBV_NODE_CA,
             .transport_type = IBV_TRANSPORT_IB,
             .name = SW_ROCE_NAME,
             .dev_name = SW_ROCE_NAME},
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
    .memory = {.most_held = SW_MOST_HELD},
};

const struct sw_state sw_device_state = {&sw_device.own, sizeof(sw_device.own)};

/*
 * A mutex is given to the first thread that requests it, and a thread that requests it again at
 * once is faster than a thread that has to wake up. So the engine would keep it for ever. Instead,
 * the engine sleeps on `returned` until as many threads have had the lock as waited for it.
 */
static struct {
    uint32_t waiting; /* threads that wait for the mutex, except the engine's; atomic */
    /* the lock guards the other fields */
    uint32_t owed; /* threads that must have the lock before the engine gets it again */
    int gives_way; /* the engine waits for `returned` */
    pthread_cond_t returned;
    uint32_t sleepers, changes; /* threads in sw_wait; calls of sw_changed */
    uint64_t work;              /* of this turn */
    int cancel_state; /* that the thread had before it took the lock: see keep_from_cancelling */
} turns = {.returned = PTHREAD_COND_INITIALIZER};

/* Random numbers that have not been used, so that few of them need a system call. */
static struct {
    uint32_t numbers[64];
    size_t left;
} random_pool;

static uint32_t waiting(void)
{
    return __atomic_load_n(&turns.waiting, __ATOMIC_RELAXED);
}

/* Count a thread that waited and now has the lock. */
static void end_waiting(void)
{
    __atomic_sub_fetch(&turns.waiting, 1, __ATOMIC_RELAXED);
    if (turns.owed)
        turns.owed--;
}

/* Whether the engine gets the lock back. If so, the caller wakes it. */
static int is_returned(void)
{
    if (!turns.gives_way || turns.owed)
        return 0;
    turns.gives_way = 0;
    return 1;
}

/*
 * A program in C may cancel its threads (pthread_cancel). With the lock held, a thread must not end
 * in a system call, so that its cancellation waits until it has returned the lock.
 */
static void keep_from_cancelling(void)
{
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &turns.cancel_state);
}

void sw_lock(void)
{
    if (sw_system->is_simulated) { /* its one thread has the device: no other may use it */
        turns.work = 0;
        return;
    }
    if (pthread_mutex_trylock(&sw_device.lock)) {
        __atomic_add_fetch(&turns.waiting, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&sw_device.lock);
        end_waiting();
    }
    keep_from_cancelling();
    turns.work = 0;
}

void sw_unlock(void)
{
    if (sw_system->is_simulated)
        return;
    int wakes_engine = is_returned(), cancel_state = turns.cancel_state;

    pthread_mutex_unlock(&sw_device.lock);
    if (wakes_engine)
        pthread_cond_signal(&turns.returned);
    pthread_setcancelstate(cancel_state, NULL);
}

void sw_wait(void)
{
    const uint32_t before = turns.changes;
    const int cancel_state = turns.cancel_state;

    turns.sleepers++;
    if (is_returned())
        pthread_cond_signal(&turns.returned);
    while (turns.changes == before)
        pthread_cond_wait(&sw_device.changed, &sw_device.lock);
    end_waiting();
    turns.cancel_state = cancel_state; /* others have had the lock */
}

void sw_changed(void)
{
    /* From now on the sleepers wait for the lock. */
    turns.changes++;
    __atomic_add_fetch(&turns.waiting, turns.sleepers, __ATOMIC_RELAXED);
    turns.sleepers = 0;
    pthread_cond_broadcast(&sw_device.changed);
}

void sw_lock_engine(void)
{
    pthread_mutex_lock(&sw_device.lock);
}

void sw_give_way(void)
{
    if (sw_system->is_simulated)
        return;
    turns.owed = waiting();
    turns.gives_way = turns.owed != 0;
    while (turns.gives_way)
        pthread_cond_wait(&turns.returned, &sw_device.lock);
}

void sw_begin_turn(void)
{
    turns.work = 0;
}

void sw_add_work(uint64_t bytes)
{
    turns.work += bytes;
}

int sw_turn_is_over(void)
{
    return turns.work >= (waiting() ? SW_SHORT_TURN : SW_LONG_TURN);
}

void sw_lock_forked(void)
{
    pthread_setcancelstate(turns.cancel_state, NULL);
    pthread_mutex_init(&sw_device.lock, NULL);
    pthread_cond_init(&sw_device.changed, NULL);
    memset(&turns, 0, sizeof(turns));
    random_pool.left = 0;
    pthread_cond_init(&turns.returned, NULL);
}

static void fill_pool(void)
{
    sw_system->random(random_pool.numbers, sizeof(random_pool.numbers));
    random_pool.left = sizeof(random_pool.numbers) / sizeof(*random_pool.numbers);
}

void sw_forget_random(void)
{
    random_pool.left = 0;
}

uint32_t sw_random(void)
{
    if (!random_pool.left)
        fill_pool();
    return random_pool.numbers[--random_pool.left];
}
