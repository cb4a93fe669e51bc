/*
 * Sending: requests of the send queue and answers to the peer become frames, which point at the
 * program's memory. TCP takes as many of them as it can in one call.
 */
#include "transmit.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "atomic.h"
#include "capture.h"
#include "crc32c.h"
#include "faults.h"

/* -- frames ------------------------------------------------------------------------------------ */

/* Add a copy of memory to the frame. The memory can change or disappear before TCP has it. */
static int add_copy(struct sw_stream *stream, struct sw_memory memory, uint32_t size)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_block *block = sending->copies;

    if (!block || block->end + size > SW_BLOCK_ROOM) {
        block = sw_stream_block(&stream->receiving);
        if (!block)
            return ENOMEM;
        block->next = sending->copies;
        sending->copies = block;
    }
    char *copy = block->bytes + block->end;
    int error = sw_copy_from(copy, memory, size);
    if (error)
        return error;
    block->end += size;
    sending->parts[sending->part_count++] = (struct iovec){copy, size};
    return 0;
}

/* Return to the state in which this block was the last one, and had this size. */
static void drop_copies(struct sw_sending *sending, struct sw_block *last, uint32_t size)
{
    while (sending->copies != last) {
        struct sw_block *block = sending->copies;
        sending->copies = block->next;
        sw_give_block(block);
    }
    if (last)
        last->end = size;
}

/* Add the iovecs of a frame's memory. Returns an errno if the memory is not accessible. */
static int add_parts(struct sw_stream *stream, struct sw_out_frame *frame)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_queue_pair *pair = stream->pair;
    const struct sw_send *send = frame->send;
    uint32_t offset = frame->offset, left = frame->payload;
    struct sw_piece piece;
    int error;

    if (frame->is_answer) {
        struct sw_memory memory;
        if (sw_reach_remote(&pair->ibv, frame->stag, frame->address, left, IBV_ACCESS_REMOTE_READ,
                            &memory))
            return EACCES;
        frame->memory = memory.at;
        if (stream->terms.crc || memory.is_of_file)
            return add_copy(stream, memory, left);
        sending->parts[sending->part_count++] = (struct iovec){memory.at, left};
        return 0;
    }
    if (send->flags & IBV_SEND_INLINE) {
        sending->parts[sending->part_count++] = (struct iovec){send->inlined + offset, left};
        return 0;
    }
    struct sw_span span = {pair->ibv.pd, send->parts, send->part_count, offset, left};
    while (span.size) {
        if (sw_next_piece(&span, 0, &piece))
            return EACCES;
        if (!piece.memory.is_of_file)
            sending->parts[sending->part_count++] = (struct iovec){piece.memory.at, piece.size};
        else if ((error = add_copy(stream, piece.memory, piece.size)))
            return error;
    }
    return 0;
}

static struct sw_out_frame *new_frame(struct sw_sending *sending)
{
    uint32_t slot = (sending->out_first + sending->out_count) % SW_OUT_FRAMES;
    struct sw_out_frame *frame = &sending->out[slot];

    frame->send = NULL;
    frame->ends = frame->is_answer = 0;
    frame->payload = frame->offset = 0;
    return frame;
}

/*
 * Add a frame to the queue: a header, and own bytes after it (already in frame->header), or the
 * memory that frame describes. If the memory is not accessible, it fails, and adds nothing.
 */
static int add_frame(struct sw_stream *stream, struct sw_out_frame *frame, struct sw_frame *what,
                     uint32_t own)
{
    struct sw_sending *sending = &stream->sending;
    int first = sending->part_count, error = 0;
    struct sw_block *copies = sending->copies;
    uint32_t copied = copies ? copies->end : 0;
    struct aiordma_fault fault;

    what->payload = own ? own : frame->payload;
    uint32_t header = sw_frame_write(frame->header, what);
    sending->parts[sending->part_count++] = (struct iovec){frame->header, header + own};
    if (frame->payload)
        error = add_parts(stream, frame);
    if (error) {
        sending->part_count = first;
        drop_copies(sending, copies, copied);
        return error;
    }
    uint32_t padding = sw_padding(header, what->payload);
    memset(frame->trailer, 0, sizeof(frame->trailer));
    if (stream->terms.crc) {
        uint32_t crc = 0;
        for (int i = first; i < sending->part_count; i++)
            crc = sw_crc32c(crc, sending->parts[i].iov_base, sending->parts[i].iov_len);
        crc = htole32(sw_crc32c(crc, frame->trailer, padding));
        memcpy(frame->trailer + padding, &crc, sizeof(crc));
        if (sw_fault(AIORDMA_FAULT_CORRUPTED, &fault))
            frame->trailer[padding] ^= 1;
    }
    sending->parts[sending->part_count++] = (struct iovec){frame->trailer, padding + 4};
    frame->size = frame->left = sw_frame_size(what);
    sending->out_bytes += frame->size;
    sending->out_count++;
    return 0;
}

