/*
 * Threads that are cancelled (pthread_cancel) in calls that wait, or with a call still to make, as
 * rping does. Compiled with rdma-core's own headers. Prints what is wrong.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <arpa/inet.h>
#include <unistd.h>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener, *client, *server;
static struct ibv_mr *region;
static char buffer[64];

static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    printf("%s (errno %d)\n", what, errno);
    exit(1);
}

static struct ibv_qp_init_attr attributes(void)
{
    return (struct ibv_qp_init_attr){
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
}

static void cancel(void *(*run)(void *), const char *what)
{
    pthread_t thread;
    void *result;

    check(!pthread_create(&thread, NULL, run, NULL), "pthread_create");
    usleep(50000);
    check(!pthread_cancel(thread) && !pthread_join(thread, &result), "pthread_cancel");
    check(result == PTHREAD_CANCELED, what);
}

static void *await_cm_event(void *unused)
{
    struct rdma_cm_event *event;

    rdma_get_cm_event(channel, &event);
    return unused;
}

static void *await_completion(void *unused)
{
    struct ibv_cq *queue;
    void *context;

    check(!ibv_req_notify_cq(server->recv_cq, 0), "ibv_req_notify_cq");
    ibv_get_cq_event(server->recv_cq_channel, &queue, &context);
    return unused;
}

static void *await_async_event(void *unused)
{
    struct ibv_async_event event;

    ibv_get_async_event(client->verbs, &event);
    return unused;
}

/* Its cancellation is pending. No call that does not wait may act on it with a lock held. */
static void *post(void *unused)
{
    check(!pthread_cancel(pthread_self()), "pthread_cancel of itself");
    check(!rdma_post_send(client, NULL, buffer, 8, region, 0), "rdma_post_send");
    pthread_testcancel();
    return unused;
}

static struct rdma_cm_event *event_of(enum rdma_cm_event_type type)
{
    struct rdma_cm_event *event;

    check(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
    check(event->event == type, rdma_event_str(event->event));
    return event;
}

static void connect_both(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct ibv_qp_init_attr ours = attributes(), theirs = attributes();

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address), "rdma_bind_addr");
    check(!rdma_listen(listener, 1), "rdma_listen");
    cancel(await_cm_event, "a thread in rdma_get_cm_event is cancelled");
    address.sin_port = rdma_get_src_port(listener);
    check(!rdma_create_id(channel, &client, NULL, RDMA_PS_TCP), "rdma_create_id of a client");
    check(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 1000), "rdma_resolve_addr");
    rdma_ack_cm_event(event_of(RDMA_CM_EVENT_ADDR_RESOLVED));
    check(!rdma_resolve_route(client, 1000), "rdma_resolve_route");
    rdma_ack_cm_event(event_of(RDMA_CM_EVENT_ROUTE_RESOLVED));
    check(!rdma_create_qp(client, NULL, &ours), "rdma_create_qp");
    region = rdma_reg_msgs(client, buffer, sizeof(buffer));
    check(region != NULL, "rdma_reg_msgs");
    check(!rdma_connect(client, NULL), "rdma_connect");
    struct rdma_cm_event *request = event_of(RDMA_CM_EVENT_CONNECT_REQUEST);
    server = request->id;
    rdma_ack_cm_event(request);
    check(!rdma_create_qp(server, NULL, &theirs), "rdma_create_qp of a server");
    for (int i = 0; i < 4; i++)
        check(!rdma_post_recv(server, NULL, buffer + 32, 32, region), "rdma_post_recv");
    check(!rdma_accept(server, NULL), "rdma_accept");
    rdma_ack_cm_event(event_of(RDMA_CM_EVENT_ESTABLISHED));
    rdma_ack_cm_event(event_of(RDMA_CM_EVENT_ESTABLISHED));
}

int main(void)
{
    struct ibv_wc completion;

    alarm(30);
    channel = rdma_create_event_channel();
    check(channel != NULL, "rdma_create_event_channel");
    connect_both();
    cancel(await_completion, "a thread in ibv_get_cq_event is cancelled");
    cancel(await_async_event, "a thread in ibv_get_async_event is cancelled");
    cancel(post, "a thread is cancelled after its post");
    strcpy(buffer, "after");
    for (int i = 0; i < 2; i++) {
        check(rdma_get_recv_comp(server, &completion) == 1 && !completion.status, "a message");
        check(rdma_get_send_comp(client, &completion) == 1 && !completion.status, "its send");
        if (!i)
            check(!rdma_post_send(client, NULL, buffer, 8, region, 0), "another post");
    }
    check(!strcmp(buffer + 32, "after"), "the last message");
    check(!rdma_disconnect(client), "rdma_disconnect");
    rdma_ack_cm_event(event_of(RDMA_CM_EVENT_DISCONNECTED));
    rdma_ack_cm_event(event_of(RDMA_CM_EVENT_DISCONNECTED));
    rdma_dereg_mr(region);
    rdma_destroy_ep(client);
    rdma_destroy_ep(server);
    rdma_destroy_id(listener);
    rdma_destroy_event_channel(channel);
    return 0;
}
