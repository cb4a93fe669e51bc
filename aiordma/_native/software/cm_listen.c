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
#include "cm_handshakes.h"
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

/* What an identifier that listens has, beside a connection whose socket listens. */
struct sw_listener {
    struct sw_identifier *identifier;
    uint32_t waiting; /* requests that the program has not taken */
    uint32_t backlog;
    int spare;                        /* a descriptor to close if there is no other; -1: none */
    uint32_t retries;                 /* to accept, since the last success */
    int is_short;                     /* of descriptors or memory, and the program has the event */
    struct sw_timer calm;             /* runs until there was no shortage for a while */
    uint32_t strangers;               /* peers without a handshake since the last event of them */
    struct sockaddr_storage stranger; /* the last one, and what it did: an errno */
    int strangeness;
    struct sw_timer told; /* runs for a while after such an event */
};

/* A peer's connection whose request did not come with it. */
struct sw_half_open {
    struct sw_handshake handshake;
    struct sw_listener *listener;
    struct sw_connection *connection;
};

/* -- listening ------------------------------------------------------------------------- */

/* Call listen_again later, after a lack of memory or descriptors. Returns 0 without a timer. */
static int retry_later(struct sw_listener *listener)
{
    return !sw_call_later(&listener->identifier->timer, RETRY_MILLISECONDS);
}

static int watch_listener(struct sw_listener *listener, uint32_t events)
{
    return sw_rewatch(&listener->identifier->connection->watch, events);
}

static void accept_again(struct sw_listener *listener)
{
    if (listener->waiting < listener->backlog && watch_listener(listener, EPOLLIN))
        retry_later(listener);
}

