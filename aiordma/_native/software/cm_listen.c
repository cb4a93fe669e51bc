/*
 * The passive side of the TCP port space, and its table of operations. A listener reads the request
 * of each peer that connects. When the request has arrived, it becomes an identifier, which the
 * program accepts or rejects. A silent peer is dropped after some seconds, or earlier if there are
 * many (cm_handshakes.h). The program gets no event for it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* accept4 */
#endif
#include "cm_listen.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cm_addresses.h"
#include "cm_stream.h"
#include "events.h"

enum {
    HEARD_MILLISECONDS = 60000,   /* for a peer's first frame, after accept */
    RETRY_MILLISECONDS = 100,     /* a listener's, after a lack of descriptors or memory */
    RETRIES = 20,                 /* before a peer is reset for that reason */
    CALM_MILLISECONDS = 10000,    /* until a shortage is reported again */
    STRANGERS_MILLISECONDS = 100, /* between two events of peers without a handshake */
    TCP_BACKLOG = 4096,           /* silent peers do not fill it between two turns */
    ACCEPTS_AT_ONCE = 16,
    HANDSHAKE_WORK = 16 * SW_FRAME_WORK, /* to accept a peer, or to read from it */
};

/* -- listening ------------------------------------------------------------------------- */

/* Call listen_again later, after a lack of memory or descriptors. Returns 0 without a timer. */
static int retry_later(struct sw_connection *listener)
{
    return !sw_call_later(&listener->identifier->timer, RETRY_MILLISECONDS);
}

static void accept_again(struct sw_connection *listener)
{
    if (listener->waiting < listener->backlog && sw_rewatch(&listener->watch, EPOLLIN))
        retry_later(listener);
}

/* Report peers that did not send a handshake: their number, and the last one's address. */
static void tell_of_strangers(struct sw_timer *timer)
{
    struct sw_connection *listener = SW_CONTAINER(timer, struct sw_connection, told);

    if (!listener->strangers || sw_call_later(timer, STRANGERS_MILLISECONDS))
        return;
    struct sw_event *event =
        sw_new_event(listener->identifier, RDMA_CM_EVENT_CONNECT_ERROR, -listener->strangeness);
    if (!event)
        return;
    sw_set_private_data(event, (const uint8_t *)&listener->stranger, sizeof(struct sockaddr_in6));
    event->ibv.param.conn.qp_num = listener->strangers;
    listener->strangers = 0;
    sw_report(event);
}

static void note_stranger(struct sw_connection *peer, int error)
{
    struct sw_connection *listener = peer->listener;

    listener->strangers++;
    listener->strangeness = error;
    memset(&listener->stranger, 0, sizeof(listener->stranger));
    (void)sw_get_socket_address(peer->fd, sw_system->getpeername, &listener->stranger);
    listener->told.expired = tell_of_strangers;
    if (!listener->told.deadline)
        tell_of_strangers(&listener->told);
}

static void drop_handshake(struct sw_handshake *handshake)
{
    struct sw_connection *peer = SW_CONTAINER(handshake, struct sw_connection, handshake);
    struct sw_connection *listener = peer->listener;

    if (handshake->source && !handshake->ticks)
        note_stranger(peer, ETIMEDOUT);
    sw_end_handshake(handshake);
    sw_reset_connection(peer);
    free(peer);
    accept_again(listener);
}

/* Everything in the reply except depths and private data. */
static struct sw_mpa reply_to(const struct sw_mpa *request)
{
    struct sw_mpa reply = {
        .is_reply = 1,
        .revision = request->revision,
        .crc = request->crc,
        .enhanced = request->enhanced,
        .peer_to_peer = request->peer_to_peer,
    };

    /* Agree to a READ of no bytes if the peer offers one. Agree to a WRITE of no bytes if the peer
     * offers one, or neither. A software device offers both, and the reply agrees to both. */
    if (request->peer_to_peer) {
        reply.ready_by_read = request->ready_by_read;
        reply.ready_by_write = request->ready_by_write || !request->ready_by_read;
    }
    return reply;
}

