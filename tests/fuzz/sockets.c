/*
 * Sockets in memory. The linker puts these functions in place of the system's (--wrap). So a run
 * needs no system call, the sanitizer checks every copy, and the fuzzer decides when a write is
 * short.
 */
#include "world.h"

#include <ifaddrs.h>
#include <limits.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FIRST = 1 << 20, SOCKETS = 64, ROOM = 1 << 18, PACKETS = 8, PACKET = 8192, CALLS = 8 };

struct packet {
    size_t size;
    uint16_t port, from_port;
    uint8_t bytes[PACKET];
};

struct fake {
    int is_open, type, family, listens, connects;
    int is_shut;        /* its sending side is shut down */
    int has_ended;      /* the peer socket sends no more */
    int is_broken;      /* the peer socket is closed */
    struct fake *other; /* the peer socket; NULL: there is none, or it is closed */
    uint16_t port, peer_port;
    uint8_t *bytes; /* received, and not read yet */
    size_t size;
    int calls[CALLS]; /* of a listener: connections not accepted yet */
    uint32_t call_count;
    struct packet packets[PACKETS];
    uint32_t packet_count;
};

static struct fake fakes[SOCKETS];
static size_t most = ROOM;
static uint16_t last_port;
static int calls[CALLS]; /* the peer's ends of the device's connections, until answer_call */
static uint32_t call_count;
static struct packet thrown; /* the device's last packet */
static enum descriptors descriptors;
static uint32_t refused_accepts;

static uint16_t new_port(void)
{
    last_port = last_port >= 40000 && last_port < 65000 ? (uint16_t)(last_port + 1) : 40000;
    return last_port;
}

static struct fake *fake_of(int fd)
{
    if (fd < FIRST || fd >= FIRST + SOCKETS)
        return NULL;
    struct fake *fake = &fakes[fd - FIRST];
    if (!fake->is_open)
        fail("a closed descriptor is used");
    return fake;
}

static struct fake *must_be_fake(int fd)
{
    struct fake *fake = fake_of(fd);

    if (!fake)
        fail("a descriptor that is no socket is used as one");
    return fake;
}

static int fd_of(const struct fake *fake)
{
    return FIRST + (int)(fake - fakes);
}

static struct fake *open_fake(int family, int type)
{
    for (int i = 0; i < SOCKETS; i++)
        if (!fakes[i].is_open) {
            uint8_t *bytes = fakes[i].bytes ? fakes[i].bytes : malloc(ROOM);
            PROMISE(bytes);
            memset(&fakes[i], 0, offsetof(struct fake, packets));
            fakes[i].packet_count = 0;
            fakes[i].bytes = bytes;
            fakes[i].is_open = 1;
            fakes[i].family = family;
            fakes[i].type = type;
            return &fakes[i];
        }
    fail("sockets are left open");
}

static void join(struct fake *one, struct fake *other)
{
    one->other = other;
    other->other = one;
    one->connects = other->connects = 1;
}

uint32_t open_sockets(void)
{
    uint32_t count = 0;

    for (int i = 0; i < SOCKETS; i++)
        count += (uint32_t)fakes[i].is_open;
    return count;
}

void set_socket_room(size_t room)
{
    most = room < ROOM ? room : ROOM;
}

void set_descriptors(enum descriptors how_many)
{
    descriptors = how_many;
}

static size_t room_of(const struct fake *fake)
{
    return fake->size < most ? most - fake->size : 0;
}

uint32_t socket_events(int fd)
{
    const struct fake *fake = must_be_fake(fd);
    uint32_t events = 0;

    if (fake->type == SOCK_DGRAM)
        return (fake->packet_count ? (uint32_t)EPOLLIN : 0) | EPOLLOUT;
    if (fake->listens)
        return fake->call_count ? EPOLLIN : 0;
    if (!fake->connects)
        return EPOLLOUT | EPOLLHUP;
    if (fake->size || fake->has_ended)
        events |= EPOLLIN;
    if (fake->has_ended)
        events |= EPOLLRDHUP;
    if (fake->has_ended && fake->is_shut)
        events |= EPOLLHUP;
    if (fake->is_broken)
        events |= EPOLLOUT | EPOLLERR | EPOLLHUP;
    else if (room_of(fake->other))
        events |= EPOLLOUT;
    return events;
}

/* -- connections and packets ------------------------------------------------------------------ */