static uint32_t next_sequence(struct sw_sending *sending, int queue)
{
    return sending->sequence[queue]++;
}

/* -- requests ---------------------------------------------------------------------------------- */

static int compose_word(struct sw_stream *stream);

static int compose_immediate(struct sw_stream *stream, struct sw_send *send, uint32_t belongs,
                             int ends)
{
    struct sw_out_frame *frame = new_frame(&stream->sending);
    int solicits = belongs == SW_OF_WRITE && send->flags & IBV_SEND_SOLICITED;
    struct sw_frame what = {
        .operation = solicits ? SW_IMMEDIATE_SOLICITED : SW_IMMEDIATE,
        .is_last = 1,
        .queue = SW_QUEUE_SEND,
        .sequence = next_sequence(&stream->sending, SW_QUEUE_SEND),
    };

    send->sequence = what.sequence;
    sw_immediate_write(frame->header + SW_UNTAGGED_HEADER, be32toh(send->immediate), belongs);
    frame->send = send;
    frame->ends = ends;
    return add_frame(stream, frame, &what, SW_IMMEDIATE_SIZE);
}

static enum sw_operation operation_of(const struct sw_send *send)
{
    int solicits = !!(send->flags & IBV_SEND_SOLICITED);

    if (send->opcode == IBV_WR_SEND_WITH_INV)
        return solicits ? SW_SEND_SOLICITED_INVALIDATE : SW_SEND_INVALIDATE;
    return solicits ? SW_SEND_SOLICITED : SW_SEND;
}

/*
 * A request that cannot be carried out fails only after the earlier ones have ended: it ends the
 * connection, which would flush them. Returns the composer's result.
 */
static int fail_in_turn(struct sw_stream *stream, struct sw_send *send, enum ibv_wc_status status)
{
    if (stream->sending.out_count)
        return 0;
    if (stream->pair->oldest != stream->pair->next_send)
        return compose_word(stream);
    sw_stream_failed_send(stream, send, status);
    return 1;
}

/* Compose the next piece of a SEND or a WRITE. Returns whether it did (as all composers). */
static int compose_piece(struct sw_stream *stream, struct sw_send *send)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_queue_pair *pair = stream->pair;
    int is_write = send->opcode == IBV_WR_RDMA_WRITE || send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    uint32_t offset = sending->offset, left = send->length - offset;

    if (!offset && !sending->sent_immediate && !sw_is_reachable(pair, send, 0))
        return fail_in_turn(stream, send, IBV_WC_LOC_PROT_ERR);
    if (send->opcode == IBV_WR_SEND_WITH_IMM && !sending->sent_immediate) {
        compose_immediate(stream, send, SW_OF_SEND, 0);
        sending->sent_immediate = 1;
        send->stage = SW_BEGUN;
        return 1;
    }
    if (send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM && sending->sent_immediate) {
        compose_immediate(stream, send, SW_OF_WRITE, 1);
        sending->needs_word = 1;
        sending->sent_immediate = 0;
        sending->offset = 0;
        pair->next_send++;
        return 1;
    }
    struct sw_out_frame *frame = new_frame(sending);
    struct sw_frame what = {.is_tagged = is_write};
    frame->send = send;
    frame->offset = offset;
    frame->payload = left < SW_MOST_PAYLOAD ? left : SW_MOST_PAYLOAD;
    what.is_last = frame->payload == left;
    if (is_write) {
        what.operation = SW_WRITE;
        what.stag = send->rkey;
        what.offset = send->remote_address + offset;
    } else {
        what.operation = operation_of(send);
        what.invalidated = send->opcode == IBV_WR_SEND_WITH_INV ? send->invalidated : 0;
        what.queue = SW_QUEUE_SEND;
        what.message_offset = offset;
        /* All pieces of a message have the same number. */
        what.sequence = send->sequence = sending->sequence[SW_QUEUE_SEND];
    }
    int more_follows = send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    frame->ends = what.is_last && !more_follows;
    int error = add_frame(stream, frame, &what, 0);
    if (error == ENOMEM) {
        sw_stream_starved(stream);
        return 1;
    }
    if (error)
        return fail_in_turn(stream, send, IBV_WC_LOC_PROT_ERR);
    sending->offset += frame->payload;
    send->stage = SW_BEGUN;
    if (!what.is_last)
        return 1;
    if (!is_write)
        sending->sequence[SW_QUEUE_SEND]++;
    sending->sent_immediate = more_follows;
    if (more_follows)
        return 1;
    sending->offset = 0;
    sending->needs_word = 1;
    pair->next_send++;
    return 1;
}

