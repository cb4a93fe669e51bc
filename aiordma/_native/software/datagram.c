/*
 * UD queue pairs: RoCE v2's datagrams over UDP. Each queue pair has a socket, whose port is the low
 * half of its number, or shares RoCE's port, and another socket for each multicast group that it is
 * attached to. A datagram that cannot be sent, or that finds no receive, is dropped silently.
 */
#include "datagram.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "engine.h"
#include "gids.h"
#include "roce_port.h"
#include "udp.h"

enum {
    BURST = 64, /* datagrams that one socket delivers in a row */
    TRIES = 4096,
};

/* A group that a queue pair is attached to. */
struct attachment {
    struct sw_watch watch;
    struct sw_udp udp;
    struct sw_datagrams *datagrams;
    union ibv_gid group;
    int is_programs; /* attached by ibv_attach_mcast, not by the connection manager */
    struct attachment *next;
};

struct sw_datagrams {
    struct sw_watch watch;
    struct sw_udp udp; /* none on RoCE's port */
    struct sw_queue_pair *pair;
    struct attachment *attachments;
};

/* -- address handles ----------------------------------------------------------------- */

static int is_ipv4(const union ibv_gid *gid)
{
    return IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)(const void *)gid->raw);
}

static int is_group(const union ibv_gid *gid)
{
    return sw_roce_is_group((const struct in6_addr *)(const void *)gid->raw);
}

int sw_find_route(const struct ibv_ah_attr *attr, struct sw_udp_route *route)
{
    static const union ibv_gid nowhere;
    const union ibv_gid *to = &attr->grh.dgid;
    struct ibv_gid_entry from;

    /* The address must be global: Ethernet has no LIDs. */
    if (attr->port_num != 1 || !attr->is_global || !memcmp(to, &nowhere, sizeof(nowhere)))
        return EINVAL;
    if (sw_gid_entry(attr->grh.sgid_index, &from) || is_ipv4(&from.gid) != is_ipv4(to))
        return EINVAL;
    memset(route, 0, sizeof(*route));
    memcpy(&route->path.source, &from.gid, sizeof(from.gid));
    memcpy(&route->path.destination, to, sizeof(*to));
    /* As in the kernel: a route has its own, and programs ask for one hop without knowing. */
    route->path.hop_limit = is_group(to) ? attr->grh.hop_limit : SW_HOP_LIMIT;
    route->path.traffic_class = attr->grh.traffic_class;
    route->interface = from.ndev_ifindex;
    return 0;
}

static struct ibv_ah *create_ah(struct ibv_pd *domain, struct ibv_ah_attr *attr)
{
    struct sw_address_handle *handle = NULL;
    struct sw_udp_route route;

    sw_lock();
    int error = domain && attr ? sw_find_route(attr, &route) : EINVAL;
    if (!error && sw_device.counts.address_handles >= SW_MOST_ADDRESS_HANDLES)
        error = ENOMEM;
    if (!error) {
        handle = calloc(1, sizeof(*handle));
        error = handle ? 0 : ENOMEM;
    }
    if (!error) {
        handle->ibv.context = domain->context;
        handle->ibv.pd = domain;
        handle->route = route;
        ((struct sw_domain *)domain)->objects++;
        sw_device.counts.address_handles++;
    }
    sw_unlock();
    if (error)
        errno = error;
    return handle ? &handle->ibv : NULL;
}

static int destroy_ah(struct ibv_ah *handle)
{
    if (!handle)
        return EINVAL;
    sw_lock();
    ((struct sw_domain *)handle->pd)->objects--;
    sw_device.counts.address_handles--;
    sw_unlock();
    free(handle);
    return 0;
}

static int init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
                           struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
    struct sw_roce_path path;
    union ibv_gid ours;
    int index = -1;

    int error = !context || !wc || !grh || !attr || port_num != 1 || !(wc->wc_flags & IBV_WC_GRH)
                    ? EINVAL
                    : sw_roce_read_grh((const uint8_t *)grh, &path);
    if (!error) {
        memcpy(&ours, &path.destination, sizeof(ours));
        sw_lock();
        index = sw_gid_index(&ours);
        sw_unlock();
        error = index < 0 ? ENODATA : 0;
    }
    if (error) {
        errno = error;
        return -1;
    }
    memset(attr, 0, sizeof(*attr));
    attr->is_global = 1;
    attr->port_num = port_num;
    attr->dlid = wc->slid;
    attr->sl = wc->sl;
    attr->src_path_bits = wc->dlid_path_bits;
    memcpy(&attr->grh.dgid, &path.source, sizeof(path.source));
    attr->grh.sgid_index = (uint8_t)index;
    attr->grh.traffic_class = path.traffic_class;
    attr->grh.hop_limit = path.hop_limit;
    return 0;
}

