/*
 * Tests turns at the software device's lock: how often the engine serves while another thread waits
 * for the lock, whether an empty poll waits for it, and how much work a peer can cause in one turn.
 * Prints nothing and returns 0, or prints the error and returns 1.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "software/connected.h"
#include "software/engine.h"
#include "software/stream.h"

#include "queue_pair.h"

enum {
    ROUNDS = 200,
    WATCHES = 3,
    MOST_TURNS = 1,
    STORM_THREADS = 4,
    STORM_TURNS = 20000,
    FRAMES = 40000, /* which wait after a message without a receive */
    CHUNK = 1000,   /* frames written at a time */
    PATIENCE = 60,  /* seconds */
};

/* -- how long a thread waits ------------------------------------------------------------------- */

/* The waiting thread, and the engine's observations of it. */
static struct {
    char stat[64];                            /* its path in /proc */
    enum { NOT, LOCKING, SLEEPING } is_about; /* to wait, in sw_lock or sw_wait; atomic */
    int is_waiting;                           /* guarded by the lock */
    uint32_t turns;                           /* of the engine since then; guarded by the lock */
} waiter;

static uint32_t engine_turns; /* in total; atomic */
static int storm_is_over;     /* atomic */

static int is_asleep(void)
{
    char text[512] = "";
    FILE *file = fopen(waiter.stat, "r");

    check(file && fgets(text, sizeof(text), file), waiter.stat);
    fclose(file);
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[2] == 'S';
}

/* Called in each turn of the engine. */
static void take_turn(void)
{
    __atomic_add_fetch(&engine_turns, 1, __ATOMIC_RELAXED);
    if (waiter.is_waiting) {
        waiter.turns++;
        return;
    }
    switch (__atomic_load_n(&waiter.is_about, __ATOMIC_ACQUIRE)) {
    case LOCKING:
        /* This thread has the lock, so the waiter will sleep until this thread releases it. */
        while (!is_asleep())
            continue;
        break;
    case SLEEPING:
        sw_changed();
        break;
    default:
        return;
    }
    waiter.is_waiting = 1;
    waiter.turns = 0;
}

static void ready(struct sw_watch *watch, uint32_t events)
{
    (void)watch;
    (void)events;
    take_turn();
}

static void expired(struct sw_timer *again)
{
    take_turn();
    check(!sw_call_later(again, 0), "sw_call_later failed");
}

static struct sw_watch watches[WATCHES];
static struct sw_timer timer = {.expired = expired};

/* Watch descriptors that are always readable, and set a timer that is always due. */
static void keep_engine_busy(void)
{
    sw_lock();
    for (int i = 0; i < WATCHES; i++) {
        int fd = eventfd(1, EFD_CLOEXEC);
        watches[i].ready = ready;
        check(fd >= 0 && !sw_watch(&watches[i], fd, EPOLLIN), "sw_watch failed");
    }
    check(!sw_call_later(&timer, 0), "sw_call_later failed");
    sw_unlock();
}

static void leave_engine_alone(void)
{
    sw_lock();
    for (int i = 0; i < WATCHES; i++) {
        sw_unwatch(&watches[i]);
        close(watches[i].fd);
    }
    sw_cancel(&timer);
    sw_unlock();
}

/* Take the lock until the engine has seen this thread wait for it. Returns the engine's turns
   during that wait. */
static uint32_t wait_for_lock(void)
{
    for (;;) {
        __atomic_store_n(&waiter.is_about, LOCKING, __ATOMIC_RELEASE);
        sw_lock();
        int has_waited = waiter.is_waiting;
        __atomic_store_n(&waiter.is_about, NOT, __ATOMIC_RELEASE);
        waiter.is_waiting = 0;
        uint32_t turns = waiter.turns;
        sw_unlock();
        if (has_waited)
            return turns;
    }
}

