/* UDP sockets for datagrams: see udp.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* struct in6_pktinfo */
#endif
#include "udp.h"

#include <errno.h>
#include <ifaddrs.h>
#include <linux/errqueue.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/udp.h>
#include <string.h>
#include <unistd.h>

#include "capture.h"
#include "device.h"

enum { BUFFER = 1 << 20 };

union any_address {
    struct sockaddr any;
    struct sockaddr_in ipv4;
    struct sockaddr_in6 ipv6;
};

/* Space for the control messages of a packet, with their alignment. */
union control {
    struct cmsghdr aligned;
    char bytes[CMSG_SPACE(sizeof(struct in6_pktinfo)) + 5 * CMSG_SPACE(sizeof(int)) +
               CMSG_SPACE(sizeof(struct in_pktinfo))];
};

static int is_ipv4(const struct in6_addr *address)
{
    return IN6_IS_ADDR_V4MAPPED(address);
}

static void map_ipv4(struct in6_addr *to, const struct in_addr *address)
{
    memset(to, 0, sizeof(*to));
    memset(to->s6_addr + 10, 0xff, 2);
    memcpy(to->s6_addr + 12, address, 4);
}

/* -- opening and closing ------------------------------------------------------------- */

static int set(int fd, int level, int name, int value)
{
    return sw_system->setsockopt(fd, level, name, &value, sizeof(value)) ? errno : 0;
}

/* Also for IPv6 sockets, which can send and receive IPv4. */
static int set_ipv4_options(int fd, int flags)
{
    int error = set(fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO); /* see roce.h */

    if (!error)
        error = set(fd, IPPROTO_IP, IP_RECVTTL, 1);
    if (!error)
        error = set(fd, IPPROTO_IP, IP_RECVTOS, 1);
    if (!error)
        error = set(fd, IPPROTO_IP, IP_MULTICAST_ALL, 0);
    if (!error && flags & SW_UDP_ERRORS)
        error = set(fd, IPPROTO_IP, IP_RECVERR, 1);
    return error;
}

static int set_ipv6_options(int fd, int flags)
{
    int error = set(fd, IPPROTO_IPV6, IPV6_V6ONLY, flags & SW_UDP_IPV6_ONLY);

    if (!error)
        error = set(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, 1);
    if (!error)
        error = set(fd, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, 1);
    if (!error)
        error = set(fd, IPPROTO_IPV6, IPV6_RECVTCLASS, 1);
    if (!error)
        error = set(fd, IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0);
    if (!error && flags & SW_UDP_ERRORS)
        error = set(fd, IPPROTO_IPV6, IPV6_RECVERR, 1);
    return error;
}

static int set_options(int fd, sa_family_t family, int flags)
{
    int error = set_ipv4_options(fd, flags);

    if (!error && family == AF_INET6)
        error = set_ipv6_options(fd, flags);
    if (!error && family == AF_INET)
        error = set(fd, IPPROTO_IP, IP_PKTINFO, 1);
    if (!error && flags & SW_UDP_SHARED)
        error = set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (!error && flags & SW_UDP_PORT_SHARED)
        error = set(fd, SOL_SOCKET, SO_REUSEPORT, 1);
    if (flags & SW_UDP_SEVERAL)
        set(fd, IPPROTO_UDP, UDP_GRO, 1); /* Linux 5.0 */
    /* As much as the system allows: a burst can arrive while the engine is busy. */
    set(fd, SOL_SOCKET, SO_RCVBUF, BUFFER);
    set(fd, SOL_SOCKET, SO_SNDBUF, BUFFER);
    return error;
}

int sw_udp_open(struct sw_udp *udp, const struct sockaddr *address, int flags)
{
    union any_address bound;
    socklen_t size = address->sa_family == AF_INET6 ? sizeof(bound.ipv6) : sizeof(bound.ipv4);

    if (address->sa_family != AF_INET && address->sa_family != AF_INET6)
        return EAFNOSUPPORT;
    int fd = sw_system->socket(address->sa_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    int error = set_options(fd, address->sa_family, flags);
    if (!error && sw_system->bind(fd, address, size))
        error = errno;
    if (!error && sw_system->getsockname(fd, &bound.any, &size))
        error = errno;
    if (error) {
        sw_system->close(fd);
        return error;
    }
    udp->fd = fd;
    udp->family = address->sa_family;
    udp->port = ntohs(udp->family == AF_INET6 ? bound.ipv6.sin6_port : bound.ipv4.sin_port);
    sw_device.counts.sockets++;
    return 0;
}

int sw_udp_open_anywhere(struct sw_udp *udp)
{
    union any_address address = {.ipv6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT}};
    int error = sw_udp_open(udp, &address.any, 0);

    if (error != EAFNOSUPPORT && error != EADDRNOTAVAIL)
        return error;
    memset(&address, 0, sizeof(address));
    address.ipv4.sin_family = AF_INET;
    return sw_udp_open(udp, &address.any, 0);
}

