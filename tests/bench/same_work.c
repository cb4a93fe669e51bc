/*
 * The benchmark's work done in C, as one would write it by hand: over the provider's table, so
 * that the same program runs on the software device and on the kernel's devices.
 *
 *   same_work DEVICE serve ADDRESS PORT POLLING                serves one client's connections
 *   same_work DEVICE ask ADDRESS PORT POLLING OPERATION SIZE DEPTH CONNECTIONS MILLISECONDS ROUNDS
 *             FUNCTIONS RECEIVES
 *       prints for each round: operations, nanoseconds in all, and, with a depth of 1, the medians
 *       of their times and of what posting took of it
 *   same_work DEVICE ask ADDRESS PORT POLLING connect SIZE MILLISECONDS
 *       prints how many connections were made, one after the other, and the nanoseconds in all: each
 *       sends one message, receives its echo and closes
 *   same_work DEVICE ask ADDRESS PORT POLLING at_once SIZE CONNECTIONS
 *       prints the nanoseconds from the first of so many connects, which begin together, to the last
 *       echo
 *
 * With a depth of 1, so many FUNCTIONS, each at an address of its own, are called between two
 * operations, outside of their times.
 *
 * DEVICE: software or rdma-core. POLLING: 1, poll for ever; 0, sleep on the completion channel.
 * OPERATION: echo, send, read or write. Every request is signaled. DEPTH operations are in flight,
 * over all connections in turn. RECEIVES: of the server for each connection's sends, each into
 * memory of its own; for READs and WRITEs, the pieces of memory on both sides that they take in turn.
 */
#include "provider.h"

#include "declarations/software.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { ECHO, SEND, READ, WRITE, OPERATIONS, CONNECT, AT_ONCE };
enum { BATCH = 32, SAMPLES = 1 << 20, RESOURCES = 16, STOP = 1, TIMEOUT_MS = 5000 };
enum { FUNCTIONS = 4096, APART = 64 };
/* Between two operations: prime, so that all pieces are taken. */
enum { APART_PIECES = 7919 };
/* Connections that the client has closed and the server has not: their completions stay queued. */
enum { UNCLOSED = 64 };

static const char *const names[OPERATIONS] = {"echo", "send", "read", "write"};

/* What a client asks for: the private data of its connections. */
struct work {
    uint32_t operation, size, depth, connections, receives;
};

/* Where a server may be read and written: the private data of its answer. */
struct place {
    uint64_t address;
    uint32_t rkey;
} __attribute__((packed));

struct peer {
    struct rdma_cm_id *id;
    char *memory; /* one piece for each receive, and one for what is sent */
    struct ibv_mr *region;
    struct place place;
    uint32_t receives;
};

/* All of one process. A wr_id is a peer's number, and the piece of its memory. */
static struct {
    const struct aiordma_provider *calls;
    struct rdma_event_channel *channel;
    struct ibv_pd *domain;
    struct ibv_comp_channel *events;
    struct ibv_cq *queue;
    struct work work;
    struct peer *peers;
    int is_server, polling;
} here;

