/*
 * The TCP port space: its passive side, and the whole of it. A listener hears out whoever
 * connects: when the request has come it becomes an identifier, which the program accepts or
 * rejects. Who says nothing is dropped after a while, and the program never learns of it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* accept4 */
#endif
#include "cm_listen.h"

#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cm_addresses.h"
#include "cm_stream.h"

enum {
    REQUEST_MILLISECONDS = 10000, /* for a peer's request to come, once TCP connected */
    HEARD_MILLISECONDS = 60000,   /* for its first frame, after we accepted */
    RETRY_MILLISECONDS = 100,     /* a listener's, out of descriptors */
    MOST_HANDSHAKES = 1024,       /* that one listener waits for */
    ACCEPTS_AT_ONCE = 16,
};

/* -- the side that listens --------------------------------------------------------------------- */

static void unlink_handshake(struct sw_connection *handshake)
{
    struct sw_connection *listener = handshake->listener;
    struct sw_connection **link = &listener->handshakes;

    while (*link && *link != handshake)
        link = &(*link)->next;
    if (*link)
        *link = handshake->next;
    listener->handshake_count--;
    handshake->next = handshake->listener = NULL;
    sw_cancel(&handshake->timer);
}

static void accept_again(struct sw_connection *listener)
{
    if (listener->handshake_count < MOST_HANDSHAKES && listener->waiting < listener->backlog)
        sw_rewatch(&listener->watch, EPOLLIN);
}

static void drop_handshake(struct sw_connection *handshake)
{
    struct sw_connection *listener = handshake->listener;

    unlink_handshake(handshake);
    sw_reset_connection(handshake);
    free(handshake);
    accept_again(listener);
}

static void handshake_expired(struct sw_timer *timer)
{
    drop_handshake(SW_CONTAINER(timer, struct sw_connection, timer));
}

/* An answer to what was asked, but for depths and private data. */
static struct sw_mpa reply_to(const struct sw_mpa *request)
{
    struct sw_mpa reply = {
        .is_reply = 1,
        .revision = request->revision,
        .crc = request->crc,
        .enhanced = request->enhanced,
        .peer_to_peer = request->peer_to_peer,
    };

    /* A WRITE of no bytes, if the peer can, or leaves it to us; a READ of none. One of our own
     * kind offers both, and is answered with both. */
    if (request->peer_to_peer) {
        reply.ready_by_read = request->ready_by_read;
        reply.ready_by_write = request->ready_by_write || !request->ready_by_read;
    }
    return reply;
}

/* What no program could take: say no in its name. */
static void refuse(struct sw_connection *handshake)
{
    struct sw_mpa reply = reply_to(&handshake->peer);

    reply.rejects = 1;
    if (sw_write_handshake(handshake, &reply)) {
        /* It learns as much from the end. */
    }
}

static struct sw_event *event_of_request(struct sw_identifier *listener,
                                         struct sw_identifier *identifier,
                                         const struct sw_mpa *peer)
{
    struct sw_event *event = sw_new_request_event(listener, identifier);

    if (!event)
        return NULL;
    /* From the viewpoint of who receives it: what the peer asks at most is what we answer. One of
     * revision 1 says nothing, and is taken at our word. */
    struct rdma_conn_param *parameters = &event->ibv.param.conn;
    parameters->responder_resources =
        (uint8_t)(peer->enhanced ? sw_least(peer->outbound_depth, SW_MOST_DEPTH) : SW_MOST_DEPTH);
    parameters->initiator_depth =
        (uint8_t)(peer->enhanced ? sw_least(peer->inbound_depth, SW_MOST_DEPTH) : SW_MOST_DEPTH);
    sw_set_private_data(event, peer->private_data, peer->private_size);
    return event;
}

/* The handshake becomes an identifier's connection. */
static int request_arrived(struct sw_connection *handshake)
{
    struct sw_connection *listening = handshake->listener;
    struct sw_identifier *listener = listening->identifier;

    if (handshake->peer.markers || handshake->peer.private_size > UINT8_MAX) {
        refuse(handshake);
        return EOPNOTSUPP;
    }
    if (listening->waiting >= listening->backlog)
        return ENOBUFS;
    struct sw_identifier *identifier = sw_new_requesting(listener);
    if (!identifier)
        return ENOMEM;
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    struct sw_event *event = NULL;
    int error = sw_get_socket_address(handshake->fd, getsockname, &addresses->src_storage);
    if (!error)
        error = sw_get_socket_address(handshake->fd, getpeername, &addresses->dst_storage);
    if (!error)
        error = sw_bind_device(identifier);
    if (!error) {
        event = event_of_request(listener, identifier, &handshake->peer);
        error = event ? 0 : ENOMEM;
    }
    if (error) {
        sw_drop_identifier(identifier);
        return error;
    }
    unlink_handshake(handshake);
    sw_unwatch(&handshake->watch); /* nothing more is due before the answer */
    handshake->identifier = identifier;
    identifier->connection = handshake;
    listening->waiting++;
    sw_report(event);
    return 0;
}

