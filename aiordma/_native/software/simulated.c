/* The simulated system: the table of system.h over the descriptors and sockets of hosts. */
#include "simulated.h"

#include <errno.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>

#include "simulated_tcp.h"
#include "simulated_udp.h"

enum { ONE_IS_LATE_OF = 32 }; /* completions */

static int sim_close(int fd)
{
    struct sw_object *object = sw_object_of(fd);

    if (!object)
        return -1;
    if (object->kind == SW_STREAM)
        return sw_tcp_close(object);
    sw_drop_object(object);
    return 0;
}

static int sim_socket(int family, int type, int protocol)
{
    (void)protocol;
    if (family != AF_INET && family != AF_INET6)
        return sw_fail(EAFNOSUPPORT);
    return type & SOCK_DGRAM ? sw_open_object(SW_DATAGRAM, family, sw_sim_datagram_events)
                             : sw_open_object(SW_STREAM, family, sw_tcp_events);
}

static int sim_bind(int fd, const struct sockaddr *address, socklen_t size)
{
    struct sw_object *object = sw_object_of(fd);

    if (!object)
        return -1;
    if (!sw_is_any(address) && !sw_is_loopback(address) && !sw_host_has(object->host, address))
        return sw_fail(EADDRNOTAVAIL);
    memset(&object->local, 0, sizeof(object->local));
    memcpy(&object->local, address, size);
    if (!*sw_port_in(&object->local))
        sw_give_port(object);
    else if (object->kind == SW_DATAGRAM &&
             sw_service_at(object->host, SW_DATAGRAM, &object->local))
        return sw_fail(EADDRINUSE);
    if (object->kind == SW_DATAGRAM)
        sw_be_service(object);
    return 0;
}

static int sim_connect(int fd, const struct sockaddr *address, socklen_t size)
{
    struct sw_object *object = sw_object_of(fd);
    struct sockaddr_storage own;

    if (!object)
        return -1;
    if (!sw_address_towards(object->host, address, &own))
        return sw_fail(ENETUNREACH);
    memset(&object->remote, 0, sizeof(object->remote));
    memcpy(&object->remote, address, size);
    in_port_t port = *sw_port_in(&object->local);
    if (!object->local.ss_family || sw_is_any(sw_as_address(&object->local)))
        object->local = own;
    *sw_port_in(&object->local) = port;
    if (!port)
        sw_give_port(object);
    if (object->kind == SW_DATAGRAM)
        return 0;
    object->peer_host = sw_host_at(object->host, address);
    if (!object->peer_host)
        return sw_fail(EHOSTUNREACH);
    sw_tcp_connect(object);
    return sw_fail(EINPROGRESS);
}

static int sim_getsockname(int fd, struct sockaddr *address, socklen_t *size)
{
    const struct sw_object *object = sw_object_of(fd);

    return object ? sw_copy_name(&object->local, address, size) : -1;
}

static int sim_getpeername(int fd, struct sockaddr *address, socklen_t *size)
{
    const struct sw_object *object = sw_object_of(fd);

    if (!object)
        return -1;
    return object->is_connected ? sw_copy_name(&object->remote, address, size) : sw_fail(ENOTCONN);
}

static ssize_t sim_send(int fd, const void *from, size_t size, int flags)
{
    struct sw_object *object = sw_object_of(fd);
    struct iovec part = {.iov_base = (void *)(uintptr_t)from, .iov_len = size};

    (void)flags;
    return object ? sw_tcp_send(object, &part, 1) : -1;
}

static ssize_t sim_readv(int fd, const struct iovec *parts, int count)
{
    struct sw_object *object = sw_object_of(fd);

    return object ? sw_tcp_receive(object, parts, count, 0) : -1;
}

static ssize_t sim_recv(int fd, void *to, size_t size, int flags)
{
    struct sw_object *object = sw_object_of(fd);
    struct iovec part = {.iov_base = to, .iov_len = size};

    return object ? sw_tcp_receive(object, &part, 1, flags) : -1;
}