int dial(uint16_t port)
{
    for (int i = 0; i < SOCKETS; i++) {
        struct fake *listener = &fakes[i];
        if (!listener->is_open || !listener->listens || listener->port != port)
            continue;
        if (listener->call_count == CALLS)
            return -1;
        struct fake *caller = open_fake(AF_INET, SOCK_STREAM);
        struct fake *called = open_fake(AF_INET, SOCK_STREAM);
        join(caller, called);
        caller->port = called->peer_port = new_port();
        caller->peer_port = called->port = port;
        listener->calls[listener->call_count++] = fd_of(called);
        return fd_of(caller);
    }
    return -1;
}

int answer_call(void)
{
    if (!call_count)
        return -1;
    int fd = calls[0];
    memmove(calls, calls + 1, --call_count * sizeof(*calls));
    return fd;
}

int throw_packet(uint16_t port, uint16_t from_port, const void *bytes, size_t size)
{
    int found = 0;

    for (int i = 0; i < SOCKETS; i++) {
        struct fake *fake = &fakes[i];
        if (!fake->is_open || fake->type != SOCK_DGRAM || (port && fake->port != port) ||
            fake->packet_count == PACKETS || size > PACKET)
            continue;
        struct packet *packet = &fake->packets[fake->packet_count++];
        packet->size = size;
        packet->from_port = from_port;
        memcpy(packet->bytes, bytes, size);
        found = 1;
    }
    return found;
}

size_t catch_packet(void *bytes, size_t room, uint16_t *port, uint16_t *from_port)
{
    size_t size = thrown.size < room ? thrown.size : room;

    memcpy(bytes, thrown.bytes, size);
    *port = thrown.port;
    *from_port = thrown.from_port;
    thrown.size = 0;
    return size;
}

/* -- in place of the system's ------------------------------------------------------------------ */

static void put_address(const struct fake *fake, uint16_t port, struct sockaddr *address,
                        socklen_t *size)
{
    struct sockaddr_in6 ipv6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    struct sockaddr_in ipv4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    const void *from = &ipv4;
    socklen_t whole = sizeof(ipv4);

    ipv4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fake->family == AF_INET6) {
        ipv6.sin6_addr.s6_addr[10] = ipv6.sin6_addr.s6_addr[11] = 0xff;
        memcpy(ipv6.sin6_addr.s6_addr + 12, &ipv4.sin_addr, 4);
        from = &ipv6;
        whole = sizeof(ipv6);
    }
    memcpy(address, from, *size < whole ? *size : whole);
    *size = whole;
}

static uint16_t port_of(const struct sockaddr *address)
{
    return ntohs(address->sa_family == AF_INET6
                     ? ((const struct sockaddr_in6 *)(const void *)address)->sin6_port
                     : ((const struct sockaddr_in *)(const void *)address)->sin_port);
}

int __wrap_socket(int family, int type, int protocol);
int __wrap_socketpair(int family, int type, int protocol, int ends[2]);
int __wrap_bind(int fd, const struct sockaddr *address, socklen_t size);
int __wrap_listen(int fd, int backlog);
int __wrap_accept4(int fd, struct sockaddr *address, socklen_t *size, int flags);
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size);
int __real_getrlimit(__rlimit_resource_t resource, struct rlimit *limit);
int __wrap_getrlimit(__rlimit_resource_t resource, struct rlimit *limit);
int __wrap_getsockname(int fd, struct sockaddr *address, socklen_t *size);
int __wrap_getpeername(int fd, struct sockaddr *address, socklen_t *size);
int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t size);
int __wrap_shutdown(int fd, int how);
int __wrap_close(int fd);
int __real_close(int fd);
ssize_t __wrap_readv(int fd, const struct iovec *parts, int count);
ssize_t __wrap_recv(int fd, void *bytes, size_t size, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_send(int fd, const void *bytes, size_t size, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);

int __wrap_socket(int family, int type, int protocol)
{
    (void)protocol;
    if (family == AF_NETLINK) {
        errno = EAFNOSUPPORT; /* no events of addresses, which do not change */
        return -1;
    }
    return fd_of(open_fake(family, type & 15));
}

int __wrap_socketpair(int family, int type, int protocol, int ends[2])
{
    struct fake *one = open_fake(family, type & 15), *other = open_fake(family, type & 15);

    (void)protocol;
    join(one, other);
    ends[0] = fd_of(one);
    ends[1] = fd_of(other);
    return 0;
}

int __wrap_bind(int fd, const struct sockaddr *address, socklen_t size)
{
    (void)size;
    struct fake *fake = must_be_fake(fd);
    if (fake->family != AF_UNIX) /* which has a name, that of a slot of RoCE's port */
        fake->port = port_of(address);
    if (!fake->port)
        fake->port = new_port();
    return 0;
}

int __wrap_listen(int fd, int backlog)
{
    (void)backlog;
    must_be_fake(fd)->listens = 1;
    return 0;
}

int __wrap_accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    struct fake *listener = must_be_fake(fd);

    (void)flags;
    if (!listener->call_count) {
        errno = EAGAIN;
        return -1;
    }
    if (descriptors == NO_DESCRIPTORS || (descriptors == ONE_DESCRIPTOR && ++refused_accepts & 1)) {
        errno = EMFILE;
        return -1;
    }
    int called = listener->calls[0];
    memmove(listener->calls, listener->calls + 1,
            --listener->call_count * sizeof(*listener->calls));
    if (address)
        put_address(must_be_fake(called), must_be_fake(called)->peer_port, address, size);
    return called;
}

