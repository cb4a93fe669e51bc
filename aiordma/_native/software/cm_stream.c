/*
 * The TCP port space: the parts for both sides, and the side that connects.
 *
 * An RDMA connection is a TCP connection that begins with a frame of MPA in each direction. This
 * module has the socket until both are exchanged, and then the stream has it.
 *
 * No peer is trusted to answer. A peer that connects and sends nothing is dropped after a while. A
 * peer that does not reply to the request is UNREACHABLE. A peer that was accepted and then sends
 * nothing is UNREACHABLE, too; one that resets its stream then is a CONNECT_ERROR.
 */
#include "cm_stream.h"

#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "capture.h"
#include "cm_addresses.h"
#include "faults.h"
#include "gids.h"

enum {
    REPLY_MILLISECONDS = 60000, /* for a peer's reply, including TCP's connecting */
};

/* -- sockets ----------------------------------------------------------------------------------- */

struct sw_connection *sw_new_connection(struct sw_identifier *identifier)
{
    struct sw_connection *connection = calloc(1, sizeof(*connection));

    if (connection) {
        connection->identifier = identifier;
        connection->member.watch = &connection->watch;
        connection->fd = -1;
    }
    return connection;
}

void sw_close_connection(struct sw_connection *connection)
{
    if (connection->fd < 0)
        return;
    sw_progress_unwatch(&connection->member);
    sw_system->close(connection->fd);
    connection->fd = -1;
    sw_device.counts.sockets--;
}

void sw_reset_connection(struct sw_connection *connection)
{
    struct linger hard = {.l_onoff = 1};

    if (connection->fd >= 0 &&
        sw_system->setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard))) {
        /* The connection then ends without a reset. */
    }
    sw_close_connection(connection);
}

/* Set an option that a socket works without. */
static void try_option(int fd, int level, int name, int value)
{
    if (sw_system->setsockopt(fd, level, name, &value, sizeof(value))) {
        /* The system does not support it. */
    }
}

void sw_set_type_of_service(const struct sw_identifier *identifier, int fd)
{
    if (!identifier->has_tos)
        return;
    if (identifier->ibv.route.addr.src_addr.sa_family == AF_INET6)
        try_option(fd, IPPROTO_IPV6, IPV6_TCLASS, identifier->tos);
    try_option(fd, IPPROTO_IP, IP_TOS, identifier->tos);
}

static int open_socket(struct sw_identifier *identifier, int family)
{
    struct sw_connection *connection = identifier->connection;
    int fd = sw_system->socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);

    if (fd < 0)
        return errno;
    int on = 1, alone = identifier->ipv6_only, error = 0;
    /* A port is free again at once. sw_check_port decides whether identifiers may share one. */
    if (sw_system->setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
        sw_system->setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) ||
        (family == AF_INET6 &&
         sw_system->setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &alone, sizeof(alone))))
        error = errno;
    if (error) {
        sw_system->close(fd);
        return error;
    }
    sw_set_type_of_service(identifier, fd);
    connection->fd = fd;
    sw_device.counts.sockets++;
    return 0;
}

static int make_connection(struct sw_identifier *identifier)
{
    if (!identifier->connection)
        identifier->connection = sw_new_connection(identifier);
    return identifier->connection ? 0 : ENOMEM;
}

int sw_get_socket_address(int fd, int (*get)(int, struct sockaddr *, socklen_t *),
                          struct sockaddr_storage *address)
{
    socklen_t size = sizeof(*address);

    memset(address, 0, sizeof(*address));
    if (get(fd, (struct sockaddr *)address, &size))
        return errno;
    sw_tidy_address(address);
    return 0;
}

int sw_stream_bind(struct sw_identifier *identifier)
{
    struct sockaddr *address = &identifier->ibv.route.addr.src_addr;
    int error = make_connection(identifier);

    if (!error)
        error = open_socket(identifier, address->sa_family);
    if (error)
        return error;
    int fd = identifier->connection->fd;
    if (sw_system->bind(fd, address, sw_address_length(address)))
        error = errno;
    if (!error)
        error = sw_get_socket_address(fd, sw_system->getsockname,
                                      &identifier->ibv.route.addr.src_storage);
    if (error)
        sw_close_connection(identifier->connection);
    return error;
}

