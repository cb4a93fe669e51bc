/*
 * Descriptors of simulated hosts: see descriptors.h.
 */
#include "descriptors.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

enum {
    FIRST = 1 << 28, /* the kernel's are far smaller */
    FIRST_PORT = 32768,
};

static struct sw_object **objects; /* by descriptor */
static int object_count, object_room;

/* -- readiness ----------------------------------------------------------------------------- */

static void unqueue(struct sw_interest *interest)
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

static void queue(struct sw_interest *interest)
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

static uint32_t wanted_events(const struct sw_interest *interest)
{
    if (!interest->events)
        return 0; /* muted: an epoll, which has no errors */
    return interest->object->ready(interest->object) & (interest->events | EPOLLERR | EPOLLHUP);
}

/* Something of the object has changed: queue it where it is watched and ready. */
void sw_object_changed(struct sw_object *object)
{
    for (struct sw_interest *each = object->interests; each; each = each->next)
        if (!each->queued && wanted_events(each)) {
            queue(each);
            sw_object_changed(each->epoll);
        }
    if (!object->interests && object->kind == SW_EPOLL)
        sw_wake_host(object->host);
}

/* -- descriptors --------------------------------------------------------------------------- */

int sw_fail(int error)
{
    errno = error;
    return -1;
}

struct sw_object *sw_object_of(int fd)
{
    struct sw_object *object =
        fd >= FIRST && fd - FIRST < object_count ? objects[fd - FIRST] : NULL;

    if (!object)
        errno = EBADF;
    return object;
}

int sw_give_descriptor(struct sw_object *object)
{
    if (object_count == object_room) {
        int room = object_room ? 2 * object_room : 64;
        struct sw_object **more = realloc(objects, (size_t)room * sizeof(struct sw_object *));
        if (!more)
            return sw_fail(ENOMEM);
        objects = more;
        object_room = room;
    }
    objects[object_count] = object;
    return object->fd = FIRST + object_count++;
}

