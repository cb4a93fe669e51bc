/*
 * What a frame that arrives does: it is checked, and its payload is placed: in a posted receive, a
 * region, or the parts of a READ. Every number in a frame comes from a peer, which can be hostile.
 */
#include "delivery.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>

#include "transmit.h"

enum { FEW_ANSWERS = 4 };

/*
 * The reason for a message that does not belong there, and for what the queue pair accepts from no
 * peer, however its memory was registered: an operation that its access flags forbid, or an atomic
 * on memory that is not aligned. InfiniBand calls both an invalid request, not an access error.
 */
static const struct sw_reason UNEXPECTED = {SW_LAYER_RDMAP, 2, 6};

/* DDP's reasons for an untagged message: it does not follow the one before, its frame does not
   follow the one before, and it does not fit. */
static const struct sw_reason WRONG_SEQUENCE = {SW_LAYER_DDP, 2, 3};
static const struct sw_reason WRONG_OFFSET = {SW_LAYER_DDP, 2, 4};
static const struct sw_reason WRONG_LENGTH = {SW_LAYER_DDP, 2, 5};

static struct sw_reason access_reason(enum sw_refusal refusal)
{
    static const uint8_t codes[] = {
        [SW_NO_KEY] = 0, [SW_BOUNDS] = 1, [SW_ACCESS] = 2, [SW_DOMAIN] = 3, [SW_WRAP] = 4};

    return (struct sw_reason){SW_LAYER_RDMAP, 1, codes[refusal]};
}

/* DDP's codes for the same refusals, of a tagged message. */
static struct sw_reason tagged_reason(enum sw_refusal refusal)
{
    static const uint8_t codes[] = {
        [SW_NO_KEY] = 0, [SW_BOUNDS] = 1, [SW_DOMAIN] = 2, [SW_WRAP] = 3};

    if (refusal == SW_ACCESS)
        return access_reason(refusal);
    return (struct sw_reason){SW_LAYER_DDP, 1, codes[refusal]};
}

int sw_refuse_frame(struct sw_stream *stream, struct sw_reason reason)
{
    sw_stream_refused(stream, reason);
    return -1;
}

static int permits(const struct sw_stream *stream, unsigned int access)
{
    return (stream->pair->attributes.qp_access_flags & access) == access;
}

/* -- the beginning of a frame ------------------------------------------------------------------ */

/* Check that an untagged frame is the next one, at this offset of its message. */
static int begin_untagged(struct sw_stream *stream, uint32_t offset)
{
    const struct sw_frame *frame = &stream->receiving.frame;

    if (frame->sequence != stream->receiving.expected[frame->queue])
        return sw_refuse_frame(stream, WRONG_SEQUENCE);
    return frame->message_offset == offset ? 1 : sw_refuse_frame(stream, WRONG_OFFSET);
}

static uint32_t room_of(const struct sw_receive *receive)
{
    uint64_t room = 0;

    for (int i = 0; i < receive->part_count; i++)
        room += receive->parts[i].length;
    return room > UINT32_MAX ? UINT32_MAX : (uint32_t)room;
}

static int begin_send(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_queue_pair *pair = stream->pair;
    int result = begin_untagged(stream, pair->has_taken ? receiving->message_size : 0);

    if (result != 1)
        return result;
    if (!pair->has_taken) {
        if (!sw_take_receive(pair, 1))
            return 0;
        receiving->message_size = 0;
    }
    if (receiving->frame.payload > room_of(&pair->taken) - receiving->message_size) {
        struct ibv_wc completion = {.status = IBV_WC_LOC_LEN_ERR, .opcode = IBV_WC_RECV};
        sw_finish_receive(pair, &completion, 0);
        return sw_refuse_frame(stream, WRONG_LENGTH);
    }
    return 1;
}

