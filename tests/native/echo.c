/*
 * Measures the software device without Python: echoes of messages between two processes on this
 * machine, and, in the same run, the same over TCP.
 *
 *     echo [size [rounds [repeats [wait]]]]
 *
 * size: bytes of a message. rounds: echoes of one measurement. wait: sleep, spin or tcp; without
 * it, all three in turn. repeats: how often each is measured. A measurement prints the median and
 * the 99th percentile of an echo in microseconds, and for each side the processor time and the
 * context switches of an echo.
 *
 * An echo has ended when the send has completed and the reply has arrived.
 */
#include "provider.h"

#include "declarations/software.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WARM_UP = 300, DEPTH = 16, MOST_ROUNDS = 1000000 };
enum wait { SLEEP, SPIN, TCP, WAITS };
static const char *const wait_names[] = {"sleep", "spin", "tcp"};

struct side {
    double user, system;
    long switches;
};

struct end {
    const struct aiordma_provider *table;
    struct rdma_event_channel *events;
    struct rdma_cm_id *id;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    struct ibv_mr *region;
    char *memory;
    size_t size;
    int spins;
    unsigned int sent, received; /* completions that await_both has not consumed yet */
    int socket, epoll;
};

static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static double seconds(struct timeval time)
{
    return (double)time.tv_sec + (double)time.tv_usec / 1e6;
}

static struct side usage(void)
{
    struct rusage used;

    check(!getrusage(RUSAGE_SELF, &used), "getrusage");
    return (struct side){seconds(used.ru_utime), seconds(used.ru_stime),
                         used.ru_nvcsw + used.ru_nivcsw};
}

static struct side since(struct side before)
{
    struct side after = usage();