/*
 * Compose a READ of no bytes. RDMAP has no acknowledgements: a sender knows only what TCP has
 * taken. The answer to a READ confirms that everything sent before it has been carried out. So a
 * request completes as on other transports: its data have arrived, or its error is known. And a
 * message that waits for its receive holds its sender back. One such READ is outstanding at a time,
 * after as many requests as possible. The program's own READs have the same effect.
 *
 * Only a software device is asked, which the handshake shows: siw (Linux 6.1) answers a READ of no
 * bytes with some bytes if it is busy. With other peers a request completes when TCP has it.
 */
static int compose_word(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;

    if (!sending->needs_word || !sw_awaits_word(stream) || sending->has_word_due ||
        sending->asked >= stream->terms.outbound_depth)
        return 0;
    struct sw_out_frame *frame = new_frame(sending);
    struct sw_frame what = {
        .operation = SW_READ_REQUEST,
        .is_last = 1,
        .queue = SW_QUEUE_REQUEST,
        .sequence = next_sequence(sending, SW_QUEUE_REQUEST),
    };
    struct sw_read_request request = {.sink = ++sending->number};
    sw_read_request_write(frame->header + SW_UNTAGGED_HEADER, &request);
    add_frame(stream, frame, &what, SW_READ_REQUEST_SIZE); /* own bytes: this cannot fail */
    sending->needs_word = 0;
    sending->has_word_due = 1;
    sending->word_covers = stream->pair->next_send;
    sending->word_sink = request.sink;
    return 1;
}

static int compose_question(struct sw_stream *stream, struct sw_send *send)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_queue_pair *pair = stream->pair;
    struct sw_frame what = {.is_last = 1, .queue = SW_QUEUE_REQUEST};

    if (!stream->terms.outbound_depth)
        return fail_in_turn(stream, send, IBV_WC_LOC_QP_OP_ERR);
    if (!sw_is_reachable(pair, send, IBV_ACCESS_LOCAL_WRITE))
        return fail_in_turn(stream, send, IBV_WC_LOC_PROT_ERR);
    struct sw_out_frame *frame = new_frame(sending);
    char *own = frame->header + SW_UNTAGGED_HEADER;
    what.sequence = send->sequence = next_sequence(sending, SW_QUEUE_REQUEST);
    sending->needs_word = 0;
    send->sink = ++sending->number;
    send->progress = 0;
    send->stage = SW_ASKED;
    uint32_t size = SW_ATOMIC_REQUEST_SIZE;
    if (send->opcode == IBV_WR_RDMA_READ) {
        struct sw_read_request request = {
            .sink = send->sink,
            .size = send->length,
            .source = send->rkey,
            .source_offset = send->remote_address,
        };
        what.operation = SW_READ_REQUEST;
        size = SW_READ_REQUEST_SIZE;
        sw_read_request_write(own, &request);
    } else {
        struct sw_atomic_request request = {
            .operation = SW_FETCH_ADD,
            .number = send->sink,
            .stag = send->rkey,
            .offset = send->remote_address,
            .operand = send->compare_add,
        };
        if (send->opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
            request.operation = SW_COMPARE_SWAP;
            request.operand = send->swap;
            request.compare = send->compare_add;
            request.operand_mask = request.compare_mask = UINT64_MAX;
        }
        what.operation = SW_ATOMIC_REQUEST;
        sw_atomic_request_write(own, &request);
    }
    add_frame(stream, frame, &what, size); /* own bytes: this cannot fail */
    sw_is_asked(stream, pair->next_send);
    pair->next_send++;
    return 1;
}