static int begin_write(struct sw_stream *stream)
{
    const struct sw_frame *frame = &stream->receiving.frame;
    struct sw_memory memory;

    if (!frame->payload && frame->is_last)
        return 1; /* accesses nothing, like the announcement */
    if (!permits(stream, IBV_ACCESS_REMOTE_WRITE))
        return sw_refuse_frame(stream, UNEXPECTED);
    enum sw_refusal refusal = sw_reach_remote(&stream->pair->ibv, frame->stag, frame->offset,
                                              frame->payload, IBV_ACCESS_REMOTE_WRITE, &memory);
    return refusal ? sw_refuse_frame(stream, tagged_reason(refusal)) : 1;
}

static int begin_read_response(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    const struct sw_frame *frame = &stream->receiving.frame;
    uint32_t counter;
    const struct sw_send *send = sw_first_asked(stream, &counter);

    if (!send && sending->has_word_due) {
        if (frame->stag != sending->word_sink)
            return sw_refuse_frame(stream, tagged_reason(SW_NO_KEY));
        if (frame->offset || frame->payload || !frame->is_last)
            return sw_refuse_frame(stream, tagged_reason(SW_BOUNDS));
        return 1;
    }
    if (!send || send->opcode != IBV_WR_RDMA_READ || frame->stag != send->sink)
        return sw_refuse_frame(stream, tagged_reason(SW_NO_KEY));
    if (frame->offset != send->progress || frame->payload > send->length - send->progress ||
        (frame->is_last && frame->payload != send->length - send->progress))
        return sw_refuse_frame(stream, tagged_reason(SW_BOUNDS));
    /* It carries nothing, and there is no limit to such frames: they would keep the answer due. */
    if (!frame->payload && !frame->is_last)
        return sw_refuse_frame(stream, tagged_reason(SW_BOUNDS));
    return 1;
}

static int begin_immediate(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_queue_pair *pair = stream->pair;
    const char *payload = sw_waiting_bytes(receiving->from) + receiving->frame.header;
    uint32_t immediate, belongs;

    if (receiving->frame.payload != SW_IMMEDIATE_SIZE || pair->has_taken)
        return sw_refuse_frame(stream, UNEXPECTED);
    sw_immediate_read(payload, &immediate, &belongs);
    if (belongs == SW_OF_SEND)
        return receiving->has_immediate ? sw_refuse_frame(stream, UNEXPECTED) : 1;
    return sw_take_receive(pair, 1);
}

/* Check a message that is one small frame with its own sequence number. */
static int begin_whole(struct sw_stream *stream, uint32_t size)
{
    const struct sw_frame *frame = &stream->receiving.frame;
    int result = begin_untagged(stream, 0);

    if (result == 1 && (!frame->is_last || frame->payload != size))
        return sw_refuse_frame(stream, WRONG_LENGTH);
    return result;
}

/* Grow the ring of answers. Most peers have few outstanding requests. */
static int grow_answers(struct sw_sending *sending, uint32_t depth)
{
    uint32_t size = sending->answer_size;
    uint32_t more = size ? 2 * size : FEW_ANSWERS;

    if (more > depth)
        more = depth;
    struct sw_answer *answers = calloc(more, sizeof(*answers));
    if (!answers)
        return ENOMEM;
    for (uint32_t i = 0; i < sending->answer_count; i++)
        answers[i] = sending->answers[(sending->answer_first + i) % size];
    free(sending->answers);
    sending->answers = answers;
    sending->answer_size = more;
    sending->answer_first = 0;
    return 0;
}

static int begin_question(struct sw_stream *stream, uint32_t size)
{
    struct sw_sending *sending = &stream->sending;
    int result = begin_whole(stream, size);

    if (result != 1)
        return result;
    /* The peer has more outstanding requests than agreed. */
    if (sending->answer_count >= stream->terms.inbound_depth)
        return sw_refuse_frame(stream, (struct sw_reason){SW_LAYER_DDP, 2, 2});
    if (sending->answer_count == sending->answer_size &&
        grow_answers(sending, stream->terms.inbound_depth)) {
        sw_stream_starved(stream);
        return -1;
    }
    return 1;
}