/* Reject a request that no program could accept. */
static void refuse(struct sw_connection *peer)
{
    struct sw_mpa reply = reply_to(&peer->peer);

    reply.rejects = 1;
    if (sw_write_handshake(peer, &reply)) {
        /* The peer then sees only that the connection ends. */
    }
}

static struct sw_event *event_of_request(struct sw_identifier *listener,
                                         struct sw_identifier *identifier,
                                         const struct sw_mpa *peer)
{
    struct sw_event *event = sw_new_request_event(listener, identifier);

    if (!event)
        return NULL;
    /* The event states depths from the listener's side: the peer's outbound depth limits
     * responder_resources. A peer of revision 1 states none, and SW_MOST_DEPTH stands for it. */
    struct rdma_conn_param *parameters = &event->ibv.param.conn;
    parameters->responder_resources =
        (uint8_t)(peer->enhanced ? sw_least(peer->outbound_depth, SW_MOST_DEPTH) : SW_MOST_DEPTH);
    parameters->initiator_depth =
        (uint8_t)(peer->enhanced ? sw_least(peer->inbound_depth, SW_MOST_DEPTH) : SW_MOST_DEPTH);
    sw_set_private_data(event, peer->private_data, peer->private_size);
    return event;
}

/* Report that the peer left before the program answered: an accept would fail. */
static void asking_peer_left(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *peer = SW_CONTAINER(watch, struct sw_connection, watch);

    (void)events;
    sw_progress_unwatch(&peer->member);
    sw_device.reads++;
    sw_report_last(peer->identifier, RDMA_CM_EVENT_CONNECT_ERROR, -ECONNRESET);
}

/* Make an identifier of a peer's connection, and report its request. */
static int request_arrived(struct sw_connection *peer)
{
    struct sw_connection *listening = peer->listener;
    struct sw_identifier *listener = listening->identifier;

    if (peer->peer.markers || peer->peer.private_size > UINT8_MAX) {
        refuse(peer);
        return EOPNOTSUPP;
    }
    if (listening->waiting >= listening->backlog)
        return ENOBUFS;
    struct sw_identifier *identifier = sw_new_requesting(listener);
    if (!identifier)
        return ENOMEM;
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    struct sw_event *event = NULL;
    int error = sw_get_socket_address(peer->fd, sw_system->getsockname, &addresses->src_storage);
    if (!error)
        error = sw_get_socket_address(peer->fd, sw_system->getpeername, &addresses->dst_storage);
    if (!error)
        error = sw_bind_device(identifier);
    if (!error) /* the peer sends nothing more before the reply */
        error = peer->watch.slot ? sw_rewatch(&peer->watch, EPOLLRDHUP)
                                 : sw_watch_connection(peer, listener, EPOLLRDHUP);
    if (!error) {
        event = event_of_request(listener, identifier, &peer->peer);
        error = event ? 0 : ENOMEM;
    }
    if (error) {
        sw_drop_identifier(identifier);
        return error;
    }
    sw_end_handshake(&peer->handshake);
    peer->watch.ready = asking_peer_left;
    peer->identifier = identifier;
    peer->listener = NULL;
    identifier->connection = peer;
    listening->waiting++;
    sw_report(event);
    return 0;
}

/* EAGAIN: the request has not arrived. Otherwise the handshake is over, also after a failure. */
static int try_request(struct sw_connection *peer)
{
    int error = sw_read_handshake(peer, 0);

    if (error == EAGAIN)
        return error;
    if (error)
        note_stranger(peer, error);
    else
        error = request_arrived(peer);
    if (error == EOPNOTSUPP) {
        /* Close without a reset, so that the peer gets the refusal. */
        sw_end_handshake(&peer->handshake);
        sw_close_connection(peer);
        free(peer);
    } else if (error) {
        drop_handshake(&peer->handshake);
    }
    return error;
}

static void read_request(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *peer = SW_CONTAINER(watch, struct sw_connection, watch);
    struct sw_connection *listener = peer->listener;

    (void)events;
    sw_add_work(HANDSHAKE_WORK);
    if (try_request(peer) != EAGAIN)
        accept_again(listener);
}