/* -- the frames of the handshake --------------------------------------------------------------- */

int sw_read_handshake(struct sw_connection *connection, int is_reply)
{
    for (;;) {
        int size = sw_mpa_size(connection->frame, connection->arrived, is_reply);
        if (size < 0)
            return EPROTO;
        if (size && connection->arrived >= (size_t)size) {
            connection->size = (size_t)size;
            return sw_mpa_read(connection->frame, connection->size, is_reply, &connection->peer)
                       ? EPROTO
                       : 0;
        }
        ssize_t got =
            sw_system->recv(connection->fd, connection->frame + connection->arrived,
                            sizeof(connection->frame) - connection->arrived, MSG_DONTWAIT);
        if (!got)
            return ECONNRESET;
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno == EWOULDBLOCK ? EAGAIN : errno;
        sw_received_bytes(connection->fd, connection->frame + connection->arrived, got);
        sw_device.reads++;
        connection->arrived += (size_t)got;
    }
}

/* The socket's buffer is empty at this time, so a partial write is an error. */
int sw_write_handshake(struct sw_connection *connection, const struct sw_mpa *frame)
{
    uint8_t bytes[SW_MPA_MOST];
    size_t size = sw_mpa_write(bytes, frame);

    if (!size)
        return EINVAL;
    ssize_t sent = sw_system->send(connection->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0)
        return errno == ENOTCONN ? EAGAIN : errno;
    sw_sent_bytes(connection->fd, bytes, sent);
    return (size_t)sent == size ? 0 : EPROTO;
}

/* TCP's checksum is sufficient for data that stay on this machine. */
int sw_wants_crc(const struct sw_identifier *identifier)
{
    const struct sockaddr *peer = &identifier->ibv.route.addr.dst_addr;
    struct aiordma_fault fault;
    union ibv_gid gid;

    if (sw_fault(AIORDMA_FAULT_CRC_WANTED, &fault))
        return 1;
    sw_gid_of(peer, &gid);
    return !sw_is_local(&gid);
}

/* -- failed attempts --------------------------------------------------------------------------- */

void sw_detach_pair(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;

    if (connection->pair && connection->pair != (struct sw_queue_pair *)identifier->ibv.qp)
        connection->pair->identifier = NULL; /* the program's own; the identifier's stays with it */
    sw_stop_looking(&connection->silence);
    connection->pair = NULL;
}

/* There is no connection: report that, once, and flush the posted requests. */
static void give_up(struct sw_identifier *identifier, struct sw_event *event)
{
    struct sw_queue_pair *pair = identifier->connection->pair;

    sw_cancel(&identifier->timer);
    sw_close_connection(identifier->connection);
    sw_detach_pair(identifier);
    identifier->state = SW_CM_DISCONNECTED;
    sw_report(event);
    if (pair)
        sw_queue_pair_failed(pair);
}

static enum rdma_cm_event_type event_of_error(int error)
{
    switch (error) {
    case ECONNREFUSED:
    case ECONNRESET:
        return RDMA_CM_EVENT_REJECTED;
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EHOSTDOWN:
        return RDMA_CM_EVENT_UNREACHABLE;
    default:
        return RDMA_CM_EVENT_CONNECT_ERROR;
    }
}

static void give_up_for(struct sw_identifier *identifier, int error)
{
    if (error == EPIPE)
        error = ECONNRESET;
    give_up(identifier, sw_last_event(identifier, event_of_error(error), -error));
}

