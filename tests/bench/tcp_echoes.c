/*
 * Echoes over plain TCP, as a C program makes them: what many connections cost the kernel, without
 * RDMA.
 *
 *   tcp_echoes serve ADDRESS PORT     serves until it is terminated
 *   tcp_echoes ask ADDRESS PORT SIZE DEPTH CONNECTIONS MILLISECONDS ROUNDS
 *       prints for each round: echoes, and nanoseconds
 *
 * DEPTH messages of SIZE bytes are in flight, over all connections in turn, and the oldest one is
 * waited for. Each message is sent by one call. Both sides receive all that is there by one call;
 * the server sends it back by one call, and waits by epoll.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 256, BUFFER = 65536, MOST_DEPTH = 1024, BACKLOG = 1024 };

static char buffer[BUFFER];

static void check(int failed, const char *what)
{
    if (failed) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static uint64_t now(void)
{
    struct timespec time;

    check(clock_gettime(CLOCK_MONOTONIC, &time), "clock_gettime");
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void send_at_once(int fd)
{
    int one = 1;

    check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)), "TCP_NODELAY");
}

static void give(int fd, size_t size)
{
    for (size_t sent = 0; sent < size;) {
        ssize_t more = send(fd, buffer + sent, size - sent, MSG_NOSIGNAL);
        check(more < 0, "send");
        sent += (size_t)more;
    }
}

static void serve(const struct sockaddr_in *address)
{
    int listener = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0), one = 1;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, found[BATCH];

    check(listener < 0 || poll < 0, "socket, epoll_create1");
    check(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)), "SO_REUSEADDR");
    check(bind(listener, (const struct sockaddr *)address, sizeof(*address)), "bind");
    check(listen(listener, BACKLOG), "listen");
    check(epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event), "epoll_ctl");
    for (int connections = 0, begun = 0; !begun || connections;) {
        int count = epoll_wait(poll, found, BATCH, -1);
        check(count < 0, "epoll_wait");
        for (int i = 0; i < count; i++) {
            int fd = found[i].data.fd;
            if (fd == listener) {
                event.data.fd = accept(listener, NULL, NULL);
                check(event.data.fd < 0, "accept");
                send_at_once(event.data.fd);
                check(epoll_ctl(poll, EPOLL_CTL_ADD, event.data.fd, &event), "epoll_ctl");
                connections++;
                begun = 1;
                continue;
            }
            ssize_t got = recv(fd, buffer, BUFFER, 0);
            if (got > 0) {
                give(fd, (size_t)got);
            } else {
                close(fd);
                connections--;
            }
        }
    }
}

struct asking {
    int *fds;
    size_t *arrived; /* bytes that arrived on each connection, and count for no echo yet */
    uint32_t connections, depth;
    size_t size;
};

static void drive(const struct asking *asking, uint64_t nanoseconds, int tells)
{
    uint64_t began = now(), until = began + nanoseconds, count = 0, time = began;
    uint32_t flight[MOST_DEPTH], first = 0, flying = 0, next = 0;

    while (time < until || flying) {
        for (; time < until && flying < asking->depth; flying++) {
            flight[(first + flying) % asking->depth] = next;
            give(asking->fds[next], asking->size);
            next = (next + 1) % asking->connections;
        }
        uint32_t oldest = flight[first];
        while (asking->arrived[oldest] < asking->size) {
            ssize_t got = recv(asking->fds[oldest], buffer, BUFFER, 0);
            check(got < 0, "recv");
            if (!got) {
                fprintf(stderr, "the server has ended a connection\n");
                exit(1);
            }
            asking->arrived[oldest] += (size_t)got;
        }
        asking->arrived[oldest] -= asking->size;
        first = (first + 1) % asking->depth;
        flying--;
        if (++count % 16 == 0 || time >= until)
            time = now();
    }
    if (tells) {
        printf("%llu %llu\n", (unsigned long long)count, (unsigned long long)(now() - began));
        check(fflush(stdout), "fflush");
    }
}

int main(int count, char **words)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct rlimit files;

    if (count < 4 || inet_pton(AF_INET, words[2], &address.sin_addr) != 1)
        return 2;
    address.sin_port = htons((uint16_t)atoi(words[3]));
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    if (!strcmp(words[1], "serve")) {
        serve(&address);
        return 0;
    }
    if (count != 9 || strcmp(words[1], "ask"))
        return 2;
    struct asking asking = {
        .size = (size_t)atoi(words[4]),
        .depth = (uint32_t)atoi(words[5]),
        .connections = (uint32_t)atoi(words[6]),
    };
    if (!asking.size || asking.size > BUFFER || !asking.depth || asking.depth > MOST_DEPTH ||
        !asking.connections)
        return 2;
    asking.fds = calloc(asking.connections, sizeof(*asking.fds));
    asking.arrived = calloc(asking.connections, sizeof(*asking.arrived));
    check(!asking.fds || !asking.arrived, "calloc");
    for (uint32_t i = 0; i < asking.connections; i++) {
        asking.fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        check(asking.fds[i] < 0, "socket");
        check(connect(asking.fds[i], (struct sockaddr *)&address, sizeof(address)), "connect");
        send_at_once(asking.fds[i]);
    }
    uint64_t nanoseconds = (uint64_t)atoi(words[7]) * 1000000;
    drive(&asking, nanoseconds / 10, 0);
    for (int rounds = atoi(words[8]); rounds > 0; rounds--)
        drive(&asking, nanoseconds, 1);
    free(asking.fds);
    free(asking.arrived);
    return 0;
}