static int carry_out(struct sw_stream *stream, struct sw_send *send)
{
    struct sw_queue_pair *pair = stream->pair;
    int failed;

    if (stream->sending.out_count)
        return 0; /* earlier frames can need the memory: send them first */
    if (send->opcode == IBV_WR_LOCAL_INV)
        failed = sw_invalidate(&pair->ibv, send->invalidated, 0) != SW_REACHED;
    else
        failed = sw_bind(&pair->ibv, send->window, send->window_key, &send->bind);
    if (failed)
        return fail_in_turn(stream, send, IBV_WC_MW_BIND_ERR);
    pair->next_send++;
    sw_end_send(pair, send, IBV_WC_SUCCESS);
    return 1;
}

/* Compose for the next request of the send queue. Returns whether it did something. */
static int compose_request(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_queue_pair *pair = stream->pair;

    if (pair->next_send == pair->end)
        return compose_word(stream);
    struct sw_send *send = &pair->sends[pair->next_send % pair->send_size];
    /* In SQD no request is begun, but a begun request continues. */
    if (pair->ibv.state != IBV_QPS_RTS && send->stage != SW_BEGUN)
        return compose_word(stream);
    if (send->flags & IBV_SEND_FENCE && sending->asked)
        return compose_word(stream);
    switch (send->opcode) {
    case IBV_WR_RDMA_READ:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        if (stream->terms.outbound_depth &&
            sending->asked + (uint32_t)sending->has_word_due >= stream->terms.outbound_depth)
            return compose_word(stream);
        return compose_question(stream, send);
    case IBV_WR_LOCAL_INV:
    case IBV_WR_BIND_MW:
        return carry_out(stream, send);
    default:
        return compose_piece(stream, send);
    }
}

/* -- answers ----------------------------------------------------------------------------------- */

/* The memory of the peer's request is not accessible any more. Send the earlier answers first. */
static int refuse_answer(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_sending *sending = &stream->sending;
    const struct sw_answer *answer = &sending->answers[sending->answer_first];
    struct sw_frame what = {
        .operation = answer->is_atomic ? SW_ATOMIC_REQUEST : SW_READ_REQUEST,
        .is_last = 1,
        .queue = SW_QUEUE_REQUEST,
        .sequence = answer->sequence,
        .payload = answer->is_atomic ? SW_ATOMIC_REQUEST_SIZE : SW_READ_REQUEST_SIZE,
    };

    if (sending->out_count)
        return 0;
    /* The TERMINATE refers to this request, not to the last frame. */
    receiving->blamed_size = sw_frame_write(receiving->blamed, &what);
    if (!answer->is_atomic) {
        sw_read_request_write(receiving->blamed + receiving->blamed_size, &answer->read);
        receiving->blamed_size += SW_READ_REQUEST_SIZE;
    }
    sw_stream_refused(stream, (struct sw_reason){SW_LAYER_RDMAP, 1, 0}); /* invalid STag */
    return 1;
}

static int answer_atomic(struct sw_stream *stream, const struct sw_atomic_request *request)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_out_frame *frame = new_frame(sending);
    struct sw_frame what = {
        .operation = SW_ATOMIC_RESPONSE, .is_last = 1, .queue = SW_QUEUE_ATOMIC};
    struct sw_memory memory;
    uint64_t before;

    if (sw_reach_remote(&stream->pair->ibv, request->stag, request->offset, 8,
                        IBV_ACCESS_REMOTE_ATOMIC, &memory) ||
        (uintptr_t)memory.at % 8 || sw_carry_out_atomic(request, memory, &before))
        return refuse_answer(stream);
    what.sequence = next_sequence(sending, SW_QUEUE_ATOMIC);
    sw_atomic_response_write(frame->header + SW_UNTAGGED_HEADER, request->number, before);
    add_frame(stream, frame, &what, SW_ATOMIC_RESPONSE_SIZE);
    sw_answer_is_sent(sending);
    return 1;
}