    return (struct side){after.user - before.user, after.system - before.system,
                         after.switches - before.switches};
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

/* -- over the device ------------------------------------------------------------------------- */

static void await_event(struct end *end, enum rdma_cm_event_type wanted)
{
    struct rdma_cm_event *event;

    check(!end->table->get_cm_event(end->events, &event), "get_cm_event");
    if (event->event != wanted) {
        fprintf(stderr, "event %d instead of %d\n", event->event, wanted);
        exit(1);
    }
    if (wanted == RDMA_CM_EVENT_CONNECT_REQUEST)
        end->id = event->id;
    check(!end->table->ack_cm_event(event), "ack_cm_event");
}

static void post_receive(struct end *end)
{
    struct ibv_sge part = {(uintptr_t)end->memory + end->size, (uint32_t)end->size,
                           end->region->lkey};
    struct ibv_recv_wr request = {.sg_list = &part, .num_sge = 1}, *refused;

    check(!ibv_post_recv(end->id->qp, &request, &refused), "ibv_post_recv");
}

static void post_send(struct end *end)
{
    struct ibv_sge part = {(uintptr_t)end->memory, (uint32_t)end->size, end->region->lkey};
    struct ibv_send_wr request = {
        .sg_list = &part, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *refused;

    check(!ibv_post_send(end->id->qp, &request, &refused), "ibv_post_send");
}

static void make_queue_pair(struct end *end)
{
    struct ibv_context *context = end->id->verbs;
    struct ibv_pd *domain = end->table->alloc_pd(context);

    check(!!domain, "alloc_pd");
    end->channel = end->table->create_comp_channel(context);
    check(!!end->channel, "create_comp_channel");
    check(!fcntl(end->channel->fd, F_SETFL, O_NONBLOCK), "fcntl");
    end->queue = end->table->create_cq(context, 4 * DEPTH, NULL, end->channel, 0);
    check(!!end->queue, "create_cq");
    check(!ibv_req_notify_cq(end->queue, 0), "ibv_req_notify_cq");
    end->memory = calloc(2, end->size);
    end->region = end->table->reg_mr(domain, end->memory, 2 * end->size, IBV_ACCESS_LOCAL_WRITE);
    check(!!end->region, "reg_mr");
    struct ibv_qp_init_attr attr = {
        .send_cq = end->queue,
        .recv_cq = end->queue,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
    };
    check(!end->table->cm_create_qp(end->id, domain, &attr), "rdma_create_qp");
    for (int i = 0; i < DEPTH / 2; i++)
        post_receive(end);
}

static void take(struct end *end, struct ibv_wc *batch, int count)
{
    check(count >= 0, "ibv_poll_cq");
    for (int i = 0; i < count; i++) {
        if (batch[i].status) {
            fprintf(stderr, "a completion's status is %d\n", batch[i].status);
            exit(1);
        }
        if (batch[i].opcode & IBV_WC_RECV)
            end->received++;
        else
            end->sent++;
    }
}

/* Do as an event loop does: sleep, take the events, arm again, poll. */
static void sleep_once(struct end *end)
{
    struct pollfd wanted = {.fd = end->channel->fd, .events = POLLIN};
    struct ibv_wc batch[DEPTH];
    unsigned int count = 0;
    struct ibv_cq *queue;
    void *context;

    check(poll(&wanted, 1, -1) == 1, "poll");
    while (!end->table->get_cq_event(end->channel, &queue, &context))
        count++;
    check(errno == EAGAIN, "get_cq_event");
    if (!count)
        return;
    end->table->ack_cq_events(end->queue, count);
    check(!ibv_req_notify_cq(end->queue, 0), "ibv_req_notify_cq");
    take(end, batch, ibv_poll_cq(end->queue, DEPTH, batch));
}

static void await_both(struct end *end)
{
    struct ibv_wc batch[DEPTH];

    while (!end->sent || !end->received) {
        if (end->spins)
            take(end, batch, ibv_poll_cq(end->queue, DEPTH, batch));
        else
            sleep_once(end);
    }
    end->sent--;
    end->received--;
    post_receive(end);
}

static void device_server(struct end *end, int port_to, int rounds)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct rdma_cm_id *listener;

    end->table = aiordma_software();
    check(!!end->table, "aiordma_software");
    end->events = end->table->create_event_channel();
    check(!end->table->create_id(end->events, &listener, NULL, RDMA_PS_TCP), "create_id");
    check(!end->table->bind_addr(listener, (struct sockaddr *)&address), "bind_addr");
    check(!end->table->listen(listener, 1), "listen");
    struct sockaddr_in *bound = (struct sockaddr_in *)&listener->route.addr.src_storage;
    check(write(port_to, &bound->sin_port, 2) == 2, "write");
    await_event(end, RDMA_CM_EVENT_CONNECT_REQUEST);
    make_queue_pair(end);
    struct rdma_conn_param parameters = {.responder_resources = 8, .initiator_depth = 8};
    check(!end->table->accept(end->id, &parameters), "accept");
    await_event(end, RDMA_CM_EVENT_ESTABLISHED);
    end->sent = 1; /* await_both waits for a send before each echo, also the first */
    for (int i = 0; i < rounds; i++) {
        await_both(end);
        post_send(end);
    }
    /* The peer waits for the completion of its last message, too. */
    while (!end->sent) {
        struct ibv_wc batch[DEPTH];
        take(end, batch, ibv_poll_cq(end->queue, DEPTH, batch));
    }
}

static void device_client(struct end *end, in_port_t port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    end->table = aiordma_software();
    check(!!end->table, "aiordma_software");
    end->events = end->table->create_event_channel();
    check(!end->table->create_id(end->events, &end->id, NULL, RDMA_PS_TCP), "create_id");
    check(!end->table->resolve_addr(end->id, NULL, (struct sockaddr *)&address, 2000),
          "resolve_addr");
    await_event(end, RDMA_CM_EVENT_ADDR_RESOLVED);
    check(!end->table->resolve_route(end->id, 2000), "resolve_route");
    await_event(end, RDMA_CM_EVENT_ROUTE_RESOLVED);
    make_queue_pair(end);
    struct rdma_conn_param parameters = {.responder_resources = 8, .initiator_depth = 8};
    check(!end->table->connect(end->id, &parameters), "connect");
    await_event(end, RDMA_CM_EVENT_ESTABLISHED);
}

/* -- over TCP, with epoll --------------------------------------------------------------------- */

static void prepare_socket(struct end *end)
{
    struct epoll_event event = {.events = EPOLLIN};
    int on = 1;

    check(!setsockopt(end->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)), "TCP_NODELAY");
    check(!fcntl(end->socket, F_SETFL, O_NONBLOCK), "fcntl");
    end->epoll = epoll_create1(0);
    check(!epoll_ctl(end->epoll, EPOLL_CTL_ADD, end->socket, &event), "epoll_ctl");
    end->memory = calloc(2, end->size);
}

static void await_bytes(struct end *end)
{
    struct epoll_event event;

    for (size_t have = 0; have < end->size;) {
        check(epoll_wait(end->epoll, &event, 1, -1) == 1, "epoll_wait");
        ssize_t got = recv(end->socket, end->memory, 262144, 0);
        check(got > 0, "recv");
        have += (size_t)got;
    }
}