static void check(int failed, const char *what)
{
    if (failed) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

/* What verbs answer is the errno. */
static void check_answer(int error, const char *what)
{
    errno = abs(error);
    check(error, what);
}

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* -- requests ----------------------------------------------------------------------------- */

static uint64_t wr_id(uint32_t peer, uint32_t piece)
{
    return (uint64_t)peer << 32 | piece;
}

static struct ibv_sge part(const struct peer *peer, uint32_t piece, uint32_t size)
{
    uintptr_t address = (uintptr_t)peer->memory + (size_t)piece * here.work.size;

    return (struct ibv_sge){.addr = address, .length = size, .lkey = peer->region->lkey};
}

static void post_receive(uint32_t number, uint32_t piece)
{
    struct peer *peer = &here.peers[number];
    struct ibv_sge sge = part(peer, piece, here.work.size);
    struct ibv_recv_wr *bad,
        request = {.wr_id = wr_id(number, piece), .sg_list = &sge, .num_sge = 1};

    check_answer(ibv_post_recv(peer->id->qp, &request, &bad), "ibv_post_recv");
}

static void post(uint32_t number, uint32_t piece, enum ibv_wr_opcode opcode, uint32_t size)
{
    struct peer *peer = &here.peers[number];
    struct ibv_sge sge = part(peer, piece, size);
    struct ibv_send_wr *bad,
        request = {
            .wr_id = wr_id(number, piece),
            .sg_list = &sge,
            .num_sge = 1,
            .opcode = opcode,
            .send_flags = IBV_SEND_SIGNALED,
            .wr.rdma = {.remote_addr = peer->place.address + (uint64_t)piece * here.work.size,
                        .rkey = peer->place.rkey},
        };

    check_answer(ibv_post_send(peer->id->qp, &request, &bad), "ibv_post_send");
}

/* A client that has its echo may close before its device has confirmed it. */
static int may_be_flushed(void)
{
    return here.is_server && here.work.operation >= CONNECT;
}

/* Wait until something has completed. */
static int completions(struct ibv_wc *found)
{
    struct ibv_cq *queue;
    void *context;
    int count;

    for (;;) {
        count = ibv_poll_cq(here.queue, BATCH, found);
        if (!count && !here.polling) {
            check_answer(ibv_req_notify_cq(here.queue, 0), "ibv_req_notify_cq");
            count = ibv_poll_cq(here.queue, BATCH, found);
            if (!count) {
                check(here.calls->get_cq_event(here.events, &queue, &context), "ibv_get_cq_event");
                here.calls->ack_cq_events(queue, 1);
                continue;
            }
        }
        check(count < 0, "ibv_poll_cq");
        for (int i = 0; i < count; i++)
            if (found[i].status != IBV_WC_SUCCESS && !may_be_flushed()) {
                fprintf(stderr, "a request ended with status %d\n", found[i].status);
                exit(1);
            }
        if (count)
            return count;
    }
}

/* -- connections -------------------------------------------------------------------------- */

static uint32_t depth_of_each(void)
{
    return here.work.connections > 1 ? 1 : here.work.depth;
}

static uint32_t receives_of_each(void)
{
    uint32_t depth = depth_of_each();

    if (here.work.operation == ECHO)
        return here.is_server ? 2 * depth + 1 : depth;
    if (here.work.operation >= CONNECT)
        return 1;
    return here.is_server && here.work.operation == SEND ? here.work.receives : 1;
}

static uint32_t sends_of_each(void)
{
    return 2 * depth_of_each() + 1; /* an answer may be seen before its question's completion */
}

/* Of memory that one-sided operations take in turn, or that a message is sent from. */
static uint32_t pieces(void)
{
    int is_one_sided = here.work.operation == READ || here.work.operation == WRITE;

    return is_one_sided ? here.work.receives : 1;
}

static void prepare(struct ibv_context *context)
{
    uint32_t each = receives_of_each() + sends_of_each(), entries = here.work.connections * each;

    if (here.work.operation == CONNECT)
        entries *= UNCLOSED;
    if (here.queue)
        return;
    here.domain = here.calls->alloc_pd(context);
    check(!here.domain, "ibv_alloc_pd");
    here.events = here.calls->create_comp_channel(context);
    check(!here.events, "ibv_create_comp_channel");
    here.queue = here.calls->create_cq(context, (int)entries, NULL, here.events, 0);
    check(!here.queue, "ibv_create_cq");
}

static void set_up(uint32_t number, struct rdma_cm_id *id)
{
    struct peer *peer = &here.peers[number];
    struct ibv_qp_init_attr attributes;
    size_t length;

    prepare(id->verbs);
    attributes = (struct ibv_qp_init_attr){
        .send_cq = here.queue,
        .recv_cq = here.queue,
        .cap = {.max_send_wr = sends_of_each(),
                .max_recv_wr = receives_of_each(),
                .max_send_sge = 1,
                .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    peer->id = id;
    peer->receives = receives_of_each();
    check(here.calls->cm_create_qp(id, here.domain, &attributes), "rdma_create_qp");
    if (!peer->region) { /* else the memory of the connection before */
        length = (size_t)here.work.size * (peer->receives + pieces());
        check(posix_memalign((void **)&peer->memory, 4096, length), "posix_memalign");
        memset(peer->memory, 0, length);
        peer->region = here.calls->reg_mr(here.domain, peer->memory, length,
                                          IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                                              IBV_ACCESS_REMOTE_WRITE);
        check(!peer->region, "ibv_reg_mr");
    }
    if (here.is_server || here.work.operation != ECHO)
        for (uint32_t i = 0; i < peer->receives; i++)
            post_receive(number, i);
}

/* Its requests have completed. */
static void close_one(struct rdma_cm_id *id)
{
    check(here.calls->disconnect(id), "rdma_disconnect");
    here.calls->cm_destroy_qp(id);
    check(here.calls->destroy_id(id), "rdma_destroy_id");
}

/* With the operation CONNECT, close the connections that the peer closes meanwhile. */
static struct rdma_cm_event *event_of(enum rdma_cm_event_type expected)
{
    struct rdma_cm_event *event;

    for (;;) {
        check(here.calls->get_cm_event(here.channel, &event), "rdma_get_cm_event");
        if (event->event == expected)
            return event;
        if (here.work.operation != CONNECT || event->event != RDMA_CM_EVENT_DISCONNECTED) {
            fprintf(stderr, "event %d, not %d\n", event->event, expected);
            exit(1);
        }
        struct rdma_cm_id *id = event->id;
        here.calls->ack_cm_event(event);
        close_one(id);
    }
}

static void pass(enum rdma_cm_event_type expected)
{
    here.calls->ack_cm_event(event_of(expected));
}

static void make_peers(uint32_t count)
{
    here.peers = calloc(count, sizeof(*here.peers));
    check(!here.peers, "calloc");
}

static void answer(uint32_t number, struct rdma_cm_id *id)
{
    set_up(number, id);
    struct place place = {(uintptr_t)here.peers[number].memory, here.peers[number].region->rkey};
    struct rdma_conn_param parameters = {
        .private_data = &place,
        .private_data_len = sizeof(place),
        .responder_resources = RESOURCES,
        .initiator_depth = RESOURCES,
        .rnr_retry_count = 7,
    };
    check(here.calls->accept(id, &parameters), "rdma_accept");
}

static void accept_one(uint32_t number)
{
    struct rdma_cm_event *event = event_of(RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *id = event->id;

    check(event->param.conn.private_data_len < sizeof(here.work), "the client does not ask");
    memcpy(&here.work, event->param.conn.private_data, sizeof(here.work));
    here.calls->ack_cm_event(event);
    if (!here.peers)
        make_peers(here.work.connections);
    answer(number, id);
    pass(RDMA_CM_EVENT_ESTABLISHED);
}

static void request(struct rdma_cm_id *id)
{
    struct rdma_conn_param parameters = {
        .private_data = &here.work,
        .private_data_len = sizeof(here.work),
        .responder_resources = RESOURCES,
        .initiator_depth = RESOURCES,
        .retry_count = 7,
        .rnr_retry_count = 7,
    };

    check(here.calls->connect(id, &parameters), "rdma_connect");
}

static void connect_one(uint32_t number, struct sockaddr_in *address)
{
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;

    check(here.calls->create_id(here.channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(here.calls->resolve_addr(id, NULL, (struct sockaddr *)address, TIMEOUT_MS),
          "rdma_resolve_addr");
    pass(RDMA_CM_EVENT_ADDR_RESOLVED);
    check(here.calls->resolve_route(id, TIMEOUT_MS), "rdma_resolve_route");
    pass(RDMA_CM_EVENT_ROUTE_RESOLVED);
    set_up(number, id);
    request(id);
    event = event_of(RDMA_CM_EVENT_ESTABLISHED);
    check(event->param.conn.private_data_len < sizeof(struct place), "the server does not say");
    memcpy(&here.peers[number].place, event->param.conn.private_data, sizeof(struct place));
    here.calls->ack_cm_event(event);
}

/* -- one connection after the other ------------------------------------------------------- */

/* Return the length of the client's message. The answer to the client before completes meanwhile. */
static uint32_t await_message(void)
{
    struct ibv_wc found[BATCH];

    for (;;) {
        int count = completions(found);
        for (int i = 0; i < count; i++)
            if (found[i].status == IBV_WC_SUCCESS && found[i].opcode & IBV_WC_RECV)
                return found[i].byte_len;
    }
}

/* Until a message of STOP bytes, and the end of its connection: the device has confirmed it then. */
static void serve_connects(void)
{
    struct rdma_cm_id *ended = NULL;

    while (await_message() != STOP) {
        post(0, 0, IBV_WR_SEND, here.work.size);
        accept_one(0);
    }
    while (ended != here.peers[0].id) {
        struct rdma_cm_event *event = event_of(RDMA_CM_EVENT_DISCONNECTED);
        ended = event->id;
        here.calls->ack_cm_event(event);
    }
}

static uint64_t connect_for(struct sockaddr_in *address, uint64_t nanoseconds)
{
    struct ibv_wc found[BATCH];
    uint64_t until = now() + nanoseconds, count = 0;

    do {
        connect_one(0, address);
        post(0, 1, IBV_WR_SEND, here.work.size);
        for (int left = 2; left;) /* the send and the receive */
            left -= completions(found);
        close_one(here.peers[0].id);
        count++;
    } while (now() < until);
    return count;
}

static void ask_connects(struct sockaddr_in *address, uint64_t nanoseconds)
{
    struct ibv_wc found[BATCH];

    make_peers(1);
    connect_for(address, nanoseconds / 10);
    uint64_t began = now(), count = connect_for(address, nanoseconds);
    printf("%llu %llu\n", (unsigned long long)count, (unsigned long long)(now() - began));
    connect_one(0, address);
    post(0, 1, IBV_WR_SEND, STOP);
    completions(found);
    close_one(here.peers[0].id);
}

/* -- connections that begin together ------------------------------------------------------ */

/* Do what follows an event, until all connections but the first, which exists, are established. */
static void establish_all(void (*follow)(struct rdma_cm_id *id, enum rdma_cm_event_type type))
{
    struct rdma_cm_event *event;

    for (uint32_t left = here.work.connections - 1; left;) {
        check(here.calls->get_cm_event(here.channel, &event), "rdma_get_cm_event");
        struct rdma_cm_id *id = event->id;
        enum rdma_cm_event_type type = event->event;
        here.calls->ack_cm_event(event);
        left -= type == RDMA_CM_EVENT_ESTABLISHED;
        follow(id, type);
    }
}

static void follow_accepting(struct rdma_cm_id *id, enum rdma_cm_event_type type)
{
    static uint32_t next = 1;

    if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
        answer(next++, id);
}

static void follow_connecting(struct rdma_cm_id *id, enum rdma_cm_event_type type)
{
    uint32_t number = (uint32_t)(uintptr_t)id->context;

    if (type == RDMA_CM_EVENT_ADDR_RESOLVED) {
        check(here.calls->resolve_route(id, TIMEOUT_MS), "rdma_resolve_route");
    } else if (type == RDMA_CM_EVENT_ROUTE_RESOLVED) {
        set_up(number, id);
        request(id);
    } else if (type == RDMA_CM_EVENT_ESTABLISHED) {
        post(number, 1, IBV_WR_SEND, here.work.size);
    } else {
        fprintf(stderr, "event %d\n", type);
        exit(1);
    }
}

static void ask_at_once(struct sockaddr_in *address)
{
    struct ibv_wc found[BATCH];
    struct rdma_cm_id *id;

    make_peers(here.work.connections);
    connect_one(0, address);
    uint64_t began = now();
    for (uint32_t i = 1; i < here.work.connections; i++) {
        check(here.calls->create_id(here.channel, &id, (void *)(uintptr_t)i, RDMA_PS_TCP),
              "rdma_create_id");
        check(here.calls->resolve_addr(id, NULL, (struct sockaddr *)address, TIMEOUT_MS),
              "rdma_resolve_addr");
    }
    establish_all(follow_connecting);
    for (uint32_t left = 2 * (here.work.connections - 1); left;) /* the sends and the receives */
        left -= (uint32_t)completions(found);
    printf("%llu\n", (unsigned long long)(now() - began));
    post(0, 1, IBV_WR_SEND, STOP);
    while (!ibv_poll_cq(here.queue, 1, found))
        ; /* it may fail: the server ends by it */
}

/* -- the two sides ------------------------------------------------------------------------ */

static void serve(struct sockaddr_in *address)
{
    struct ibv_wc found[BATCH];
    struct rdma_cm_id *listener;

    check(here.calls->create_id(here.channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(here.calls->bind_addr(listener, (struct sockaddr *)address), "rdma_bind_addr");
    check(here.calls->listen(listener, 16), "rdma_listen");
    accept_one(0);
    if (here.work.operation == CONNECT) {
        serve_connects();
        return;
    }
    if (here.work.operation == AT_ONCE)
        establish_all(follow_accepting);
    for (uint32_t i = 1; i < here.work.connections && here.work.operation != AT_ONCE; i++)
        accept_one(i);
    if (here.work.operation >= READ)
        here.polling = 0; /* nothing to do meanwhile */
    for (;;) {
        int count = completions(found);
        for (int i = 0; i < count; i++) {
            uint32_t peer = (uint32_t)(found[i].wr_id >> 32), piece = (uint32_t)found[i].wr_id;
            int arrived = found[i].opcode & IBV_WC_RECV;
            if (arrived && found[i].byte_len == STOP)
                return;
            if (arrived && (here.work.operation == ECHO || here.work.operation == AT_ONCE))
                post(peer, piece, IBV_WR_SEND, here.work.size);
            else if (here.work.operation != AT_ONCE)
                post_receive(peer, piece);
        }
    }
}

/* Functions that return at once; `ret` is their word for it on both. */
#if defined(__x86_64__) || defined(__aarch64__)
__asm__(".pushsection .text\n"
        ".balign 4096\n"
        "functions:\n"
        ".rept 4096\n"
        "ret\n"
        ".balign 64\n"
        ".endr\n"
        ".popsection");
extern char functions[];

static void call_functions(int count)
{
    for (int i = 0; i < count; i++)
        ((void (*)(void))(uintptr_t)(functions + (size_t)i * APART))();
}
#else
static void call_functions(int count)
{
    if (count) {
        fprintf(stderr, "there are no functions to call on this processor\n");
        exit(1);
    }
}
#endif

static void start(uint32_t number, uint32_t piece)
{
    static const enum ibv_wr_opcode opcodes[OPERATIONS] = {IBV_WR_SEND, IBV_WR_SEND,
                                                           IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE};

    static uint32_t next;

    if (here.work.operation == ECHO) {
        post_receive(number, piece);
        piece = here.peers[number].receives;
    } else {
        piece = next++ * APART_PIECES % pieces();
    }
    post(number, piece, opcodes[here.work.operation], here.work.size);
}

static int ascending(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

    return a < b ? -1 : a > b;
}

/* So many operations in flight; each end of one starts the next, while there is time, and at least
 * once, so that there is a post to time. */
static void drive(uint64_t nanoseconds, int functions_between, int tell)
{
    uint64_t began = now(), until = began + nanoseconds, last = began, count = 0;
    uint64_t *samples = calloc(SAMPLES, sizeof(*samples));
    uint64_t *posts = calloc(SAMPLES, sizeof(*posts));
    uint32_t flying = here.work.depth, next = 0, sends = 0, posted = 0;
    struct ibv_wc found[BATCH];

    check(!samples || !posts, "calloc");
    for (uint32_t i = 0; i < flying; i++, next++)
        start(next % here.work.connections, here.work.connections > 1 ? 0 : i);
    sends = here.work.operation == ECHO ? flying : 0;
    while (flying || sends) {
        int ends = completions(found);
        for (int i = 0; i < ends; i++) {
            if (here.work.operation == ECHO && !(found[i].opcode & IBV_WC_RECV)) {
                sends--;
                continue;
            }
            uint64_t time = here.work.depth == 1 || count % 16 == 0 ? now() : last;
            if (here.work.depth == 1 && count < SAMPLES)
                samples[count] = time - last;
            last = time;
            count++;
            if (time >= until && count > 1) {
                flying--;
                continue;
            }
            sends += here.work.operation == ECHO;
            if (here.work.depth == 1) {
                call_functions(functions_between);
                last = now();
            }
            start(here.work.connections > 1 ? next % here.work.connections : 0,
                  here.work.connections > 1 ? 0 : (uint32_t)found[i].wr_id);
            if (here.work.depth == 1 && posted < SAMPLES)
                posts[posted++] = now() - last;
            next++;
        }
    }
    uint64_t took = now() - began, known = count < SAMPLES ? count : SAMPLES;

    if (here.work.depth > 1)
        known = 0;
    qsort(samples, known, sizeof(*samples), ascending);
    qsort(posts, posted, sizeof(*posts), ascending);
    if (tell) {
        printf("%llu %llu %llu %llu\n", (unsigned long long)count, (unsigned long long)took,
               (unsigned long long)samples[known / 2], (unsigned long long)posts[posted / 2]);
        fflush(stdout);
    }
    free(samples);
    free(posts);
}

static void ask(struct sockaddr_in *address, uint64_t nanoseconds, int rounds,
                int functions_between)
{
    struct ibv_wc found[BATCH];

    make_peers(here.work.connections);
    for (uint32_t i = 0; i < here.work.connections; i++)
        connect_one(i, address);
    drive(nanoseconds / 10, functions_between, 0);
    while (rounds--)
        drive(nanoseconds, functions_between, 1);
    post(0, here.peers[0].receives, IBV_WR_SEND, STOP);
    while (!ibv_poll_cq(here.queue, 1, found))
        ; /* it may fail: the server ends by it */
}

int main(int count, char **words)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    char message[256] = "no memory";

    if (count < 6 || inet_pton(AF_INET, words[3], &address.sin_addr) != 1)
        return 2;
    address.sin_port = htons((uint16_t)atoi(words[4]));
    here.polling = atoi(words[5]);
    here.is_server = !strcmp(words[2], "serve");
    here.calls = strcmp(words[1], "software") ? aiordma_rdma_core(message, sizeof(message))
                                              : aiordma_software();
    if (!here.calls) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max; /* the software device has a socket for a connection */
        setrlimit(RLIMIT_NOFILE, &files);
    }
    here.channel = here.calls->create_event_channel();
    check(!here.channel, "rdma_create_event_channel");
    if (here.is_server) {
        serve(&address);
        return 0;
    }
    if (count == 9 && !strcmp(words[6], "connect")) {
        here.work = (struct work){CONNECT, (uint32_t)atoi(words[7]), 1, 1, 1};
        if (here.work.size <= STOP)
            return 2;
        ask_connects(&address, (uint64_t)atoi(words[8]) * 1000000);
        return 0;
    }
    if (count == 9 && !strcmp(words[6], "at_once")) {
        here.work =
            (struct work){AT_ONCE, (uint32_t)atoi(words[7]), 1, (uint32_t)atoi(words[8]) + 1, 1};
        if (here.work.size <= STOP)
            return 2;
        ask_at_once(&address);
        return 0;
    }
    if (count != 14)
        return 2;
    while (here.work.operation < OPERATIONS && strcmp(names[here.work.operation], words[6]))
        here.work.operation++;
    here.work.size = (uint32_t)atoi(words[7]);
    here.work.depth = (uint32_t)atoi(words[8]);
    here.work.connections = (uint32_t)atoi(words[9]);
    int between = atoi(words[12]);
    here.work.receives = (uint32_t)atoi(words[13]);
    if (between < 0 || between > FUNCTIONS)
        return 2;
    if (here.work.operation == OPERATIONS || here.work.size <= STOP || !here.work.depth ||
        !here.work.connections || !here.work.receives)
        return 2;
    if (here.work.connections > 1 && here.work.connections < 2 * here.work.depth)
        return 2;
    ask(&address, (uint64_t)atoi(words[10]) * 1000000, atoi(words[11]), between);
    return 0;
}
