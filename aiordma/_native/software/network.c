/*
 * Simulated hosts and the network between them. TCP is simplified: it has no segments of its own
 * and no congestion control. What one call sends arrives as one piece, in order, when its path has
 * carried it. What is lost, or cut off, is sent again after a time that doubles, as TCP does, and a
 * connection ends after as many attempts as Linux makes. UDP packets that are lost stay lost.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* struct in6_pktinfo */
#endif
#include "network.h"

#include <errno.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>

#define MILLISECOND 1000000u

enum {
    FIRST = 1 << 28, /* descriptors: the kernel's are far smaller */
    WINDOW = 1 << 20,
    DATAGRAMS = 1024, /* that wait at a socket; more are lost */
    FIRST_PORT = 32768,
    AGAIN_MILLISECONDS = 200, /* the first time after which TCP sends again */
    MOST_AGAIN_MILLISECONDS = 120000,
    MOST_ATTEMPTS = 15, /* net.ipv4.tcp_retries2 */
    CONNECT_MILLISECONDS = 1000,
    CONNECT_ATTEMPTS = 6, /* net.ipv4.tcp_syn_retries */
    PROBE_MILLISECONDS = 1000,
};

enum kind { SIGNAL, EPOLL, STREAM, LISTENER, DATAGRAM };

enum piece_kind { DATA, END };

struct piece {
    struct piece *next;
    uint64_t due;
    enum piece_kind kind;
    uint32_t size, start;
    struct sockaddr_storage from, to; /* of a datagram */
    char bytes[];
};

struct pieces {
    struct piece *first, **last;
};

/* An object in an epoll. */
struct interest {
    struct sw_object *object, *epoll;
    uint32_t events;
    epoll_data_t data;
    struct interest *next, **link;            /* of the object */
    struct interest *next_watched, **watched; /* of the epoll */
    struct interest *next_queued, **queued;   /* in the epoll's queue; queued NULL: it is not */
};

struct sw_object {
    enum kind kind;
    int fd; /* -1: it has none (any more) */
    struct sw_host *host;
    struct sw_object *next, **link;                 /* of the host */
    struct sw_object *next_service, **service_link; /* NULL: it is none */
    struct interest *interests;

    uint64_t count; /* of a signal */

    struct interest *watched; /* of an epoll */
    struct interest *queue, **last_queued;

    /* sockets */
    int family;
    struct sockaddr_storage local, remote;
    struct pieces arrived;
    uint32_t buffered; /* bytes, or datagrams */

    /* of TCP */
    struct sw_object *peer;    /* NULL: none yet, or none any more */
    struct sw_host *peer_host; /* NULL: nobody has its address */
    int is_connected, is_shut, has_ended, error, is_refused;
    int resets, keeps_alive; /* SO_LINGER of 0; SO_KEEPALIVE */
    uint32_t low_water;
    struct pieces flying;
    uint32_t in_flight; /* bytes without an acknowledgement */
    uint64_t path_is_free, last_due;
    uint32_t attempts, delivered;   /* delivered: bytes whose acknowledgement is on its way */
    uint64_t heard;                 /* the last acknowledgement */
    struct sw_timer flight, answer; /* the first piece arrives; an acknowledgement does */
    /* of a listener, and of what waits there */
    uint32_t backlog, waiting;
    struct sw_object *waits, **last_waiting, *next_waiting, *listener;
};

struct sw_network sw_network;

static struct sw_object **objects; /* by descriptor */
static int object_count, object_room;

static void fly(struct sw_object *object);
static void drop(struct sw_object *object);
static void request_again(struct sw_object *object);

/* -- random numbers, and the trace --------------------------------------------------------- */