void sw_udp_close(struct sw_udp *udp)
{
    sw_system->close(udp->fd);
    udp->fd = -1;
    sw_device.counts.sockets--;
}

static int join_on(const struct sw_udp *udp, const struct in6_addr *group, uint32_t interface)
{
    if (is_ipv4(group)) {
        struct ip_mreqn request = {.imr_ifindex = (int)interface};
        memcpy(&request.imr_multiaddr, group->s6_addr + 12, 4);
        return sw_system->setsockopt(udp->fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &request,
                                     sizeof(request))
                   ? errno
                   : 0;
    }
    struct ipv6_mreq request = {.ipv6mr_multiaddr = *group, .ipv6mr_interface = interface};
    return sw_system->setsockopt(udp->fd, IPPROTO_IPV6, IPV6_JOIN_GROUP, &request, sizeof(request))
               ? errno
               : 0;
}

static int join_everywhere(const struct sw_udp *udp, const struct in6_addr *group)
{
    sa_family_t family = is_ipv4(group) ? AF_INET : AF_INET6;
    struct ifaddrs *addresses, *at;
    int error = ENODEV;

    if (sw_system->getifaddrs(&addresses))
        return errno;
    for (at = addresses; at; at = at->ifa_next) {
        if (!at->ifa_addr || at->ifa_addr->sa_family != family || !(at->ifa_flags & IFF_UP))
            continue;
        int failed = join_on(udp, group, sw_system->if_nametoindex(at->ifa_name));
        if (!failed || failed == EADDRINUSE) /* joined there for another address */
            error = 0;
        else if (error)
            error = failed;
    }
    sw_system->freeifaddrs(addresses);
    return error;
}

int sw_udp_join(const struct sw_udp *udp, const struct in6_addr *group, uint32_t interface)
{
    return interface ? join_on(udp, group, interface) : join_everywhere(udp, group);
}

/*
 * Check that the system has a route to the group on an interface. Connecting a UDP socket sends
 * nothing.
 */
static int check_route(const struct sw_udp *udp, const struct in6_addr *group, uint32_t interface)
{
    union any_address to;
    socklen_t size = udp->family == AF_INET ? sizeof(to.ipv4) : sizeof(to.ipv6);
    int error;

    memset(&to, 0, sizeof(to));
    if (udp->family == AF_INET) {
        struct ip_mreqn by = {.imr_ifindex = (int)interface};
        to.ipv4.sin_family = AF_INET;
        to.ipv4.sin_port = htons(SW_GROUP_PORT);
        memcpy(&to.ipv4.sin_addr, group->s6_addr + 12, 4);
        error = sw_system->setsockopt(udp->fd, IPPROTO_IP, IP_MULTICAST_IF, &by, sizeof(by)) ? errno
                                                                                             : 0;
    } else {
        to.ipv6.sin6_family = AF_INET6;
        to.ipv6.sin6_port = htons(SW_GROUP_PORT);
        to.ipv6.sin6_addr = *group;
        to.ipv6.sin6_scope_id = interface;
        error = set(udp->fd, IPPROTO_IPV6, IPV6_MULTICAST_IF, (int)interface);
    }
    if (!error && sw_system->connect(udp->fd, &to.any, size))
        error = errno;
    return error;
}

