/*
 * Detection of dead peers. If RDMA_OPTION_ID_ACK_TIMEOUT is set, a peer that disappears without a
 * word is detected within that timeout times the number of attempts.
 *
 * TCP_USER_TIMEOUT does not fit: it also breaks a connection whose peer is alive and has no receive
 * posted, for which RDMA waits without a limit. Instead, a timer checks whether TCP retransmits
 * without an acknowledgement. If everything is acknowledged and an answer of the peer is due, TCP
 * has nothing to retransmit. Then it has to send keep-alive probes.
 *
 * A request can complete before its bytes are acknowledged, if the peer gives no word
 * (transmit.c). So connections with incomplete requests are checked, and those with bytes that TCP
 * has not got an acknowledgement for. If all are idle, the timer stops, and the next post, or bytes
 * that are sent, start it again.
 */
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

#include "cm_silence.h"
#include "stream.h"

enum {
    MOST_QUESTIONS = 127, /* TCP's own limit */
    LOOK_MILLISECONDS = 500,
    LEAST_MILLISECONDS = 1000,  /* of silence: TCP's clock is coarse */
    MOST_MILLISECONDS = 900000, /* TCP itself gives up soon after that */
};

static struct {
    struct sw_timer look;
    struct sw_silence *first;
} silences;

const struct sw_state sw_silence_state = {&silences, sizeof(silences)};

/* 4.096 us x 2^ack_timeout, for the first attempt and each retry. 0: as long as TCP allows. */
static uint64_t patience_of(uint8_t ack_timeout, uint8_t retry_count)
{
    uint64_t once = ((uint64_t)4096 << ack_timeout) / 1000000;
    uint64_t all = once * (retry_count + 1u);

    if (!ack_timeout)
        return MOST_MILLISECONDS;
    if (all < LEAST_MILLISECONDS)
        return LEAST_MILLISECONDS;
    return all < MOST_MILLISECONDS ? all : MOST_MILLISECONDS;
}

static void try_option(int fd, int level, int name, int value)
{
    if (sw_system->setsockopt(fd, level, name, &value, sizeof(value))) {
        /* Without the option, unacknowledged data is still noticed. */
    }
}

/*
 * Enable keep-alive probes, about one each second, or disable them. TCP's own limit on unanswered
 * probes comes after patience.
 */
static void set_asking(struct sw_silence *silence, int asks)
{
    int fd = silence->pair->stream->fd;

    if (silence->asks == asks)
        return;
    silence->asks = asks;
    if (asks) {
        int seconds = (int)(silence->patience / 1000);
        try_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
        try_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1 + seconds / MOST_QUESTIONS);
        try_option(fd, IPPROTO_TCP, TCP_KEEPCNT, MOST_QUESTIONS);
    }
    try_option(fd, SOL_SOCKET, SO_KEEPALIVE, asks);
}

static int has_requests(const struct sw_silence *silence)
{
    return silence->pair->oldest != silence->pair->end;
}

static int may_be_due(const struct sw_silence *silence)
{
    return silence->pair->stream &&
           (has_requests(silence) || silence->pair->stream->carried != silence->quiet);
}

/*
 * Whether TCP retransmits or probes without an answer. since: the last acknowledgement. Notes when
 * TCP waits for none.
 */
static int is_silent(struct sw_silence *silence, uint64_t time, uint64_t *since)
{
    const struct sw_stream *stream = silence->pair->stream;
    struct tcp_info info;
    socklen_t size = sizeof(info);
    int unacknowledged;

    if (!sw_system->unacknowledged(stream->fd, &unacknowledged) && !unacknowledged)
        silence->quiet = stream->carried;
    if (sw_system->getsockopt(stream->fd, IPPROTO_TCP, TCP_INFO, &info, &size))
        return 0;
    *since = time - info.tcpi_last_ack_recv;
    return info.tcpi_retransmits || info.tcpi_probes;
}

static void look_at(struct sw_silence *silence, uint64_t time)
{
    uint64_t since;

    set_asking(silence, has_requests(silence));
    if (!may_be_due(silence) || !is_silent(silence, time, &since)) {
        silence->since = 0;
        return;
    }
    /* Measure from the first check that finds silence: the last acknowledgement can be hours old if
     * there was nothing to acknowledge. */
    if (!silence->since)
        silence->since = time;
    else if (silence->since < since)
        silence->since = since;
    if (time - silence->since >= silence->patience)
        sw_stream_broken(silence->pair->stream, ETIMEDOUT);
}

static void look(struct sw_timer *timer)
{
    uint64_t time = sw_system->now() / 1000000;
    int is_due = 0;

    /* A broken stream leaves the list. */
    for (struct sw_silence *each = silences.first, *next; each; each = next) {
        next = each->next;
        if (!each->pair->stream)
            continue;
        is_due |= may_be_due(each);
        look_at(each, time);
    }
    if (is_due && sw_call_later(timer, LOOK_MILLISECONDS)) {
        /* This cannot fail: the engine runs, and it makes this call. */
    }
}

static void look_soon(void)
{
    silences.look.expired = look;
    if (!silences.look.deadline && sw_call_later(&silences.look, LOOK_MILLISECONDS)) {
        /* This cannot fail: the engine runs as long as there is a connection. */
    }
}

void sw_look_for_silence(struct sw_silence *silence, struct sw_queue_pair *pair,
                         uint8_t ack_timeout, uint8_t retry_count)
{
    *silence = (struct sw_silence){
        .next = silences.first,
        .pair = pair,
        .patience = patience_of(ack_timeout, retry_count),
    };
    silences.first = silence;
    pair->works = look_soon;
    look_soon();
}

void sw_stop_looking(struct sw_silence *silence)
{
    struct sw_silence **link = &silences.first;

    while (*link && *link != silence)
        link = &(*link)->next;
    if (*link) {
        *link = silence->next;
        silence->pair->works = NULL;
    }
}

void sw_silence_forked(void)
{
    silences.look.deadline = 0;
    silences.first = NULL;
}