/* -- sending ------------------------------------------------------------------------- */

static int is_on_roce(const struct sw_queue_pair *pair)
{
    return pair->transport == &sw_roce_datagram_transport;
}

static enum ibv_wc_status send_one(struct sw_queue_pair *pair, const struct sw_send *send)
{
    struct sw_udp_route route = send->route;
    uint8_t own[SW_ROCE_MOST], *packet = is_on_roce(pair) ? sw_roce_port_room() : own;
    struct sw_roce_packet datagram = {
        .opcode =
            send->opcode == IBV_WR_SEND_WITH_IMM ? SW_UD_SEND_ONLY_IMMEDIATE : SW_UD_SEND_ONLY,
        .destination_qpn = send->remote_qpn & 0xffffff,
        .source_qpn = pair->ibv.qp_num,
        .psn = pair->attributes.sq_psn,
        /* If the highest bit is set, the queue pair's own Q_Key is used. */
        .qkey = send->remote_qkey >> 31 ? pair->attributes.qkey : send->remote_qkey,
        .immediate = send->immediate,
        .solicited = send->flags & IBV_SEND_SOLICITED ? 1 : 0,
        .size = send->length,
    };

    if (send->length > SW_DATAGRAM_MTU)
        return IBV_WC_LOC_LEN_ERR;
    uint32_t headers = sw_roce_headers(packet, &datagram);
    if (send->flags & IBV_SEND_INLINE) {
        memcpy(packet + headers, send->inlined, send->length);
    } else {
        enum ibv_wc_status status = sw_gather(pair->ibv.pd, send->parts, send->part_count, 0,
                                              packet + headers, send->length);
        if (status != IBV_WC_SUCCESS)
            return status;
    }
    pair->attributes.sq_psn = (pair->attributes.sq_psn + 1) & 0xffffff;
    /* If it cannot be sent, it is lost, as any datagram can be. */
    if (is_on_roce(pair)) {
        sw_roce_port_add(&route, headers + send->length);
        return IBV_WC_SUCCESS;
    }
    route.path.source_port = pair->datagrams->udp.port;
    route.path.destination_port = sw_roce_is_group(&route.path.destination)
                                      ? SW_GROUP_PORT
                                      : (uint16_t)(datagram.destination_qpn & 0xffff);
    uint32_t size = sw_roce_seal(packet, headers + send->length, &route.path, 0);
    (void)sw_udp_send(&pair->datagrams->udp, &route, packet, size);
    return IBV_WC_SUCCESS;
}

static void transmit(struct sw_queue_pair *pair)
{
    while (pair->ibv.state == IBV_QPS_RTS && pair->next_send != pair->end) {
        struct sw_send *send = &pair->sends[pair->next_send % pair->send_size];
        pair->next_send++;
        enum ibv_wc_status status = send_one(pair, send);
        sw_end_send(pair, send, status);
        if (status != IBV_WC_SUCCESS)
            sw_queue_pair_failed(pair);
    }
    sw_roce_port_flush();
}

/* -- receiving ----------------------------------------------------------------------- */

/*
 * Whether a datagram was sent to an address of this machine, as on rxe: the socket also gets
 * broadcasts and the rest of 127.0.0.0/8, whose GID a receiver could not find. The machine's other
 * addresses count, too: a program chooses the one that its peer answers to (gid_index).
 */
static int is_for_us(const struct sw_queue_pair *pair, const struct sw_roce_path *path)
{
    union ibv_gid destination;

    memcpy(&destination, &path->destination, sizeof(destination));
    return !memcmp(&destination, &pair->source, sizeof(destination)) || sw_has_gid(&destination);
}