uint64_t sw_network_random(void)
{
    uint64_t z = sw_network.random += 0x9e3779b97f4a7c15u; /* SplitMix64 */

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double chance(void)
{
    return (double)(sw_network_random() >> 11) / 9007199254740992.0;
}

static void trace(const struct sw_host *from, const struct sw_host *to,
                  enum aiordma_simulated_kind kind, uint32_t size)
{
    sw_network.trace[sw_network.traced++ % AIORDMA_SIMULATED_TRACE] =
        (struct aiordma_simulated_event){
            .time = sw_network.now,
            .sender = from->number,
            .receiver = to ? to->number : -1,
            .kind = (int)kind,
            .size = size,
    };
}

/* -- timers -------------------------------------------------------------------------------- */

static void cancel(struct sw_timer *timer)
{
    if (timer->deadline)
        sw_timers_remove(&sw_network.timers, timer);
}

static void call_at(struct sw_timer *timer, uint64_t time, void (*expired)(struct sw_timer *))
{
    cancel(timer);
    timer->expired = expired;
    timer->deadline = time ? time : 1;
    sw_timers_add(&sw_network.timers, timer);
}

void sw_network_advance(uint64_t now)
{
    sw_network.now = now;
    while (sw_network.timers.first && sw_network.timers.first->deadline <= now) {
        struct sw_timer *timer = sw_network.timers.first;
        sw_timers_remove(&sw_network.timers, timer);
        timer->expired(timer);
    }
}

/* -- hosts and paths ----------------------------------------------------------------------- */

static int is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 ==
               127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static int is_any(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return !((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr;
    return IN6_IS_ADDR_UNSPECIFIED(
        &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static int is_same(const struct sockaddr *one, const struct sockaddr *other)
{
    if (one->sa_family != other->sa_family)
        return 0;
    if (one->sa_family == AF_INET)
        return ((const struct sockaddr_in *)(const void *)one)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)(const void *)other)->sin_addr.s_addr;
    return IN6_ARE_ADDR_EQUAL(&((const struct sockaddr_in6 *)(const void *)one)->sin6_addr,
                              &((const struct sockaddr_in6 *)(const void *)other)->sin6_addr);
}

static in_port_t *port_of(struct sockaddr_storage *address)
{
    /* In both families the port comes after the family. */
    return &((struct sockaddr_in *)(void *)address)->sin_port;
}

static const struct sockaddr *as_address(const struct sockaddr_storage *address)
{
    return (const struct sockaddr *)(const void *)address;
}

static socklen_t size_of(sa_family_t family)
{
    return family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

static struct sockaddr_storage loopback_of(int family)
{
    struct sockaddr_storage address = {.ss_family = (sa_family_t)family};

    if (family == AF_INET)
        ((struct sockaddr_in *)(void *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else
        ((struct sockaddr_in6 *)(void *)&address)->sin6_addr = in6addr_loopback;
    return address;
}

static int has_address(const struct sw_host *host, const struct sockaddr *address)
{
    for (int i = 0; i < host->address_count; i++)
        if (is_same(as_address(&host->addresses[i]), address))
            return 1;
    return 0;
}

static struct sw_host *host_at(struct sw_host *from, const struct sockaddr *address)
{
    if (is_loopback(address) || is_any(address))
        return from;
    for (int i = 0; i < sw_network.host_count; i++)
        if (has_address(sw_network.hosts[i], address))
            return sw_network.hosts[i];
    return NULL;
}

/* The host's own address on the way to another. Returns 0 if it has none of that family. */
static int own_address(const struct sw_host *host, const struct sockaddr *to,
                       struct sockaddr_storage *own)
{
    if (is_loopback(to) || is_any(to)) {
        *own = loopback_of(to->sa_family);
        return 1;
    }
    for (int i = 0; i < host->address_count; i++)
        if (host->addresses[i].ss_family == to->sa_family) {
            *own = host->addresses[i];
            return 1;
        }
    return 0;
}

struct sw_host *sw_network_host(void)
{
    int count = sw_network.host_count;
    struct sw_host *host = calloc(1, sizeof(*host)), **hosts;

    if (!host)
        return NULL;
    hosts = realloc(sw_network.hosts, (size_t)(count + 1) * sizeof(struct sw_host *));
    if (!hosts) {
        free(host);
        return NULL;
    }
    sw_network.hosts = hosts;
    hosts[sw_network.host_count++] = host;
    host->number = count;
    host->is_up = 1;
    return host;
}

static struct sw_path *own_path(const struct sw_host *from, const struct sw_host *to)
{
    struct sw_path *path = from->paths;

    while (path && path->to != to)
        path = path->next;
    return path;
}

struct aiordma_simulated_link *sw_network_path(struct sw_host *from, const struct sw_host *to)
{
    struct sw_path *path = own_path(from, to);

    if (path)
        return &path->link;
    path = calloc(1, sizeof(*path));
    if (!path)
        return NULL;
    path->to = to;
    path->link = sw_network.link;
    path->next = from->paths;
    from->paths = path;
    return &path->link;
}

static const struct aiordma_simulated_link *link_to(const struct sw_host *from,
                                                    const struct sw_host *to)
{
    static const struct aiordma_simulated_link within = {.latency = 5000};
    const struct sw_path *path;

    if (from == to)
        return &within;
    path = own_path(from, to);
    return path ? &path->link : &sw_network.link;
}

static uint64_t latency(const struct aiordma_simulated_link *link)
{
    return link->latency + (link->jitter ? sw_network_random() % (link->jitter + 1) : 0);
}

/* Whether something can go this way now. */
static int is_open(const struct sw_host *from, const struct sw_host *to)
{
    return to && to->is_up && !link_to(from, to)->is_cut;
}

/* -- readiness ----------------------------------------------------------------------------- */

static void wake(struct sw_host *host)
{
    if (host->is_awake)
        return;
    host->is_awake = 1;
    host->next_awake = NULL;
    if (!sw_network.awake)
        sw_network.last_awake = &sw_network.awake;
    *sw_network.last_awake = host;
    sw_network.last_awake = &host->next_awake;
}

static uint32_t ready_events(struct sw_object *object);

static void unqueue(struct interest *interest)
{
    if (!interest->queued)
        return;
    *interest->queued = interest->next_queued;
    if (interest->next_queued)
        interest->next_queued->queued = interest->queued;
    else
        interest->epoll->last_queued = interest->queued;
    interest->queued = NULL;
}

static void queue(struct interest *interest)
{
    struct sw_object *epoll = interest->epoll;

    if (interest->queued)
        return;
    if (!epoll->queue)
        epoll->last_queued = &epoll->queue;
    interest->next_queued = NULL;
    interest->queued = epoll->last_queued;
    *epoll->last_queued = interest;
    epoll->last_queued = &interest->next_queued;
}

static uint32_t wanted_events(const struct interest *interest)
{
    if (!interest->events)
        return 0; /* muted: an epoll, which has no errors */
    return ready_events(interest->object) & (interest->events | EPOLLERR | EPOLLHUP);
}

/* Something of the object has changed: queue it where it is watched and ready. */
static void changed(struct sw_object *object)
{
    for (struct interest *each = object->interests; each; each = each->next)
        if (!each->queued && wanted_events(each)) {
            queue(each);
            changed(each->epoll);
        }
    if (!object->interests && object->kind == EPOLL)
        wake(object->host);
}

static uint32_t stream_events(const struct sw_object *object)
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

static uint32_t ready_events(struct sw_object *object)
{
    switch (object->kind) {
    case SIGNAL:
        return object->count ? EPOLLIN : 0;
    case EPOLL:
        while (object->queue) {
            if (wanted_events(object->queue))
                return EPOLLIN;
            unqueue(object->queue);
        }
        return 0;
    case STREAM:
        return stream_events(object);
    case LISTENER:
        return object->waits ? EPOLLIN : 0;
    default:
        return EPOLLOUT | (object->arrived.first ? EPOLLIN : 0);
    }
}

/* -- descriptors --------------------------------------------------------------------------- */

static int fail(int error)
{
    errno = error;
    return -1;
}

static struct sw_object *find(int fd)
{
    struct sw_object *object =
        fd >= FIRST && fd - FIRST < object_count ? objects[fd - FIRST] : NULL;

    if (!object)
        errno = EBADF;
    return object;
}

static int give_descriptor(struct sw_object *object)
{
    if (object_count == object_room) {
        int room = object_room ? 2 * object_room : 64;
        struct sw_object **more = realloc(objects, (size_t)room * sizeof(struct sw_object *));
        if (!more)
            return fail(ENOMEM);
        objects = more;
        object_room = room;
    }
    objects[object_count] = object;
    return object->fd = FIRST + object_count++;
}

static struct sw_object *new_object(struct sw_host *host, enum kind kind)
{
    struct sw_object *object = calloc(1, sizeof(*object));

    if (!object) {
        errno = ENOMEM;
        return NULL;
    }
    object->kind = kind;
    object->fd = -1;
    object->host = host;
    object->arrived.last = &object->arrived.first;
    object->flying.last = &object->flying.first;
    object->last_waiting = &object->waits;
    object->next = host->objects;
    if (object->next)
        object->next->link = &object->next;
    object->link = &host->objects;
    host->objects = object;
    return object;
}

static int open_object(enum kind kind, int family)
{
    if (!sw_network.current)
        return fail(ENETDOWN);
    struct sw_object *object = new_object(sw_network.current, kind);
    if (!object)
        return -1;
    object->family = family;
    int fd = give_descriptor(object);
    if (fd < 0)
        drop(object);
    return fd;
}

static void forget_interest(struct interest *interest)
{
    unqueue(interest);
    *interest->link = interest->next;
    if (interest->next)
        interest->next->link = interest->link;
    *interest->watched = interest->next_watched;
    if (interest->next_watched)
        interest->next_watched->watched = interest->watched;
    free(interest);
}

static void be_service(struct sw_object *object)
{
    object->next_service = object->host->services;
    if (object->next_service)
        object->next_service->service_link = &object->next_service;
    object->service_link = &object->host->services;
    object->host->services = object;
}

static void free_pieces(struct pieces *pieces)
{
    while (pieces->first) {
        struct piece *piece = pieces->first;
        pieces->first = piece->next;
        free(piece);
    }
    pieces->last = &pieces->first;
}

/* Take the object's descriptor, and all that the program knows of it. */
static void detach(struct sw_object *object)
{
    if (object->fd >= 0)
        objects[object->fd - FIRST] = NULL;
    object->fd = -1;
    while (object->interests)
        forget_interest(object->interests);
    while (object->watched)
        forget_interest(object->watched);
    if (object->service_link) {
        *object->service_link = object->next_service;
        if (object->next_service)
            object->next_service->service_link = object->service_link;
        object->service_link = NULL;
    }
}

static void drop(struct sw_object *object)
{
    detach(object);
    cancel(&object->flight);
    cancel(&object->answer);
    free_pieces(&object->arrived);
    free_pieces(&object->flying);
    while (object->waits) {
        struct sw_object *waiting = object->waits;
        object->waits = waiting->next_waiting;
        drop(waiting);
    }
    if (object->peer)
        object->peer->peer = NULL;
    *object->link = object->next;
    if (object->next)
        object->next->link = object->link;
    free(object);
}

void sw_network_crash(struct sw_host *host)
{
    while (host->objects)
        drop(host->objects);
}

void sw_network_clear(void)
{
    for (int i = 0; i < sw_network.host_count; i++) {
        struct sw_host *host = sw_network.hosts[i];
        sw_network_crash(host);
        while (host->paths) {
            struct sw_path *path = host->paths;
            host->paths = path->next;
            free(path);
        }
        free(host->state);
        free(host);
    }
    free(sw_network.hosts);
    free(objects);
    objects = NULL;
    object_count = object_room = 0;
    memset(&sw_network, 0, sizeof(sw_network));
}

void sw_network_wake(int epoll)
{
    struct sw_object *object = find(epoll);

    if (object && ready_events(object))
        wake(object->host);
}

/* -- signals and epolls -------------------------------------------------------------------- */

static int sim_eventfd(unsigned int count, int flags)
{
    int fd = open_object(SIGNAL, 0);

    (void)flags;
    if (fd >= 0)
        find(fd)->count = count;
    return fd;
}

static void sim_ring(int fd)
{
    struct sw_object *object = find(fd);

    if (object) {
        object->count++;
        changed(object);
    }
}

static void sim_quiet(int fd)
{
    struct sw_object *object = find(fd);

    if (object)
        object->count = 0;
}

static int sim_epoll_create1(int flags)
{
    (void)flags;
    return open_object(EPOLL, 0);
}

static int sim_epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event)
{
    struct sw_object *epoll = find(epoll_fd), *object = find(fd);
    struct interest *interest;

    if (!epoll || !object)
        return -1;
    interest = object->interests;
    while (interest && interest->epoll != epoll)
        interest = interest->next;
    if (operation == EPOLL_CTL_ADD) {
        if (interest)
            return fail(EEXIST);
        interest = calloc(1, sizeof(*interest));
        if (!interest)
            return fail(ENOMEM);
        *interest = (struct interest){
            .object = object,
            .epoll = epoll,
            .next = object->interests,
            .link = &object->interests,
            .next_watched = epoll->watched,
            .watched = &epoll->watched,
        };
        if (interest->next)
            interest->next->link = &interest->next;
        object->interests = interest;
        if (interest->next_watched)
            interest->next_watched->watched = &interest->next_watched;
        epoll->watched = interest;
    } else if (!interest) {
        return fail(ENOENT);
    } else if (operation == EPOLL_CTL_DEL) {
        forget_interest(interest);
        return 0;
    }
    interest->events = event->events;
    interest->data = event->data;
    unqueue(interest);
    if (wanted_events(interest)) {
        queue(interest);
        changed(epoll);
    }
    return 0;
}

/* The order in which descriptors become ready is the network's, and random where it has none. */
static void shuffle(struct epoll_event *events, int count)
{
    for (int i = count - 1; i > 0; i--) {
        int other = (int)(sw_network_random() % (uint64_t)(i + 1));
        struct epoll_event kept = events[i];
        events[i] = events[other];
        events[other] = kept;
    }
}

static int sim_epoll_wait(int fd, struct epoll_event *events, int most, int milliseconds)
{
    struct sw_object *epoll = find(fd);
    struct interest *first, *again = NULL, **last = &again;
    int count = 0;

    (void)milliseconds;
    if (!epoll)
        return -1;
    while (count < most && (first = epoll->queue)) {
        uint32_t ready = wanted_events(first);
        unqueue(first);
        if (!ready)
            continue;
        events[count].events = ready;
        events[count++].data = first->data;
        if (!(first->events & (uint32_t)EPOLLET)) {
            /* It is reported again while it is ready; until then the list borrows its link. */
            *last = first;
            last = &first->next_queued;
            *last = NULL;
        }
    }
    while ((first = again)) {
        again = first->next_queued;
        queue(first);
    }
    shuffle(events, count);
    return count;
}

/* -- TCP ----------------------------------------------------------------------------------- */

static void add_piece(struct pieces *pieces, struct piece *piece)
{
    piece->next = NULL;
    *pieces->last = piece;
    pieces->last = &piece->next;
}

static struct piece *take_piece(struct pieces *pieces)
{
    struct piece *piece = pieces->first;

    pieces->first = piece->next;
    if (!pieces->first)
        pieces->last = &pieces->first;
    return piece;
}

static uint64_t again_after(uint32_t attempts, uint64_t first, uint64_t most)
{
    uint64_t milliseconds = attempts < 20 ? first << attempts : most;

    return (milliseconds < most ? milliseconds : most) * MILLISECOND;
}

/* When something of this size arrives that is sent now. */
static uint64_t arrival(struct sw_object *object, uint32_t size)
{
    const struct aiordma_simulated_link *link = link_to(object->host, object->peer_host);
    uint64_t begins = sw_network.now;

    if (begins < object->path_is_free)
        begins = object->path_is_free;
    if (link->bandwidth)
        begins += (uint64_t)((double)size * 1e9 / (double)link->bandwidth);
    object->path_is_free = begins;
    uint64_t due = begins + latency(link);
    for (uint32_t i = 0; link->loss > 0 && i < MOST_ATTEMPTS && chance() < link->loss; i++) {
        trace(object->host, object->peer_host, AIORDMA_SIMULATED_LOST, size);
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
    cancel(&object->flight);
    cancel(&object->answer);
    free_pieces(&object->flying);
    object->in_flight = object->delivered = 0;
    if (object->peer)
        object->peer->peer = NULL;
    object->peer = NULL;
    if (object->fd < 0 && !object->listener) {
        drop(object); /* its program has closed it */
        return;
    }
    object->error = error;
    object->is_connected = 1; /* so that it fails, and does not connect */
    changed(object);
}

static void reset_arrives(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, answer);

    if (!is_open(object->peer_host, object->host)) {
        /* It is lost. What this side sends again is answered by another one. */
        if (object->is_connected)
            fly(object);
        else
            request_again(object);
        return;
    }
    trace(object->peer_host, object->host, AIORDMA_SIMULATED_RESET, 0);
    break_stream(object, object->is_refused ? ECONNREFUSED : ECONNRESET);
}

/* A reset is on its way to this side. It overtakes nothing that the other side has sent. */
static void reset_later(struct sw_object *object, uint64_t not_before)
{
    uint64_t due = sw_network.now + latency(link_to(object->peer_host, object->host));

    cancel(&object->flight);
    call_at(&object->answer, due < not_before ? not_before : due, reset_arrives);
}

static void acknowledged(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, answer);

    if (!is_open(object->peer_host, object->host)) { /* lost; the next one covers it */
        call_at(timer, sw_network.now + (uint64_t)AGAIN_MILLISECONDS * MILLISECOND, acknowledged);
        object->attempts++;
        return;
    }
    object->in_flight -= object->delivered;
    object->delivered = object->attempts = 0;
    object->heard = sw_network.now;
    if (object->fd < 0 && !object->listener && !object->flying.first)
        drop(object); /* closed, and all of it has arrived */
    else
        changed(object);
}

static void arrive(struct sw_object *object, struct piece *piece)
{
    struct sw_object *peer = object->peer;

    if (piece->kind == END) {
        trace(object->host, peer->host, AIORDMA_SIMULATED_END, 0);
        peer->has_ended = 1;
        free(piece);
    } else {
        trace(object->host, peer->host, AIORDMA_SIMULATED_DATA, piece->size);
        object->delivered += piece->size;
        peer->buffered += piece->size;
        add_piece(&peer->arrived, piece);
    }
    if (!object->answer.deadline)
        call_at(&object->answer, sw_network.now + latency(link_to(peer->host, object->host)),
                acknowledged);
    changed(peer);
}

static void piece_is_due(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, flight);

    if (!is_open(object->host, object->peer_host)) {
        if (object->attempts++ >= MOST_ATTEMPTS) {
            break_stream(object, ETIMEDOUT);
            return;
        }
        object->flying.first->due =
            sw_network.now +
            again_after(object->attempts, AGAIN_MILLISECONDS, MOST_AGAIN_MILLISECONDS);
        fly(object);
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
    arrive(object, take_piece(&object->flying));
    fly(object);
}

static void fly(struct sw_object *object)
{
    struct piece *first = object->flying.first;

    if (first)
        call_at(&object->flight, first->due > sw_network.now ? first->due : sw_network.now,
                piece_is_due);
}

static int send_piece(struct sw_object *object, enum piece_kind kind, const struct iovec *parts,
                      size_t count, uint32_t size)
{
    struct piece *piece = malloc(sizeof(*piece) + size);
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
        add_piece(&object->flying, piece);
    } else {
        add_piece(&object->flying, piece);
        fly(object);
    }
    return 0;
}

static ssize_t send_parts(struct sw_object *object, const struct iovec *parts, size_t count)
{
    size_t size = 0;

    if (object->error) {
        errno = object->error;
        return -1;
    }
    if (!object->is_connected)
        return fail(object->peer_host ? EAGAIN : ENOTCONN);
    if (object->is_shut)
        return fail(EPIPE);
    for (size_t i = 0; i < count; i++)
        size += parts[i].iov_len;
    uint32_t taken = object->in_flight + (object->peer ? object->peer->buffered : 0);
    if (taken >= WINDOW)
        return fail(EAGAIN);
    if (size > WINDOW - taken)
        size = WINDOW - taken;
    int error = size ? send_piece(object, DATA, parts, count, (uint32_t)size) : 0;
    return error ? fail(error) : (ssize_t)size;
}

static ssize_t sim_send(int fd, const void *from, size_t size, int flags)
{
    struct sw_object *object = find(fd);
    struct iovec part = {.iov_base = (void *)(uintptr_t)from, .iov_len = size};

    (void)flags;
    return object ? send_parts(object, &part, 1) : -1;
}

static ssize_t receive(struct sw_object *object, const struct iovec *parts, int count, int flags)
{
    size_t done = 0;

    if (!object->arrived.first) {
        if (object->error) {
            errno = object->error;
            return -1;
        }
        if (object->has_ended)
            return 0;
        return fail(object->is_connected || object->peer_host ? EAGAIN : ENOTCONN);
    }
    for (int i = 0; i < count; i++) {
        size_t filled = 0;
        while (filled < parts[i].iov_len && object->arrived.first) {
            struct piece *piece = object->arrived.first;
            size_t left = piece->size - piece->start, room = parts[i].iov_len - filled;
            size_t part = left < room ? left : room;
            memcpy((char *)parts[i].iov_base + filled, piece->bytes + piece->start, part);
            filled += part;
            if (flags & MSG_PEEK)
                return (ssize_t)filled;
            piece->start += (uint32_t)part;
            object->buffered -= (uint32_t)part;
            if (piece->start == piece->size)
                free(take_piece(&object->arrived));
        }
        done += filled;
    }
    if (object->peer)
        changed(object->peer); /* there is room again */
    return (ssize_t)done;
}

static ssize_t sim_readv(int fd, const struct iovec *parts, int count)
{
    struct sw_object *object = find(fd);

    return object ? receive(object, parts, count, 0) : -1;
}

static ssize_t sim_recv(int fd, void *to, size_t size, int flags)
{
    struct sw_object *object = find(fd);
    struct iovec part = {.iov_base = to, .iov_len = size};

    return object ? receive(object, &part, 1, flags) : -1;
}

static int sim_shutdown(int fd, int how)
{
    struct sw_object *object = find(fd);

    (void)how;
    if (!object)
        return -1;
    if (!object->is_connected || object->error)
        return fail(ENOTCONN);
    if (!object->is_shut && send_piece(object, END, NULL, 0, 0))
        return fail(ENOMEM);
    object->is_shut = 1;
    return 0;
}

static int sim_close(int fd)
{
    struct sw_object *object = find(fd);

    if (!object)
        return -1;
    int is_live = object->kind == STREAM && object->is_connected && !object->error;
    detach(object);
    if (!is_live || !object->peer) {
        drop(object);
        return 0;
    }
    struct sw_object *peer = object->peer;
    if (object->resets || object->arrived.first) {
        peer->peer = object->peer = NULL;
        reset_later(peer, object->last_due);
        drop(object);
        return 0;
    }
    if (!object->is_shut && send_piece(object, END, NULL, 0, 0)) {
        drop(object);
        return 0;
    }
    object->is_shut = 1; /* what it has sent still arrives */
    return 0;
}

/* -- connecting ---------------------------------------------------------------------------- */

static struct sw_object *service_at(struct sw_host *host, enum kind kind,
                                    const struct sockaddr_storage *address)
{
    struct sockaddr_storage wanted = *address;

    for (struct sw_object *each = host->services; each; each = each->next_service) {
        if (each->kind != kind || *port_of(&each->local) != *port_of(&wanted))
            continue;
        if (is_same(as_address(&each->local), as_address(&wanted)) ||
            (is_any(as_address(&each->local)) &&
             (each->family == AF_INET6 || each->family == wanted.ss_family)))
            return each;
    }
    return NULL;
}

static void connected(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, answer);

    if (!is_open(object->peer_host, object->host)) {
        call_at(timer, sw_network.now + (uint64_t)CONNECT_MILLISECONDS * MILLISECOND, connected);
        return;
    }
    object->is_connected = 1;
    object->attempts = 0;
    object->heard = sw_network.now;
    changed(object);
}

static void request_is_due(struct sw_timer *timer);

static void request_again(struct sw_object *object)
{
    if (object->attempts >= CONNECT_ATTEMPTS) {
        break_stream(object, ETIMEDOUT);
        return;
    }
    uint64_t after = again_after(object->attempts++, CONNECT_MILLISECONDS, UINT32_MAX);
    call_at(&object->flight, sw_network.now + after, request_is_due);
}

static void request_is_due(struct sw_timer *timer)
{
    struct sw_object *object = SW_CONTAINER(timer, struct sw_object, flight);
    struct sw_host *host = object->peer_host;
    uint32_t port = ntohs(*port_of(&object->remote));

    if (!is_open(object->host, host)) {
        request_again(object);
        return;
    }
    struct sw_object *listener = service_at(host, LISTENER, &object->remote);
    if (!listener) {
        trace(object->host, host, AIORDMA_SIMULATED_REFUSED, port);
        object->is_refused = 1;
        reset_later(object, 0);
        return;
    }
    struct sw_object *peer =
        listener->waiting > listener->backlog ? NULL : new_object(host, STREAM);
    if (!peer) { /* the backlog is full: the request is dropped */
        request_again(object);
        return;
    }
    trace(object->host, host, AIORDMA_SIMULATED_CONNECT, port);
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
    call_at(&object->answer, sw_network.now + latency(link_to(host, object->host)), connected);
    peer->last_due = object->answer.deadline;
    changed(listener);
}

static void give_port(struct sw_object *object)
{
    struct sw_host *host = object->host;

    if (host->last_port < FIRST_PORT || host->last_port >= 60999)
        host->last_port = FIRST_PORT;
    *port_of(&object->local) = htons(++host->last_port);
}

static int sim_bind(int fd, const struct sockaddr *address, socklen_t size)
{
    struct sw_object *object = find(fd);

    if (!object)
        return -1;
    if (!is_any(address) && !is_loopback(address) && !has_address(object->host, address))
        return fail(EADDRNOTAVAIL);
    memset(&object->local, 0, sizeof(object->local));
    memcpy(&object->local, address, size);
    if (!*port_of(&object->local))
        give_port(object);
    else if (object->kind == DATAGRAM && service_at(object->host, DATAGRAM, &object->local))
        return fail(EADDRINUSE);
    if (object->kind == DATAGRAM)
        be_service(object);
    return 0;
}

static int sim_listen(int fd, int backlog)
{
    struct sw_object *object = find(fd);

    if (!object)
        return -1;
    if (service_at(object->host, LISTENER, &object->local))
        return fail(EADDRINUSE);
    object->kind = LISTENER;
    object->backlog = (uint32_t)backlog;
    be_service(object);
    return 0;
}

static int sim_connect(int fd, const struct sockaddr *address, socklen_t size)
{
    struct sw_object *object = find(fd);
    struct sockaddr_storage own;

    if (!object)
        return -1;
    if (!own_address(object->host, address, &own))
        return fail(ENETUNREACH);
    memset(&object->remote, 0, sizeof(object->remote));
    memcpy(&object->remote, address, size);
    in_port_t port = *port_of(&object->local);
    if (!object->local.ss_family || is_any(as_address(&object->local)))
        object->local = own;
    *port_of(&object->local) = port;
    if (!port)
        give_port(object);
    if (object->kind == DATAGRAM)
        return 0;
    object->peer_host = host_at(object->host, address);
    if (!object->peer_host)
        return fail(EHOSTUNREACH);
    call_at(&object->flight, sw_network.now + latency(link_to(object->host, object->peer_host)),
            request_is_due);
    return fail(EINPROGRESS);
}

static int copy_name(const struct sockaddr_storage *from, struct sockaddr *to, socklen_t *size)
{
    socklen_t length = from->ss_family ? size_of(from->ss_family) : 0;

    if (!to)
        return 0;
    memcpy(to, from, length < *size ? length : *size);
    *size = length;
    return 0;
}

static int sim_accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    struct sw_object *listener = find(fd);

    (void)flags;
    if (!listener)
        return -1;
    struct sw_object *peer = listener->waits;
    if (!peer)
        return fail(EAGAIN);
    if (give_descriptor(peer) < 0)
        return -1;
    listener->waits = peer->next_waiting;
    if (!listener->waits)
        listener->last_waiting = &listener->waits;
    listener->waiting--;
    peer->listener = peer->next_waiting = NULL;
    copy_name(&peer->remote, address, size);
    return peer->fd;
}

static int sim_getsockname(int fd, struct sockaddr *address, socklen_t *size)
{
    const struct sw_object *object = find(fd);

    return object ? copy_name(&object->local, address, size) : -1;
}

static int sim_getpeername(int fd, struct sockaddr *address, socklen_t *size)
{
    const struct sw_object *object = find(fd);

    if (!object)
        return -1;
    return object->is_connected ? copy_name(&object->remote, address, size) : fail(ENOTCONN);
}

/* -- datagrams ----------------------------------------------------------------------------- */

struct packet {
    struct sw_timer timer;
    struct sw_host *from, *to;
    struct piece *piece;
};

static void packet_arrives(struct sw_timer *timer)
{
    struct packet *packet = SW_CONTAINER(timer, struct packet, timer);
    struct piece *piece = packet->piece;
    struct sw_object *object = NULL;

    if (is_open(packet->from, packet->to))
        object = service_at(packet->to, DATAGRAM, &piece->to);
    if (object && object->buffered < DATAGRAMS) {
        trace(packet->from, packet->to, AIORDMA_SIMULATED_DATAGRAM, piece->size);
        object->buffered++;
        add_piece(&object->arrived, piece);
        changed(object);
    } else {
        trace(packet->from, packet->to, AIORDMA_SIMULATED_LOST, piece->size);
        free(piece);
    }
    free(packet);
}

/* An IPv4 address in IPv6 form becomes an IPv4 address. */
static void tidy(struct sockaddr_storage *address)
{
    struct sockaddr_in6 six;
    struct sockaddr_in four = {.sin_family = AF_INET};

    if (address->ss_family != AF_INET6)
        return;
    memcpy(&six, address, sizeof(six));
    if (!IN6_IS_ADDR_V4MAPPED(&six.sin6_addr))
        return;
    four.sin_port = six.sin6_port;
    memcpy(&four.sin_addr, six.sin6_addr.s6_addr + 12, sizeof(four.sin_addr));
    memset(address, 0, sizeof(*address));
    memcpy(address, &four, sizeof(four));
}

/* The source that the sender's control message asks for. */
static void read_source(const struct msghdr *message, struct sockaddr_storage *from)
{
    struct msghdr copy = *message;

    for (struct cmsghdr *header = CMSG_FIRSTHDR(&copy); header;
         header = CMSG_NXTHDR(&copy, header)) {
        if (header->cmsg_level == IPPROTO_IP && header->cmsg_type == IP_PKTINFO) {
            struct in_pktinfo info;
            memcpy(&info, CMSG_DATA(header), sizeof(info));
            if (info.ipi_spec_dst.s_addr)
                ((struct sockaddr_in *)(void *)from)->sin_addr = info.ipi_spec_dst;
        } else if (header->cmsg_level == IPPROTO_IPV6 && header->cmsg_type == IPV6_PKTINFO) {
            struct in6_pktinfo info;
            memcpy(&info, CMSG_DATA(header), sizeof(info));
            if (!IN6_IS_ADDR_UNSPECIFIED(&info.ipi6_addr))
                ((struct sockaddr_in6 *)(void *)from)->sin6_addr = info.ipi6_addr;
        }
    }
}

static ssize_t send_datagram(struct sw_object *object, const struct msghdr *message)
{
    struct sockaddr_storage to = {0}, from;
    struct packet *packet;
    size_t size = 0;

    memcpy(&to, message->msg_name, message->msg_namelen);
    tidy(&to);
    if (!own_address(object->host, as_address(&to), &from))
        return fail(ENETUNREACH);
    read_source(message, &from);
    *port_of(&from) = *port_of(&object->local);
    for (size_t i = 0; i < message->msg_iovlen; i++)
        size += message->msg_iov[i].iov_len;
    struct sw_host *host = host_at(object->host, as_address(&to));
    const struct aiordma_simulated_link *link = host ? link_to(object->host, host) : NULL;
    if (!host || (link->loss > 0 && chance() < link->loss)) {
        trace(object->host, host, AIORDMA_SIMULATED_LOST, (uint32_t)size);
        return (ssize_t)size;
    }
    packet = calloc(1, sizeof(*packet));
    struct piece *piece = packet ? malloc(sizeof(*piece) + size) : NULL;
    if (!piece) {
        free(packet);
        return fail(ENOBUFS);
    }
    memset(piece, 0, sizeof(*piece));
    piece->size = (uint32_t)size;
    piece->from = from;
    piece->to = to;
    size_t done = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        memcpy(piece->bytes + done, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
        done += message->msg_iov[i].iov_len;
    }
    packet->piece = piece;
    packet->from = object->host;
    packet->to = host;
    uint64_t line = link->bandwidth ? (uint64_t)((double)size * 1e9 / (double)link->bandwidth) : 0;
    call_at(&packet->timer, sw_network.now + line + latency(link), packet_arrives);
    return (ssize_t)size;
}

static ssize_t sim_sendmsg(int fd, const struct msghdr *message, int flags)
{
    struct sw_object *object = find(fd);

    (void)flags;
    if (!object)
        return -1;
    return object->kind == DATAGRAM ? send_datagram(object, message)
                                    : send_parts(object, message->msg_iov, message->msg_iovlen);
}

static void as_mapped(struct sockaddr_storage *address)
{
    struct sockaddr_in four;
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};

    if (address->ss_family != AF_INET)
        return;
    memcpy(&four, address, sizeof(four));
    six.sin6_port = four.sin_port;
    memset(six.sin6_addr.s6_addr + 10, 0xff, 2);
    memcpy(six.sin6_addr.s6_addr + 12, &four.sin_addr, sizeof(four.sin_addr));
    memcpy(address, &six, sizeof(six));
}

