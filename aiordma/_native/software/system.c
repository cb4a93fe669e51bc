/*
 * The operating system, as the device uses it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* preadv2 */
#endif
#include "system.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

void sw_tidy_address(struct sockaddr_storage *address)
{
    struct sockaddr_in6 six;
    struct sockaddr_in four = {.sin_family = AF_INET};

    if (address->ss_family != AF_INET6)
        return;
    memcpy(&six, address, sizeof(six));
    if (!IN6_IS_ADDR_V4MAPPED(&six.sin6_addr))
        return;
    four.sin_port = six.sin6_port;
    memcpy(&four.sin_addr, &six.sin6_addr.s6_addr[12], sizeof(four.sin_addr));
    memset(address, 0, sizeof(*address));
    memcpy(address, &four, sizeof(four));
}

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void random_bytes(void *to, size_t size)
{
    char *at = to;

    while (size) {
        ssize_t got = getrandom(at, size, 0);
        if (got < 0 && errno != EINTR)
            abort(); /* otherwise keys would be predictable */
        if (got > 0) {
            at += got;
            size -= (size_t)got;
        }
    }
}

static int blocks(int fd)
{
    int flags = fcntl(fd, F_GETFL);

    return flags < 0 ? -1 : !(flags & O_NONBLOCK);
}

static void ring(int fd)
{
    uint64_t one = 1;

    if (write(fd, &one, sizeof(one)) < 0) {
        /* This fails only if the counter is full, and then the descriptor is readable as well. */
    }
}

static void quiet(int fd)
{
    uint64_t count;
    struct iovec to = {&count, sizeof(count)};

    /* The descriptor is readable, unless the program has read it itself: do not block then. */
    if (preadv2(fd, &to, 1, -1, RWF_NOWAIT) < 0 && errno != EAGAIN) {
        struct pollfd wanted = {.fd = fd, .events = POLLIN}; /* for kernels before 5.8 */
        if (poll(&wanted, 1, 0) == 1 && read(fd, &count, sizeof(count)) < 0) {
            /* Another thread has read it. */
        }
    }
}

static int bind_to(int fd, const struct sockaddr *address, socklen_t size)
{
    return bind(fd, address, size);
}

static int accept_one(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    return accept4(fd, address, size, flags);
}

static int connect_to(int fd, const struct sockaddr *address, socklen_t size)
{
    return connect(fd, address, size);
}

static int name_of(int fd, struct sockaddr *address, socklen_t *size)
{
    return getsockname(fd, address, size);
}

static int peer_of(int fd, struct sockaddr *address, socklen_t *size)
{
    return getpeername(fd, address, size);
}

static int unacknowledged(int fd, int *bytes)
{
    return ioctl(fd, SIOCOUTQ, bytes);
}

const struct sw_system_calls sw_operating_system = {
    .now = now,
    .random = random_bytes,
    .close = close,
    .blocks = blocks,
    .poll = poll,
    .eventfd = eventfd,
    .ring = ring,
    .quiet = quiet,
    .epoll_create1 = epoll_create1,
    .epoll_ctl = epoll_ctl,
    .epoll_wait = epoll_wait,
    .socket = socket,
    .bind = bind_to,
    .listen = listen,
    .accept4 = accept_one,
    .connect = connect_to,
    .shutdown = shutdown,
    .getsockname = name_of,
    .getpeername = peer_of,
    .getsockopt = getsockopt,
    .setsockopt = setsockopt,
    .unacknowledged = unacknowledged,
    .recv = recv,
    .readv = readv,
    .recvmsg = recvmsg,
    .send = send,
    .sendmsg = sendmsg,
    .getifaddrs = getifaddrs,
    .freeifaddrs = freeifaddrs,
    .if_nametoindex = if_nametoindex,
};

const struct sw_system_calls *sw_system = &sw_operating_system;
