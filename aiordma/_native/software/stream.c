/*
 * Streams: the events that they wait for, and their end. A stream outlives its queue pair for a
 * while: closing a TCP socket with unread bytes resets the connection, which discards the bytes
 * that the peer has not read yet.
 */
#include "stream.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "capture.h"
#include "crc32c.h"
#include "faults.h"

enum { LINGER_MILLISECONDS = 2000 };

void sw_stream_rewatch(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_sending *sending = &stream->sending;

    if (stream->is_dead || sending->is_blocked || receiving->is_full) {
        stream->merit = 0;
        sw_progress_leave(&stream->member);
    }
    if (stream->is_dead) {
        (void)sw_rewatch(&stream->watch, 0);
        return;
    }
    uint32_t events = sending->is_blocked ? EPOLLOUT : 0;

    /* While there is no space for the frames after a message without a receive, TCP holds the peer
     * back. Then only the peer's end is watched, edge-triggered: it would stay ready. */
    events |= receiving->is_full ? (uint32_t)EPOLLET | EPOLLRDHUP : EPOLLIN;
    (void)sw_rewatch(&stream->watch, events); /* a change between events: this cannot fail */
}

void sw_stream_rest(struct sw_stream *stream)
{
    if (sw_call_later(&stream->rest, 0)) {
        /* This cannot fail: the engine runs as long as there is a stream. */
    }
}

/* -- the end ------------------------------------------------------------------------------- */

/* Return the buffers, which only a queue pair needs. */
static void give_buffers_back(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_sending *sending = &stream->sending;

    while (receiving->kept) {
        receiving->kept->start = receiving->kept->end;
        sw_kept_is_read(receiving);
    }
    sw_give_block(receiving->in);
    sw_give_blocks(sending->copies);
    free(sending->answers);
    receiving->in = sending->copies = NULL;
    sending->answers = NULL;
    sending->answer_size = sending->answer_count = 0;
}

void sw_stream_discard(struct sw_stream *stream)
{
    give_buffers_back(stream);
    free(stream);
}

void sw_stream_release(struct sw_stream *stream)
{
    sw_cancel(&stream->timer);
    sw_progress_unwatch(&stream->member);
    sw_system->close(stream->fd);
    sw_device.counts.sockets--;
    sw_stream_discard(stream);
}

/* Have close() reset the connection. shutdown() does not reset it, and see_off() closes later. */
static void have_it_reset(const struct sw_stream *stream)
{
    struct linger at_once = {.l_onoff = 1, .l_linger = 0};

    if (sw_system->setsockopt(stream->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once))) {
        /* The connection then ends without a reset. */
    }
}

static void linger_expired(struct sw_timer *timer)
{
    struct sw_stream *stream = SW_CONTAINER(timer, struct sw_stream, timer);

    /* A peer that holds messages back can also hold TCP back, and would not see the end. Reset the
     * connection: the bytes that it has not read by now belong to flushed requests. */
    if (sw_awaits_word(stream))
        have_it_reset(stream);
    sw_stream_release(stream);
}

/*
 * Send the rest of the TERMINATE, then the end. If the socket is full, wait for it. If it cannot be
 * watched, the timer ends the stream.
 */
static void say_last_word(struct sw_stream *stream)
{
    while (stream->last_sent < stream->last_size) {
        ssize_t sent =
            sw_system->send(stream->fd, stream->last_word + stream->last_sent,
                            stream->last_size - stream->last_sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
            (void)sw_rewatch(&stream->watch, EPOLLIN | EPOLLOUT);
            return;
        }
        if (sent < 0)
            break; /* the peer then sees only the end */
        sw_sent_bytes(stream->fd, stream->last_word + stream->last_sent, sent);
        stream->last_sent += (uint32_t)sent;
    }
    stream->last_size = 0;
    if (!stream->is_reset)
        sw_system->shutdown(stream->fd, SHUT_WR);
    (void)sw_rewatch(&stream->watch, EPOLLIN);
}