static int await_request(struct sw_connection *listener, int fd, const struct sockaddr *from)
{
    struct sw_connection *peer = sw_new_connection(NULL);

    if (!peer) {
        sw_system->close(fd);
        return ENOMEM;
    }
    peer->fd = fd;
    sw_device.counts.sockets++;
    peer->listener = listener;
    peer->watch.ready = read_request;
    peer->handshake.drop = drop_handshake;
    int error = 0, on = 1;
    if (sw_system->setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
        error = errno;
    if (!error && try_request(peer) != EAGAIN)
        return 0; /* most requests come with the connection */
    if (!error)
        error = sw_watch_connection(peer, listener->identifier, EPOLLIN);
    if (!error)
        error = sw_begin_handshake(&peer->handshake, from);
    if (error)
        drop_handshake(&peer->handshake);
    return error;
}

/* -- shortage of descriptors ----------------------------------------------------------- */

static int is_shortage(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

static void calmed_down(struct sw_timer *timer)
{
    SW_CONTAINER(timer, struct sw_connection, calm)->is_short = 0;
}

/* Report once that the listener resets peers, and the reason. */
static void report_shortage(struct sw_connection *listener, int reason)
{
    if (!listener->is_short) {
        struct sw_event *event =
            sw_new_event(listener->identifier, RDMA_CM_EVENT_CONNECT_ERROR, -reason);
        if (!event)
            return; /* the next peer causes another attempt */
        sw_report(event);
    }
    listener->is_short = 1;
    listener->calm.expired = calmed_down;
    if (sw_call_later(&listener->calm, CALM_MILLISECONDS))
        listener->is_short = 0;
}

/* Reset the connection, so that the peer does not wait for its own time limit. */
static void turn_away(int fd)
{
    struct linger hard = {.l_onoff = 1};

    if (sw_system->setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard))) {
        /* The connection then ends without a reset. */
    }
    sw_system->close(fd);
}

/* Reset the next peer, using the descriptor of the spare eventfd for a moment. */
static int turn_next_away(struct sw_connection *listener)
{
    if (listener->spare < 0)
        return EMFILE;
    sw_system->close(listener->spare);
    int fd = sw_system->accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        turn_away(fd);
    listener->spare = sw_new_signal();
    return fd < 0 ? EMFILE : 0; /* another thread may have taken the descriptor */
}

/* Stop watching for a moment: the waiting peer keeps the listener readable. */
static void pause_listener(struct sw_connection *listener)
{
    if (retry_later(listener))
        (void)sw_rewatch(&listener->watch, 0);
}

static void listen_again(struct sw_timer *timer)
{
    struct sw_connection *listener = SW_CONTAINER(timer, struct sw_identifier, timer)->connection;

    if (listener->spare < 0)
        listener->spare = sw_new_signal();
    accept_again(listener);
}

/*
 * There was no descriptor or no memory for a peer, and no half-open handshake to evict. At first
 * the peer waits in TCP's own queue, because the shortage may end soon.
 */
static int accept_nobody(struct sw_connection *listener, int reason)
{
    int error = reason;

    report_shortage(listener, reason);
    if (listener->retries < RETRIES)
        listener->retries++;
    else if (reason == EMFILE || reason == ENFILE)
        error = turn_next_away(listener);
    if (error)
        pause_listener(listener);
    return error;
}

/* Move a socket to the lowest free number: the descriptors kept for the program stay free. */
static int low_descriptor(int fd)
{
    int lower = fcntl(fd, F_DUPFD_CLOEXEC, 0);

    if (lower < 0)
        return fd;
    sw_system->close(fd);
    return lower;
}

