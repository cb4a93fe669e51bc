/*
 * Receiving: bytes become frames, which delivery.c carries out.
 */
#include "receive.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "capture.h"
#include "crc32c.h"
#include "delivery.h"
#include "transmit.h"

/*
 * Payload of WORTH_IT bytes and more is read directly into its place, and not into the buffer. Such
 * a read takes at most AFTER_PAYLOAD bytes more, which the buffer gets: the next header is among
 * them, so that the next payload can be read directly, too.
 */
enum { WORTH_IT = 2048, AFTER_PAYLOAD = 256, MOST_READS = 32 };

/*
 * A stream that carries large payloads gets a larger receive buffer of TCP, once so many bytes have
 * been read directly.
 */
enum { LARGE_AFTER = 1 << 20, LARGE_BUFFER = 4 << 20 };

/* LEAST_ROOM: the least space for a read after the beginning of a frame in the buffer. */
enum { LEAST_ROOM = 4096 };

/* -- frames in the buffer ----------------------------------------------------------------------- */

static int is_intact(const struct sw_receiving *receiving)
{
    const char *bytes = sw_waiting_bytes(receiving->from);
    uint32_t covered = sw_frame_size(&receiving->frame) - 4, crc;

    memcpy(&crc, bytes + covered, sizeof(crc));
    return le32toh(crc) == sw_crc32c(0, bytes, covered);
}

/* Read a header and begin its frame: 1; 0: it needs more bytes, or is held back; -1: refused. */
static int next_frame(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    uint32_t here = sw_waiting_size(receiving->from);
    struct sw_reason reason;

    int found = sw_frame_read(sw_waiting_bytes(receiving->from), here, &receiving->frame, &reason);
    if (found < 0) {
        receiving->blamed_size = 0;
        return sw_refuse_frame(stream, reason);
    }
    if (!found)
        return 0;
    /* With a CRC a frame is placed after the check, because its header can be corrupted. */
    int whole = stream->terms.crc || !sw_has_payload(receiving->frame.operation);
    if (whole && here < sw_frame_size(&receiving->frame))
        return 0;
    if (stream->terms.crc && !is_intact(receiving)) {
        receiving->blamed_size = 0;
        return sw_refuse_frame(stream, (struct sw_reason){SW_LAYER_MPA, 0, 2});
    }
    receiving->blamed_size = here < sizeof(receiving->blamed) ? here : sizeof(receiving->blamed);
    memcpy(receiving->blamed, sw_waiting_bytes(receiving->from), receiving->blamed_size);
    int result = sw_begin_frame(stream);
    if (result != 1)
        return result;
    if (receiving->frame.operation == SW_WRITE && !receiving->is_writing)
        receiving->written = 0;
    receiving->from->start += receiving->frame.header;
    receiving->placed = 0;
    receiving->has_frame = 1;
    return 1;
}

/* Continue with the frame. 1: done; 0: it needs more bytes; -1: the queue pair has failed. */
static int go_on(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_frame *frame = &receiving->frame;
    const char *payload = sw_waiting_bytes(receiving->from);
    uint32_t trailer = sw_padding(frame->header, frame->payload) + 4;

    if (sw_system->is_simulated && frame->operation == SW_WRITE && !receiving->placed &&
        sw_waiting_size(receiving->from) >= frame->payload && sw_place_last_bytes(stream))
        return 0;
    if (sw_has_payload(frame->operation)) {
        if (sw_place_payload(stream))
            return -1;
        if (receiving->placed < frame->payload)
            return 0;
    } else {
        trailer += frame->payload;
    }
    if (sw_waiting_size(receiving->from) < trailer)
        return 0;
    receiving->from->start += trailer;
    receiving->has_frame = 0;
    sw_add_work(SW_FRAME_WORK + frame->payload);
    if (!stream->has_heard) {
        stream->has_heard = 1;
        if (stream->pair->identifier)
            stream->pair->reports->first_frame(stream->pair->identifier);
        if (!stream->pair)
            return -1;
    }
    return sw_end_frame(stream, payload) ? -1 : 1;
}

static int is_answer(enum sw_operation operation)
{
    return operation == SW_READ_RESPONSE || operation == SW_ATOMIC_RESPONSE ||
           operation == SW_TERMINATE;
}

/*
 * While a message waits for its receive, answers to this side's requests overtake it, because the
 * program may post the receive only after an answer. All other frames are kept in memory, in order,
 * up to a limit. The rest stays in TCP. While an answer is outstanding the limit is higher:
 * everything that TCP held when it was requested can come before it.
 */