/*
 * The descriptors of this file are larger than any limit. So the limit is either infinite or so low
 * that descriptors are scarce. The sanitizer calls this, too, before it is initialized.
 */
__attribute__((no_sanitize("address", "undefined"))) int
__wrap_getrlimit(__rlimit_resource_t resource, struct rlimit *limit)
{
    if (resource != RLIMIT_NOFILE)
        return __real_getrlimit(resource, limit);
    limit->rlim_cur = limit->rlim_max = descriptors == FEW_DESCRIPTORS ? 4 : RLIM_INFINITY;
    return 0;
}

int __wrap_connect(int fd, const struct sockaddr *address, socklen_t size)
{
    struct fake *fake = must_be_fake(fd);

    (void)size;
    if (!fake->port)
        fake->port = new_port();
    fake->peer_port = port_of(address);
    if (fake->type == SOCK_DGRAM)
        return 0;
    if (call_count == CALLS) {
        errno = ECONNREFUSED;
        return -1;
    }
    struct fake *called = open_fake(AF_INET, SOCK_STREAM);
    join(fake, called);
    calls[call_count++] = fd_of(called);
    errno = EINPROGRESS;
    return -1;
}

int __wrap_getsockname(int fd, struct sockaddr *address, socklen_t *size)
{
    const struct fake *fake = must_be_fake(fd);

    put_address(fake, fake->port, address, size);
    return 0;
}

int __wrap_getpeername(int fd, struct sockaddr *address, socklen_t *size)
{
    const struct fake *fake = must_be_fake(fd);

    if (fake->is_broken) {
        errno = ENOTCONN;
        return -1;
    }
    put_address(fake, fake->peer_port, address, size);
    return 0;
}

int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    (void)level;
    (void)name;
    must_be_fake(fd);
    memset(value, 0, *size);
    return 0;
}

int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    (void)level;
    (void)name;
    (void)value;
    (void)size;
    must_be_fake(fd);
    return 0;
}

int __wrap_shutdown(int fd, int how)
{
    struct fake *fake = must_be_fake(fd);

    if (how == SHUT_RD)
        return 0;
    fake->is_shut = 1;
    if (fake->other)
        fake->other->has_ended = 1;
    return 0;
}

int __wrap_close(int fd)
{
    struct fake *fake = fd >= FIRST ? must_be_fake(fd) : NULL;

    if (!fake)
        return __real_close(fd);
    for (uint32_t i = 0; i < fake->call_count; i++)
        __wrap_close(fake->calls[i]);
    if (fake->other) {
        fake->other->has_ended = fake->other->is_broken = 1;
        fake->other->other = NULL;
    }
    fake->is_open = 0;
    return 0;
}

ssize_t __wrap_readv(int fd, const struct iovec *parts, int count)
{
    struct fake *fake = must_be_fake(fd);
    size_t taken = 0;

    PROMISE(count > 0 && count <= IOV_MAX);
    if (!fake->size && fake->has_ended)
        return 0;
    if (!fake->size) {
        errno = EAGAIN;
        return -1;
    }
    for (int i = 0; i < count; i++) {
        size_t here = fake->size - taken < parts[i].iov_len ? fake->size - taken : parts[i].iov_len;
        memcpy(parts[i].iov_base, fake->bytes + taken, here);
        taken += here;
    }
    fake->size -= taken;
    memmove(fake->bytes, fake->bytes + taken, fake->size);
    return (ssize_t)taken;
}

ssize_t __wrap_recv(int fd, void *bytes, size_t size, int flags)
{
    struct fake *fake = must_be_fake(fd);
    struct iovec part = {bytes, size};

    if (!(flags & MSG_PEEK))
        return __wrap_readv(fd, &part, 1);
    size = size < fake->size ? size : fake->size;
    memcpy(bytes, fake->bytes, size);
    if (!size && !fake->has_ended) {
        errno = EAGAIN;
        return -1;
    }
    return (ssize_t)size;
}