struct sw_object *sw_new_object(struct sw_host *host, enum sw_kind kind,
                                uint32_t (*ready)(struct sw_object *))
{
    struct sw_object *object = calloc(1, sizeof(*object));

    if (!object) {
        errno = ENOMEM;
        return NULL;
    }
    object->kind = kind;
    object->ready = ready;
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

int sw_open_object(enum sw_kind kind, int family, uint32_t (*ready)(struct sw_object *))
{
    if (!sw_network.current)
        return sw_fail(ENETDOWN);
    struct sw_object *object = sw_new_object(sw_network.current, kind, ready);
    if (!object)
        return -1;
    object->family = family;
    int fd = sw_give_descriptor(object);
    if (fd < 0)
        sw_drop_object(object);
    return fd;
}

static void forget_interest(struct sw_interest *interest)
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

void sw_free_pieces(struct sw_pieces *pieces)
{
    while (pieces->first) {
        struct sw_data *piece = pieces->first;
        pieces->first = piece->next;
        free(piece);
    }
    pieces->last = &pieces->first;
}

/* Take the object's descriptor, and all that the program knows of it. */
void sw_detach_object(struct sw_object *object)
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

/* The object is dropped before a program has accepted it. */
static void leave_listener(struct sw_object *object)
{
    struct sw_object *listener = object->listener, **at;

    if (!listener)
        return;
    for (at = &listener->waits; *at != object; at = &(*at)->next_waiting)
        ;
    *at = object->next_waiting;
    if (!*at)
        listener->last_waiting = at;
    listener->waiting--;
}

void sw_drop_object(struct sw_object *object)
{
    sw_detach_object(object);
    leave_listener(object);
    sw_call_never(&object->flight);
    sw_call_never(&object->answer);
    sw_free_pieces(&object->arrived);
    sw_free_pieces(&object->flying);
    while (object->waits)
        sw_drop_object(object->waits);
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
        sw_drop_object(host->objects);
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
    struct sw_object *object = sw_object_of(epoll);

    if (object && object->ready(object))
        sw_wake_host(object->host);
}

/* -- what sockets have in common ----------------------------------------------------------- */

void sw_add_piece(struct sw_pieces *pieces, struct sw_data *piece)
{
    piece->next = NULL;
    *pieces->last = piece;
    pieces->last = &piece->next;
}

struct sw_data *sw_take_piece(struct sw_pieces *pieces)
{
    struct sw_data *piece = pieces->first;

    pieces->first = piece->next;
    if (!pieces->first)
        pieces->last = &pieces->first;
    return piece;
}

void sw_be_service(struct sw_object *object)
{
    object->next_service = object->host->services;
    if (object->next_service)
        object->next_service->service_link = &object->next_service;
    object->service_link = &object->host->services;
    object->host->services = object;
}

struct sw_object *sw_service_at(struct sw_host *host, enum sw_kind kind,
                                const struct sockaddr_storage *address)
{
    struct sockaddr_storage wanted = *address;

    for (struct sw_object *each = host->services; each; each = each->next_service) {
        if (each->kind != kind || *sw_port_in(&each->local) != *sw_port_in(&wanted))
            continue;
        if (sw_is_same_address(sw_as_address(&each->local), sw_as_address(&wanted)) ||
            (sw_is_any(sw_as_address(&each->local)) &&
             (each->family == AF_INET6 || each->family == wanted.ss_family)))
            return each;
    }
    return NULL;
}

void sw_give_port(struct sw_object *object)
{
    struct sw_host *host = object->host;

    if (host->last_port < FIRST_PORT || host->last_port >= 60999)
        host->last_port = FIRST_PORT;
    *sw_port_in(&object->local) = htons(++host->last_port);
}

int sw_copy_name(const struct sockaddr_storage *from, struct sockaddr *to, socklen_t *size)
{
    socklen_t length = from->ss_family ? sw_size_of_address(from->ss_family) : 0;

    if (!to)
        return 0;
    memcpy(to, from, length < *size ? length : *size);
    *size = length;
    return 0;
}

/* -- signals and epolls -------------------------------------------------------------------- */

static uint32_t signal_events(struct sw_object *object)
{
    return object->count ? EPOLLIN : 0;
}

static uint32_t epoll_events(struct sw_object *object)
{
    while (object->queue) {
        if (wanted_events(object->queue))
            return EPOLLIN;
        unqueue(object->queue);
    }
    return 0;
}

int sw_sim_eventfd(unsigned int count, int flags)
{
    int fd = sw_open_object(SW_SIGNAL, 0, signal_events);

    (void)flags;
    if (fd >= 0)
        sw_object_of(fd)->count = count;
    return fd;
}

void sw_sim_ring(int fd)
{
    struct sw_object *object = sw_object_of(fd);

    if (object) {
        object->count++;
        sw_object_changed(object);
    }
}

void sw_sim_quiet(int fd)
{
    struct sw_object *object = sw_object_of(fd);

    if (object)
        object->count = 0;
}

int sw_sim_epoll_create1(int flags)
{
    (void)flags;
    return sw_open_object(SW_EPOLL, 0, epoll_events);
}

int sw_sim_epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event)
{
    struct sw_object *epoll = sw_object_of(epoll_fd), *object = sw_object_of(fd);
    struct sw_interest *interest;

    if (!epoll || !object)
        return -1;
    interest = object->interests;
    while (interest && interest->epoll != epoll)
        interest = interest->next;
    if (operation == EPOLL_CTL_ADD) {
        if (interest)
            return sw_fail(EEXIST);
        interest = calloc(1, sizeof(*interest));
        if (!interest)
            return sw_fail(ENOMEM);
        *interest = (struct sw_interest){
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
        return sw_fail(ENOENT);
    } else if (operation == EPOLL_CTL_DEL) {
        forget_interest(interest);
        return 0;
    }
    interest->events = event->events;
    interest->data = event->data;
    unqueue(interest);
    if (wanted_events(interest)) {
        queue(interest);
        sw_object_changed(epoll);
    }
    return 0;
}

/* The order in which descriptors become ready is the network's, and random where it has none. */
static void shuffle(struct epoll_event *events, int count)
{
    for (int i = count - 1; i > 0; i--) {
        int other = i - (int)sw_choose(AIORDMA_SIMULATED_READY, (uint64_t)i + 1);
        struct epoll_event kept = events[i];
        events[i] = events[other];
        events[other] = kept;
    }
}

int sw_sim_epoll_wait(int fd, struct epoll_event *events, int most, int milliseconds)
{
    struct sw_object *epoll = sw_object_of(fd);
    struct sw_interest *first, *again = NULL, **last = &again;
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