static int can_receive(const struct sw_queue_pair *pair)
{
    switch (pair->ibv.state) {
    case IBV_QPS_RTR:
    case IBV_QPS_RTS:
    case IBV_QPS_SQD:
    case IBV_QPS_SQE:
        return 1;
    default:
        return 0;
    }
}

/*
 * Whether the oldest receive is large enough. If not, the receive stays posted: no peer can end a
 * queue pair with a datagram that is too long.
 */
static int has_room(const struct sw_queue_pair *pair, uint32_t size)
{
    const struct sw_receives *receives = pair->shared ? &pair->shared->receives : &pair->receives;
    uint64_t room = 0;

    if (!receives->count)
        return 0;
    const struct sw_receive *oldest = &receives->ring[receives->head % receives->size];
    for (int i = 0; i < oldest->part_count; i++)
        room += oldest->parts[i].length;
    return room >= SW_GRH + (uint64_t)size;
}

/* is_to_group: it came by the socket of a group, and to no other address. */
static void deliver(struct sw_queue_pair *pair, const struct sw_roce_path *path,
                    const struct sw_roce_packet *datagram, size_t size, int is_to_group)
{
    int has_immediate = datagram->opcode == SW_UD_SEND_ONLY_IMMEDIATE;
    uint8_t grh[SW_GRH];

    /* The address last, so that only a peer that knows the qkey makes work of it. */
    if (!can_receive(pair) || datagram->qkey != pair->attributes.qkey ||
        !has_room(pair, datagram->size) || (!is_to_group && !is_for_us(pair, path)) ||
        !sw_take_receive(pair, 0))
        return;
    sw_roce_grh(grh, path, size);
    struct ibv_wc completion = {
        .opcode = IBV_WC_RECV,
        .byte_len = SW_GRH + datagram->size,
        .src_qp = datagram->source_qpn,
        .wc_flags = IBV_WC_GRH | (has_immediate ? IBV_WC_WITH_IMM : 0),
        .imm_data = datagram->immediate,
    };
    completion.status = sw_fill_receive(pair, 0, grh, SW_GRH);
    if (completion.status == IBV_WC_SUCCESS)
        completion.status = sw_fill_receive(pair, SW_GRH, datagram->payload, datagram->size);
    sw_finish_receive(pair, &completion, datagram->solicited);
    if (completion.status != IBV_WC_SUCCESS)
        sw_queue_pair_failed(pair);
}

/* group: NULL for the queue pair's own socket. */
static void receive(struct sw_datagrams *datagrams, const struct sw_udp *udp,
                    const union ibv_gid *group)
{
    uint32_t number = group ? SW_QPN_GROUP : datagrams->pair->ibv.qp_num;
    uint8_t packet[SW_ROCE_MOST];
    struct sw_roce_packet datagram;
    struct sw_udp_route route;

    for (int i = 0; i < BURST && !sw_turn_is_over(); i++) {
        ssize_t size = sw_udp_receive(udp, packet, sizeof(packet), &route, NULL);
        if (size < 0 && (errno == EAGAIN || errno == EBADF))
            return;
        sw_add_work(SW_FRAME_WORK + SW_DATAGRAM_MTU);
        if (size < 0 || (size_t)size > sizeof(packet) ||
            (group && memcmp(group, &route.path.destination, sizeof(*group))) ||
            sw_roce_read(packet, (size_t)size, &route.path, &datagram) ||
            !(sw_roce_parts((uint8_t)datagram.opcode) & SW_HAS_DETH))
            continue;
        if (datagram.destination_qpn == number)
            deliver(datagrams->pair, &route.path, &datagram, (size_t)size, !!group);
    }
}

static void ready(struct sw_watch *watch, uint32_t events)
{
    struct sw_datagrams *datagrams = SW_CONTAINER(watch, struct sw_datagrams, watch);

    (void)events;
    receive(datagrams, &datagrams->udp, NULL);
}

static void group_ready(struct sw_watch *watch, uint32_t events)
{
    struct attachment *attachment = SW_CONTAINER(watch, struct attachment, watch);

    (void)events;
    receive(attachment->datagrams, &attachment->udp, &attachment->group);
}

/* -- sockets ------------------------------------------------------------------------- */