static int overtake(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_frame frame;
    struct sw_reason reason;

    receiving->from = receiving->in;
    if (!receiving->in)
        return 0;
    uint32_t here = sw_waiting_size(receiving->in);
    int found = sw_frame_read(sw_waiting_bytes(receiving->in), here, &frame, &reason);
    if (found < 0) {
        receiving->blamed_size = 0;
        return sw_refuse_frame(stream, reason);
    }
    uint32_t size = found ? sw_frame_size(&frame) : 0;
    if (!found || here < size)
        return 0;
    if (!is_answer(frame.operation)) {
        sw_add_work(SW_FRAME_WORK + size);
        enum sw_keeping keeping = sw_keep(stream, sw_waiting_bytes(receiving->in), size);
        if (keeping == SW_NO_MEMORY) {
            sw_stream_starved(stream);
            return -1;
        }
        receiving->is_full = keeping == SW_NO_ROOM;
        receiving->in->start += receiving->is_full ? 0 : size;
        return !receiving->is_full;
    }
    int result = next_frame(stream);
    return result == 1 ? go_on(stream) : result;
}

/* One step. 1: there may be another; 0: it needs more bytes, space or a receive; -1: failed. */
static int step(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;

    /* A message in the middle of its frame has its receive. */
    if (stream->pair->is_waiting)
        return overtake(stream);
    if (receiving->kept)
        sw_kept_is_read(receiving);
    receiving->from = receiving->kept ? receiving->kept : receiving->in;
    if (!receiving->from)
        return 0;
    if (!receiving->has_frame) {
        int result = next_frame(stream);
        if (result != 1)
            return result == 0 && stream->pair->is_waiting ? 1 : result;
    }
    return go_on(stream);
}

static void give_empty_back(struct sw_receiving *receiving)
{
    if (!receiving->in || sw_waiting_size(receiving->in))
        return;
    sw_give_block(receiving->in);
    receiving->in = NULL;
}

void sw_process(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    int result;

    sw_cancel(&stream->rest);
    do {
        receiving->is_full = receiving->has_ended;
        do
            result = step(stream);
        while (result == 1 && !sw_turn_is_over());
        if (!stream->pair)
            return;
        if (result == 1) {
            sw_stream_rest(stream);
        } else if (receiving->has_ended && !stream->pair->is_waiting) {
            sw_stream_broken(stream, sw_stream_is_cut(stream) ? ECONNRESET : 0);
            return;
        }
        give_empty_back(receiving);
        /* An answer may be due. Or a READ can be sent, after the answer of another one. */
        if (!stream->sending.is_blocked)
            sw_reply(stream);
    } while (sw_finds_room(stream));
}

/* -- reading ------------------------------------------------------------------------------------ */

/* Where to read the next bytes: to the frame's place if it is large enough, then to the buffer. */
static int next_parts(struct sw_stream *stream, struct iovec *parts, uint32_t *direct)
{
    struct sw_receiving *receiving = &stream->receiving;
    uint32_t left = receiving->frame.payload - receiving->placed;
    struct sw_piece places[SW_MOST_PARTS];
    int count = 0;

    *direct = 0;
    if (receiving->has_frame && sw_has_payload(receiving->frame.operation) && !receiving->in->end &&
        left >= WORTH_IT) {
        count = sw_locate_payload(stream, left, places);
        if (count < 0)
            return -1;
        for (int i = 0; i < count; i++)
            parts[i] = (struct iovec){places[i].memory.at, places[i].size};
        *direct = left;
    }
    uint32_t room = *direct ? AFTER_PAYLOAD : SW_BLOCK_ROOM - receiving->in->end;
    parts[count++] = (struct iovec){receiving->in->bytes + receiving->in->end, room};
    return count;
}

/*
 * Provide a buffer with space for more bytes. It holds the beginning of a frame. This is moved to
 * the front if it is no longer than the part that has been read, or if there is too little space
 * after it. 0: out of memory.
 */
static int make_room(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_block *in = receiving->in;

    if (!in) {
        receiving->in = sw_stream_block(receiving);
        return receiving->in != NULL;
    }
    uint32_t waiting = sw_waiting_size(in);
    if (in->start && (in->start >= waiting || SW_BLOCK_ROOM - in->end < LEAST_ROOM)) {
        memmove(in->bytes, sw_waiting_bytes(in), waiting);
        sw_device.memory.moved += waiting;
        in->start = 0;
        in->end = waiting;
    }
    return 1;
}