int sw_udp_open_member(struct sw_udp *udp, const struct in6_addr *group, uint32_t interface,
                       int send_only)
{
    udp->family = is_ipv4(group) ? AF_INET : AF_INET6;
    udp->port = 0;
    udp->fd = sw_system->socket(udp->family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (udp->fd < 0)
        return errno;
    sw_device.counts.sockets++;
    int error = check_route(udp, group, interface);
    if (!error && !send_only)
        error = sw_udp_join(udp, group, interface);
    if (error)
        sw_udp_close(udp);
    return error;
}

/* -- sending ------------------------------------------------------------------------- */

static void add_control(struct msghdr *message, int level, int type, const void *data, size_t size)
{
    char *control = message->msg_control;
    struct cmsghdr *header = (void *)(control + message->msg_controllen);

    header->cmsg_level = level;
    header->cmsg_type = type;
    header->cmsg_len = CMSG_LEN(size);
    memcpy(CMSG_DATA(header), data, size);
    message->msg_controllen += CMSG_SPACE(size);
}

static void add_path(struct msghdr *message, const struct sw_udp_route *route)
{
    const struct sw_roce_path *path = &route->path;
    int hops = path->hop_limit, traffic_class = path->traffic_class;

    if (is_ipv4(&path->destination)) {
        struct in_pktinfo from = {0};
        memcpy(&from.ipi_spec_dst, path->source.s6_addr + 12, 4);
        if (IN_MULTICAST(ntohl(path->destination.s6_addr32[3])))
            from.ipi_ifindex = (int)route->interface;
        add_control(message, IPPROTO_IP, IP_PKTINFO, &from, sizeof(from));
        if (hops)
            add_control(message, IPPROTO_IP, IP_TTL, &hops, sizeof(hops));
        if (traffic_class)
            add_control(message, IPPROTO_IP, IP_TOS, &traffic_class, sizeof(traffic_class));
        return;
    }
    struct in6_pktinfo from = {.ipi6_addr = path->source};
    if (IN6_IS_ADDR_MULTICAST(&path->destination) || IN6_IS_ADDR_LINKLOCAL(&path->destination))
        from.ipi6_ifindex = route->interface;
    add_control(message, IPPROTO_IPV6, IPV6_PKTINFO, &from, sizeof(from));
    if (hops)
        add_control(message, IPPROTO_IPV6, IPV6_HOPLIMIT, &hops, sizeof(hops));
    if (traffic_class)
        add_control(message, IPPROTO_IPV6, IPV6_TCLASS, &traffic_class, sizeof(traffic_class));
}

static int set_name(struct msghdr *message, union any_address *name, const struct sw_udp *udp,
                    const struct sw_udp_route *route)
{
    const struct sw_roce_path *path = &route->path;

    memset(name, 0, sizeof(*name));
    message->msg_name = name;
    if (udp->family == AF_INET) {
        if (!is_ipv4(&path->destination))
            return EAFNOSUPPORT;
        name->ipv4.sin_family = AF_INET;
        name->ipv4.sin_port = htons(path->destination_port);
        memcpy(&name->ipv4.sin_addr, path->destination.s6_addr + 12, 4);
        message->msg_namelen = sizeof(name->ipv4);
        return 0;
    }
    name->ipv6.sin6_family = AF_INET6;
    name->ipv6.sin6_port = htons(path->destination_port);
    name->ipv6.sin6_addr = path->destination;
    if (IN6_IS_ADDR_MULTICAST(&path->destination) || IN6_IS_ADDR_LINKLOCAL(&path->destination))
        name->ipv6.sin6_scope_id = route->interface;
    message->msg_namelen = sizeof(name->ipv6);
    return 0;
}

int sw_udp_send(const struct sw_udp *udp, const struct sw_udp_route *route, const void *packet,
                size_t size)
{
    int error = sw_udp_send_several(udp, route, packet, size, (uint16_t)size);

    if (error != EMSGSIZE || !is_ipv4(&route->path.destination))
        return error;
    /* It exceeds the network's MTU: allow fragmentation of this packet. */
    error = set(udp->fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT);
    if (!error)
        error = sw_udp_send_several(udp, route, packet, size, (uint16_t)size);
    set(udp->fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO);
    return error;
}

int sw_udp_send_several(const struct sw_udp *udp, const struct sw_udp_route *route,
                        const void *packets, size_t size, uint16_t each)
{
    union any_address name;
    union control control;
    struct iovec part = {.iov_base = (void *)(uintptr_t)packets, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control};

    int error = set_name(&message, &name, udp, route);
    if (error)
        return error;
    memset(&control, 0, sizeof(control));
    add_path(&message, route);
    if (each < size)
        add_control(&message, IPPROTO_UDP, UDP_SEGMENT, &each, sizeof(each));
    if (sw_system->sendmsg(udp->fd, &message, MSG_NOSIGNAL) < 0)
        return errno;
    const char *at = packets;
    for (; sw_is_capturing && size; at += each, size -= size < each ? size : each)
        sw_capture_packet(route, udp->port, 1, at, size < each ? size : each);
    return 0;
}

/* -- receiving ----------------------------------------------------------------------- */

static uint16_t read_address(const union any_address *from, struct in6_addr *address)
{
    if (from->any.sa_family == AF_INET) {
        map_ipv4(address, &from->ipv4.sin_addr);
        return ntohs(from->ipv4.sin_port);
    }
    *address = from->ipv6.sin6_addr;
    return ntohs(from->ipv6.sin6_port);
}

static void read_control(const struct cmsghdr *header, struct sw_udp_route *route)
{
    struct sw_roce_path *path = &route->path;
    int is_ip = header->cmsg_level == IPPROTO_IP, is_ipv6 = header->cmsg_level == IPPROTO_IPV6;
    int number = 0;

    if (is_ipv6 && header->cmsg_type == IPV6_PKTINFO) {
        struct in6_pktinfo to;
        memcpy(&to, CMSG_DATA(header), sizeof(to));
        path->destination = to.ipi6_addr;
        route->interface = to.ipi6_ifindex;
    } else if (is_ip && header->cmsg_type == IP_PKTINFO) {
        struct in_pktinfo to;
        memcpy(&to, CMSG_DATA(header), sizeof(to));
        map_ipv4(&path->destination, &to.ipi_addr);
        route->interface = (uint32_t)to.ipi_ifindex;
    } else if (is_ip && header->cmsg_type == IP_TOS) {
        path->traffic_class = *CMSG_DATA(header); /* one byte, unlike the others */
    } else if ((is_ip && header->cmsg_type == IP_TTL) ||
               (is_ipv6 && header->cmsg_type == IPV6_HOPLIMIT)) {
        memcpy(&number, CMSG_DATA(header), sizeof(number));
        path->hop_limit = (uint8_t)number;
    } else if (is_ipv6 && header->cmsg_type == IPV6_TCLASS) {
        memcpy(&number, CMSG_DATA(header), sizeof(number));
        path->traffic_class = (uint8_t)number;
    }
}

ssize_t sw_udp_receive(const struct sw_udp *udp, void *packet, size_t room,
                       struct sw_udp_route *route, size_t *each)
{
    union any_address from;
    union control control;
    struct iovec part = {.iov_base = packet, .iov_len = room};
    struct msghdr message = {
        .msg_name = &from,
        .msg_namelen = sizeof(from),
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = &control,
        .msg_controllen = sizeof(control),
    };

    int together = 0;
    ssize_t size = sw_system->recvmsg(udp->fd, &message, MSG_TRUNC);
    if (size < 0)
        return -1;
    memset(route, 0, sizeof(*route));
    route->path.source_port = read_address(&from, &route->path.source);
    route->path.destination_port = udp->port;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header;
         header = CMSG_NXTHDR(&message, header)) {
        read_control(header, route);
        if (header->cmsg_level == IPPROTO_UDP && header->cmsg_type == UDP_GRO)
            memcpy(&together, CMSG_DATA(header), sizeof(together));
    }
    size_t part_size = together > 0 ? (size_t)together : (size_t)size;
    if (each)
        *each = part_size;
    for (size_t at = 0; sw_is_capturing && (size_t)size <= room && at < (size_t)size;
         at += part_size)
        sw_capture_packet(route, udp->port, 0, (const char *)packet + at,
                          (size_t)size - at < part_size ? (size_t)size - at : part_size);
    return size;
}