static void write_destination(struct msghdr *message, const struct sockaddr_storage *to)
{
    struct cmsghdr *header = message->msg_control;

    if (to->ss_family == AF_INET) {
        struct in_pktinfo info = {
            .ipi_ifindex = 1, .ipi_addr = ((const struct sockaddr_in *)(const void *)to)->sin_addr};
        header->cmsg_level = IPPROTO_IP;
        header->cmsg_type = IP_PKTINFO;
        header->cmsg_len = CMSG_LEN(sizeof(info));
        memcpy(CMSG_DATA(header), &info, sizeof(info));
        message->msg_controllen = CMSG_SPACE(sizeof(info));
    } else {
        struct in6_pktinfo info = {.ipi6_ifindex = 1,
                                   .ipi6_addr =
                                       ((const struct sockaddr_in6 *)(const void *)to)->sin6_addr};
        header->cmsg_level = IPPROTO_IPV6;
        header->cmsg_type = IPV6_PKTINFO;
        header->cmsg_len = CMSG_LEN(sizeof(info));
        memcpy(CMSG_DATA(header), &info, sizeof(info));
        message->msg_controllen = CMSG_SPACE(sizeof(info));
    }
}

static ssize_t sim_recvmsg(int fd, struct msghdr *message, int flags)
{
    struct sw_object *object = find(fd);

    if (!object)
        return -1;
    if (flags & MSG_ERRQUEUE || !object->arrived.first)
        return fail(EAGAIN);
    struct piece *piece = take_piece(&object->arrived);
    const struct iovec *part = message->msg_iov;
    object->buffered--;
    memcpy(part->iov_base, piece->bytes, piece->size < part->iov_len ? piece->size : part->iov_len);
    if (object->family == AF_INET6) {
        as_mapped(&piece->from);
        as_mapped(&piece->to);
    }
    copy_name(&piece->from, message->msg_name, &message->msg_namelen);
    write_destination(message, &piece->to);
    ssize_t size = (ssize_t)piece->size;
    free(piece);
    return size;
}