void sw_took_too_long(struct sw_timer *timer)
{
    struct sw_identifier *identifier = SW_CONTAINER(timer, struct sw_identifier, timer);

    if (identifier->state == SW_CM_CONNECTING) {
        give_up_for(identifier, ETIMEDOUT);
    } else if (identifier->state == SW_CM_ACCEPTING) {
        struct sw_queue_pair *pair = identifier->connection->pair;
        identifier->state = SW_CM_DISCONNECTED;
        sw_report_last(identifier, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
        if (pair)
            sw_queue_pair_failed(pair);
    }
}

/* -- the side that connects -------------------------------------------------------------------- */

int sw_attach_pair(struct sw_identifier *identifier)
{
    struct sw_queue_pair *pair = (struct sw_queue_pair *)identifier->ibv.qp;

    if (!pair)
        pair = sw_find_queue_pair(identifier->parameters.qp_num);
    if (!pair || pair->ibv.qp_type != IBV_QPT_RC || pair->ibv.state != IBV_QPS_INIT ||
        pair->ibv.context != identifier->ibv.verbs ||
        (pair->identifier && pair->identifier != identifier))
        return EINVAL;
    identifier->connection->pair = pair;
    sw_give_queue_pair(identifier, pair);
    pair->attributes.timeout = identifier->ack_timeout; /* for ibv_query_qp */
    return 0;
}

void sw_report_established(struct sw_identifier *identifier, const struct sw_terms *terms,
                           int has_data)
{
    struct sw_event *event = sw_new_event(identifier, RDMA_CM_EVENT_ESTABLISHED, 0);
    struct sw_connection *connection = identifier->connection;
    const struct sw_mpa *peer = &connection->peer;

    if (!event) {
        /* A connection that cannot be reported ends. */
        give_up(identifier, sw_last_event(identifier, RDMA_CM_EVENT_CONNECT_ERROR, -ENOMEM));
        return;
    }
    event->ibv.param.conn.responder_resources = (uint8_t)terms->inbound_depth;
    event->ibv.param.conn.initiator_depth = (uint8_t)terms->outbound_depth;
    if (has_data)
        sw_set_private_data(event, peer->private_data, peer->private_size);
    sw_report(event);
    if (identifier->has_ack_timeout)
        sw_look_for_silence(&connection->silence, connection->pair, identifier->ack_timeout,
                            identifier->parameters.retry_count);
}

/* Check the peer's reply, and compute the terms. */
static int agree(struct sw_identifier *identifier, struct sw_terms *terms)
{
    const struct sw_connection *connection = identifier->connection;
    const struct sw_mpa *peer = &connection->peer;
    uint16_t inbound = sw_depth_of(identifier->parameters.responder_resources);
    uint16_t outbound = sw_depth_of(identifier->parameters.initiator_depth);

    /* The device supports no markers. Private data must fit into an event. */
    if (peer->markers || !peer->enhanced || peer->private_size > UINT8_MAX)
        return EPROTO;
    /* The peer may lower the requested depth, but not raise it (RFC 6581, 9.2). */
    if (peer->outbound_depth > inbound)
        return EPROTO;
    if (peer->peer_to_peer && !peer->ready_by_write)
        return EPROTO;
    *terms = (struct sw_terms){
        .crc = peer->crc || sw_wants_crc(identifier),
        .is_initiator = 1,
        .sends_ready = peer->peer_to_peer,
        .gives_word = peer->ready_by_write && peer->ready_by_read,
        .inbound_depth = peer->outbound_depth,
        .outbound_depth = sw_least(outbound, peer->inbound_depth),
        .already = connection->frame + connection->size,
        .already_size = connection->arrived - connection->size,
    };
    return 0;
}

static void was_rejected(struct sw_identifier *identifier)
{
    const struct sw_mpa *peer = &identifier->connection->peer;
    struct sw_event *event = sw_last_event(identifier, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED);

    sw_set_private_data(event, peer->private_data, peer->private_size);
    give_up(identifier, event);
}

/* BBR sets a timer for each segment, two fifths of the sender's time within a machine. */
static void do_not_pace(int fd)
{
    static const char control[] = "reno"; /* every user may set it */

    if (sw_system->setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, sizeof(control) - 1)) {
        /* The system's default then stays. */
    }
}

int sw_begin_stream(struct sw_connection *connection, const struct sw_terms *terms)
{
    const struct sw_identifier *identifier = connection->identifier;
    struct ibv_ah_attr *vector = &connection->pair->attributes.ah_attr;
    int fd = connection->fd;

    vector->is_global = 1;
    vector->port_num = identifier->ibv.port_num;
    vector->grh.dgid = identifier->ibv.route.addr.addr.ibaddr.dgid;
    vector->grh.traffic_class = identifier->has_tos ? identifier->tos : 0;
    sw_progress_unwatch(&connection->member);
    connection->fd = -1;
    sw_device.counts.sockets--;    /* the stream counts it */
    if (!sw_wants_crc(identifier)) /* the peer is on this machine */
        do_not_pace(fd);
    return sw_stream_begin(connection->pair, fd, terms);
}

