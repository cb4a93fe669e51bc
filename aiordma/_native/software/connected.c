/*
 * RC queue pairs: the start of their streams. A socket, a post or a new receive resumes a stream.
 */
#include "connected.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "receive.h"
#include "transmit.h"

enum { HEARING_MILLISECONDS = 150 };

/*
 * Packets that make completions are served by the program's thread (progress.c), which has to wake
 * for the completions in any case. A stream that only carries a peer's READs and WRITEs, pieces of
 * large messages, or more than TCP takes, stays with the engine: it would wake the program for
 * nothing.
 */
enum { MOST_MERIT = 4, FIRST_MERIT = 3, DEMERIT = 2 };

static void judge(struct sw_stream *stream, int has_completed)
{
    stream->merit += has_completed ? 1 : -DEMERIT;
    if (stream->merit <= 0) {
        stream->merit = 0;
        sw_progress_leave(&stream->member);
    } else if (stream->merit >= MOST_MERIT) {
        stream->merit = MOST_MERIT;
        if (stream->progress && stream->watch.events == EPOLLIN)
            sw_progress_join(stream->progress, &stream->member);
    }
}

/*
 * From now on the packets make completions. If the program's thread is here, it can be expected to
 * poll its queues: lend it the socket.
 */
static void leave_manager(struct sw_stream *stream)
{
    if (!stream->progress || stream->watch.events != EPOLLIN) {
        sw_progress_leave(&stream->member);
        return;
    }
    sw_progress_join(stream->progress, &stream->member);
    if (!sw_is_engine())
        sw_progress_lend(stream->progress);
}

/* Transmit. If the stream may now keep more, process the frames that waited for that. */
static void go_on(struct sw_stream *stream)
{
    sw_transmit(stream);
    if (!sw_finds_room(stream))
        return;
    sw_process(stream);
    if (stream->pair)
        sw_stream_rewatch(stream);
}

static void rested(struct sw_timer *timer)
{
    struct sw_stream *stream = SW_CONTAINER(timer, struct sw_stream, rest);

    if (!stream->sending.is_blocked)
        sw_transmit(stream);
    if (!stream->pair)
        return;
    sw_process(stream);
    if (stream->pair)
        sw_stream_rewatch(stream);
}

static void ready(struct sw_watch *watch, uint32_t events)
{
    struct sw_stream *stream = SW_CONTAINER(watch, struct sw_stream, watch);

    if (events & EPOLLOUT) {
        stream->sending.is_blocked = 0;
        go_on(stream);
    }
    if (!stream->pair || !(events & (uint32_t)~EPOLLOUT))
        return;
    uint64_t completions = sw_device.completions, reads = sw_device.reads;
    int has_heard = stream->has_heard;
    sw_receive(stream, events);
    if (!stream->pair && stream->is_read_out) {
        sw_stream_release(stream);
        return;
    }
    if (!stream->pair || sw_device.reads == reads)
        return;
    /* The first packet says nothing: it can be the peer's announcement (RTR) alone. */
    if (has_heard)
        judge(stream, sw_device.completions != completions);
    else if (stream->has_heard)
        leave_manager(stream);
}

static struct sw_stream *new_stream(int fd, const struct sw_terms *terms)
{
    struct sw_stream *stream = calloc(1, sizeof(*stream));

    if (!stream)
        return NULL;
    if (terms->already_size) {
        stream->receiving.in = terms->already_size > SW_BLOCK_ROOM ? NULL : sw_take_block();
        if (!stream->receiving.in) {
            sw_stream_discard(stream);
            return NULL;
        }
        memcpy(stream->receiving.in->bytes, terms->already, terms->already_size);
        stream->receiving.in->end = (uint32_t)terms->already_size;
    }
    stream->fd = fd;
    stream->terms = *terms;
    stream->terms.already = NULL;
    stream->sending.must_announce = terms->is_initiator && terms->sends_ready;
    stream->watch.ready = ready;
    stream->member.watch = &stream->watch;
    stream->sending.held.release = sw_nothing_took_it;
    stream->rest.expired = rested;
    for (int queue = 0; queue < SW_QUEUES; queue++)
        stream->sending.sequence[queue] = stream->receiving.expected[queue] = 1;
    /* A sink is a random number: a peer cannot know it before it gets a READ request for it. */
    stream->sending.number = sw_random();
    return stream;
}

/*
 * The accepting side sends nothing before the peer's first frame, because the peer may still be
 * reading the reply to the handshake (RFC 5044, 7.1.2). A peer that does not announce itself can be
 * waiting for a message: stop waiting for its frame.
 */
static void heard_nothing(struct sw_timer *timer)
{
    struct sw_stream *stream = SW_CONTAINER(timer, struct sw_stream, timer);

    stream->terms.must_hear_first = 0;
    sw_transmit(stream);
}

int sw_stream_begin(struct sw_queue_pair *pair, int fd, const struct sw_terms *terms)
{
    struct sw_stream *stream = NULL;
    int error = 0;

    if (pair->stream || pair->ibv.state == IBV_QPS_ERR || pair->ibv.state == IBV_QPS_RESET)
        error = EINVAL;
    if (!error) {
        stream = new_stream(fd, terms);
        error = stream ? 0 : ENOMEM;
    }
    if (!error) {
        stream->progress = sw_progress_of(&pair->ibv);
        error = sw_progress_watch(terms->manager ? terms->manager : stream->progress,
                                  &stream->member, fd, EPOLLIN);
    }
    if (error) {
        if (stream)
            sw_stream_discard(stream);
        sw_system->close(fd);
        return error;
    }
    sw_device.counts.sockets++;
    stream->pair = pair;
    if (stream->progress && !terms->manager && !sw_is_engine())
        sw_progress_lend(stream->progress);
    stream->merit = FIRST_MERIT;
    pair->stream = stream;
    pair->attributes.max_rd_atomic = (uint8_t)terms->outbound_depth;
    pair->attributes.max_dest_rd_atomic = (uint8_t)terms->inbound_depth;
    sw_queue_pair_ready(pair);
    if (terms->must_hear_first && terms->must_hear_soon) {
        stream->timer.expired = heard_nothing;
        if (sw_call_later(&stream->timer, HEARING_MILLISECONDS)) {
            /* This cannot fail: the engine runs, because it watches the socket. */
        }
    }
    sw_transmit(stream);
    if (stream->pair && stream->receiving.in)
        sw_stream_rest(stream); /* after the caller has reported the connection */
    return 0;
}

/* -- the transport ----------------------------------------------------------------------------- */

static int open_pair(struct sw_queue_pair *pair)
{
    pair->ibv.qp_num = sw_new_queue_pair_number();
    return 0;
}

static void transmit(struct sw_queue_pair *pair)
{
    struct sw_stream *stream = pair->stream;

    if (!stream)
        return;
    sw_note_post(&stream->sending);
    if (!sw_stream_is_hopeless(stream) && !stream->sending.is_blocked &&
        !sw_stream_is_struck(stream))
        go_on(stream);
}

static void resume(struct sw_queue_pair *pair)
{
    struct sw_stream *stream = pair->stream;

    if (!stream)
        return;
    sw_process(stream);
    if (stream->pair)
        sw_stream_rewatch(stream);
}

const struct sw_transport sw_stream_transport = {
    .open = open_pair,
    .close = sw_stream_end,
    .transmit = transmit,
    .resume = resume,
    .end = sw_stream_end,
};