/* The same for a thread in sw_wait, which releases the lock until a change. */
static uint32_t wait_for_change(void)
{
    sw_lock();
    __atomic_store_n(&waiter.is_about, SLEEPING, __ATOMIC_RELEASE);
    sw_wait();
    __atomic_store_n(&waiter.is_about, NOT, __ATOMIC_RELEASE);
    waiter.is_waiting = 0;
    uint32_t turns = waiter.turns;
    sw_unlock();
    return turns;
}

static void check_waiters_have_their_turn(void)
{
    for (int i = 0; i < ROUNDS; i++) {
        uint32_t turns = i % 2 ? wait_for_lock() : wait_for_change();
        if (turns > MOST_TURNS) {
            printf("the engine had %u turns while a thread waited in %s\n", turns,
                   i % 2 ? "sw_lock" : "sw_wait");
            exit(1);
        }
    }
}

static void *lock_and_change(void *unused)
{
    (void)unused;
    while (!__atomic_load_n(&storm_is_over, __ATOMIC_RELAXED)) {
        sw_lock();
        sw_changed();
        sw_unlock();
    }
    return NULL;
}

/* Threads that always take the lock stop neither the engine nor each other. */
static void check_threads_stop_nothing(void)
{
    pthread_t threads[STORM_THREADS];

    __atomic_store_n(&engine_turns, 0, __ATOMIC_RELAXED);
    for (int i = 0; i < STORM_THREADS; i++)
        check(!pthread_create(&threads[i], NULL, lock_and_change, NULL), "pthread_create failed");
    while (__atomic_load_n(&engine_turns, __ATOMIC_RELAXED) < STORM_TURNS) {
        sw_lock();
        sw_wait();
        sw_unlock();
    }
    __atomic_store_n(&storm_is_over, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < STORM_THREADS; i++)
        check(!pthread_join(threads[i], NULL), "pthread_join failed");
}

/* -- polls that find nothing ------------------------------------------------------------------- */

static void *poll_empty(void *queue)
{
    struct ibv_wc completion;

    check(!ibv_poll_cq(queue, 1, &completion), "ibv_poll_cq returns a completion");
    return NULL;
}

/* A program that polls without pause must not make the engine wait, nor wait for it. */
static void check_empty_poll_needs_no_lock(const struct aiordma_provider *table,
                                           struct ibv_context *context)
{
    struct ibv_cq *queue = table->create_cq(context, 1, NULL, NULL, 0);
    pthread_t thread;

    check(queue != NULL, "create_cq failed");
    sw_lock();
    alarm(PATIENCE); /* SIGALRM ends the program if the poll waits for the lock */
    check(!pthread_create(&thread, NULL, poll_empty, queue), "pthread_create failed");
    check(!pthread_join(thread, NULL), "pthread_join failed");
    alarm(0);
    sw_unlock();
    check(!table->destroy_cq(queue), "destroy_cq failed");
}

/* -- how much work a peer causes --------------------------------------------------------------- */

