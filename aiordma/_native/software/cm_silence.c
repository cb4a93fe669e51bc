/*
 * Dead peers. A program that sets an acknowledgement timeout is told within that, times the
 * retries, when a peer is gone without a word (RDMA_OPTION_ID_ACK_TIMEOUT).
 *
 * TCP_USER_TIMEOUT is not it: that also breaks a connection whose peer is alive and only has no
 * receive posted, for which RDMA waits for ever. So we look now and then whether TCP repeats what
 * it sent, and gets no answer. Where everything is acknowledged, and an answer of the peer's is
 * due, TCP has nothing to repeat: then it is to ask (keep-alive).
 *
 * All of this is for connections with requests that have not ended. Nothing is due on others.
 */
#include <errno.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <time.h>

#include "cm_stream.h"
#include "stream.h"

enum {
    MOST_QUESTIONS = 127, /* TCP's own limit */
    LOOK_MILLISECONDS = 500,
    LEAST_MILLISECONDS = 1000, /* of silence: TCP's own clock is coarse */
    MOST_MILLISECONDS = 900000, /* as TCP has it: then it gives up by itself */
};

static struct sw_timer next_look;

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

/* 4.096 us x 2^n, and as often again as it may be retried. */
static uint64_t patience_of(const struct sw_identifier *identifier)
{
    uint64_t once = ((uint64_t)4096 << identifier->ack_timeout) / 1000000;
    uint64_t all = once * (identifier->parameters.retry_count + 1u);

    if (all < LEAST_MILLISECONDS)
        return LEAST_MILLISECONDS;
    return all < MOST_MILLISECONDS ? all : MOST_MILLISECONDS;
}

static int is_looked_at(const struct sw_identifier *identifier)
{
    return identifier->has_ack_timeout && identifier->ack_timeout &&
           identifier->ibv.ps == RDMA_PS_TCP && identifier->state == SW_CM_CONNECTED &&
           identifier->connection->pair && identifier->connection->pair->stream;
}

static void try_option(int fd, int level, int name, int value)
{
    if (setsockopt(fd, level, name, &value, sizeof(value))) {
        /* Without it, then: what is repeated is noticed all the same. */
    }
}

/* TCP asks about each second, and it is for us to give up. */
static void set_asking(struct sw_connection *connection, int asks)
{
    int fd = connection->pair->stream->fd;

    if (connection->asks == asks)
        return;
    connection->asks = asks;
    if (asks) {
        int seconds = (int)(patience_of(connection->identifier) / 1000);
        try_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
        try_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1 + seconds / MOST_QUESTIONS);
        try_option(fd, IPPROTO_TCP, TCP_KEEPCNT, MOST_QUESTIONS);
    }
    try_option(fd, SOL_SOCKET, SO_KEEPALIVE, asks);
}

/* Whether TCP repeats data, or asks, and nobody answers; since: when it last heard of the peer. */
static int is_silent(const struct sw_queue_pair *pair, uint64_t time, uint64_t *since)
{
    struct tcp_info info;
    socklen_t size = sizeof(info);

    if (getsockopt(pair->stream->fd, IPPROTO_TCP, TCP_INFO, &info, &size))
        return 0;
    *since = time - info.tcpi_last_ack_recv;
    return info.tcpi_retransmits || info.tcpi_probes;
}

static void look(struct sw_timer *timer)
{
    uint64_t time = now(), since;
    int goes_on = 0;

    for (struct sw_identifier *each = sw_device.identifiers; each; each = each->next) {
        if (!is_looked_at(each))
            continue;
        struct sw_connection *connection = each->connection;
        goes_on = 1;
        int is_due = connection->pair->oldest != connection->pair->end;
        set_asking(connection, is_due);
        if (!is_due || !is_silent(connection->pair, time, &since)) {
            connection->silent_since = 0;
            continue;
        }
        /* Before there was something to answer it may well have said nothing for hours. */
        if (!connection->silent_since)
            connection->silent_since = time;
        else if (connection->silent_since < since)
            connection->silent_since = since;
        if (time - connection->silent_since >= patience_of(each))
            sw_stream_broken(connection->pair->stream, ETIMEDOUT);
    }
    if (goes_on && sw_call_later(timer, LOOK_MILLISECONDS)) {
        /* The engine runs: this is its own call. */
    }
}

void sw_look_for_silence(struct sw_identifier *identifier)
{
    if (next_look.deadline || !is_looked_at(identifier))
        return;
    next_look.expired = look;
    if (sw_call_later(&next_look, LOOK_MILLISECONDS)) {
        /* The engine runs, or there would be no connection. */
    }
}

void sw_silence_forked(void)
{
    next_look.deadline = 0;
}