/* Read and discard what still arrives, until the peer ends its side. */
static void lingering(struct sw_watch *watch, uint32_t events)
{
    struct sw_stream *stream = SW_CONTAINER(watch, struct sw_stream, watch);
    char unread[16384];

    if (events & EPOLLOUT && stream->last_size)
        say_last_word(stream);
    for (int i = 0; i < 64; i++) {
        ssize_t size = sw_system->recv(stream->fd, unread, sizeof(unread), MSG_DONTWAIT);
        if (size < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        sw_device.reads++;
        if (size <= 0) {
            sw_stream_release(stream);
            return;
        }
        sw_progress_leave(&stream->member); /* the program does not wait for this */
    }
}

/* Compose a TERMINATE frame of at most 128 bytes. Returns its size. */
static uint32_t compose_terminate(struct sw_stream *stream, char *to)
{
    struct sw_frame what = {
        .operation = SW_TERMINATE,
        .is_last = 1,
        .queue = SW_QUEUE_TERMINATE,
        .sequence = stream->sending.sequence[SW_QUEUE_TERMINATE]++,
        .payload = stream->terminate_size,
    };
    uint32_t header = sw_frame_write(to, &what);
    uint32_t covered = header + what.payload + sw_padding(header, what.payload), crc = 0;

    memcpy(to + header, stream->terminate, what.payload);
    memset(to + header + what.payload, 0, covered - header - what.payload);
    if (stream->terms.crc)
        crc = htole32(sw_crc32c(0, to, covered));
    memcpy(to + covered, &crc, sizeof(crc));
    return covered + sizeof(crc);
}

/*
 * Send the answers of no bytes that wait for the program's next message (transmit.c): they confirm
 * requests that have been carried out. Returns whether the stream is between two frames then.
 */
static int send_held(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    char frame[SW_TAGGED_HEADER + 4];

    sw_unhold(&sending->held);
    while (sending->answer_count && !stream->is_dead && !stream->is_reset) {
        const struct sw_answer *answer = &sending->answers[sending->answer_first];
        const struct sw_read_request *read = &answer->read;
        if (answer->is_atomic || read->size)
            break; /* it was asked for while the others waited, and is not carried out any more */
        struct sw_frame what = {
            .operation = SW_READ_RESPONSE,
            .is_tagged = 1,
            .is_last = 1,
            .stag = read->sink,
            .offset = read->sink_offset,
        };
        uint32_t header = sw_frame_write(frame, &what), crc = 0;
        if (stream->terms.crc)
            crc = htole32(sw_crc32c(0, frame, header));
        memcpy(frame + header, &crc, sizeof(crc));
        ssize_t sent =
            sw_system->send(stream->fd, frame, sizeof(frame), MSG_DONTWAIT | MSG_NOSIGNAL);
        sw_sent_bytes(stream->fd, frame, sent);
        if (sent != (ssize_t)sizeof(frame))
            return sent < 0; /* the peer then sees only the end */
        sw_answer_is_sent(sending);
    }
    return 1;
}

static void see_off(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    int is_whole = 1;

    if (sending->held.link)
        is_whole = send_held(stream);
    sw_cancel(&stream->rest);
    stream->pair = NULL;
    /* In the middle of a frame no TERMINATE can be sent. */
    const struct sw_out_frame *out = &sending->out[sending->out_first];
    int is_between = !sending->out_count || out->left == out->size;
    if (stream->terminate_size && is_between && is_whole)
        stream->last_size = compose_terminate(stream, stream->last_word);
    give_buffers_back(stream);
    if (stream->is_read_out && !stream->last_size)
        return; /* both sides have ended it */
    stream->is_read_out = 0;
    stream->watch.ready = lingering;
    stream->timer.expired = linger_expired;
    say_last_word(stream);
    if (sw_call_later(&stream->timer, stream->is_reset ? 0 : LINGER_MILLISECONDS)) {
        /* This cannot fail: the engine runs as long as there is a stream. */
    }
}

void sw_stream_end(struct sw_queue_pair *pair)
{
    struct sw_stream *stream = pair->stream;

    if (!stream)
        return;
    pair->stream = NULL;
    see_off(stream);
    if (pair->identifier)
        pair->reports->ended(pair->identifier);
}

/* A peer decides how many frames an answer has, so this is not searched for in the queue. */
struct sw_send *sw_first_asked(struct sw_stream *stream, uint32_t *counter)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_queue_pair *pair = stream->pair;

    if (!sending->asked)
        return NULL;
    /* The READ of no bytes was sent before all requests that it does not cover. */
    if (sending->has_word_due && (int32_t)(sending->word_covers - sending->first_asked) <= 0)
        return NULL;
    *counter = sending->first_asked;
    return &pair->sends[sending->first_asked % pair->send_size];
}

void sw_is_asked(struct sw_stream *stream, uint32_t counter)
{
    if (!stream->sending.asked++)
        stream->sending.first_asked = counter;
}

void sw_is_answered(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_queue_pair *pair = stream->pair;

    if (!--sending->asked)
        return;
    do
        sending->first_asked++;
    while (pair->sends[sending->first_asked % pair->send_size].stage != SW_ASKED);
}

struct sw_send *sw_first_unended(struct sw_stream *stream)
{
    struct sw_queue_pair *pair = stream->pair;

    for (uint32_t at = pair->oldest; at != pair->next_send; at++) {
        struct sw_send *send = &pair->sends[at % pair->send_size];
        if (send->stage != SW_DONE)
            return send;
    }
    return NULL;
}