static void read_request(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *handshake = SW_CONTAINER(watch, struct sw_connection, watch);

    (void)events;
    int error = sw_read_handshake(handshake, 0);
    if (error == EAGAIN)
        return;
    struct sw_connection *listener = handshake->listener;
    if (!error)
        error = request_arrived(handshake);
    if (error == EOPNOTSUPP) {
        /* Closed in the usual way, so that the refusal arrives. */
        unlink_handshake(handshake);
        sw_close_connection(handshake);
        free(handshake);
    } else if (error) {
        drop_handshake(handshake);
    }
    accept_again(listener);
}

static int hear_out(struct sw_connection *listener, int fd)
{
    struct sw_connection *handshake = sw_new_connection(NULL);

    if (!handshake) {
        close(fd);
        return ENOMEM;
    }
    handshake->fd = fd;
    sw_device.counts.sockets++;
    handshake->listener = listener;
    handshake->next = listener->handshakes;
    listener->handshakes = handshake;
    listener->handshake_count++;
    handshake->watch.ready = read_request;
    handshake->timer.expired = handshake_expired;
    int error = 0, on = 1;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
        error = errno;
    if (!error)
        error = sw_watch(&handshake->watch, fd, EPOLLIN);
    if (!error)
        error = sw_call_later(&handshake->timer, REQUEST_MILLISECONDS);
    if (error)
        drop_handshake(handshake);
    return error;
}

static void listen_again(struct sw_timer *timer)
{
    accept_again(SW_CONTAINER(timer, struct sw_identifier, timer)->connection);
}

static void accept_some(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *listener = SW_CONTAINER(watch, struct sw_connection, watch);
    int fd = 0, error = 0;

    (void)events;
    for (int i = 0; i < ACCEPTS_AT_ONCE; i++) {
        /* Who comes when there is no room waits in TCP's own queue. */
        if (listener->handshake_count >= MOST_HANDSHAKES ||
            listener->waiting >= listener->backlog) {
            sw_rewatch(&listener->watch, 0);
            return;
        }
        fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        error = fd < 0 ? errno : hear_out(listener, fd);
        if (error)
            break;
    }
    if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        /* Who waits makes the listener readable all the time: look again a little later. */
        if (!sw_call_later(&listener->identifier->timer, RETRY_MILLISECONDS))
            sw_rewatch(&listener->watch, 0);
    }
}

static int start_listening(struct sw_identifier *identifier, int backlog)
{
    struct sw_connection *connection = identifier->connection;

    connection->watch.ready = accept_some;
    connection->backlog = (uint32_t)backlog;
    identifier->timer.expired = listen_again;
    if (listen(connection->fd, backlog))
        return errno;
    return sw_watch(&connection->watch, connection->fd, EPOLLIN);
}

static void request_taken(struct sw_identifier *listener)
{
    if (listener->connection && listener->connection->waiting) {
        listener->connection->waiting--;
        accept_again(listener->connection);
    }
}

/* -- the side that accepts --------------------------------------------------------------------- */

/* Whether the peer still waits for an answer. */
static int check_patience(const struct sw_connection *connection)
{
    char byte;
    ssize_t got = recv(connection->fd, &byte, sizeof(byte), MSG_PEEK | MSG_DONTWAIT);

    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : ECONNRESET;
}

