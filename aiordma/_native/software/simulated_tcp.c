/*
 * TCP of simulated hosts, simplified: it has no segments of its own and no congestion control. What
 * one call sends arrives as one piece, in order, when its path has carried it. What is lost, or cut
 * off, is sent again after a time that doubles, as TCP does, and a connection ends after as many
 * attempts as Linux makes.
 */
#include "simulated_tcp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#define MILLISECOND 1000000u

enum {
    WINDOW = 1 << 20,
    AGAIN_MILLISECONDS = 200, /* the first time after which TCP sends again */
    MOST_AGAIN_MILLISECONDS = 120000,
    MOST_ATTEMPTS = 15, /* net.ipv4.tcp_retries2 */
    CONNECT_MILLISECONDS = 1000,
    CONNECT_ATTEMPTS = 6, /* net.ipv4.tcp_syn_retries */
    PROBE_MILLISECONDS = 1000,
};

static void fly(struct sw_object *object);
static void request_again(struct sw_object *object);
static void request_is_due(struct sw_timer *timer);

uint32_t sw_tcp_events(struct sw_object *object)
{
    uint32_t events = 0, least = object->low_water ? object->low_water : 1;

    if (object->error)
        return EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP | EPOLLRDHUP;
    if (!object->is_connected)
        return object->peer_host ? 0 : EPOLLOUT | EPOLLHUP;
    if (object->buffered >= least || object->has_ended)
        events |= EPOLLIN;
    if (object->has_ended)
        events |= EPOLLRDHUP | (object->is_shut ? EPOLLHUP : 0);
    if (object->in_flight + (object->peer ? object->peer->buffered : 0) < WINDOW)
        events |= EPOLLOUT;
    return events;
}

static uint64_t again_after(uint32_t attempts, uint64_t first, uint64_t most)
{
    uint64_t milliseconds = attempts < 20 ? first << attempts : most;

    return (milliseconds < most ? milliseconds : most) * MILLISECOND;
}

/* When something of this size arrives that is sent now. */
static uint64_t arrival(struct sw_object *object, uint32_t size)
{
    const struct aiordma_simulated_link *link = sw_link_to(object->host, object->peer_host);
    uint64_t due = sw_leaves_at(object->host, object->peer_host, size) + sw_latency(link);

    for (uint32_t i = 0; i < MOST_ATTEMPTS && sw_is_lost(link); i++) {
        sw_trace(object->host, object->peer_host, AIORDMA_SIMULATED_LOST, size);
        due += again_after(i, AGAIN_MILLISECONDS, MOST_AGAIN_MILLISECONDS);
    }
    if (due < object->last_due) /* in order */
        due = object->last_due;
    object->last_due = due;
    return due;
}

/* The connection is over, on this side. */
static void break_stream(struct sw_object *object, int error)
{
    sw_call_never(&object->flight);
    sw_call_never(&object->answer);
    sw_free_pieces(&object->flying);
    object->in_flight = object->delivered = 0;
    if (object->peer)
        object->peer->peer = NULL;
    object->peer = NULL;
    if (object->fd < 0 && !object->listener) {
        sw_drop_object(object); /* its program has closed it */
        return;
    }
    object->error = error;
    object->is_connected = 1; /* so that it fails, and does not connect */
    sw_object_changed(object);
}

/* The first piece has not arrived, or nobody has answered it: send it again after a time. */
static void fly_again(struct sw_object *object)
{
    if (!object->flying.first)
        return;
    if (object->attempts++ >= MOST_ATTEMPTS) {
        break_stream(object, ETIMEDOUT);
        return;
    }
    object->flying.first->due =
        sw_network.now + again_after(object->attempts, AGAIN_MILLISECONDS, MOST_AGAIN_MILLISECONDS);
    fly(object);
}

static void reset_arrives(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, answer);

    if (!sw_is_open(object->peer_host, object->host)) {
        /* It is lost. What this side sends again is answered by another one. */
        if (object->is_connected)
            fly_again(object);
        else
            request_again(object);
        return;
    }
    sw_trace(object->peer_host, object->host, AIORDMA_SIMULATED_RESET, 0);
    break_stream(object, object->is_refused ? ECONNREFUSED : ECONNRESET);
}

/* A reset is on its way to this side. It overtakes nothing that the other side has sent. */
static void reset_later(struct sw_object *object, uint64_t not_before)
{
    uint64_t due = sw_network.now + sw_latency(sw_link_to(object->peer_host, object->host));

    sw_call_never(&object->flight);
    sw_call_at(&object->answer, due < not_before ? not_before : due, reset_arrives);
}

static void acknowledged(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, answer);

    if (!sw_is_open(object->peer_host, object->host)) { /* lost; the next one covers it */
        sw_call_at(timer, sw_network.now + (uint64_t)AGAIN_MILLISECONDS * MILLISECOND,
                   acknowledged);
        object->attempts++;
        return;
    }
    object->in_flight -= object->delivered;
    object->delivered = object->attempts = 0;
    object->heard = sw_network.now;
    if (object->fd < 0 && !object->listener && !object->flying.first)
        sw_drop_object(object); /* closed, and all of it has arrived */
    else
        sw_object_changed(object);
}