int sw_begin_frame(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;

    switch (receiving->frame.operation) {
    case SW_WRITE:
        return begin_write(stream);
    case SW_READ_RESPONSE:
        return begin_read_response(stream);
    case SW_READ_REQUEST:
        return begin_question(stream, SW_READ_REQUEST_SIZE);
    case SW_ATOMIC_REQUEST:
        return begin_question(stream, SW_ATOMIC_REQUEST_SIZE);
    case SW_ATOMIC_RESPONSE:
        return begin_whole(stream, SW_ATOMIC_RESPONSE_SIZE);
    case SW_IMMEDIATE:
    case SW_IMMEDIATE_SOLICITED: {
        int result = begin_whole(stream, SW_IMMEDIATE_SIZE);
        return result == 1 ? begin_immediate(stream) : result;
    }
    case SW_TERMINATE:
        return receiving->frame.payload <= SW_MOST_TERMINATE ? 1
                                                             : sw_refuse_frame(stream, UNEXPECTED);
    default:
        return begin_send(stream);
    }
}

/* -- placing payload --------------------------------------------------------------------------- */

int sw_has_payload(enum sw_operation operation)
{
    switch (operation) {
    case SW_WRITE:
    case SW_READ_RESPONSE:
    case SW_SEND:
    case SW_SEND_INVALIDATE:
    case SW_SEND_SOLICITED:
    case SW_SEND_SOLICITED_INVALIDATE:
        return 1;
    default:
        return 0;
    }
}

static int locate_parts(struct sw_stream *stream, const struct ibv_sge *parts, int count,
                        uint32_t offset, uint32_t size, struct sw_piece *to)
{
    struct sw_span span = {stream->pair->ibv.pd, parts, count, offset, size};
    int found = 0;

    while (span.size)
        if (sw_next_piece(&span, IBV_ACCESS_LOCAL_WRITE, &to[found++]))
            return -1;
    return found;
}

/* Fail a request whose answer cannot be placed. */
static int fail_asked(struct sw_stream *stream, struct sw_send *send, uint32_t counter,
                      enum ibv_wc_status status)
{
    sw_end_sent(stream->pair, counter); /* the earlier ones were carried out */
    sw_stream_failed_send(stream, send, status);
    return -1;
}

int sw_fail_payload(struct sw_stream *stream, enum sw_refusal refusal)
{
    struct ibv_wc completion = {.status = IBV_WC_LOC_PROT_ERR, .opcode = IBV_WC_RECV};
    struct sw_send *send;
    uint32_t counter;

    switch (stream->receiving.frame.operation) {
    case SW_WRITE:
        return sw_refuse_frame(stream, tagged_reason(refusal));
    case SW_READ_RESPONSE:
        send = sw_first_asked(stream, &counter);
        if (!send)
            return sw_refuse_frame(stream, tagged_reason(SW_NO_KEY));
        return fail_asked(stream, send, counter, IBV_WC_LOC_PROT_ERR);
    default:
        sw_finish_receive(stream->pair, &completion, 0);
        return sw_refuse_frame(stream, (struct sw_reason){SW_LAYER_RDMAP, 0, 0});
    }
}

int sw_locate_payload(struct sw_stream *stream, uint32_t size, struct sw_piece *to)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_queue_pair *pair = stream->pair;
    const struct sw_frame *frame = &receiving->frame;
    enum sw_refusal refusal = SW_NO_KEY; /* only used for a peer's access */
    struct sw_send *send;
    uint32_t counter;
    int found = -1;

    switch (frame->operation) {
    case SW_WRITE:
        refusal = sw_reach_remote(&pair->ibv, frame->stag, frame->offset + receiving->placed, size,
                                  IBV_ACCESS_REMOTE_WRITE, &to->memory);
        to->size = size;
        found = refusal ? -1 : 1;
        break;
    case SW_READ_RESPONSE:
        send = sw_first_asked(stream, &counter);
        if (send)
            found = locate_parts(stream, send->parts, send->part_count, send->progress, size, to);
        break;
    default:
        found = locate_parts(stream, pair->taken.parts, pair->taken.part_count,
                             receiving->message_size, size, to);
    }
    return found < 0 ? sw_fail_payload(stream, refusal) : found;
}