static void write_all(int fd, const char *bytes, size_t size, struct sw_stream *stream)
{
    while (size) {
        ssize_t written = send(fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (written > 0) {
            bytes += written;
            size -= (size_t)written;
        }
        sw_begin_turn();
        stream->watch.ready(&stream->watch, EPOLLIN);
    }
}

/* The number of frames that have arrived and are not processed yet. */
static uint32_t frames_left(const struct sw_receiving *receiving)
{
    uint32_t bytes = receiving->in ? sw_waiting_size(receiving->in) : 0;

    for (const struct sw_block *block = receiving->kept; block; block = block->next)
        bytes += sw_waiting_size(block);
    return bytes / (SW_TAGGED_HEADER + 4);
}

/*
 * Send a message without a receive, and then WRITEs of no bytes, which are kept. The caller holds
 * the lock, so the engine does not run.
 */
static void say_much(int fd, struct sw_stream *stream)
{
    struct sw_frame message = {
        .operation = SW_SEND, .is_last = 1, .queue = SW_QUEUE_SEND, .sequence = 1};
    struct sw_frame nothing = {.operation = SW_WRITE, .is_tagged = 1, .is_last = 1};
    char first[SW_UNTAGGED_HEADER + 4] = "", frames[CHUNK * (SW_TAGGED_HEADER + 4)] = "";

    sw_frame_write(first, &message);
    for (int i = 0; i < CHUNK; i++)
        sw_frame_write(frames + i * (SW_TAGGED_HEADER + 4), &nothing);
    write_all(fd, first, sizeof(first), stream);
    for (int i = 0; i < FRAMES / CHUNK; i++)
        write_all(fd, frames, sizeof(frames), stream);
    check(frames_left(&stream->receiving) >= FRAMES, "the frames were not kept");
}

static void *wait_for_turn(void *unused)
{
    (void)unused;
    snprintf(waiter.stat, sizeof(waiter.stat), "/proc/self/task/%ld/stat", syscall(SYS_gettid));
    __atomic_store_n(&waiter.is_about, LOCKING, __ATOMIC_RELEASE);
    sw_lock();
    sw_unlock();
    return NULL;
}

/* Post the receive, with or without a thread that waits for the lock, and check that the turn
   processes no more frames than it may. */
static void check_turn(const struct aiordma_provider *table, struct ibv_pd *domain, int is_awaited)
{
    struct ibv_qp *queue_pair = make_queue_pair(table, domain, 4);
    struct sw_queue_pair *pair = (struct sw_queue_pair *)queue_pair;
    struct sw_terms terms = {.inbound_depth = 4, .outbound_depth = 4};
    struct ibv_recv_wr receive = {.wr_id = 1};
    uint32_t most = (is_awaited ? SW_SHORT_TURN : SW_LONG_TURN) / SW_FRAME_WORK + 1;
    pthread_t thread;
    int ends[2];

    check(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), "socketpair");
    sw_lock();
    check(!sw_stream_begin(pair, ends[1], &terms), "sw_stream_begin failed");
    say_much(ends[0], pair->stream);
    waiter.is_about = NOT;
    if (is_awaited) {
        check(!pthread_create(&thread, NULL, wait_for_turn, NULL), "pthread_create failed");
        while (__atomic_load_n(&waiter.is_about, __ATOMIC_ACQUIRE) == NOT || !is_asleep())
            continue;
    }
    /* The same steps as in post_recv. */
    check(!sw_receives_add(&pair->receives, &receive), "sw_receives_add failed");
    pair->is_waiting = 0;
    sw_begin_turn();
    pair->transport->resume(pair);
    uint32_t done = FRAMES - frames_left(&pair->stream->receiving);
    sw_unlock();
    if (!done || done > most) {
        printf("%u frames in one turn, of at most %u\n", done, most);
        exit(1);
    }
    if (is_awaited)
        check(!pthread_join(thread, NULL), "pthread_join failed");
    /* The engine processes the other frames, in several turns. */
    for (uint32_t left = 1, i = 0; left; i++) {
        check(i < PATIENCE * 1000, "the engine did not go on");
        usleep(1000);
        sw_lock();
        left = frames_left(&pair->stream->receiving);
        sw_unlock();
    }
    struct ibv_cq *queue = queue_pair->send_cq;
    check(!table->destroy_qp(queue_pair) && !table->destroy_cq(queue), "destroy failed");
    close(ends[0]);
}

static void check_on_device(void)
{
    const struct aiordma_provider *table = aiordma_software();
    struct ibv_device **devices = table->get_device_list(NULL);
    struct ibv_context *context = devices ? table->open_device(devices[0]) : NULL;
    struct ibv_pd *domain = context ? table->alloc_pd(context) : NULL;

    check(domain != NULL, "the device does not open");
    table->free_device_list(devices);
    check_empty_poll_needs_no_lock(table, context);
    check_turn(table, domain, 0);
    check_turn(table, domain, 1);
    check(!table->dealloc_pd(domain) && !table->close_device(context), "something is left");
}

int main(void)
{
    snprintf(waiter.stat, sizeof(waiter.stat), "/proc/self/task/%ld/stat", syscall(SYS_gettid));
    keep_engine_busy();
    check_waiters_have_their_turn();
    check_threads_stop_nothing();
    leave_engine_alone();
    check_on_device();
    return 0;
}