static void arrive(struct sw_object *object, struct sw_data *piece)
{
    struct sw_object *peer = object->peer;

    if (piece->kind == SW_END) {
        sw_trace(object->host, peer->host, AIORDMA_SIMULATED_END, 0);
        peer->has_ended = 1;
        free(piece);
    } else {
        sw_trace(object->host, peer->host, AIORDMA_SIMULATED_DATA, piece->size);
        object->delivered += piece->size;
        peer->buffered += piece->size;
        sw_add_piece(&peer->arrived, piece);
    }
    if (!object->answer.deadline)
        sw_call_at(&object->answer,
                   sw_network.now + sw_latency(sw_link_to(peer->host, object->host)), acknowledged);
    sw_object_changed(peer);
}

static void piece_is_due(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, flight);

    if (!sw_is_open(object->host, object->peer_host)) {
        fly_again(object);
        return;
    }
    if (!object->peer) { /* nobody has this connection there */
        reset_later(object, 0);
        return;
    }
    if (object->peer->fd < 0 && !object->peer->listener) { /* the peer has closed it */
        reset_later(object, object->peer->last_due);
        return;
    }
    arrive(object, sw_take_piece(&object->flying));
    fly(object);
}

static void fly(struct sw_object *object)
{
    struct sw_data *first = object->flying.first;

    if (first)
        sw_call_at(&object->flight, first->due > sw_network.now ? first->due : sw_network.now,
                   piece_is_due);
}

static int send_piece(struct sw_object *object, enum sw_data_kind kind, const struct iovec *parts,
                      size_t count, uint32_t size)
{
    struct sw_data *piece = malloc(sizeof(*piece) + size);
    uint32_t done = 0;

    if (!piece)
        return ENOMEM;
    memset(piece, 0, sizeof(*piece));
    piece->kind = kind;
    piece->size = size;
    for (size_t i = 0; i < count && done < size; i++) {
        uint32_t part = size - done;
        if (parts[i].iov_len < part)
            part = (uint32_t)parts[i].iov_len;
        memcpy(piece->bytes + done, parts[i].iov_base, part);
        done += part;
    }
    piece->due = arrival(object, size);
    object->in_flight += size;
    if (object->flying.first) {
        sw_add_piece(&object->flying, piece);
    } else {
        sw_add_piece(&object->flying, piece);
        fly(object);
    }
    return 0;
}

ssize_t sw_tcp_send(struct sw_object *object, const struct iovec *parts, size_t count)
{
    size_t size = 0;

    if (object->error) {
        errno = object->error;
        return -1;
    }
    if (!object->is_connected)
        return sw_fail(object->peer_host ? EAGAIN : ENOTCONN);
    if (object->is_shut)
        return sw_fail(EPIPE);
    for (size_t i = 0; i < count; i++)
        size += parts[i].iov_len;
    uint32_t taken = object->in_flight + (object->peer ? object->peer->buffered : 0);
    if (taken >= WINDOW)
        return sw_fail(EAGAIN);
    if (size > WINDOW - taken)
        size = WINDOW - taken;
    int error = size ? send_piece(object, SW_DATA, parts, count, (uint32_t)size) : 0;
    return error ? sw_fail(error) : (ssize_t)size;
}

ssize_t sw_tcp_receive(struct sw_object *object, const struct iovec *parts, int count, int flags)
{
    size_t done = 0;

    if (!object->arrived.first) {
        if (object->error) {
            errno = object->error;
            return -1;
        }
        if (object->has_ended)
            return 0;
        return sw_fail(object->is_connected || object->peer_host ? EAGAIN : ENOTCONN);
    }
    for (int i = 0; i < count; i++) {
        size_t filled = 0;
        while (filled < parts[i].iov_len && object->arrived.first) {
            struct sw_data *piece = object->arrived.first;
            size_t left = piece->size - piece->start, room = parts[i].iov_len - filled;
            size_t part = left < room ? left : room;
            memcpy((char *)parts[i].iov_base + filled, piece->bytes + piece->start, part);
            filled += part;
            if (flags & MSG_PEEK)
                return (ssize_t)filled;
            piece->start += (uint32_t)part;
            object->buffered -= (uint32_t)part;
            if (piece->start == piece->size)
                free(sw_take_piece(&object->arrived));
        }
        done += filled;
    }
    if (object->peer)
        sw_object_changed(object->peer); /* there is room again */
    return (ssize_t)done;
}

int sw_tcp_shutdown(int fd, int how)
{
    struct sw_object *object = sw_object_of(fd);

    (void)how;
    if (!object)
        return -1;
    if (!object->is_connected || object->error)
        return sw_fail(ENOTCONN);
    if (!object->is_shut && send_piece(object, SW_END, NULL, 0, 0))
        return sw_fail(ENOMEM);
    object->is_shut = 1;
    return 0;
}