/* -- the rest ------------------------------------------------------------------------------ */

static int sim_socket(int family, int type, int protocol)
{
    (void)protocol;
    if (family != AF_INET && family != AF_INET6)
        return fail(EAFNOSUPPORT);
    return open_object(type & SOCK_DGRAM ? DATAGRAM : STREAM, family);
}

static int sim_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    struct sw_object *object = find(fd);

    (void)size;
    if (!object)
        return -1;
    if (level == SOL_SOCKET && name == SO_LINGER)
        object->resets = !((const struct linger *)value)->l_linger;
    else if (level == SOL_SOCKET && name == SO_KEEPALIVE)
        object->keeps_alive = *(const int *)value;
    else if (level == SOL_SOCKET && name == SO_RCVLOWAT)
        object->low_water = (uint32_t)*(const int *)value;
    return 0;
}

/* What TCP knows of a peer that does not answer. */
static void tell(const struct sw_object *object, struct tcp_info *info)
{
    uint64_t silent = (sw_network.now - object->heard) / MILLISECOND;

    memset(info, 0, sizeof(*info));
    info->tcpi_last_ack_recv = silent < UINT32_MAX ? (uint32_t)silent : UINT32_MAX;
    info->tcpi_retransmits = object->attempts < UINT8_MAX ? (uint8_t)object->attempts : UINT8_MAX;
    if (object->keeps_alive && silent >= PROBE_MILLISECONDS && object->peer_host &&
        (!is_open(object->host, object->peer_host) || !is_open(object->peer_host, object->host)))
        info->tcpi_probes = 1;
}