static int answer_yes(struct sw_identifier *identifier, struct sw_terms *terms)
{
    struct sw_connection *connection = identifier->connection;
    const struct sw_mpa *peer = &connection->peer;
    const struct rdma_conn_param *parameters = &identifier->parameters;
    struct sw_mpa reply = reply_to(peer);

    *terms = (struct sw_terms){
        .crc = peer->crc || sw_wants_crc(identifier),
        .must_hear_first = 1,
        .must_hear_soon = !peer->peer_to_peer,
        .gives_word = peer->peer_to_peer && peer->ready_by_write && peer->ready_by_read,
        .inbound_depth = sw_depth_of(parameters->responder_resources),
        .outbound_depth = sw_depth_of(parameters->initiator_depth),
    };
    if (peer->enhanced) {
        terms->inbound_depth = sw_least(terms->inbound_depth, peer->outbound_depth);
        terms->outbound_depth = sw_least(terms->outbound_depth, peer->inbound_depth);
        reply.inbound_depth = terms->inbound_depth;
        reply.outbound_depth = terms->outbound_depth;
    }
    reply.crc = terms->crc;
    reply.private_data = identifier->private_data;
    reply.private_size = parameters->private_data_len;
    return sw_write_handshake(connection, &reply);
}

static int accept_request(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    struct sw_terms terms;

    if (connection->fd < 0)
        return ECONNRESET; /* an accept that failed before */
    int error = sw_attach_pair(identifier);
    if (error)
        return error;
    sw_set_type_of_service(identifier, connection->fd);
    int announces = connection->peer.peer_to_peer;
    error = check_patience(connection);
    if (!error)
        error = answer_yes(identifier, &terms);
    if (!error) {
        identifier->state = SW_CM_ACCEPTING;
        identifier->timer.expired = sw_took_too_long;
        error = announces ? sw_call_later(&identifier->timer, HEARD_MILLISECONDS) : 0;
    }
    if (!error)
        error = sw_begin_stream(connection, &terms);
    if (error) {
        struct sw_queue_pair *pair = connection->pair;
        sw_cancel(&identifier->timer);
        sw_reset_connection(connection);
        sw_detach_pair(identifier);
        identifier->state = SW_CM_DISCONNECTED;
        sw_queue_pair_failed(pair);
        return error == EPIPE ? ECONNRESET : error;
    }
    /* One that announces itself is connected when it has; of others nothing is due. */
    if (!announces && identifier->state == SW_CM_ACCEPTING) {
        identifier->state = SW_CM_CONNECTED;
        sw_report_established(identifier, &terms, 0);
    }
    return 0;
}

static int reject_request(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    struct sw_mpa reply = reply_to(&connection->peer);

    if (connection->fd < 0)
        return ECONNRESET;
    int error = check_patience(connection);
    reply.rejects = 1;
    reply.private_data = identifier->private_data;
    reply.private_size = identifier->parameters.private_data_len;
    if (!error)
        error = sw_write_handshake(connection, &reply);
    sw_close_connection(connection);
    return error == EPIPE ? ECONNRESET : error;
}

/* -- the end of an identifier ------------------------------------------------------------------- */

/* A listener goes: those that it hears out are reset. */
static void forget_handshakes(struct sw_connection *connection)
{
    while (connection->handshakes) {
        struct sw_connection *handshake = connection->handshakes;
        unlink_handshake(handshake);
        sw_reset_connection(handshake);
        free(handshake);
    }
}

static void forget(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    enum sw_cm_state before = identifier->state;

    if (!connection)
        return;
    forget_handshakes(connection);
    if (before == SW_CM_REQUESTED) {
        identifier->parameters.private_data_len = 0;
        reject_request(identifier); /* whoever waits is told no */
    }
    sw_close_connection(connection);
    identifier->state = SW_CM_DISCONNECTED; /* the stream's end is nobody's news any more */
    struct sw_queue_pair *pair = connection->pair;
    if (pair) {
        sw_detach_pair(identifier);
        if (before == SW_CM_CONNECTED || before == SW_CM_ACCEPTING || before == SW_CM_CONNECTING)
            sw_queue_pair_failed(pair);
    }
    identifier->connection = NULL;
    free(connection);
}

static void forked(struct sw_identifier *identifier)
{
    const struct sw_connection *connection = identifier->connection;

    /* Those that are watched are the engine's to close. */
    if (connection && connection->fd >= 0 && !connection->watch.slot)
        close(connection->fd);
}

const struct sw_port_space sw_stream_space = {
    .bind = sw_stream_bind,
    .listen = start_listening,
    .connect = sw_stream_connect,
    .accept = accept_request,
    .reject = reject_request,
    .disconnect = sw_stream_disconnect,
    .request_taken = request_taken,
    .forget = forget,
    .forked = forked,
    .told = {sw_stream_heard, sw_stream_ended, sw_stream_lost_queue_pair},
};