/* Report peers that did not send a handshake: their number, and the last one's address. */
static void tell_of_strangers(struct sw_timer *timer)
{
    struct sw_listener *listener = SW_CONTAINER(timer, struct sw_listener, told);

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

static void note_stranger(struct sw_listener *listener, int fd, int error)
{
    listener->strangers++;
    listener->strangeness = error;
    memset(&listener->stranger, 0, sizeof(listener->stranger));
    (void)sw_get_socket_address(fd, sw_system->getpeername, &listener->stranger);
    listener->told.expired = tell_of_strangers;
    if (!listener->told.deadline)
        tell_of_strangers(&listener->told);
}

/* The request has arrived, or the connection is over. */
static void end_half_open(struct sw_connection *connection)
{
    if (!connection->half_open)
        return;
    sw_end_handshake(&connection->half_open->handshake);
    free(connection->half_open);
    connection->half_open = NULL;
}

static void drop_handshake(struct sw_handshake *handshake)
{
    struct sw_half_open *half_open = SW_CONTAINER(handshake, struct sw_half_open, handshake);
    struct sw_listener *listener = half_open->listener;
    struct sw_connection *connection = half_open->connection;

    if (!handshake->ticks)
        note_stranger(listener, connection->fd, ETIMEDOUT);
    end_half_open(connection);
    sw_reset_connection(connection);
    free(connection);
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
static void refuse(struct sw_connection *connection)
{
    struct sw_mpa reply = reply_to(&connection->peer);

    reply.rejects = 1;
    if (sw_write_handshake(connection, &reply)) {
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
    struct sw_connection *connection = SW_CONTAINER(watch, struct sw_connection, watch);

    (void)events;
    sw_progress_unwatch(&connection->member);
    sw_device.reads++;
    sw_report_last(connection->identifier, RDMA_CM_EVENT_CONNECT_ERROR, -ECONNRESET);
}

/* Make an identifier of a peer's connection, and report its request. */
static int request_arrived(struct sw_listener *listener, struct sw_connection *connection)
{
    const struct sw_mpa *peer = &connection->peer;

    if (peer->markers || peer->private_size > UINT8_MAX) {
        refuse(connection);
        return EOPNOTSUPP;
    }
    if (listener->waiting >= listener->backlog)
        return ENOBUFS;
    struct sw_identifier *identifier = sw_new_requesting(listener->identifier);
    if (!identifier)
        return ENOMEM;
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    struct sw_event *event = NULL;
    int error =
        sw_get_socket_address(connection->fd, sw_system->getsockname, &addresses->src_storage);
    if (!error)
        error =
            sw_get_socket_address(connection->fd, sw_system->getpeername, &addresses->dst_storage);
    if (!error)
        error = sw_bind_device(identifier);
    if (!error) /* the peer sends nothing more before the reply */
        error = connection->watch.slot
                    ? sw_rewatch(&connection->watch, EPOLLRDHUP)
                    : sw_watch_connection(connection, listener->identifier, EPOLLRDHUP);
    if (!error) {
        event = event_of_request(listener->identifier, identifier, peer);
        error = event ? 0 : ENOMEM;
    }
    if (error) {
        sw_drop_identifier(identifier);
        return error;
    }
    end_half_open(connection);
    connection->watch.ready = asking_peer_left;
    connection->identifier = identifier;
    identifier->connection = connection;
    listener->waiting++;
    sw_report(event);
    return 0;
}

/* EAGAIN: the request has not arrived. Otherwise the handshake is over, also after a failure. */
static int try_request(struct sw_listener *listener, struct sw_connection *connection)
{
    int error = sw_read_handshake(connection, 0);

    if (error == EAGAIN)
        return error;
    if (error)
        note_stranger(listener, connection->fd, error);
    else
        error = request_arrived(listener, connection);
    if (!error)
        return 0;
    end_half_open(connection);
    if (error == EOPNOTSUPP)
        sw_close_connection(connection); /* without a reset, so that the peer gets the refusal */
    else
        sw_reset_connection(connection);
    free(connection);
    return error;
}

static void read_request(struct sw_watch *watch, uint32_t events)
{
    struct sw_connection *connection = SW_CONTAINER(watch, struct sw_connection, watch);
    struct sw_listener *listener = connection->half_open->listener;

    (void)events;
    sw_add_work(HANDSHAKE_WORK);
    if (try_request(listener, connection) != EAGAIN)
        accept_again(listener);
}

static int await_request(struct sw_listener *listener, struct sw_connection *connection,
                         const struct sockaddr *from)
{
    struct sw_half_open *half_open = calloc(1, sizeof(*half_open));

    if (!half_open)
        return ENOMEM;
    half_open->handshake.drop = drop_handshake;
    half_open->listener = listener;
    half_open->connection = connection;
    connection->half_open = half_open;
    connection->watch.ready = read_request;
    int error = sw_watch_connection(connection, listener->identifier, EPOLLIN);
    return error ? error : sw_begin_handshake(&half_open->handshake, from);
}

static int accept_peer(struct sw_listener *listener, int fd, const struct sockaddr *from)
{
    struct sw_connection *connection = sw_new_connection(NULL);
    int error, on = 1;

    if (!connection) {
        sw_system->close(fd);
        return ENOMEM;
    }
    connection->fd = fd;
    sw_device.counts.sockets++;
    if (sw_system->setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
        error = errno;
    else if (try_request(listener, connection) != EAGAIN)
        return 0; /* most requests come with the connection */
    else
        error = await_request(listener, connection, from);
    if (error) {
        end_half_open(connection);
        sw_reset_connection(connection);
        free(connection);
    }
    return error;
}

/* -- shortage of descriptors ----------------------------------------------------------- */

static int is_shortage(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

static void calmed_down(struct sw_timer *timer)
{
    SW_CONTAINER(timer, struct sw_listener, calm)->is_short = 0;
}

/* Report once that the listener resets peers, and the reason. */
static void report_shortage(struct sw_listener *listener, int reason)
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
static int turn_next_away(struct sw_listener *listener)
{
    if (listener->spare < 0)
        return EMFILE;
    sw_system->close(listener->spare);
    int fd = sw_system->accept4(listener->identifier->connection->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        turn_away(fd);
    listener->spare = sw_new_signal();
    return fd < 0 ? EMFILE : 0; /* another thread may have taken the descriptor */
}

/* Stop watching for a moment: the waiting peer keeps the listener readable. */
static void pause_listener(struct sw_listener *listener)
{
    if (retry_later(listener))
        (void)watch_listener(listener, 0);
}

static void listen_again(struct sw_timer *timer)
{
    struct sw_listener *listener = SW_CONTAINER(timer, struct sw_identifier, timer)->listener;

    if (listener->spare < 0)
        listener->spare = sw_new_signal();
    accept_again(listener);
}

/*
 * There was no descriptor or no memory for a peer, and no half-open handshake to evict. At first
 * the peer waits in TCP's own queue, because the shortage may end soon.
 */
static int accept_nobody(struct sw_listener *listener, int reason)
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

static int accept_one(struct sw_listener *listener)
{
    struct sockaddr_storage from;
    socklen_t size = sizeof(from);
    int fd = sw_system->accept4(listener->identifier->connection->fd, (struct sockaddr *)&from,
                                &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
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
    error = accept_peer(listener, fd, (struct sockaddr *)&from);
    if (is_shortage(error))
        report_shortage(listener, error);
    return error;
}

static void accept_some(struct sw_watch *watch, uint32_t events)
{
    struct sw_listener *listener =
        SW_CONTAINER(watch, struct sw_connection, watch)->identifier->listener;
    int error = 0;

    (void)events;
    for (int i = 0; i < ACCEPTS_AT_ONCE && !error && !sw_turn_is_over(); i++) {
        if (listener->waiting >= listener->backlog) {
            /* Further peers wait in TCP's own queue until the program takes a request. */
            (void)watch_listener(listener, 0);
            return;
        }
        error = accept_one(listener);
    }
}

static int start_listening(struct sw_identifier *identifier, int backlog)
{
    struct sw_connection *connection = identifier->connection;
    struct sw_listener *listener = identifier->listener;

    if (!listener) {
        listener = identifier->listener = calloc(1, sizeof(*listener));
        if (!listener)
            return ENOMEM;
        listener->identifier = identifier;
        listener->spare = -1;
    }
    connection->watch.ready = accept_some;
    connection->watch.is_last = 1;
    listener->backlog = (uint32_t)backlog;
    identifier->timer.expired = listen_again;
    if (listener->spare < 0)
        listener->spare = sw_new_signal();
    if (listener->spare < 0 || sw_system->listen(connection->fd, TCP_BACKLOG))
        return errno;
    return sw_watch_connection(connection, identifier, EPOLLIN);
}

static void request_taken(struct sw_identifier *identifier)
{
    struct sw_listener *listener = identifier->listener;

    if (listener && listener->waiting) {
        listener->waiting--;
        accept_again(listener);
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
static void forget_listener(struct sw_listener *listener)
{
    struct sw_handshake *each = sw_oldest_handshake(), *newer;

    listener->backlog = 0; /* or each handshake that is dropped would let it accept again */
    sw_cancel(&listener->calm);
    sw_cancel(&listener->told);
    for (; each; each = newer) {
        newer = each->newer;
        if (SW_CONTAINER(each, struct sw_half_open, handshake)->listener == listener)
            drop_handshake(each);
    }
    if (listener->spare >= 0)
        sw_system->close(listener->spare);
    listener->identifier->listener = NULL;
    free(listener);
}

static void forget(struct sw_identifier *identifier)
{
    struct sw_connection *connection = identifier->connection;
    enum sw_cm_state before = identifier->state;

    if (!connection)
        return;
    if (identifier->listener)
        forget_listener(identifier->listener);
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
    if (identifier->listener && identifier->listener->spare >= 0)
        sw_system->close(identifier->listener->spare);
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