void sw_count_payload(struct sw_stream *stream, uint32_t size)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_send *send;
    uint32_t counter;

    receiving->placed += size;
    switch (receiving->frame.operation) {
    case SW_WRITE:
        receiving->written += size;
        break;
    case SW_READ_RESPONSE:
        send = sw_first_asked(stream, &counter);
        if (send)
            send->progress += size;
        break;
    default:
        receiving->message_size += size;
    }
}

int sw_place_last_bytes(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    const struct sw_frame *frame = &receiving->frame;
    uint32_t late = receiving->is_scrambled ? 0 : sw_system->late(frame->payload);
    struct sw_memory to;

    receiving->is_scrambled = late != 0;
    if (!late || sw_reach_remote(&stream->pair->ibv, frame->stag, frame->offset + late,
                                 frame->payload - late, IBV_ACCESS_REMOTE_WRITE, &to))
        return 0;
    if (sw_copy_to(to, sw_waiting_bytes(receiving->from) + late, frame->payload - late))
        return 0;
    return !sw_call_later(&stream->rest, 1);
}

int sw_place_payload(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    uint32_t here = sw_waiting_size(receiving->from);
    uint32_t left = receiving->frame.payload - receiving->placed;
    struct sw_piece parts[SW_MOST_PARTS];

    if (here > left)
        here = left;
    if (!here)
        return 0;
    int count = sw_locate_payload(stream, here, parts);
    if (count < 0)
        return -1;
    for (int i = 0; i < count; i++) {
        if (sw_copy_to(parts[i].memory, sw_waiting_bytes(receiving->from), parts[i].size))
            return sw_fail_payload(stream, SW_BOUNDS);
        receiving->from->start += parts[i].size;
    }
    sw_count_payload(stream, here);
    return 0;
}

/* -- the end of a frame: 0, or -1: the queue pair has failed ----------------------------------- */

static int end_send(struct sw_stream *stream)
{
    struct sw_receiving *receiving = &stream->receiving;
    struct sw_queue_pair *pair = stream->pair;
    const struct sw_frame *frame = &receiving->frame;
    int solicits =
        frame->operation == SW_SEND_SOLICITED || frame->operation == SW_SEND_SOLICITED_INVALIDATE;

    if (!frame->is_last)
        return 0;
    receiving->expected[SW_QUEUE_SEND]++;
    struct ibv_wc completion = {
        .status = IBV_WC_SUCCESS,
        .opcode = IBV_WC_RECV,
        .byte_len = receiving->message_size,
    };
    if (frame->operation == SW_SEND_INVALIDATE ||
        frame->operation == SW_SEND_SOLICITED_INVALIDATE) {
        if (sw_invalidate(&pair->ibv, frame->invalidated, 1)) {
            completion.status = IBV_WC_LOC_ACCESS_ERR;
            sw_finish_receive(pair, &completion, 0);
            return sw_refuse_frame(stream, (struct sw_reason){SW_LAYER_RDMAP, 1, 9});
        }
        completion.wc_flags = IBV_WC_WITH_INV;
        completion.invalidated_rkey = frame->invalidated;
    } else if (receiving->has_immediate) {
        completion.wc_flags = IBV_WC_WITH_IMM;
        completion.imm_data = htonl(receiving->immediate);
    }
    receiving->has_immediate = 0;
    receiving->message_size = 0;
    sw_note_message(&stream->sending);
    sw_finish_receive(pair, &completion, solicits);
    return 0;
}

static int end_immediate(struct sw_stream *stream, const char *payload)
{
    struct sw_receiving *receiving = &stream->receiving;
    uint32_t belongs;

    receiving->expected[SW_QUEUE_SEND]++;
    sw_immediate_read(payload, &receiving->immediate, &belongs);
    if (belongs == SW_OF_SEND) {
        receiving->has_immediate = 1;
        return 0;
    }
    struct ibv_wc completion = {
        .status = IBV_WC_SUCCESS,
        .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
        .byte_len = receiving->written,
        .wc_flags = IBV_WC_WITH_IMM,
        .imm_data = htonl(receiving->immediate),
    };
    sw_note_message(&stream->sending);
    sw_finish_receive(stream->pair, &completion,
                      receiving->frame.operation == SW_IMMEDIATE_SOLICITED);
    return 0;
}

