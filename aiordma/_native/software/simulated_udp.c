#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* struct in6_pktinfo */
#endif
/* UDP of simulated hosts. What is lost stays lost. */
#include "simulated_udp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

enum { DATAGRAMS = 1024 }; /* that wait at a socket; more are lost */

struct packet {
    struct sw_timer timer;
    struct sw_host *from, *to;
    struct sw_data *piece;
};

static void packet_arrives(struct sw_timer *timer)
{
    struct packet *packet = SW_CONTAINER(timer, struct packet, timer);
    struct sw_data *piece = packet->piece;
    struct sw_object *object = NULL;

    if (sw_is_open(packet->from, packet->to))
        object = sw_service_at(packet->to, SW_DATAGRAM, &piece->to);
    if (object && object->buffered < DATAGRAMS) {
        sw_trace(packet->from, packet->to, AIORDMA_SIMULATED_DATAGRAM, piece->size);
        object->buffered++;
        sw_add_piece(&object->arrived, piece);
        sw_object_changed(object);
    } else {
        sw_trace(packet->from, packet->to, AIORDMA_SIMULATED_LOST, piece->size);
        free(piece);
    }
    free(packet);
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
            if (from->ss_family == AF_INET && IN6_IS_ADDR_V4MAPPED(&info.ipi6_addr))
                memcpy(&((struct sockaddr_in *)(void *)from)->sin_addr, info.ipi6_addr.s6_addr + 12,
                       4);
            else if (from->ss_family == AF_INET6 && !IN6_IS_ADDR_UNSPECIFIED(&info.ipi6_addr))
                ((struct sockaddr_in6 *)(void *)from)->sin6_addr = info.ipi6_addr;
        }
    }
}

ssize_t sw_sim_send_datagram(struct sw_object *object, const struct msghdr *message)
{
    struct sockaddr_storage to = {0}, from;
    struct packet *packet;
    size_t size = 0;

    memcpy(&to, message->msg_name, message->msg_namelen);
    sw_tidy_address(&to);
    if (!sw_address_towards(object->host, sw_as_address(&to), &from))
        return sw_fail(ENETUNREACH);
    read_source(message, &from);
    *sw_port_in(&from) = *sw_port_in(&object->local);
    for (size_t i = 0; i < message->msg_iovlen; i++)
        size += message->msg_iov[i].iov_len;
    struct sw_host *host = sw_host_at(object->host, sw_as_address(&to));
    const struct aiordma_simulated_link *link = host ? sw_link_to(object->host, host) : NULL;
    if (!host || sw_is_lost(link)) {
        sw_trace(object->host, host, AIORDMA_SIMULATED_LOST, (uint32_t)size);
        return (ssize_t)size;
    }
    packet = calloc(1, sizeof(*packet));
    struct sw_data *piece = packet ? malloc(sizeof(*piece) + size) : NULL;
    if (!piece) {
        free(packet);
        return sw_fail(ENOBUFS);
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
    uint64_t leaves = sw_leaves_at(object->host, host, (uint32_t)size);
    sw_call_at(&packet->timer, leaves + sw_latency(link), packet_arrives);
    return (ssize_t)size;
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

ssize_t sw_sim_recvmsg(int fd, struct msghdr *message, int flags)
{
    struct sw_object *object = sw_object_of(fd);

    if (!object)
        return -1;
    if (flags & MSG_ERRQUEUE || !object->arrived.first)
        return sw_fail(EAGAIN);
    struct sw_data *piece = sw_take_piece(&object->arrived);
    const struct iovec *part = message->msg_iov;
    object->buffered--;
    memcpy(part->iov_base, piece->bytes, piece->size < part->iov_len ? piece->size : part->iov_len);
    if (object->family == AF_INET6) {
        as_mapped(&piece->from);
        as_mapped(&piece->to);
    }
    sw_copy_name(&piece->from, message->msg_name, &message->msg_namelen);
    write_destination(message, &piece->to);
    ssize_t size = (ssize_t)piece->size;
    free(piece);
    return size;
}

uint32_t sw_sim_datagram_events(struct sw_object *object)
{
    return EPOLLOUT | (object->arrived.first ? EPOLLIN : 0);
}