static void send_bytes(struct end *end)
{
    for (size_t have = 0; have < end->size;) {
        ssize_t sent = send(end->socket, end->memory + have, end->size - have, MSG_NOSIGNAL);
        check(sent > 0 || errno == EAGAIN, "send");
        if (sent > 0)
            have += (size_t)sent;
    }
}

static void tcp_server(struct end *end, int port_to, int rounds)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM, 0);

    check(!bind(listener, (struct sockaddr *)&address, size), "bind");
    check(!listen(listener, 1), "listen");
    check(!getsockname(listener, (struct sockaddr *)&address, &size), "getsockname");
    check(write(port_to, &address.sin_port, 2) == 2, "write");
    end->socket = accept(listener, NULL, NULL);
    check(end->socket >= 0, "accept");
    prepare_socket(end);
    for (int i = 0; i < rounds; i++) {
        await_bytes(end);
        send_bytes(end);
    }
}

static void tcp_client(struct end *end, in_port_t port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    end->socket = socket(AF_INET, SOCK_STREAM, 0);
    check(!connect(end->socket, (struct sockaddr *)&address, sizeof(address)), "connect");
    prepare_socket(end);
}

/* -- one measurement -------------------------------------------------------------------------- */

static int by_size(const void *one, const void *other)
{
    double left = *(const double *)one, right = *(const double *)other;

    return left < right ? -1 : left > right;
}

static void serve(enum wait wait, size_t size, int rounds, int to)
{
    struct end end = {.size = size, .spins = wait == SPIN};
    struct side before = usage();

    if (wait == TCP)
        tcp_server(&end, to, rounds + WARM_UP);
    else
        device_server(&end, to, rounds + WARM_UP);
    struct side used = since(before);
    check(write(to, &used, sizeof(used)) == sizeof(used), "write");
    if (end.id) /* let the peer complete its last message */
        usleep(20000);
    _exit(0);
}

static void measure(enum wait wait, size_t size, int rounds)
{
    static double times[MOST_ROUNDS];
    struct end end = {.size = size, .spins = wait == SPIN};
    struct side theirs, before = {0, 0, 0};
    in_port_t port;
    int ends[2];

    check(!pipe(ends), "pipe");
    pid_t server = fork();
    check(server >= 0, "fork");
    if (!server)
        serve(wait, size, rounds, ends[1]);
    /* Each side of each measurement is a process, which has its own engine of the device. */
    check(read(ends[0], &port, sizeof(port)) == sizeof(port), "read");
    if (wait == TCP)
        tcp_client(&end, port);
    else
        device_client(&end, port);
    for (int i = -WARM_UP; i < rounds; i++) {
        if (!i)
            before = usage();
        double begin = now();
        if (wait == TCP) {
            send_bytes(&end);
            await_bytes(&end);
        } else {
            post_send(&end);
            await_both(&end);
        }
        if (i >= 0)
            times[i] = now() - begin;
    }
    struct side ours = since(before);
    check(read(ends[0], &theirs, sizeof(theirs)) == sizeof(theirs), "read");
    waitpid(server, NULL, 0);
    qsort(times, (size_t)rounds, sizeof(*times), by_size);
    printf("%-5s p50 %6.1f  p99 %6.1f us; client %5.1f us %.2f switches; server %5.1f us %.2f\n",
           wait_names[wait], times[rounds / 2], times[rounds - 1 - rounds / 100],
           (ours.user + ours.system) * 1e6 / rounds, (double)ours.switches / rounds,
           (theirs.user + theirs.system) * 1e6 / rounds, (double)theirs.switches / rounds);
    fflush(stdout);
    _exit(0);
}

int main(int count, char **arguments)
{
    size_t size = count > 1 ? strtoul(arguments[1], NULL, 0) : 64;
    int rounds = count > 2 ? atoi(arguments[2]) : 5000;
    int repeats = count > 3 ? atoi(arguments[3]) : 3;

    if (!size || rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "echo [size [rounds [repeats [sleep|spin|tcp]]]]\n");
        return 2;
    }
    for (int repeat = 0; repeat < repeats; repeat++)
        for (enum wait wait = 0; wait < WAITS; wait++) {
            int status;

            if (count > 4 && strcmp(arguments[4], wait_names[wait]))
                continue;
            pid_t client = fork();
            check(client >= 0, "fork");
            if (!client)
                measure(wait, size, rounds);
            if (waitpid(client, &status, 0) != client || status)
                return 1;
        }
    return 0;
}