/* Return the next answer, which is not counted yet. begin_question has made room for it. */
static struct sw_answer *new_answer(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    uint32_t at = (sending->answer_first + sending->answer_count) % sending->answer_size;

    stream->receiving.expected[SW_QUEUE_REQUEST]++;
    sending->answers[at] = (struct sw_answer){.sequence = stream->receiving.frame.sequence};
    return &sending->answers[at];
}

/* Check the peer's access to memory: 0, or -1. */
static int check_access(struct sw_stream *stream, uint32_t stag, uint64_t offset, uint32_t size,
                        unsigned int access, struct sw_memory *memory)
{
    if (!permits(stream, access))
        return sw_refuse_frame(stream, UNEXPECTED);
    enum sw_refusal refusal =
        sw_reach_remote(&stream->pair->ibv, stag, offset, size, access, memory);
    return refusal ? sw_refuse_frame(stream, access_reason(refusal)) : 0;
}

static int end_read_request(struct sw_stream *stream, const char *payload)
{
    struct sw_answer *answer = new_answer(stream);
    struct sw_read_request *read = &answer->read;
    struct sw_memory memory;

    sw_read_request_read(payload, read);
    if (read->size && check_access(stream, read->source, read->source_offset, read->size,
                                   IBV_ACCESS_REMOTE_READ, &memory))
        return -1;
    stream->sending.answer_count++;
    return 0;
}

static int end_atomic_request(struct sw_stream *stream, const char *payload)
{
    struct sw_answer *answer = new_answer(stream);
    struct sw_atomic_request *atomic = &answer->atomic;
    struct sw_memory memory;

    answer->is_atomic = 1;
    sw_atomic_request_read(payload, atomic);
    if (atomic->operation != SW_FETCH_ADD && atomic->operation != SW_COMPARE_SWAP)
        return sw_refuse_frame(stream, UNEXPECTED);
    if (check_access(stream, atomic->stag, atomic->offset, 8, IBV_ACCESS_REMOTE_ATOMIC, &memory))
        return -1;
    if ((uintptr_t)memory.at % 8)
        return sw_refuse_frame(stream, UNEXPECTED);
    stream->sending.answer_count++;
    return 0;
}

/* An answer confirms everything that was sent before its request. */
static void answered(struct sw_stream *stream, struct sw_send *send, uint32_t counter)
{
    sw_is_answered(stream);
    sw_end_sent(stream->pair, counter);
    sw_end_send(stream->pair, send, IBV_WC_SUCCESS);
}

static int end_atomic_response(struct sw_stream *stream, const char *payload)
{
    uint32_t counter, number;
    struct sw_send *send = sw_first_asked(stream, &counter);
    uint64_t value;

    stream->receiving.expected[SW_QUEUE_ATOMIC]++;
    sw_atomic_response_read(payload, &number, &value);
    if (!send || send->opcode == IBV_WR_RDMA_READ || number != send->sink)
        return sw_refuse_frame(stream, UNEXPECTED);
    enum ibv_wc_status status =
        sw_scatter(stream->pair->ibv.pd, send->parts, send->part_count, 0, &value, sizeof(value));
    if (status)
        return fail_asked(stream, send, counter, status);
    answered(stream, send, counter);
    return 0;
}

static int end_read_response(struct sw_stream *stream)
{
    struct sw_sending *sending = &stream->sending;
    uint32_t counter;
    struct sw_send *send = sw_first_asked(stream, &counter);

    if (!stream->receiving.frame.is_last)
        return 0;
    if (send) {
        answered(stream, send, counter);
    } else {
        sending->has_word_due = 0;
        sw_end_sent(stream->pair, sending->word_covers);
    }
    return 0;
}