/*
 * Enlarge TCP's receive buffer. Linux adapts it to the bytes that are read within a round trip. The
 * device reads at once what arrives, so the buffer would stay at a few frames, and TCP would send
 * and confirm them one by one. SO_RCVLOWAT enlarges the buffer for a packet of that size, and
 * leaves it large. SO_RCVBUF would end the adaptation, and sets 208 KiB at most.
 */
static void enlarge_buffer(const struct sw_stream *stream)
{
    int large = LARGE_BUFFER, any = 1;

    if (sw_system->setsockopt(stream->fd, SOL_SOCKET, SO_RCVLOWAT, &large, sizeof(large)))
        return; /* the buffer keeps its size */
    if (sw_system->setsockopt(stream->fd, SOL_SOCKET, SO_RCVLOWAT, &any, sizeof(any))) {
        /* This cannot fail: the call before it has succeeded. */
    }
}

/* Count payload that was read directly to its place. */
static void count_direct(struct sw_stream *stream, uint32_t size)
{
    struct sw_receiving *receiving = &stream->receiving;

    if (receiving->direct >= LARGE_AFTER)
        return;
    receiving->direct += size;
    if (receiving->direct >= LARGE_AFTER)
        enlarge_buffer(stream);
}

/*
 * How a connection ended that is not read: 0, if the peer's end of the data came, or an errno. (The
 * kernel reports a reset with EPOLLRDHUP, too, and behind the end of the data as EPIPE.)
 */
static int end_of(const struct sw_stream *stream)
{
    int error = 0;
    socklen_t size = sizeof(error);

    if (sw_system->getsockopt(stream->fd, SOL_SOCKET, SO_ERROR, &error, &size))
        error = errno;
    if (error && error != EPIPE)
        return error;
    return stream->receiving.has_left ? 0 : ECONNRESET;
}

void sw_receive(struct sw_stream *stream, uint32_t events)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct iovec parts[SW_MOST_PARTS + 1];
    uint32_t direct;

    if (receiving->is_full) {
        /* Held back: only the peer's end matters. */
        receiving->has_left |= !!(events & EPOLLRDHUP);
        if (events & (EPOLLERR | EPOLLHUP))
            sw_stream_broken(stream, end_of(stream));
        else
            sw_stream_is_hopeless(stream);
        return;
    }
    if (stream->rest.deadline) {
        /* Process the buffered bytes first: until then, there may be no space for more. */
        sw_process(stream);
        if (stream->pair)
            sw_stream_rewatch(stream);
        return;
    }
    for (int i = 0; i < MOST_READS; i++) {
        if (!make_room(stream)) {
            sw_stream_starved(stream);
            return;
        }
        int count = next_parts(stream, parts, &direct);
        if (count < 0)
            return;
        ssize_t size = sw_system->readv(stream->fd, parts, count);
        if (size < 0 && errno == EINTR)
            continue;
        if (size < 0 && errno == EAGAIN)
            break;
        sw_device.reads++;
        if (size < 0 && errno == EFAULT && direct) {
            sw_fail_payload(stream, SW_BOUNDS);
            return;
        }
        if (!size && stream->pair->is_waiting) {
            /* The peer has ended the stream, and its last messages wait for receives. */
            receiving->has_ended = receiving->has_left = receiving->is_full = 1;
            sw_stream_is_hopeless(stream);
            break;
        }
        if (size <= 0) {
            stream->is_read_out = !size;
            sw_stream_broken(stream, size ? errno : sw_stream_is_cut(stream) ? ECONNRESET : 0);
            return;
        }
        sw_received(stream->fd, parts, count, size);
        uint32_t room = direct + (uint32_t)parts[count - 1].iov_len, taken = (uint32_t)size;
        uint32_t placed = taken < direct ? taken : direct;
        if (placed) {
            sw_count_payload(stream, placed);
            count_direct(stream, placed);
        }
        receiving->in->end += taken - placed;
        if (sw_stream_carried(stream, taken))
            return;
        sw_process(stream);
        if (!stream->pair || receiving->is_full || sw_turn_is_over())
            break;
        if (taken < room)
            break; /* there was no more */
    }
    if (!stream->pair)
        return;
    give_empty_back(receiving);
    sw_stream_rewatch(stream);
}