static ssize_t sim_sendmsg(int fd, const struct msghdr *message, int flags)
{
    struct sw_object *object = sw_object_of(fd);

    (void)flags;
    if (!object)
        return -1;
    return object->kind == SW_DATAGRAM ? sw_sim_send_datagram(object, message)
                                       : sw_tcp_send(object, message->msg_iov, message->msg_iovlen);
}

static int sim_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    struct sw_object *object = sw_object_of(fd);

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

static int sim_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    struct sw_object *object = sw_object_of(fd);

    if (!object)
        return -1;
    if (level == IPPROTO_TCP && name == TCP_INFO) {
        struct tcp_info info;
        sw_tcp_tell(object, &info);
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
    const struct sw_object *object = sw_object_of(fd);

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
    if (size < 2 || !sw_network.scrambles)
        return 0;
    const uint32_t chosen = (uint32_t)sw_choose(AIORDMA_SIMULATED_PLACING, 2 * (uint64_t)size - 2);
    return chosen < size - 1 ? 0 : chosen - (size - 2); /* half of them are placed in order */
}

static uint32_t sim_completion_delay(void)
{
    const uint32_t chosen = (uint32_t)sw_choose(AIORDMA_SIMULATED_LATE, 3 * ONE_IS_LATE_OF);

    return chosen < 3 * ONE_IS_LATE_OF - 3 ? 0 : chosen - (3 * ONE_IS_LATE_OF - 4); /* 1 to 3 */
}

static void sim_posted(uint64_t wr_id, uint32_t qp_num)
{
    if (sw_network.posted)
        sw_network.posted(wr_id, qp_num);
}

static void sim_misused(int kind, uint64_t wr_id, uint32_t qp_num, uint32_t size)
{
    struct sw_host *host = sw_network.current;

    if (kind == AIORDMA_SIMULATED_TWICE)
        sim_posted(wr_id, qp_num); /* its program makes the post: receives are not noted before */
    sw_network.trace[sw_network.traced++ % AIORDMA_SIMULATED_TRACE] =
        (struct aiordma_simulated_event){
            .time = sw_network.now,
            .sender = host ? host->number : 0,
            .receiver = host ? host->number : 0,
            .kind = kind,
            .size = size,
            .wr_id = wr_id,
            .qp_num = qp_num,
    };
}

static int sim_blocks(int fd)
{
    return sw_object_of(fd) ? 0 : -1;
}

static int sim_poll(struct pollfd *wanted, unsigned long count, int milliseconds)
{
    (void)wanted, (void)count, (void)milliseconds;
    return sw_fail(ENOSYS); /* nothing blocks here */
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
        return sw_fail(ENOMEM);
    for (int i = 0; i < count; i++) {
        each[i].address = i == 0   ? sw_loopback_of(AF_INET)
                          : i == 1 ? sw_loopback_of(AF_INET6)
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
    .eventfd = sw_sim_eventfd,
    .ring = sw_sim_ring,
    .quiet = sw_sim_quiet,
    .epoll_create1 = sw_sim_epoll_create1,
    .epoll_ctl = sw_sim_epoll_ctl,
    .epoll_wait = sw_sim_epoll_wait,
    .socket = sim_socket,
    .bind = sim_bind,
    .listen = sw_tcp_listen,
    .accept4 = sw_tcp_accept4,
    .connect = sim_connect,
    .shutdown = sw_tcp_shutdown,
    .getsockname = sim_getsockname,
    .getpeername = sim_getpeername,
    .getsockopt = sim_getsockopt,
    .setsockopt = sim_setsockopt,
    .unacknowledged = sim_unacknowledged,
    .recv = sim_recv,
    .readv = sim_readv,
    .recvmsg = sw_sim_recvmsg,
    .send = sim_send,
    .sendmsg = sim_sendmsg,
    .late = sim_late,
    .completion_delay = sim_completion_delay,
    .posted = sim_posted,
    .misused = sim_misused,
    .getifaddrs = sim_getifaddrs,
    .freeifaddrs = sim_freeifaddrs,
    .if_nametoindex = sim_if_nametoindex,
};