int sw_udp_refusal(const struct sw_udp *udp, struct in6_addr *destination, uint16_t *port)
{
    union any_address to;
    union {
        struct cmsghdr aligned;
        char bytes[512];
    } control;
    char packet[1];

    for (;;) {
        struct iovec part = {.iov_base = packet, .iov_len = sizeof(packet)};
        struct msghdr message = {
            .msg_name = &to,
            .msg_namelen = sizeof(to),
            .msg_iov = &part,
            .msg_iovlen = 1,
            .msg_control = &control,
            .msg_controllen = sizeof(control),
        };
        if (sw_system->recvmsg(udp->fd, &message, MSG_ERRQUEUE) < 0)
            return 0;
        if (!message.msg_namelen)
            continue;
        *port = read_address(&to, destination);
        for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header;
             header = CMSG_NXTHDR(&message, header)) {
            struct sock_extended_err error;
            if (!(header->cmsg_level == IPPROTO_IP && header->cmsg_type == IP_RECVERR) &&
                !(header->cmsg_level == IPPROTO_IPV6 && header->cmsg_type == IPV6_RECVERR))
                continue;
            memcpy(&error, CMSG_DATA(header), sizeof(error));
            if (error.ee_errno)
                return (int)error.ee_errno;
        }
    }
}