int sw_stream_is_cut(const struct sw_stream *stream)
{
    const struct sw_receiving *receiving = &stream->receiving;

    return receiving->has_frame || receiving->is_writing || stream->pair->has_taken ||
           (receiving->in && sw_waiting_size(receiving->in));
}

void sw_stream_broken(struct sw_stream *stream, int error)
{
    struct sw_queue_pair *pair = stream->pair;
    struct sw_send *first = sw_first_unended(stream);

    if (!first && pair->oldest != pair->end)
        first = &pair->sends[pair->oldest % pair->send_size];
    pair->broken = error;
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
        /* TCP gave up on a silent peer: other transports report RETRY_EXC for that. If the peer
         * is there again, it gets a reset, because this side has not ended the connection. */
        if (first)
            sw_end_send(stream->pair, first, IBV_WC_RETRY_EXC_ERR);
        have_it_reset(stream);
        stream->is_reset = 1;
    }
    sw_queue_pair_failed(stream->pair);
}

int sw_stream_is_hopeless(struct sw_stream *stream)
{
    const struct sw_queue_pair *pair = stream->pair;

    /* Even then, messages that this side held back are received, unless the peer waited for a
     * confirmation. It got none, so its requests were flushed when it left. */
    if (!stream->receiving.has_left || (pair->oldest == pair->end && !sw_gives_word(stream)))
        return 0;
    sw_stream_broken(stream, 0);
    return 1;
}

