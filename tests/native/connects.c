/*
 * Measures the life of a connection on the software device without Python: both sides in one process
 * and one thread, which sleeps in poll on its two descriptors.
 *
 *     connects [count [size]]
 *
 * A connection's life: the client connects, sends one message of `size` bytes, receives its echo and
 * disconnects; both sides destroy their queue pair and identifier. The program prints what one
 * connection costs: microseconds, processor time in microseconds, and voluntary context switches, of
 * all threads.
 */
#include "provider.h"

#include "declarations/software.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { WARM_UP = 20, BATCH = 16, TIMEOUT_MS = 2000, PATIENCE_MS = 10000 };
enum { CLIENT, SERVER, SIDES };

struct side {
    struct rdma_cm_id *id; /* NULL: closed */
    int sent, received;    /* completions */
};

static struct {
    const struct aiordma_provider *table;
    struct rdma_event_channel *events;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    struct ibv_pd *domain;
    struct ibv_mr *region;
    char *memory;
    uint32_t size;
    struct rdma_cm_id *listener;
    struct side sides[SIDES];
} here;

static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(clockid_t clock)
{
    struct timespec time;

    check(!clock_gettime(clock, &time), "clock_gettime");
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static long switches(void)
{
    struct rusage used;

    check(!getrusage(RUSAGE_SELF, &used), "getrusage");
    return used.ru_nvcsw;
}

/* -- requests -------------------------------------------------------------------------------- */

/* The wr_id is the side. Each side receives into its own part of the memory, and sends from it. */
static struct ibv_sge part_of(int side)
{
    return (struct ibv_sge){(uintptr_t)here.memory + (uint32_t)side * here.size, here.size,
                            here.region->lkey};
}

static void post_receive(int side)
{
    struct ibv_sge part = part_of(side);
    struct ibv_recv_wr *refused,
        request = {.wr_id = (uint64_t)side, .sg_list = &part, .num_sge = 1};

    check(!ibv_post_recv(here.sides[side].id->qp, &request, &refused), "ibv_post_recv");
}

static void post_send(int side)
{
    struct ibv_sge part = part_of(side);
    struct ibv_send_wr *refused, request = {.wr_id = (uint64_t)side,
                                            .sg_list = &part,
                                            .num_sge = 1,
                                            .opcode = IBV_WR_SEND,
                                            .send_flags = IBV_SEND_SIGNALED};

    check(!ibv_post_send(here.sides[side].id->qp, &request, &refused), "ibv_post_send");
}

/* -- connections ----------------------------------------------------------------------------- */

static void prepare(struct ibv_context *context)
{
    if (here.queue)
        return;
    here.domain = here.table->alloc_pd(context);
    check(!!here.domain, "ibv_alloc_pd");
    here.channel = here.table->create_comp_channel(context);
    check(!!here.channel, "ibv_create_comp_channel");
    check(!fcntl(here.channel->fd, F_SETFL, O_NONBLOCK), "fcntl");
    here.queue = here.table->create_cq(context, 256, NULL, here.channel, 0);
    check(!!here.queue, "ibv_create_cq");
    check(!ibv_req_notify_cq(here.queue, 0), "ibv_req_notify_cq");
    here.memory = calloc(SIDES, here.size);
    check(!!here.memory, "calloc");
    here.region =
        here.table->reg_mr(here.domain, here.memory, SIDES * here.size, IBV_ACCESS_LOCAL_WRITE);
    check(!!here.region, "ibv_reg_mr");
}

static void set_up(int side, struct rdma_cm_id *id)
{
    prepare(id->verbs);
    struct ibv_qp_init_attr attr = {
        .send_cq = here.queue,
        .recv_cq = here.queue,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
    };
    here.sides[side] = (struct side){.id = id};
    check(!here.table->cm_create_qp(id, here.domain, &attr), "rdma_create_qp");
    post_receive(side);
}

static void tear_down(int side)
{
    struct rdma_cm_id *id = here.sides[side].id;

    check(!here.table->disconnect(id), "rdma_disconnect");
    here.table->cm_destroy_qp(id);
    check(!here.table->destroy_id(id), "rdma_destroy_id");
    here.sides[side].id = NULL;
}

static void took_event(enum rdma_cm_event_type type, struct rdma_cm_id *id)
{
    struct rdma_conn_param parameters = {.responder_resources = 8, .initiator_depth = 8};

    switch (type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
        check(!here.table->resolve_route(id, TIMEOUT_MS), "rdma_resolve_route");
        return;
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
        set_up(CLIENT, id);
        check(!here.table->connect(id, &parameters), "rdma_connect");
        return;
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        set_up(SERVER, id);
        check(!here.table->accept(id, &parameters), "rdma_accept");
        return;
    case RDMA_CM_EVENT_ESTABLISHED:
        if (id == here.sides[CLIENT].id)
            post_send(CLIENT);
        return;
    case RDMA_CM_EVENT_DISCONNECTED:
        tear_down(id == here.sides[CLIENT].id ? CLIENT : SERVER);
        return;
    default:
        fprintf(stderr, "an event of type %d\n", type);
        exit(1);
    }
}

static void take_events(void)
{
    struct rdma_cm_event *event;

    while (!here.table->get_cm_event(here.events, &event)) {
        struct rdma_cm_id *id = event->id;
        enum rdma_cm_event_type type = event->event;
        check(!here.table->ack_cm_event(event), "rdma_ack_cm_event");
        took_event(type, id);
    }
    check(errno == EAGAIN, "rdma_get_cm_event");
}

static void took_completion(const struct ibv_wc *completion)
{
    int number = (int)completion->wr_id;
    struct side *side = &here.sides[number];

    if (completion->status != IBV_WC_SUCCESS) {
        check(number == SERVER, "a completion of the client"); /* the client has left */
        return;
    }
    if (completion->opcode & IBV_WC_RECV) {
        side->received++;
        if (number == SERVER)
            post_send(SERVER);
    } else {
        side->sent++;
    }
    if (number == CLIENT && side->sent && side->received)
        tear_down(CLIENT);
}

static void take_completions(void)
{
    struct ibv_wc batch[BATCH];
    struct ibv_cq *queue;
    unsigned int events = 0;
    void *context;
    int count;

    while (!here.table->get_cq_event(here.channel, &queue, &context))
        events++;
    check(errno == EAGAIN, "ibv_get_cq_event");
    if (!events)
        return;
    here.table->ack_cq_events(here.queue, events);
    check(!ibv_req_notify_cq(here.queue, 0), "ibv_req_notify_cq");
    while ((count = ibv_poll_cq(here.queue, BATCH, batch)) > 0)
        for (int i = 0; i < count; i++)
            took_completion(&batch[i]);
    check(!count, "ibv_poll_cq");
}

static void connect_once(void)
{
    struct sockaddr *address = &here.listener->route.addr.src_addr;
    struct rdma_cm_id *id;

    check(!here.table->create_id(here.events, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(!here.table->resolve_addr(id, NULL, address, TIMEOUT_MS), "rdma_resolve_addr");
    here.sides[CLIENT].id = id;
    here.sides[SERVER].id = here.listener; /* until the request comes */
    while (here.sides[CLIENT].id || here.sides[SERVER].id) {
        struct pollfd wanted[] = {{.fd = here.events->fd, .events = POLLIN},
                                  {.fd = here.channel ? here.channel->fd : -1, .events = POLLIN}};
        check(poll(wanted, 2, PATIENCE_MS) > 0, "poll");
        if (wanted[0].revents)
            take_events();
        if (wanted[1].revents)
            take_completions();
    }
}

static void start_listening(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    here.table = aiordma_software();
    check(!!here.table, "aiordma_software");
    here.events = here.table->create_event_channel();
    check(!!here.events, "rdma_create_event_channel");
    check(!fcntl(here.events->fd, F_SETFL, O_NONBLOCK), "fcntl");
    check(!here.table->create_id(here.events, &here.listener, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(!here.table->bind_addr(here.listener, (struct sockaddr *)&address), "rdma_bind_addr");
    check(!here.table->listen(here.listener, 16), "rdma_listen");
}

int main(int count, char **arguments)
{
    int rounds = count > 1 ? atoi(arguments[1]) : 2000;

    here.size = count > 2 ? (uint32_t)atoi(arguments[2]) : 64;
    if (rounds < 1 || !here.size) {
        fprintf(stderr, "connects [count [size]]\n");
        return 2;
    }
    start_listening();
    for (int i = 0; i < WARM_UP; i++)
        connect_once();
    double begin = now(CLOCK_MONOTONIC), used = now(CLOCK_PROCESS_CPUTIME_ID);
    long switched = switches();
    for (int i = 0; i < rounds; i++)
        connect_once();
    printf("connection: %.1f us, processor %.1f us, %.2f switches\n",
           (now(CLOCK_MONOTONIC) - begin) / rounds, (now(CLOCK_PROCESS_CPUTIME_ID) - used) / rounds,
           (double)(switches() - switched) / rounds);
    check(!here.table->destroy_id(here.listener), "rdma_destroy_id");
    check(!here.table->destroy_cq(here.queue), "ibv_destroy_cq");
    check(!here.table->destroy_comp_channel(here.channel), "ibv_destroy_comp_channel");
    check(!here.table->dereg_mr(here.region), "ibv_dereg_mr");
    check(!here.table->dealloc_pd(here.domain), "ibv_dealloc_pd");
    here.table->destroy_event_channel(here.events);
    free(here.memory);
    return 0;
}