static int sim_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    struct sw_object *object = find(fd);

    if (!object)
        return -1;
    if (level == IPPROTO_TCP && name == TCP_INFO) {
        struct tcp_info info;
        tell(object, &info);
        memcpy(value, &info, *size < sizeof(info) ? *size : sizeof(info));
    } else if (level == SOL_SOCKET && name == SO_ERROR) {
        *(int *)value = object->error;
    } else {
        *(int *)value = 0;
    }
    return 0;
}

static int sim_unacknowledged(int fd, int *bytes)
{
    const struct sw_object *object = find(fd);

    if (!object)
        return -1;
    *bytes = (int)object->in_flight;
    return 0;
}

static uint64_t sim_now(void)
{
    return sw_network.now;
}

static void sim_random(void *to, size_t size)
{
    for (char *at = to; size; at++, size--)
        *at = (char)sw_network_random();
}

static uint32_t sim_late(uint32_t size)
{
    if (size < 2 || !sw_network.scrambles || sw_network_random() & 1)
        return 0;
    return 1 + (uint32_t)(sw_network_random() % (size - 1));
}

static void sim_posted(uint64_t wr_id, uint32_t qp_num)
{
    if (sw_network.posted)
        sw_network.posted(wr_id, qp_num);
}

static void sim_changed(uint64_t wr_id, uint32_t qp_num, uint32_t size)
{
    struct sw_host *host = sw_network.current;

    sw_network.trace[sw_network.traced++ % AIORDMA_SIMULATED_TRACE] =
        (struct aiordma_simulated_event){
            .time = sw_network.now,
            .sender = host ? host->number : 0,
            .receiver = host ? host->number : 0,
            .kind = AIORDMA_SIMULATED_CHANGED,
            .size = size,
            .wr_id = wr_id,
            .qp_num = qp_num,
    };
}

