/*
 * Synchronous identifiers and endpoints, as the man pages of librdmacm describe them. Compiled with
 * rdma-core's own headers, and run with the libraries that export the software device. Prints what
 * is wrong.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <arpa/inet.h>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

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
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
}

static struct rdma_addrinfo *look_up(int flags, const char *port)
{
    struct rdma_addrinfo hints = {.ai_flags = flags, .ai_port_space = RDMA_PS_TCP}, *result;

    check(!rdma_getaddrinfo("127.0.0.1", port, &hints, &result), "rdma_getaddrinfo");
    return result;
}

static struct rdma_cm_id *listening(struct ibv_qp_init_attr *attr)
{
    struct rdma_addrinfo *result = look_up(RAI_PASSIVE, "0");
    struct rdma_cm_id *listener;

    check(!rdma_create_ep(&listener, result, NULL, attr), "rdma_create_ep of a listener");
    rdma_freeaddrinfo(result);
    check(!rdma_listen(listener, 4), "rdma_listen");
    check(rdma_get_src_port(listener) != 0, "a listener has a port");
    return listener;
}

static struct rdma_cm_id *client_of(uint16_t port, struct ibv_qp_init_attr *attr)
{
    struct rdma_cm_id *id;
    char text[8];

    snprintf(text, sizeof(text), "%u", ntohs(port));
    struct rdma_addrinfo *result = look_up(0, text);
    check(!rdma_create_ep(&id, result, NULL, attr), "rdma_create_ep of a client");
    rdma_freeaddrinfo(result);
    return id;
}

/* What rdma-core's own Python tests ask of each device. */
static void query(struct rdma_cm_id *id, int timeout)
{
    struct ibv_device_attr device;
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    check(!ibv_query_device(id->verbs, &device) && device.vendor_id, "a device has a vendor");
    check(!ibv_query_qp(id->qp, &attr, IBV_QP_TIMEOUT, &init), "ibv_query_qp");
    check(attr.timeout == timeout, "a queue pair has its identifier's timeout");
}

/* -- a connection, message and reply -------------------------------------------------------------- */

static void *serve(void *argument)
{
    struct rdma_cm_id *listener = argument, *id;
    struct ibv_wc completion;
    char buffer[16];

    check(!rdma_get_request(listener, &id), "rdma_get_request");
    check(id->qp != NULL, "a request has the listener's queue pair attributes");
    check(id->pd != NULL && id->pd == id->qp->pd, "a request has a default domain");
    check(id->event && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST,
          "a request has its event");
    check(id->event->param.conn.private_data_len >= 5 &&
              !memcmp(id->event->param.conn.private_data, "hello", 5),
          "a request has private data");
    struct ibv_mr *region = rdma_reg_msgs(id, buffer, sizeof(buffer));
    check(region != NULL, "rdma_reg_msgs");
    check(!rdma_post_recv(id, NULL, buffer, sizeof(buffer), region), "rdma_post_recv");
    check(!rdma_accept(id, NULL), "rdma_accept");
    check(id->event && id->event->event == RDMA_CM_EVENT_ESTABLISHED, "rdma_accept waits");
    query(id, 0);
    check(rdma_get_recv_comp(id, &completion) == 1, "rdma_get_recv_comp");
    check(completion.byte_len == 4 && !memcmp(buffer, "ping", 4), "the message");
    check(!rdma_post_send(id, NULL, "pong", 4, NULL, IBV_SEND_INLINE) || errno, "rdma_post_send");
    check(rdma_get_send_comp(id, &completion) == 1, "rdma_get_send_comp");
    check(!rdma_disconnect(id), "rdma_disconnect of a server");
    check(id->event && id->event->event == RDMA_CM_EVENT_DISCONNECTED, "rdma_disconnect waits");
    rdma_dereg_mr(region);
    rdma_destroy_ep(id);
    return NULL;
}

static void converse(void)
{
    struct ibv_qp_init_attr attr = attributes(), ours = attributes();
    struct rdma_conn_param parameters = {
        .private_data = "hello", .private_data_len = 5, .retry_count = 7, .rnr_retry_count = 7};
    struct ibv_wc completion;
    pthread_t thread;
    char buffer[16] = "ping";

    attr.cap.max_inline_data = ours.cap.max_inline_data = 16;
    struct rdma_cm_id *listener = listening(&attr);
    check(!pthread_create(&thread, NULL, serve, listener), "pthread_create");
    struct rdma_cm_id *id = client_of(rdma_get_src_port(listener), &ours);
    check(id->qp && id->verbs && id->send_cq_channel && id->recv_cq, "an endpoint has queues");
    struct ibv_mr *region = rdma_reg_msgs(id, buffer, sizeof(buffer));
    check(region != NULL, "rdma_reg_msgs of a client");
    uint8_t timeout = 21;
    check(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, 1),
          "rdma_set_option");
    check(!rdma_connect(id, &parameters), "rdma_connect");
    query(id, timeout);
    check(id->event && id->event->event == RDMA_CM_EVENT_ESTABLISHED, "rdma_connect waits");
    check(!rdma_post_recv(id, NULL, buffer + 8, 8, region), "rdma_post_recv of a client");
    check(!rdma_post_send(id, buffer, buffer, 4, region, 0), "rdma_post_send of a client");
    check(rdma_get_send_comp(id, &completion) == 1, "rdma_get_send_comp of a client");
    check(completion.wr_id == (uintptr_t)buffer, "a context is the wr_id");
    check(rdma_get_recv_comp(id, &completion) == 1, "rdma_get_recv_comp of a client");
    check(!memcmp(buffer + 8, "pong", 4), "the reply");
    check(!rdma_disconnect(id), "rdma_disconnect of a client");
    pthread_join(thread, NULL);
    rdma_dereg_mr(region);
    rdma_destroy_ep(id);
    rdma_destroy_ep(listener);
}