static void put_control(struct msghdr *message, const struct fake *fake)
{
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    struct in6_pktinfo to = {.ipi6_ifindex = 1};

    to.ipi6_addr.s6_addr[10] = to.ipi6_addr.s6_addr[11] = 0xff;
    to.ipi6_addr.s6_addr[12] = 127;
    to.ipi6_addr.s6_addr[15] = 1;
    if (!header)
        return;
    if (fake->family == AF_INET6) {
        header->cmsg_level = IPPROTO_IPV6;
        header->cmsg_type = IPV6_PKTINFO;
        header->cmsg_len = CMSG_LEN(sizeof(to));
        memcpy(CMSG_DATA(header), &to, sizeof(to));
    } else {
        struct in_pktinfo ipv4 = {.ipi_ifindex = 1};
        memcpy(&ipv4.ipi_addr, to.ipi6_addr.s6_addr + 12, 4);
        header->cmsg_level = IPPROTO_IP;
        header->cmsg_type = IP_PKTINFO;
        header->cmsg_len = CMSG_LEN(sizeof(ipv4));
        memcpy(CMSG_DATA(header), &ipv4, sizeof(ipv4));
    }
    message->msg_controllen = header->cmsg_len;
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
    struct fake *fake = must_be_fake(fd);

    if (flags & MSG_ERRQUEUE || !fake->packet_count) {
        errno = EAGAIN;
        return -1;
    }
    struct packet *packet = &fake->packets[0];
    size_t size = packet->size, room = message->msg_iov[0].iov_len;
    memcpy(message->msg_iov[0].iov_base, packet->bytes, size < room ? size : room);
    if (message->msg_name)
        put_address(fake, packet->from_port, message->msg_name, &message->msg_namelen);
    put_control(message, fake);
    memmove(fake->packets, fake->packets + 1, --fake->packet_count * sizeof(*fake->packets));
    return (ssize_t)(flags & MSG_TRUNC || size < room ? size : room);
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    struct fake *fake = must_be_fake(fd);
    size_t sent = 0;

    (void)flags;
    PROMISE(message->msg_iovlen > 0 && message->msg_iovlen <= IOV_MAX);
    if (fake->type == SOCK_DGRAM && (fake->family == AF_UNIX || !message->msg_name)) {
        errno = ECONNREFUSED; /* there is no other process */
        return -1;
    }
    if (fake->type == SOCK_DGRAM) {
        if (message->msg_iov[0].iov_len > PACKET) {
            errno = EMSGSIZE; /* several packets: the device then sends them one by one */
            return -1;
        }
        thrown.size = message->msg_iov[0].iov_len;
        thrown.port = port_of(message->msg_name);
        thrown.from_port = fake->port;
        memcpy(thrown.bytes, message->msg_iov[0].iov_base, thrown.size);
        return (ssize_t)thrown.size;
    }
    PROMISE(fake->connects);
    if (fake->is_shut || fake->is_broken) {
        errno = fake->is_broken ? ECONNRESET : EPIPE;
        return -1;
    }
    struct fake *to = fake->other;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        size_t room = room_of(to), whole = message->msg_iov[i].iov_len;
        size_t here = whole < room ? whole : room;
        memcpy(to->bytes + to->size, message->msg_iov[i].iov_base, here);
        to->size += here;
        sent += here;
        if (here < whole)
            break;
    }
    if (!sent && !room_of(to)) {
        errno = EAGAIN;
        return -1;
    }
    return (ssize_t)sent;
}

ssize_t __wrap_send(int fd, const void *bytes, size_t size, int flags)
{
    struct iovec part = {(void *)(uintptr_t)bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

    return __wrap_sendmsg(fd, &message, flags);
}

/* The answer is cached, because the system call would take most of a run's time. */
int __real_getifaddrs(struct ifaddrs **list);
int __wrap_getifaddrs(struct ifaddrs **list);
void __wrap_freeifaddrs(struct ifaddrs *list);
unsigned int __wrap_if_nametoindex(const char *name);

int __wrap_getifaddrs(struct ifaddrs **list)
{
    static struct ifaddrs *answer;

    if (!answer && __real_getifaddrs(&answer))
        return -1;
    *list = answer;
    return 0;
}

void __wrap_freeifaddrs(struct ifaddrs *list)
{
    (void)list;
}

unsigned int __wrap_if_nametoindex(const char *name)
{
    return strcmp(name, "lo") ? 2 : 1;
}