static int compose_answer(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;

    if (!sending->answer_count)
        return 0;
    struct sw_answer *answer = &sending->answers[sending->answer_first];
    if (answer->is_atomic)
        return answer_atomic(stream, &answer->atomic);
    struct sw_out_frame *frame = new_frame(sending);
    uint32_t left = answer->read.size - answer->done;
    frame->is_answer = 1;
    frame->payload = left < SW_MOST_PAYLOAD ? left : SW_MOST_PAYLOAD;
    frame->stag = answer->read.source;
    frame->address = answer->read.source_offset + answer->done;
    struct sw_frame what = {
        .operation = SW_READ_RESPONSE,
        .is_tagged = 1,
        .is_last = frame->payload == left,
        .stag = answer->read.sink,
        .offset = answer->read.sink_offset + answer->done,
    };
    int error = add_frame(stream, frame, &what, 0);
    if (error == ENOMEM) {
        sw_stream_starved(stream);
        return 1;
    }
    if (error)
        return refuse_answer(stream);
    answer->done += frame->payload;
    if (what.is_last)
        sw_answer_is_sent(sending);
    return 1;
}

/* -- sending frames ---------------------------------------------------------------------------- */

static void compose_announcement(struct sw_stream *stream)
{
    struct sw_frame what = {.operation = SW_WRITE, .is_tagged = 1, .is_last = 1};

    stream->sending.must_announce = 0;
    add_frame(stream, new_frame(&stream->sending), &what, 0);
}

/* Fill the queue of frames. The queue pair can fail by this. */
static void compose(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;

    if (stream->terms.must_hear_first && !stream->has_heard)
        return;
    if (sending->must_announce)
        compose_announcement(stream);
    while (stream->pair && sending->out_count < SW_OUT_FRAMES &&
           sending->part_count + SW_MOST_PARTS + 2 <= SW_OUT_PARTS &&
           sending->out_bytes < SW_OUT_BYTES) {
        /* In turn, so that READs of one side do not starve the messages of the other. */
        sending->answers_next = !sending->answers_next;
        if (sending->answers_next ? compose_answer(stream) : compose_request(stream))
            continue;
        if (!stream->pair)
            return;
        if (sending->answers_next ? compose_request(stream) : compose_answer(stream))
            continue;
        break;
    }
}

/*
 * Find the first waiting frame whose memory may not be read any more, because it was deregistered
 * after the frame was composed. NULL: there is none.
 */
static struct sw_out_frame *find_gone(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_memory memory;

    for (uint32_t i = 0; i < sending->out_count; i++) {
        struct sw_out_frame *frame = &sending->out[(sending->out_first + i) % SW_OUT_FRAMES];
        /* A key can have other memory by now (ibv_rereg_mr). */
        if (frame->is_answer && frame->payload &&
            (sw_reach_remote(&stream->pair->ibv, frame->stag, frame->address, frame->payload,
                             IBV_ACCESS_REMOTE_READ, &memory) ||
             memory.at != frame->memory))
            return frame;
        if (frame->send && frame->payload && !sw_is_reachable(stream->pair, frame->send, 0))
            return frame;
    }
    return NULL;
}

/* Remove the bytes that TCP has taken. */
static void advance(struct sw_stream *stream, size_t taken)
{
    struct sw_sending *sending = &stream->sending;

    sending->out_bytes -= (uint32_t)taken;
    for (size_t left = taken; left;) {
        struct iovec *part = &sending->parts[sending->part_first];
        if (left < part->iov_len) {
            part->iov_base = (char *)part->iov_base + left;
            part->iov_len -= left;
            break;
        }
        left -= part->iov_len;
        sending->part_first++;
    }
    while (sending->out_count) {
        struct sw_out_frame *frame = &sending->out[sending->out_first];
        if (taken < frame->left) {
            frame->left -= (uint32_t)taken;
            return;
        }
        taken -= frame->left;
        sending->out_first = (sending->out_first + 1) % SW_OUT_FRAMES;
        sending->out_count--;
        if (frame->ends && sw_awaits_word(stream))
            frame->send->stage = SW_SENT;
        else if (frame->ends)
            sw_end_send(stream->pair, frame->send, IBV_WC_SUCCESS);
    }
    sending->out_first = 0; /* the same memory for each message, not all of the ring's */
    sending->part_first = sending->part_count = 0;
    sw_give_blocks(sending->copies);
    sending->copies = NULL;
}

/* The memory of a composed frame is gone. */
static void fail_frame(struct sw_stream *stream, const struct sw_out_frame *frame)
{
    if (!frame->is_answer) {
        sw_stream_failed_send(stream, frame->send, IBV_WC_LOC_PROT_ERR);
        return;
    }
    stream->receiving.blamed_size = 0; /* its request may have left the ring */
    sw_stream_refused(stream, (struct sw_reason){SW_LAYER_RDMAP, 1, 0}); /* invalid STag */
}