static int sim_blocks(int fd)
{
    return find(fd) ? 0 : -1;
}

static int sim_poll(struct pollfd *wanted, nfds_t count, int milliseconds)
{
    (void)wanted, (void)count, (void)milliseconds;
    return fail(ENOSYS); /* nothing blocks here */
}

/* The addresses of the current host, and loopback's, in one piece of memory. */
static int sim_getifaddrs(struct ifaddrs **addresses)
{
    const struct sw_host *host = sw_network.current;
    int count = (host ? host->address_count : 0) + 2;
    struct {
        struct ifaddrs ifaddrs;
        struct sockaddr_storage address;
    } *each = calloc((size_t)count, sizeof(*each));

    if (!each)
        return fail(ENOMEM);
    for (int i = 0; i < count; i++) {
        each[i].address = i == 0   ? loopback_of(AF_INET)
                          : i == 1 ? loopback_of(AF_INET6)
                                   : host->addresses[i - 2];
        each[i].ifaddrs.ifa_name = (char *)(uintptr_t)(i < 2 ? "lo" : "eth0");
        each[i].ifaddrs.ifa_flags = IFF_UP;
        each[i].ifaddrs.ifa_addr = (struct sockaddr *)&each[i].address;
        each[i].ifaddrs.ifa_next = i + 1 < count ? &each[i + 1].ifaddrs : NULL;
    }
    *addresses = &each->ifaddrs;
    return 0;
}