int sw_watch_connection(struct sw_connection *connection, const struct sw_identifier *identifier,
                        uint32_t events)
{
    return sw_progress_watch(sw_cm_progress(identifier), &connection->member, connection->fd,
                             events);
}

static void read_reply(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *connection = SW_CONTAINER(watch, struct sw_connection, watch);
    struct sw_identifier *identifier = connection->identifier;
    struct sw_terms terms;

    (void)events;
    int error = sw_read_handshake(connection, 1);
    if (error == EAGAIN)
        return;
    if (!error && connection->peer.rejects) {
        was_rejected(identifier);
        return;
    }
    if (!error)
        error = agree(identifier, &terms);
    if (!error) {
        sw_cancel(&identifier->timer);
        error = sw_begin_stream(connection, &terms);
    }
    if (error) {
        give_up_for(identifier, error);
    } else if (identifier->state == SW_CM_CONNECTING) { /* it can be over by now */
        identifier->state = SW_CM_CONNECTED;
        sw_report_established(identifier, &terms, 1);
    }
}

static int send_request(struct sw_identifier *identifier)
{
    const struct rdma_conn_param *parameters = &identifier->parameters;
    struct sw_mpa request = {
        .revision = 2,
        .crc = sw_wants_crc(identifier),
        .enhanced = 1,
        .peer_to_peer = 1,
        .ready_by_write = 1,
        .ready_by_read = 1, /* only to show that this is a software device */
        .inbound_depth = sw_depth_of(parameters->responder_resources),
        .outbound_depth = sw_depth_of(parameters->initiator_depth),
        .private_data = identifier->private_data,
        .private_size = parameters->private_data_len,
    };

    return sw_write_handshake(identifier->connection, &request);
}

/* On one machine, a port without a listener can be the one that this socket connects from. */
static int is_myself(struct sw_identifier *identifier)
{
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    union ibv_gid ours, theirs;

    sw_gid_of(&addresses->src_addr, &ours);
    sw_gid_of(&addresses->dst_addr, &theirs);
    return *sw_port_of(&addresses->src_addr) == *sw_port_of(&addresses->dst_addr) &&
           !memcmp(&ours, &theirs, sizeof(ours));
}

/* A fault has delayed the peer's reply. */
static void delay_is_over(struct sw_timer *timer)
{
    struct sw_identifier *identifier = SW_CONTAINER(timer, struct sw_identifier, timer);

    identifier->timer.expired = sw_took_too_long;
    if (sw_call_later(&identifier->timer, REPLY_MILLISECONDS)) {
        /* This cannot fail: the engine runs, and it makes this call. */
    }
    int error = sw_rewatch(&identifier->connection->watch, EPOLLIN);
    if (error)
        give_up_for(identifier, error);
}

/* The request has been sent. Returns the events to wait for. */
static uint32_t await_reply(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    struct aiordma_fault fault;

    connection->arrived = 0;
    connection->watch.ready = read_reply;
    if (!sw_fault(AIORDMA_FAULT_CONNECT_DELAYED, &fault))
        return EPOLLIN;
    identifier->timer.expired = delay_is_over;
    return sw_call_later(&identifier->timer, fault.milliseconds) ? EPOLLIN : 0;
}

/* TCP is connected, or has failed, which sending finds out. */
static void connected(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *connection = SW_CONTAINER(watch, struct sw_connection, watch);
    struct sw_identifier *identifier = connection->identifier;

    int error = send_request(identifier);
    if (error == EAGAIN && !(events & (EPOLLERR | EPOLLHUP)))
        return; /* a spurious wake-up */
    sw_device.reads++;
    if (error)
        give_up_for(identifier, error);
    else
        (void)sw_rewatch(watch, await_reply(identifier)); /* it was watched: this cannot fail */
}