static int accept_one(struct sw_connection *listener)
{
    struct sockaddr_storage from;
    socklen_t size = sizeof(from);
    int fd = sw_system->accept4(listener->fd, (struct sockaddr *)&from, &size,
                                SOCK_NONBLOCK | SOCK_CLOEXEC);
    int error = fd < 0 ? errno : 0;

    if (is_shortage(error) && sw_evict_handshake())
        return 0; /* its descriptor or memory serves the next attempt */
    if (is_shortage(error))
        return accept_nobody(listener, error);
    if (error)
        return error;
    sw_device.reads++;
    sw_add_work(HANDSHAKE_WORK);
    listener->retries = 0;
    if (sw_is_scarce(fd)) {
        if (!sw_evict_handshake()) {
            report_shortage(listener, EMFILE);
            turn_away(fd);
            return 0;
        }
        fd = low_descriptor(fd);
    }
    error = await_request(listener, fd, (struct sockaddr *)&from);
    if (is_shortage(error))
        report_shortage(listener, error);
    return error;
}

static void accept_some(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *listener = SW_CONTAINER(watch, struct sw_connection, watch);
    int error = 0;

    (void)events;
    for (int i = 0; i < ACCEPTS_AT_ONCE && !error && !sw_turn_is_over(); i++) {
        if (listener->waiting >= listener->backlog) {
            /* Further peers wait in TCP's own queue until the program takes a request. */
            (void)sw_rewatch(&listener->watch, 0);
            return;
        }
        error = accept_one(listener);
    }
}

static int start_listening(struct sw_identifier *identifier, int backlog)
{
    struct sw_connection *connection = identifier->connection;

    connection->watch.ready = accept_some;
    connection->watch.is_last = 1;
    connection->backlog = (uint32_t)backlog;
    identifier->timer.expired = listen_again;
    if (connection->spare < 0)
        connection->spare = sw_new_signal();
    if (connection->spare < 0 || sw_system->listen(connection->fd, TCP_BACKLOG))
        return errno;
    return sw_watch_connection(connection, identifier, EPOLLIN);
}

static void request_taken(struct sw_identifier *listener)
{
    if (listener->connection && listener->connection->waiting) {
        listener->connection->waiting--;
        accept_again(listener->connection);
    }
}

/* -- accepting ------------------------------------------------------------------------- */

/* Check whether the peer still waits for a reply. */
static int check_patience(const struct sw_connection *connection)
{
    char byte;

    if (connection->arrived > connection->size)
        return ECONNRESET;
    ssize_t got = sw_system->recv(connection->fd, &byte, sizeof(byte), MSG_PEEK | MSG_DONTWAIT);

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
        .manager = peer->peer_to_peer ? sw_cm_progress(identifier) : NULL,
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
        return ECONNRESET; /* an earlier accept failed */
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
        sw_cm_lend(identifier);
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
    /* A peer that announces itself is connected by its first frame. Other peers owe no frame. */
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

/* -- the end of an identifier ---------------------------------------------------------- */

/* Reset the half-open handshakes of a listener that is being destroyed. */
static void forget_listener(struct sw_connection *listener)
{
    struct sw_handshake *each = sw_oldest_handshake(), *newer;

    listener->backlog = 0; /* or each handshake that is dropped would let it accept again */
    sw_cancel(&listener->calm);
    sw_cancel(&listener->told);
    for (; each; each = newer) {
        newer = each->newer;
        if (SW_CONTAINER(each, struct sw_connection, handshake)->listener == listener)
            drop_handshake(each);
    }
    if (listener->spare >= 0)
        sw_system->close(listener->spare);
    listener->spare = -1;
}

static void forget(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    enum sw_cm_state before = identifier->state;

    if (!connection)
        return;
    if (connection->backlog)
        forget_listener(connection);
    if (before == SW_CM_REQUESTED) {
        identifier->parameters.private_data_len = 0;
        reject_request(identifier); /* the peer waits for a reply */
    }
    sw_close_connection(connection);
    identifier->state = SW_CM_DISCONNECTED; /* the end of the stream is not reported any more */
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

    if (!connection)
        return;
    /* The engine closes the sockets that it watches. */
    if (connection->fd >= 0 && !connection->watch.slot)
        sw_system->close(connection->fd);
    if (connection->spare >= 0)
        sw_system->close(connection->spare);
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
    .reports = {sw_stream_first_frame, sw_stream_ended, sw_stream_lost_queue_pair},
};