int sw_tcp_close(struct sw_object *object)
{
    int is_live = object->kind == SW_STREAM && object->is_connected && !object->error;
    sw_detach_object(object);
    if (!is_live || !object->peer) {
        sw_drop_object(object);
        return 0;
    }
    struct sw_object *peer = object->peer;
    if (object->resets || object->arrived.first) {
        peer->peer = object->peer = NULL;
        reset_later(peer, object->last_due);
        sw_drop_object(object);
        return 0;
    }
    if (!object->is_shut && send_piece(object, SW_END, NULL, 0, 0)) {
        sw_drop_object(object);
        return 0;
    }
    object->is_shut = 1; /* what it has sent still arrives */
    return 0;
}

static void connected(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, answer);

    if (!sw_is_open(object->peer_host, object->host)) {
        sw_call_at(timer, sw_network.now + (uint64_t)CONNECT_MILLISECONDS * MILLISECOND, connected);
        return;
    }
    object->is_connected = 1;
    object->attempts = 0;
    object->heard = sw_network.now;
    sw_object_changed(object);
}

static void request_again(struct sw_object *object)
{
    if (object->attempts >= CONNECT_ATTEMPTS) {
        break_stream(object, ETIMEDOUT);
        return;
    }
    uint64_t after = again_after(object->attempts++, CONNECT_MILLISECONDS, UINT32_MAX);
    sw_call_at(&object->flight, sw_network.now + after, request_is_due);
}

static void request_is_due(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, flight);
    struct sw_host *host = object->peer_host;
    uint32_t port = ntohs(*sw_port_in(&object->remote));

    if (!sw_is_open(object->host, host)) {
        request_again(object);
        return;
    }
    struct sw_object *listener = sw_service_at(host, SW_LISTENER, &object->remote);
    if (!listener) {
        sw_trace(object->host, host, AIORDMA_SIMULATED_REFUSED, port);
        object->is_refused = 1;
        reset_later(object, 0);
        return;
    }
    struct sw_object *peer = listener->waiting > listener->backlog
                                 ? NULL
                                 : sw_new_object(host, SW_STREAM, sw_tcp_events);
    if (!peer) { /* the backlog is full: the request is dropped */
        request_again(object);
        return;
    }
    sw_trace(object->host, host, AIORDMA_SIMULATED_CONNECT, port);
    peer->family = object->family;
    peer->local = object->remote;
    peer->remote = object->local;
    peer->peer_host = object->host;
    peer->is_connected = 1;
    peer->heard = sw_network.now;
    peer->listener = listener;
    peer->peer = object;
    object->peer = peer;
    *listener->last_waiting = peer;
    listener->last_waiting = &peer->next_waiting;
    listener->waiting++;
    sw_call_at(&object->answer, sw_network.now + sw_latency(sw_link_to(host, object->host)),
               connected);
    peer->last_due = object->answer.deadline;
    sw_object_changed(listener);
}

void sw_tcp_connect(struct sw_object *object)
{
    sw_call_at(&object->flight,
               sw_network.now + sw_latency(sw_link_to(object->host, object->peer_host)),
               request_is_due);
}

static uint32_t listener_events(struct sw_object *object)
{
    return object->waits ? EPOLLIN : 0;
}

int sw_tcp_listen(int fd, int backlog)
{
    struct sw_object *object = sw_object_of(fd);

    if (!object)
        return -1;
    if (sw_service_at(object->host, SW_LISTENER, &object->local))
        return sw_fail(EADDRINUSE);
    object->kind = SW_LISTENER;
    object->ready = listener_events;
    object->backlog = (uint32_t)backlog;
    sw_be_service(object);
    return 0;
}

int sw_tcp_accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    struct sw_object *listener = sw_object_of(fd);

    (void)flags;
    if (!listener)
        return -1;
    struct sw_object *peer = listener->waits;
    if (!peer)
        return sw_fail(EAGAIN);
    if (sw_give_descriptor(peer) < 0)
        return -1;
    listener->waits = peer->next_waiting;
    if (!listener->waits)
        listener->last_waiting = &listener->waits;
    listener->waiting--;
    peer->listener = peer->next_waiting = NULL;
    sw_copy_name(&peer->remote, address, size);
    return peer->fd;
}

/* What TCP knows of a peer that does not answer. */
void sw_tcp_tell(const struct sw_object *object, struct tcp_info *info)
{
    uint64_t silent = (sw_network.now - object->heard) / MILLISECOND;

    memset(info, 0, sizeof(*info));
    info->tcpi_last_ack_recv = silent < UINT32_MAX ? (uint32_t)silent : UINT32_MAX;
    info->tcpi_retransmits = object->attempts < UINT8_MAX ? (uint8_t)object->attempts : UINT8_MAX;
    if (object->keeps_alive && silent >= PROBE_MILLISECONDS && object->peer_host &&
        (!sw_is_open(object->host, object->peer_host) ||
         !sw_is_open(object->peer_host, object->host)))
        info->tcpi_probes = 1;
}