static int is_question(const struct sw_send *send)
{
    return send->opcode == IBV_WR_RDMA_READ || send->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
           send->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static enum ibv_wc_status status_of(const struct sw_reason *reason, const struct sw_send *send)
{
    if (reason->layer == SW_LAYER_RDMAP && reason->type == 1)
        return IBV_WC_REM_ACCESS_ERR;
    if (reason->layer == UNEXPECTED.layer && reason->type == UNEXPECTED.type &&
        reason->code == UNEXPECTED.code)
        return IBV_WC_REM_INV_REQ_ERR;
    if (reason->layer == SW_LAYER_DDP && reason->type == 1)
        return IBV_WC_REM_ACCESS_ERR;
    /* siw (Linux 6.1) exchanges layer and type. DDP's type 0 has code 0. */
    if (reason->layer == SW_LAYER_DDP && reason->type == 0 && reason->code)
        return IBV_WC_REM_ACCESS_ERR;
    /* Without a buffer: a message has no receive, a question is beyond the peer's depth. */
    if (reason->layer == SW_LAYER_DDP && reason->type == 2)
        return reason->code == 2 && !is_question(send) ? IBV_WC_RNR_RETRY_EXC_ERR
                                                       : IBV_WC_REM_INV_REQ_ERR;
    return IBV_WC_REM_OP_ERR;
}

/* Whether the header in a TERMINATE belongs to a frame of this request. */
static int is_of(const struct sw_send *send, const struct sw_frame *header)
{
    int is_write = send->opcode == IBV_WR_RDMA_WRITE || send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;

    if (send->stage == SW_DONE)
        return 0;
    if (header->is_tagged)
        return is_write && header->stag == send->rkey &&
               header->offset - send->remote_address < send->length;
    if (header->queue == SW_QUEUE_REQUEST)
        return is_question(send) && header->sequence == send->sequence;
    return !is_question(send) && (!is_write || send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) &&
           header->queue == SW_QUEUE_SEND && header->sequence == send->sequence;
}

/* Find the request that a TERMINATE refers to; without a header the oldest one. NULL: none. */
static struct sw_send *find_blamed(struct sw_stream *stream, const char *header, uint32_t size)
{
    struct sw_sending *sending = &stream->sending;
    struct sw_queue_pair *pair = stream->pair;
    struct sw_frame frame;
    struct sw_reason reason;

    if (sw_frame_read(header, size, &frame, &reason) != 1)
        return sw_first_unended(stream);
    /* A partly sent request counts, too. */
    for (uint32_t at = pair->oldest; at != pair->end; at++) {
        struct sw_send *send = &pair->sends[at % pair->send_size];
        if (at == pair->next_send && !sending->offset && !sending->sent_immediate)
            break;
        if (is_of(send, &frame)) {
            sw_end_sent(pair, at); /* the earlier ones were carried out */
            return send;
        }
        if (at == pair->next_send)
            break;
    }
    return sw_first_unended(stream);
}

/* The peer ends the connection, and states the reason. */
static int end_terminate(struct sw_stream *stream, const char *payload)
{
    uint32_t size = stream->receiving.frame.payload, header = 4;
    struct sw_reason reason;

    if (!sw_terminate_read(payload, size, &reason)) {
        struct sw_send *send = find_blamed(stream, payload + header, size - header);
        if (send)
            sw_end_send(stream->pair, send, status_of(&reason, send));
    }
    stream->pair->broken = ECONNABORTED;
    sw_queue_pair_failed(stream->pair);
    return -1;
}

int sw_end_frame(struct sw_stream *stream, const char *payload)
{
    struct sw_receiving *receiving = &stream->receiving;

    switch (receiving->frame.operation) {
    case SW_WRITE:
        receiving->is_writing = !receiving->frame.is_last;
        return 0;
    case SW_READ_RESPONSE:
        return end_read_response(stream);
    case SW_READ_REQUEST:
        return end_read_request(stream, payload);
    case SW_ATOMIC_REQUEST:
        return end_atomic_request(stream, payload);
    case SW_ATOMIC_RESPONSE:
        return end_atomic_response(stream, payload);
    case SW_IMMEDIATE:
    case SW_IMMEDIATE_SOLICITED:
        return end_immediate(stream, payload);
    case SW_TERMINATE:
        return end_terminate(stream, payload);
    default:
        return end_send(stream);
    }
}