static void sim_freeifaddrs(struct ifaddrs *addresses)
{
    free(addresses);
}

static unsigned int sim_if_nametoindex(const char *name)
{
    return strcmp(name, "lo") ? 2 : 1;
}

const struct sw_system_calls sw_simulated_system = {
    .is_simulated = 1,
    .now = sim_now,
    .random = sim_random,
    .close = sim_close,
    .blocks = sim_blocks,
    .poll = sim_poll,
    .eventfd = sim_eventfd,
    .ring = sim_ring,
    .quiet = sim_quiet,
    .epoll_create1 = sim_epoll_create1,
    .epoll_ctl = sim_epoll_ctl,
    .epoll_wait = sim_epoll_wait,
    .socket = sim_socket,
    .bind = sim_bind,
    .listen = sim_listen,
    .accept4 = sim_accept4,
    .connect = sim_connect,
    .shutdown = sim_shutdown,
    .getsockname = sim_getsockname,
    .getpeername = sim_getpeername,
    .getsockopt = sim_getsockopt,
    .setsockopt = sim_setsockopt,
    .unacknowledged = sim_unacknowledged,
    .recv = sim_recv,
    .readv = sim_readv,
    .recvmsg = sim_recvmsg,
    .send = sim_send,
    .sendmsg = sim_sendmsg,
    .late = sim_late,
    .posted = sim_posted,
    .changed = sim_changed,
    .getifaddrs = sim_getifaddrs,
    .freeifaddrs = sim_freeifaddrs,
    .if_nametoindex = sim_if_nametoindex,
};