/* Go on as far as possible: on one machine, TCP is connected when connect() has returned. */
static int go_on(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    uint32_t events = EPOLLOUT;

    int error = sw_get_socket_address(connection->fd, sw_system->getsockname,
                                      &identifier->ibv.route.addr.src_storage);
    if (!error && is_myself(identifier))
        error = ECONNREFUSED;
    if (!error)
        error = send_request(identifier);
    if (!error)
        events = await_reply(identifier);
    if (error && error != EAGAIN)
        return error;
    error = sw_watch_connection(connection, identifier, events);
    if (!error)
        sw_cm_lend(identifier);
    return error;
}

static int start_connecting(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    const struct sockaddr *peer = &identifier->ibv.route.addr.dst_addr;
    int error = 0, is_bound = connection->fd >= 0;

    if (!is_bound)
        error = open_socket(identifier, peer->sa_family);
    else
        sw_set_type_of_service(identifier, connection->fd);
    if (error)
        return error;
    if (sw_system->connect(connection->fd, peer, sw_address_length(peer)) && errno != EINPROGRESS)
        error = errno;
    connection->watch.ready = connected;
    identifier->timer.expired = sw_took_too_long;
    if (!error)
        error = go_on(identifier);
    if (!error && !identifier->timer.deadline)
        error = sw_call_later(&identifier->timer, REPLY_MILLISECONDS);
    if (!error)
        return 0;
    if (event_of_error(error) != RDMA_CM_EVENT_CONNECT_ERROR) {
        give_up_for(identifier, error); /* caused by the peer or the network: an event reports it */
        return 0;
    }
    sw_cancel(&identifier->timer);
    sw_progress_unwatch(&connection->member);
    if (!is_bound)
        sw_close_connection(connection);
    return error;
}

int sw_stream_connect(struct sw_identifier *identifier)
{
    struct aiordma_fault fault;
    int error = make_connection(identifier);

    if (!error)
        error = sw_attach_pair(identifier);
    if (!error && sw_fault(AIORDMA_FAULT_CONNECT_REFUSED, &fault)) {
        give_up_for(identifier, ECONNREFUSED);
        return 0;
    }
    if (!error)
        error = start_connecting(identifier);
    if (error && identifier->connection)
        sw_detach_pair(identifier);
    return error;
}

/* -- connected, and over ----------------------------------------------------------------------- */

void sw_stream_first_frame(struct sw_identifier *identifier)
{
    struct sw_terms terms = {0};

    if (identifier->state != SW_CM_ACCEPTING)
        return;
    sw_cancel(&identifier->timer);
    identifier->state = SW_CM_CONNECTED;
    terms.inbound_depth = identifier->connection->pair->attributes.max_dest_rd_atomic;
    terms.outbound_depth = identifier->connection->pair->attributes.max_rd_atomic;
    sw_report_established(identifier, &terms, 0);
}

void sw_stream_ended(struct sw_identifier *identifier)
{
    enum sw_cm_state before = identifier->state;
    int broken;

    sw_cancel(&identifier->timer);
    if (before != SW_CM_CONNECTED && before != SW_CM_ACCEPTING && before != SW_CM_CONNECTING)
        return;
    broken = identifier->connection->pair ? identifier->connection->pair->broken : 0;
    sw_detach_pair(identifier);
    identifier->state = SW_CM_DISCONNECTED;
    if (before == SW_CM_CONNECTED)
        sw_report_last(identifier, RDMA_CM_EVENT_DISCONNECTED, -broken);
    else
        sw_report_last(identifier, RDMA_CM_EVENT_CONNECT_ERROR, -ECONNRESET);
}

int sw_stream_disconnect(struct sw_identifier *identifier)
{
    if (identifier->state == SW_CM_DISCONNECTED)
        return 0; /* the peer was faster, or this is the second call */
    if (identifier->state != SW_CM_CONNECTED && identifier->state != SW_CM_ACCEPTING)
        return EINVAL;
    sw_queue_pair_failed(identifier->connection->pair);
    return 0;
}

void sw_stream_lost_queue_pair(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;

    sw_lose_queue_pair(identifier);
    if (!connection || !connection->pair)
        return;
    connection->pair->identifier = NULL;
    sw_stop_looking(&connection->silence);
    connection->pair = NULL;
    if (identifier->state == SW_CM_CONNECTING)
        give_up_for(identifier, ECONNABORTED);
    else
        sw_stream_ended(identifier);
}