void sw_transmit(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    int most_parts = SW_OUT_PARTS;

    sw_unhold(&sending->held);
    if (stream->is_dead)
        return;
    struct sw_out_frame *gone = find_gone(stream);
    if (gone) {
        fail_frame(stream, gone);
        return;
    }
    for (int has_sent = 0;;) {
        if (!sending->out_count)
            compose(stream);
        if (!stream->pair)
            return;
        if (!sending->out_count)
            break;
        /* A peer that reads as fast as this side writes must not keep the lock, or the posting
         * thread: the engine continues. With is_full, epoll reports only new space, so a timer is
         * used. */
        if (has_sent && sw_turn_is_over()) {
            if (stream->receiving.is_full)
                sw_stream_rest(stream);
            else
                sending->is_blocked = 1;
            break;
        }
        struct msghdr message = {
            .msg_iov = sending->parts + sending->part_first,
            .msg_iovlen = (size_t)(sending->part_count - sending->part_first),
        };
        if (message.msg_iovlen > (size_t)most_parts)
            message.msg_iovlen = (size_t)most_parts;
        ssize_t taken = sw_system->sendmsg(stream->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (taken < 0 && errno == EINTR)
            continue;
        if (taken < 0 && errno == EFAULT) {
            /* Not mapped any more. Send part by part, so that everything before it is sent. */
            if (message.msg_iovlen > 1) {
                most_parts = 1;
                continue;
            }
            fail_frame(stream, &sending->out[sending->out_first]);
            return;
        }
        /* If the peer has left, its TERMINATE may still wait to be read before the end. */
        if (taken < 0 && (errno == EAGAIN || errno == EPIPE || errno == ECONNRESET)) {
            sending->is_blocked = 1;
            break;
        }
        if (taken < 0) {
            sw_stream_broken(stream, errno);
            return;
        }
        sw_sent(stream->fd, message.msg_iov, (int)message.msg_iovlen, taken);
        advance(stream, (size_t)taken);
        if (stream->pair->works)
            stream->pair->works();
        if (sw_stream_carried(stream, (size_t)taken))
            return;
        sw_add_work((uint64_t)taken);
        has_sent = 1;
    }
    sw_stream_rewatch(stream);
}

/* -- answers that travel with messages --------------------------------------------------------- */

/*
 * If two programs send in turn, the answer to a READ of no bytes (compose_word) needs no packet of
 * its own: it travels with the program's next message. It is held only while the program can be
 * expected to post (progress.c), and only if the last messages were answered by posts.
 */
enum { CHATS = 4, AFTER_LATE = -16, AFTER_EARLY = 2 };

void sw_note_post(struct sw_sending *sending)
{
    if (sending->is_unanswered && sending->chats < CHATS)
        sending->chats++;
    sending->is_unanswered = 0;
}

void sw_note_message(struct sw_sending *sending)
{
    if (sending->is_unanswered && sending->chats > 0)
        sending->chats = 0;
    sending->is_unanswered = 1;
}

void sw_nothing_took_it(struct sw_held *held, int is_late)
{
    struct sw_stream *stream = SW_CONTAINER(held, struct sw_stream, sending.held);

    stream->sending.chats = is_late ? AFTER_LATE : AFTER_EARLY;
    sw_transmit(stream);
}

static int can_wait(const struct sw_stream *stream)
{
    const struct sw_sending *sending = &stream->sending;
    const struct sw_queue_pair *pair = stream->pair;

    if (sending->chats < CHATS || !sending->is_unanswered || !stream->member.progress ||
        !stream->member.progress->serves || sending->out_count || !sending->answer_count ||
        pair->next_send != pair->end || sending->needs_word)
        return 0;
    for (uint32_t i = 0; i < sending->answer_count; i++) {
        const struct sw_answer *answer =
            &sending->answers[(sending->answer_first + i) % sending->answer_size];
        if (answer->is_atomic || answer->read.size)
            return 0;
    }
    return 1;
}

void sw_reply(struct sw_stream *stream)
{
    if (can_wait(stream))
        sw_hold(stream->member.progress, &stream->sending.held);
    else
        sw_transmit(stream);
}
