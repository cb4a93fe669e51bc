/*
 * What is below the device: sockets, descriptors, the clock and random numbers. The device calls
 * nothing of the system's directly, except for memory and names. There are two implementations: the
 * operating system, and a simulation of hosts and their network in memory (simulation.c).
 *
 * Each function is the C library's of that name, for the arguments that the device passes.
 */
#ifndef AIORDMA_SOFTWARE_SYSTEM_H
#define AIORDMA_SOFTWARE_SYSTEM_H

#include <ifaddrs.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

struct pollfd;

struct sw_system_calls {
    int is_simulated; /* nothing blocks, and there is no thread: sw_engine_turn is the engine's */

    uint64_t (*now)(void); /* nanoseconds of CLOCK_MONOTONIC */
    void (*random)(void *to, size_t size);

    int (*close)(int fd);
    int (*blocks)(int fd); /* 1: it has no O_NONBLOCK; 0: it has; -1 and errno */
    int (*poll)(struct pollfd *wanted, unsigned long count, int milliseconds);

    int (*eventfd)(unsigned int count, int flags);
    void (*ring)(int eventfd);  /* add 1 */
    void (*quiet)(int eventfd); /* read it, without waiting */
    int (*epoll_create1)(int flags);
    int (*epoll_ctl)(int epoll, int operation, int fd, struct epoll_event *event);
    int (*epoll_wait)(int epoll, struct epoll_event *events, int most, int milliseconds);

    int (*socket)(int family, int type, int protocol);
    int (*bind)(int fd, const struct sockaddr *address, socklen_t size);
    int (*listen)(int fd, int backlog);
    int (*accept4)(int fd, struct sockaddr *address, socklen_t *size, int flags);
    int (*connect)(int fd, const struct sockaddr *address, socklen_t size);
    int (*shutdown)(int fd, int how);
    int (*getsockname)(int fd, struct sockaddr *address, socklen_t *size);
    int (*getpeername)(int fd, struct sockaddr *address, socklen_t *size);
    int (*getsockopt)(int fd, int level, int name, void *value, socklen_t *size);
    int (*setsockopt)(int fd, int level, int name, const void *value, socklen_t size);
    int (*unacknowledged)(int fd, int *bytes); /* SIOCOUTQ, tcp(7) */
    ssize_t (*recv)(int fd, void *to, size_t size, int flags);
    ssize_t (*readv)(int fd, const struct iovec *parts, int count);
    ssize_t (*recvmsg)(int fd, struct msghdr *message, int flags);
    ssize_t (*send)(int fd, const void *from, size_t size, int flags);
    ssize_t (*sendmsg)(int fd, const struct msghdr *message, int flags);

    /* Of a simulation. */
    uint32_t (*late)(uint32_t size); /* how many bytes of a WRITE are placed after its last ones */
    uint32_t (*completion_delay)(void); /* milliseconds */
    void (*posted)(uint64_t wr_id, uint32_t qp_num);
    /* A program misused memory. kind: CHANGED, TWICE, ACCESSED or DENIED, of simulation.h. */
    void (*misused)(int kind, uint64_t wr_id, uint32_t qp_num, uint32_t size);

    int (*getifaddrs)(struct ifaddrs **addresses);
    void (*freeifaddrs)(struct ifaddrs *addresses);
    unsigned int (*if_nametoindex)(const char *name);
};

extern const struct sw_system_calls sw_operating_system;

/* The one that the device uses. It changes while nobody has the device's lock. */
extern const struct sw_system_calls *sw_system;

/* An IPv4 address in IPv6 form becomes an IPv4 address. */
void sw_tidy_address(struct sockaddr_storage *address);

#endif