/* Find a free queue pair number: the port, and eight random bits. 0: none is free. */
static uint32_t number_at(uint16_t port)
{
    for (int i = 0; i < TRIES; i++) {
        uint32_t number = (sw_random() & 0xff) << 16 | port;
        if (number > 1 && number != SW_QPN_GROUP && !sw_find_queue_pair(number))
            return number;
    }
    return 0;
}

static struct sw_datagrams *begin(struct sw_queue_pair *pair)
{
    struct sw_datagrams *datagrams = calloc(1, sizeof(*datagrams));

    if (!datagrams)
        return NULL;
    datagrams->pair = pair;
    return datagrams;
}

static int open_pair(struct sw_queue_pair *pair)
{
    struct sw_datagrams *datagrams = begin(pair);

    if (!datagrams)
        return ENOMEM;
    int error = sw_udp_open_anywhere(&datagrams->udp);
    if (error) {
        free(datagrams);
        return error;
    }
    uint32_t number = number_at(datagrams->udp.port);
    datagrams->watch.ready = ready;
    error = number ? sw_watch(&datagrams->watch, datagrams->udp.fd, EPOLLIN) : EAGAIN;
    if (error) {
        sw_udp_close(&datagrams->udp);
        free(datagrams);
        return error;
    }
    pair->ibv.qp_num = number;
    pair->datagrams = datagrams;
    return 0;
}

static void detach(struct attachment **link)
{
    struct attachment *attachment = *link;

    *link = attachment->next;
    sw_unwatch(&attachment->watch);
    sw_udp_close(&attachment->udp);
    free(attachment);
}

static void end(struct sw_queue_pair *pair)
{
    struct sw_datagrams *datagrams = pair->datagrams;

    pair->datagrams = NULL;
    while (datagrams->attachments)
        detach(&datagrams->attachments);
    free(datagrams);
}

static void close_pair(struct sw_queue_pair *pair)
{
    if (!pair->datagrams)
        return;
    sw_unwatch(&pair->datagrams->watch);
    sw_udp_close(&pair->datagrams->udp);
    end(pair);
}

/* -- groups -------------------------------------------------------------------------- */

static struct attachment **find_attachment(struct sw_datagrams *datagrams,
                                           const union ibv_gid *group)
{
    struct attachment **link = &datagrams->attachments;

    while (*link && memcmp(&(*link)->group, group, sizeof(*group)))
        link = &(*link)->next;
    return link;
}

/* The interface of the queue pair's address. 0: it has no address. */
static uint32_t interface_of(const struct sw_queue_pair *pair)
{
    static const union ibv_gid none;
    struct ibv_gid_entry entry;

    if (!memcmp(&pair->source, &none, sizeof(none)))
        return 0;
    int index = sw_gid_index(&pair->source);
    return index >= 0 && !sw_gid_entry(index, &entry) ? entry.ndev_ifindex : 0;
}

/*
 * interface: 0 if the queue pair has no address. At RoCE's port, the socket is bound to the group:
 * bound to all addresses, it would take part in sharing the queue pairs' packets.
 */
static int open_group(struct sw_udp *udp, const union ibv_gid *group, uint32_t interface,
                      int is_roce)
{
    const uint16_t port = htons(is_roce ? SW_ROCE_PORT : SW_GROUP_PORT);
    struct sockaddr_in6 ipv6 = {.sin6_family = AF_INET6, .sin6_port = port};
    struct sockaddr_in ipv4 = {.sin_family = AF_INET, .sin_port = port};
    const struct sockaddr *address =
        is_ipv4(group) ? (const struct sockaddr *)&ipv4 : (const struct sockaddr *)&ipv6;
    struct in6_addr joined;

    memcpy(&joined, group, sizeof(joined));
    if (is_roce) {
        ipv6.sin6_addr = joined;
        ipv6.sin6_scope_id = interface;
        memcpy(&ipv4.sin_addr, group->raw + 12, sizeof(ipv4.sin_addr));
    }
    int error = sw_udp_open(udp, address,
                            SW_UDP_IPV6_ONLY | (is_roce ? SW_UDP_PORT_SHARED : SW_UDP_SHARED));
    if (error)
        return error;
    error = sw_udp_join(udp, &joined, interface);
    if (error)
        sw_udp_close(udp);
    return error;
}