/* -- failures ------------------------------------------------------------------------------------- */

static void *reject(void *argument)
{
    struct rdma_cm_id *listener = argument, *id;

    check(!rdma_get_request(listener, &id), "rdma_get_request of a request to reject");
    check(id->qp == NULL, "a listener without attributes makes no queue pair");
    check(!rdma_reject(id, "no", 2), "rdma_reject");
    check(!rdma_destroy_id(id), "rdma_destroy_id of a rejected request");
    return NULL;
}

static void be_rejected(void)
{
    struct ibv_qp_init_attr attr = attributes();
    struct rdma_cm_id *listener = listening(NULL), *id;
    pthread_t thread;

    check(!pthread_create(&thread, NULL, reject, listener), "pthread_create");
    id = client_of(rdma_get_src_port(listener), &attr);
    errno = 0;
    check(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED, "a rejection is ECONNREFUSED");
    check(id->event->event == RDMA_CM_EVENT_REJECTED, "a rejection's event");
    check(id->event->param.conn.private_data_len >= 2, "a rejection's private data");
    pthread_join(thread, NULL);
    rdma_destroy_ep(id);
    uint16_t port = rdma_get_src_port(listener);
    rdma_destroy_ep(listener);
    attr = attributes(); /* rdma_create_qp has written its queues there */
    id = client_of(port, &attr);
    check(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED, "nobody listens");
    rdma_destroy_ep(id);
}

static void be_refused(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id, *request;

    check(channel != NULL, "rdma_create_event_channel");
    check(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(rdma_get_request(id, &request) == -1 && errno == EINVAL,
          "rdma_get_request of an asynchronous identifier");
    check(rdma_create_id(channel, &request, NULL, RDMA_PS_IB) == -1, "another port space");
    check(!rdma_destroy_id(id), "rdma_destroy_id");
    rdma_destroy_event_channel(channel);
}

/* -- from one mode to the other ------------------------------------------------------------------- */

static void migrate(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7)};
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(!rdma_create_id(NULL, &id, &address, RDMA_PS_TCP), "a synchronous identifier");
    check(id->context == &address && id->channel != NULL, "its context and channel");
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000), "rdma_resolve_addr");
    check(id->event->event == RDMA_CM_EVENT_ADDR_RESOLVED && id->pd, "rdma_resolve_addr waits");
    check(!rdma_migrate_id(id, channel), "rdma_migrate_id to a channel");
    check(id->channel == channel && !id->event, "an asynchronous identifier");
    check(!rdma_resolve_route(id, 1000), "rdma_resolve_route");
    check(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
    check(event->event == RDMA_CM_EVENT_ROUTE_RESOLVED && event->id == id, "its event");
    check(!strcmp(rdma_event_str(event->event), "RDMA_CM_EVENT_ROUTE_RESOLVED"), "its name");
    rdma_ack_cm_event(event);
    check(!rdma_migrate_id(id, NULL), "rdma_migrate_id to no channel");
    check(id->channel && id->channel != channel, "a synchronous identifier again");
    errno = 0;
    struct ibv_qp_init_attr attr = attributes();
    check(!rdma_create_qp(id, NULL, &attr), "rdma_create_qp");
    check(rdma_connect(id, NULL) == -1 && errno == ECONNREFUSED, "rdma_connect waits");
    rdma_destroy_ep(id);
    rdma_destroy_event_channel(channel);
}

static void share_receives(void)
{
    struct ibv_qp_init_attr attr = attributes();
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7)};
    struct rdma_cm_id *id;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP), "an identifier");
    check(rdma_create_srq(id, NULL, &init) == -1 && errno == EINVAL, "rdma_create_srq: unbound");
    check(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000), "rdma_resolve_addr");
    check(!rdma_create_srq(id, NULL, &init) && id->srq, "rdma_create_srq");
    check(rdma_create_srq(id, NULL, &init) == -1 && errno == EINVAL, "rdma_create_srq: twice");
    check(!rdma_create_qp(id, NULL, &attr), "rdma_create_qp");
    check(id->qp->srq == id->srq, "a queue pair uses its identifier's shared receives");
    rdma_destroy_ep(id);
}

int main(void)
{
    converse();
    be_rejected();
    be_refused();
    migrate();
    share_receives();
    return 0;
}
