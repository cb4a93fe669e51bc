/*
 * The transfers of 1 MiB WRITEs and READs as a plain C program makes them over TCP: blocking
 * sockets, one writev for each message, and one recv for all of its bytes.
 *
 *   plain_tcp serve ADDRESS PORT                serves one client
 *   plain_tcp ask ADDRESS PORT OPERATION SIZE DEPTH MILLISECONDS ROUNDS ZEROCOPY
 *       prints for each round: messages, nanoseconds, and the processor time of this side
 *
 * OPERATION: write or read. write: the client sends messages, and the server confirms each one when
 * all of it has arrived. read: the client requests messages, and the server sends them. DEPTH
 * messages are unconfirmed or requested at a time. Each side uses one buffer of SIZE bytes.
 * ZEROCOPY: 1, send with MSG_ZEROCOPY.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* What a client asks for; its first bytes. */
struct work {
    uint32_t is_read, size, is_zerocopy;
};

/* Before each message and as each confirmation: as long as the header of a WRITE of iWARP. */
struct header {
    uint32_t size, number;
    uint64_t place;
};

static struct work work;
static char *memory;
static uint32_t unreaped; /* sends with MSG_ZEROCOPY that the kernel has not finished */

static void check(int failed, const char *what)
{
    if (failed) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static uint64_t now(clockid_t clock)
{
    struct timespec time;

    check(clock_gettime(clock, &time), "clock_gettime");
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* Read all of it. Returns 0 at the end of the stream. */
static int take(int fd, void *to, size_t size)
{
    ssize_t got = recv(fd, to, size, MSG_WAITALL);

    check(got < 0 || (got && (size_t)got < size), "recv");
    return got != 0;
}

/* Take the kernel's reports about finished sends. */
static void reap(int fd)
{
    while (unreaped) {
        char control[128];
        struct msghdr message = {.msg_control = control, .msg_controllen = sizeof(control)};
        if (recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
            check(errno != EAGAIN, "recvmsg");
            return;
        }
        for (struct cmsghdr *part = CMSG_FIRSTHDR(&message); part;
             part = CMSG_NXTHDR(&message, part)) {
            struct sock_extended_err report;
            memcpy(&report, CMSG_DATA(part), sizeof(report));
            unreaped -= report.ee_data - report.ee_info + 1;
        }
    }
}

/* Send a header, and a message after it if it has a size. */
static void give(int fd, uint32_t number, uint32_t size)
{
    struct header header = {.size = size, .number = number};
    struct iovec parts[2] = {{&header, sizeof(header)}, {memory, size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = size ? 2 : 1};

    if (work.is_zerocopy && size) {
        struct iovec first = parts[0];
        check(send(fd, first.iov_base, first.iov_len, MSG_MORE) != (ssize_t)first.iov_len, "send");
        for (size_t left = size; left;) {
            ssize_t sent = send(fd, memory + size - left, left, MSG_ZEROCOPY);
            check(sent < 0, "send");
            unreaped++;
            left -= (size_t)sent;
        }
        reap(fd);
        return;
    }
    while (message.msg_iovlen) {
        ssize_t sent = writev(fd, message.msg_iov, (int)message.msg_iovlen);
        check(sent < 0, "writev");
        while (message.msg_iovlen && (size_t)sent >= message.msg_iov->iov_len) {
            sent -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= (size_t)sent;
        }
    }
}

static void prepare(int fd)
{
    int one = 1;

    check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)), "TCP_NODELAY");
    if (work.is_zerocopy)
        check(setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof(one)), "SO_ZEROCOPY");
    memory = mmap(NULL, work.size, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    check(memory == MAP_FAILED, "mmap");
}

static void serve(const struct sockaddr_in *address)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct header header;

    check(listener < 0, "socket");
    check(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), "SO_REUSEADDR");
    check(bind(listener, (const struct sockaddr *)address, sizeof(*address)), "bind");
    check(listen(listener, 1), "listen");
    int fd = accept(listener, NULL, NULL);
    check(fd < 0, "accept");
    if (!take(fd, &work, sizeof(work)))
        return;
    prepare(fd);
    while (take(fd, &header, sizeof(header))) {
        if (!work.is_read && !take(fd, memory, header.size))
            return;
        give(fd, header.number, work.is_read ? work.size : 0);
    }
}

/* Begin a message: send it, or request it. */
static void begin(int fd, uint32_t number)
{
    give(fd, number, work.is_read ? 0 : work.size);
}

/* Wait for the end of the oldest message. */
static void finish(int fd)
{
    struct header header;

    if (!take(fd, &header, sizeof(header)) || (work.is_read && !take(fd, memory, header.size))) {
        fprintf(stderr, "the server has ended the connection\n");
        exit(1);
    }
}

static void drive(int fd, uint32_t depth, uint64_t nanoseconds, int tells)
{
    uint64_t began = now(CLOCK_MONOTONIC), until = began + nanoseconds, time = began;
    uint64_t processor = now(CLOCK_PROCESS_CPUTIME_ID);
    uint32_t begun = 0, finished = 0;

    while (time < until || finished < begun) {
        for (; time < until && begun - finished < depth; begun++)
            begin(fd, begun);
        finish(fd);
        finished++;
        time = now(CLOCK_MONOTONIC);
    }
    if (!tells)
        return;
    printf("%u %llu %llu\n", finished, (unsigned long long)(time - began),
           (unsigned long long)(now(CLOCK_PROCESS_CPUTIME_ID) - processor));
    check(fflush(stdout), "fflush");
}

int main(int count, char **words)
{
    struct sockaddr_in address = {.sin_family = AF_INET};

    if (count < 4 || inet_pton(AF_INET, words[2], &address.sin_addr) != 1)
        return 2;
    address.sin_port = htons((uint16_t)atoi(words[3]));
    if (!strcmp(words[1], "serve")) {
        serve(&address);
        return 0;
    }
    if (count != 10 || strcmp(words[1], "ask"))
        return 2;
    work = (struct work){
        .is_read = !strcmp(words[4], "read"),
        .size = (uint32_t)atoi(words[5]),
        .is_zerocopy = (uint32_t)atoi(words[9]),
    };
    uint32_t depth = (uint32_t)atoi(words[6]);
    uint64_t nanoseconds = (uint64_t)atoi(words[7]) * 1000000;
    if (!work.size || !depth || (!work.is_read && strcmp(words[4], "write")))
        return 2;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(fd < 0, "socket");
    check(connect(fd, (struct sockaddr *)&address, sizeof(address)), "connect");
    check(send(fd, &work, sizeof(work), 0) != sizeof(work), "send");
    prepare(fd);
    drive(fd, depth, nanoseconds / 10, 0);
    for (int rounds = atoi(words[8]); rounds > 0; rounds--)
        drive(fd, depth, nanoseconds, 1);
    check(close(fd), "close");
    return 0;
}