static int attach(struct sw_datagrams *datagrams, const union ibv_gid *group)
{
    struct attachment *attachment;
    uint32_t count = 0;

    for (attachment = datagrams->attachments; attachment; attachment = attachment->next)
        count++;
    attachment = count < SW_MOST_GROUPS ? calloc(1, sizeof(*attachment)) : NULL;
    if (!attachment)
        return ENOMEM;
    int error = open_group(&attachment->udp, group, interface_of(datagrams->pair),
                           is_on_roce(datagrams->pair));
    if (!error) {
        attachment->watch.ready = group_ready;
        error = sw_watch(&attachment->watch, attachment->udp.fd, EPOLLIN);
        if (error)
            sw_udp_close(&attachment->udp);
    }
    if (error) {
        free(attachment);
        return error;
    }
    attachment->datagrams = datagrams;
    attachment->group = *group;
    attachment->next = datagrams->attachments;
    datagrams->attachments = attachment;
    return 0;
}

int sw_datagrams_attach(struct sw_queue_pair *pair, const union ibv_gid *group)
{
    if (!pair->datagrams || !is_group(group))
        return EINVAL;
    return *find_attachment(pair->datagrams, group) ? 0 : attach(pair->datagrams, group);
}

int sw_datagrams_detach(struct sw_queue_pair *pair, const union ibv_gid *group)
{
    if (!pair->datagrams)
        return EINVAL;
    struct attachment **link = find_attachment(pair->datagrams, group);
    if (!*link)
        return EINVAL;
    detach(link);
    return 0;
}

int sw_datagrams_are_attached(const struct sw_queue_pair *pair)
{
    const struct attachment *each = pair->datagrams ? pair->datagrams->attachments : NULL;

    while (each && !each->is_programs)
        each = each->next;
    return !!each;
}

static int attach_mcast(struct ibv_qp *queue_pair, const union ibv_gid *gid, uint16_t lid)
{
    (void)lid; /* for InfiniBand only */
    if (!queue_pair || !gid)
        return EINVAL;
    struct sw_queue_pair *pair = (struct sw_queue_pair *)queue_pair;
    sw_lock();
    int error = sw_datagrams_attach(pair, gid);
    if (!error)
        (*find_attachment(pair->datagrams, gid))->is_programs = 1;
    sw_unlock();
    return error;
}

static int detach_mcast(struct ibv_qp *queue_pair, const union ibv_gid *gid, uint16_t lid)
{
    (void)lid;
    if (!queue_pair || !gid)
        return EINVAL;
    sw_lock();
    int error = sw_datagrams_detach((struct sw_queue_pair *)queue_pair, gid);
    sw_unlock();
    return error;
}

/* A datagram without a receive is dropped, so nothing resumes, and a state change ends nothing. */
static void do_nothing(struct sw_queue_pair *pair)
{
    (void)pair;
}

const struct sw_transport sw_datagram_transport = {
    .open = open_pair,
    .close = close_pair,
    .transmit = transmit,
    .resume = do_nothing,
    .end = do_nothing,
};

/* -- on RoCE's port ------------------------------------------------------------------ */

static int join_port(struct sw_queue_pair *pair)
{
    struct sw_datagrams *datagrams = begin(pair);
    int error = datagrams ? sw_roce_port_join(&pair->ibv.qp_num) : ENOMEM;

    if (error)
        free(datagrams);
    else
        pair->datagrams = datagrams;
    return error;
}

static void leave_port(struct sw_queue_pair *pair)
{
    if (!pair->datagrams)
        return;
    end(pair);
    sw_roce_port_leave();
}

static void arrived(struct sw_queue_pair *pair, const struct sw_udp_route *route,
                    const struct sw_roce_packet *packet, size_t size)
{
    if (sw_roce_parts((uint8_t)packet->opcode) & SW_HAS_DETH)
        deliver(pair, &route->path, packet, size, 0);
}

const struct sw_transport sw_roce_datagram_transport = {
    .open = join_port,
    .close = leave_port,
    .transmit = transmit,
    .resume = do_nothing,
    .end = do_nothing,
    .arrived = arrived,
};

void sw_fill_datagram(struct aiordma_provider *table)
{
    table->create_ah = create_ah;
    table->init_ah_from_wc = init_ah_from_wc;
    table->destroy_ah = destroy_ah;
    table->attach_mcast = attach_mcast;
    table->detach_mcast = detach_mcast;
}