void sw_stream_refused(struct sw_stream *stream, struct sw_reason reason)
{
    struct sw_receiving *receiving = &stream->receiving;
    int is_access = (reason.layer == SW_LAYER_RDMAP && reason.type == 1) ||
                    (reason.layer == SW_LAYER_DDP && reason.type == 1);

    stream->terminate_size =
        sw_terminate_write(stream->terminate, &reason, receiving->blamed, receiving->blamed_size);
    stream->pair->broken = is_access ? EACCES : EPROTO;
    if (is_access && sw_system->is_simulated)
        sw_system->misused(AIORDMA_SIMULATED_DENIED, 0, stream->pair->ibv.qp_num, 0);
    sw_raise_queue_pair(&stream->pair->ibv,
                        is_access ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
    sw_queue_pair_failed(stream->pair);
}

void sw_stream_failed_send(struct sw_stream *stream, struct sw_send *send,
                           enum ibv_wc_status status)
{
    struct sw_reason reason = {SW_LAYER_RDMAP, 0, 0}; /* a local error */

    stream->terminate_size = sw_terminate_write(stream->terminate, &reason, NULL, 0);
    sw_end_send(stream->pair, send, status);
    sw_queue_pair_failed(stream->pair);
}

void sw_stream_starved(struct sw_stream *stream)
{
    struct sw_reason reason = {SW_LAYER_RDMAP, 0, 0}; /* a local error */

    stream->terminate_size = sw_terminate_write(stream->terminate, &reason, NULL, 0);
    stream->pair->broken = ENOMEM;
    sw_raise_queue_pair(&stream->pair->ibv, IBV_EVENT_QP_FATAL);
    sw_queue_pair_failed(stream->pair);
}

/* -- kept frames --------------------------------------------------------------------------- */

static struct sw_receiving *keepers;

const struct sw_state sw_streams_state = {&keepers, sizeof(keepers)};

static int waits_for_answer(const struct sw_sending *sending)
{
    return sending->asked || sending->has_word_due;
}

/* Whether the stream may keep so many blocks, by the limit of each stream. */
static int may_keep(const struct sw_stream *stream, uint32_t blocks)
{
    uint32_t most =
        waits_for_answer(&stream->sending) ? SW_KEPT_FOR_ANSWERS : SW_KEPT_SIZE; /* in bytes */

    return blocks <= most / SW_BLOCK_SIZE;
}

/* Whether all streams together may keep another block in this part of their limit. */
static int is_within(uint64_t most)
{
    return sw_device.memory.held + SW_BLOCK_SIZE <= most;
}

/* The half of the common limit that is for all streams, and not only for answers. */
static uint64_t common_half(void)
{
    return sw_device.memory.most_held / 2;
}

/* Whether the stream may keep another block now, which can end other streams. */
static int has_room(const struct sw_stream *stream)
{
    return may_keep(stream, stream->receiving.kept_blocks + 1) &&
           (waits_for_answer(&stream->sending) || is_within(common_half()));
}

/*
 * Whether the stream never ends to make space for others: it keeps no more than a stream may that
 * waits for no answer, and all of that in the half for such streams. So these streams fill at most
 * that half, and at the common limit there are always others.
 */
static int is_spared(const struct sw_receiving *receiving)
{
    return !receiving->excess_blocks && receiving->kept_blocks <= SW_KEPT_SIZE / SW_BLOCK_SIZE;
}

/* End the stream that keeps most, if it keeps more than this many blocks. */
static int end_one_that_keeps(uint32_t least, int ends_spared)
{
    struct sw_receiving *most = NULL;

    for (struct sw_receiving *keeper = keepers; keeper; keeper = keeper->next_keeper)
        if (keeper->kept_blocks > (most ? most->kept_blocks : least) &&
            (ends_spared || !is_spared(keeper)))
            most = keeper;
    if (most)
        sw_stream_starved(SW_CONTAINER(most, struct sw_stream, receiving));
    return most != NULL;
}

static int make_share(const struct sw_receiving *receiving)
{
    while (!is_within(sw_device.memory.most_held))
        if (!end_one_that_keeps(receiving->kept_blocks, 0))
            return 0;
    return 1;
}

struct sw_block *sw_stream_block(const struct sw_receiving *receiving)
{
    struct sw_block *block = sw_take_block();

    while (!block && end_one_that_keeps(receiving->kept_blocks, 1))
        block = sw_take_block();
    return block;
}

static int add_block(struct sw_receiving *receiving)
{
    struct sw_block *block = sw_stream_block(receiving);

    if (!block)
        return 0;
    if (!receiving->kept) {
        receiving->kept = block;
        receiving->next_keeper = keepers;
        if (keepers)
            keepers->keeper_link = &receiving->next_keeper;
        receiving->keeper_link = &keepers;
        keepers = receiving;
    } else {
        receiving->kept_last->next = block;
    }
    receiving->kept_last = block;
    block->is_excess = !is_within(common_half());
    receiving->kept_blocks++;
    receiving->excess_blocks += block->is_excess;
    sw_device.memory.held += SW_BLOCK_SIZE;
    return 1;
}

enum sw_keeping sw_keep(struct sw_stream *stream, const char *frame, uint32_t size)
{
    struct sw_receiving *receiving = &stream->receiving;

    if (!receiving->kept || receiving->kept_last->end + size > SW_BLOCK_ROOM) {
        if (!has_room(stream))
            return SW_NO_ROOM;
        if (!make_share(receiving) || !add_block(receiving))
            return SW_NO_MEMORY;
    }
    memcpy(receiving->kept_last->bytes + receiving->kept_last->end, frame, size);
    receiving->kept_last->end += size;
    return SW_KEPT;
}

void sw_kept_is_read(struct sw_receiving *receiving)
{
    struct sw_block *first = receiving->kept;

    if (first->start < first->end)
        return;
    receiving->kept = first->next;
    receiving->kept_blocks--;
    receiving->excess_blocks -= first->is_excess;
    sw_device.memory.held -= SW_BLOCK_SIZE;
    sw_give_block(first);
    if (receiving->kept)
        return;
    *receiving->keeper_link = receiving->next_keeper;
    if (receiving->next_keeper)
        receiving->next_keeper->keeper_link = receiving->keeper_link;
}

void sw_streams_forked(void)
{
    keepers = NULL;
    sw_device.memory.held = sw_device.memory.blocks = 0;
}

int sw_finds_room(const struct sw_stream *stream)
{
    const struct sw_receiving *receiving = &stream->receiving;

    return stream->pair && receiving->is_full && !receiving->has_ended && has_room(stream);
}

/* -- faults -------------------------------------------------------------------------------- */

static void gave_up(struct sw_timer *timer)
{
    struct sw_stream *stream = SW_CONTAINER(timer, struct sw_stream, timer);

    sw_stream_broken(stream, ETIMEDOUT);
}

/* From now on the peer is dead. TCP reports it milliseconds later. */
static int dies(struct sw_stream *stream)
{
    struct aiordma_fault fault;

    if (!sw_fault(AIORDMA_FAULT_DEAD_PEER, &fault))
        return 0;
    stream->timer.expired = gave_up;
    if (sw_call_later(&stream->timer, fault.milliseconds))
        return 0;
    stream->is_dead = 1;
    sw_stream_rewatch(stream);
    return 1;
}

static void reset(struct sw_stream *stream)
{
    have_it_reset(stream);
    stream->is_reset = 1;
    sw_stream_broken(stream, ECONNRESET);
}

int sw_stream_carried(struct sw_stream *stream, size_t bytes)
{
    stream->carried += bytes;
    if (!sw_strikes_bytes(stream->carried))
        return 0;
    reset(stream);
    return 1;
}

int sw_stream_is_struck(struct sw_stream *stream)
{
    struct aiordma_fault fault;

    if (stream->is_dead || dies(stream))
        return 1;
    if (!sw_fault(AIORDMA_FAULT_DROP_AFTER_REQUESTS, &fault))
        return 0;
    reset(stream);
    return 1;
}
