/*
 * The responder. Packets are carried out in the order of their numbers. One that comes too early is
 * dropped, and the peer is told which one is missing. One that comes again is answered again, and
 * not carried out again. Every number in a packet comes from the network, which can be hostile.
 */
#include "roce_responder.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "atomic.h"
#include "engine.h"

enum { MOST_ANSWER_BYTES = 64 << 10 }; /* of a turn */

static int permits(const struct sw_packets *packets, unsigned int access)
{
    return (packets->pair->attributes.qp_access_flags & access) == access;
}

/* -- answers -------------------------------------------------------------------------------------- */

static int has_answers(const struct sw_responder *responder)
{
    return responder->answer_next != responder->answer_end;
}

static struct sw_roce_answer *answer_at(const struct sw_responder *responder, uint32_t counter)
{
    return &responder->answers[counter % responder->answer_size];
}

/* The last word: the peer, then the program, learn that the queue pair failed. */
static void fail(struct sw_packets *packets)
{
    struct sw_queue_pair *pair = packets->pair;
    int is_access = packets->responder.due == SW_ACCESS_ERROR;

    pair->broken = is_access ? EACCES : EPROTO;
    sw_raise_queue_pair(&pair->ibv, is_access ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
    sw_queue_pair_failed(pair);
}

/* Send the acknowledgement that is due, unless answers have to be sent before it. */
static void acknowledge(struct sw_packets *packets)
{
    struct sw_responder *responder = &packets->responder;
    /* An acknowledgement names the last packet that was carried out, another answer the next. */
    int is_positive = (responder->due & SW_KIND) == SW_ACKNOWLEDGED;
    struct sw_roce_packet packet = {
        .opcode = SW_RC_ACKNOWLEDGE,
        .psn = sw_psn(responder->psn - (is_positive ? 1 : 0)),
        .syndrome = responder->due,
        .messages = responder->messages & 0xffffff,
    };

    if (!responder->is_due || has_answers(responder))
        return;
    responder->is_due = 0;
    sw_packet_add(packets, sw_packet_begin(packets, &packet), 0);
    sw_roce_port_flush();
    if (responder->is_ending)
        fail(packets);
}

/* An acknowledgement is sent once for all packets of a burst; a refusal is never replaced. */
static void owe(struct sw_packets *packets, uint8_t syndrome)
{
    struct sw_responder *responder = &packets->responder;

    if (!packets->is_reliable)
        return;
    if (!responder->is_due || (responder->due & SW_KIND) == SW_ACKNOWLEDGED)
        responder->due = syndrome;
    responder->is_due = 1;
    sw_roce_port_after(&packets->due);
}

/* The request cannot be carried out: the connection ends. (UC: only this message.) */
static void refuse(struct sw_packets *packets, uint8_t syndrome)
{
    struct sw_responder *responder = &packets->responder;

    responder->message = 0;
    if (!packets->is_reliable)
        return;
    responder->is_ending = 1;
    responder->is_due = 0;
    owe(packets, syndrome);
}

/* Compose the next packet of an answer. EACCES: the memory is no longer accessible. */
static int send_answer(struct sw_packets *packets, struct sw_roce_answer *answer)
{
    struct sw_memory memory;
    struct sw_roce_packet packet = {
        .psn = sw_psn(answer->psn + answer->sent),
        .syndrome = SW_ACKNOWLEDGED | SW_NO_CREDITS,
        .messages = packets->responder.messages & 0xffffff,
        .original = answer->original,
    };
    int is_first = !answer->sent, is_last = answer->sent + 1 == answer->packets;

    if (answer->is_atomic) {
        packet.opcode = SW_RC_ATOMIC_ACKNOWLEDGE;
        sw_packet_add(packets, sw_packet_begin(packets, &packet), 0);
        return 0;
    }
    packet.opcode = is_first  ? is_last ? SW_RC_READ_RESPONSE_ONLY : SW_RC_READ_RESPONSE_FIRST
                    : is_last ? SW_RC_READ_RESPONSE_LAST
                              : SW_RC_READ_RESPONSE_MIDDLE;
    packet.size = sw_packet_size(packets, answer->length, answer->sent);
    uint8_t *payload = sw_packet_begin(packets, &packet);
    if (packet.size && (sw_reach_remote(&packets->pair->ibv, answer->rkey,
                                        answer->address + (uint64_t)answer->sent * packets->mtu,
                                        packet.size, IBV_ACCESS_REMOTE_READ, &memory) ||
                        sw_copy_from(payload, memory, packet.size)))
        return EACCES;
    sw_packet_add(packets, payload, packet.size);
    return 0;
}

void sw_responder_answers(struct sw_packets *packets)
{
    struct sw_responder *responder = &packets->responder;
    uint32_t sent = 0;

    while (has_answers(responder)) {
        struct sw_roce_answer *answer = answer_at(responder, responder->answer_next);
        if (sent >= MOST_ANSWER_BYTES) {
            sw_roce_port_flush();
            (void)sw_call_later(&responder->rest, 0);
            return;
        }
        if (send_answer(packets, answer)) {
            responder->answer_next = responder->answer_end;
            refuse(packets, SW_ACCESS_ERROR);
            break;
        }
        sent += packets->mtu;
        if (++answer->sent == answer->packets)
            responder->answer_next++;
    }
    sw_roce_port_flush();
    acknowledge(packets);
}

static void rested(struct sw_timer *timer)
{
    sw_responder_answers(SW_CONTAINER(timer, struct sw_packets, responder.rest));
}

/* The peer repeats a request. Answer it and all later ones again, if that is not due anyway. */
static void answer_again(struct sw_packets *packets, uint32_t psn)
{
    struct sw_responder *responder = &packets->responder;
    uint32_t kept = responder->answer_end < responder->answer_size ? responder->answer_end
                                                                   : responder->answer_size;

    for (uint32_t at = responder->answer_next - 1; at + 1 + kept > responder->answer_end; at--) {
        struct sw_roce_answer *answer = answer_at(responder, at);
        int32_t packet = sw_psn_after(psn, answer->psn);
        if (packet < 0)
            continue;
        if ((uint32_t)packet >= answer->packets)
            return; /* it was not a READ or an atomic */
        answer->sent = (uint32_t)packet;
        for (uint32_t later = at + 1; later != responder->answer_end; later++)
            answer_at(responder, later)->sent = 0;
        responder->answer_next = at;
        sw_roce_port_after(&packets->due);
        return;
    }
}

/* -- requests ------------------------------------------------------------------------------------- */

static void advance(struct sw_responder *responder, uint32_t by)
{
    responder->psn = sw_psn(responder->psn + by);
    responder->has_complained = 0;
}

static struct sw_roce_answer *new_answer(struct sw_packets *packets,
                                         const struct sw_roce_packet *packet)
{
    struct sw_responder *responder = &packets->responder;

    /* The peer has more outstanding requests than agreed. */
    if (responder->answer_end - responder->answer_next >= responder->answer_size)
        return NULL;
    struct sw_roce_answer *answer = answer_at(responder, responder->answer_end);
    memset(answer, 0, sizeof(*answer));
    answer->psn = packet->psn;
    answer->address = packet->address;
    answer->rkey = packet->rkey;
    answer->length = packet->length;
    answer->packets = sw_packet_count(packets, packet->length);
    return answer;
}

static void answered(struct sw_packets *packets, const struct sw_roce_answer *answer)
{
    struct sw_responder *responder = &packets->responder;

    responder->answer_end++;
    responder->messages++;
    advance(responder, answer->packets);
    sw_roce_port_after(&packets->due);
}

static void read_requested(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_roce_answer *answer = new_answer(packets, packet);
    struct sw_memory memory;

    if (!answer || packet->length > SW_MOST_MESSAGE || !permits(packets, IBV_ACCESS_REMOTE_READ))
        refuse(packets, SW_INVALID_REQUEST);
    else if (packet->length && sw_reach_remote(&packets->pair->ibv, packet->rkey, packet->address,
                                               packet->length, IBV_ACCESS_REMOTE_READ, &memory))
        refuse(packets, SW_ACCESS_ERROR);
    else
        answered(packets, answer);
}

static void atomic_requested(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_roce_answer *answer = new_answer(packets, packet);
    struct sw_atomic_request request = {.operation = SW_FETCH_ADD, .operand = packet->swap_add};
    struct sw_memory memory;

    if (packet->opcode == SW_RC_COMPARE_SWAP) {
        request.operation = SW_COMPARE_SWAP;
        request.compare = packet->compare;
        request.operand_mask = request.compare_mask = UINT64_MAX;
    }
    if (!answer || !permits(packets, IBV_ACCESS_REMOTE_ATOMIC) || packet->address % 8) {
        refuse(packets, SW_INVALID_REQUEST);
    } else if (sw_reach_remote(&packets->pair->ibv, packet->rkey, packet->address, 8,
                               IBV_ACCESS_REMOTE_ATOMIC, &memory)) {
        refuse(packets, SW_ACCESS_ERROR);
    } else if ((uintptr_t)memory.at % 8) { /* through a window, whose addresses begin at 0 */
        refuse(packets, SW_INVALID_REQUEST);
    } else if (sw_carry_out_atomic(&request, memory, &answer->original)) {
        refuse(packets, SW_ACCESS_ERROR);
    } else {
        answer->is_atomic = 1;
        answer->packets = 1;
        answered(packets, answer);
    }
}

/* Whether the packet can follow the last one: its place in a message, and its size. */
static int is_valid(const struct sw_packets *packets, const struct sw_roce_packet *packet,
                    unsigned int parts)
{
    const unsigned int kind = parts & (SW_IS_SEND | SW_IS_WRITE);
    const unsigned int before = packets->responder.message;

    if (kind && !(parts & SW_IS_FIRST) ? before != kind : before != 0)
        return 0;
    if (!kind)
        return !packet->size;
    if (!(parts & SW_IS_LAST))
        return packet->size == packets->mtu;
    return packet->size <= packets->mtu && (packet->size || parts & SW_IS_FIRST);
}

static uint64_t room_of(const struct sw_receive *receive)
{
    uint64_t room = 0;

    for (int i = 0; i < receive->part_count; i++)
        room += receive->parts[i].length;
    return room;
}

/* Take a receive. 0: there is none, and the peer is told to wait. */
static int take_receive(struct sw_packets *packets)
{
    struct sw_queue_pair *pair = packets->pair;

    if (pair->has_taken || sw_take_receive(pair, 0))
        return 1;
    if (packets->is_reliable)
        owe(packets, SW_NOT_READY | pair->attributes.min_rnr_timer);
    else
        packets->responder.message = 0;
    packets->responder.has_complained = 1; /* the peer knows that it has to repeat the later ones */
    return 0;
}

static void finish(struct sw_packets *packets, enum ibv_wc_status status,
                   const struct sw_roce_packet *packet, enum ibv_wc_opcode opcode)
{
    unsigned int parts = sw_roce_parts((uint8_t)packet->opcode);
    struct ibv_wc completion = {
        .status = status,
        .opcode = opcode,
        .byte_len = packets->responder.arrived,
        .src_qp = packets->pair->attributes.dest_qp_num,
    };

    if (parts & SW_HAS_IMMEDIATE) {
        completion.wc_flags = IBV_WC_WITH_IMM;
        completion.imm_data = packet->immediate;
    } else if (parts & SW_HAS_INVALIDATE) {
        completion.wc_flags = IBV_WC_WITH_INV;
        completion.invalidated_rkey = packet->invalidated;
    }
    sw_finish_receive(packets->pair, &completion, packet->solicited);
}

/* A receive ends with an error, and so does the connection. */
static void fail_receive(struct sw_packets *packets, const struct sw_roce_packet *packet,
                         enum ibv_wc_status status, uint8_t syndrome)
{
    finish(packets, status, packet, IBV_WC_RECV);
    refuse(packets, syndrome);
}

/* Place the packet of a SEND. Returns whether it was carried out. */
static int place_send(struct sw_packets *packets, const struct sw_roce_packet *packet,
                      unsigned int parts)
{
    struct sw_responder *responder = &packets->responder;
    struct sw_queue_pair *pair = packets->pair;

    if (parts & SW_IS_FIRST)
        responder->arrived = 0;
    if (!take_receive(packets))
        return 0;
    if (packet->size > room_of(&pair->taken) - responder->arrived) {
        fail_receive(packets, packet, IBV_WC_LOC_LEN_ERR, SW_INVALID_REQUEST);
        return 0;
    }
    if (sw_fill_receive(pair, responder->arrived, packet->payload, packet->size)) {
        fail_receive(packets, packet, IBV_WC_LOC_PROT_ERR, SW_OPERATION_ERROR);
        return 0;
    }
    responder->arrived += packet->size;
    if (!(parts & SW_IS_LAST))
        return 1;
    if (parts & SW_HAS_INVALIDATE && sw_invalidate(&pair->ibv, packet->invalidated, 1)) {
        fail_receive(packets, packet, IBV_WC_LOC_ACCESS_ERR, SW_ACCESS_ERROR);
        return 0;
    }
    finish(packets, IBV_WC_SUCCESS, packet, IBV_WC_RECV);
    return 1;
}

/* The same for a WRITE. */
static int place_write(struct sw_packets *packets, const struct sw_roce_packet *packet,
                       unsigned int parts)
{
    struct sw_responder *responder = &packets->responder;
    struct sw_queue_pair *pair = packets->pair;
    struct sw_memory memory;

    if (parts & SW_IS_FIRST) {
        responder->arrived = 0;
        responder->address = packet->address;
        responder->rkey = packet->rkey;
        responder->length = packet->length;
        if (!permits(packets, IBV_ACCESS_REMOTE_WRITE)) {
            refuse(packets, SW_INVALID_REQUEST);
            return 0;
        }
        if (packet->length && sw_reach_remote(&pair->ibv, packet->rkey, packet->address,
                                              packet->length, IBV_ACCESS_REMOTE_WRITE, &memory)) {
            refuse(packets, SW_ACCESS_ERROR);
            return 0;
        }
    }
    uint32_t left = responder->length - responder->arrived;
    if (parts & SW_IS_LAST ? packet->size != left : packet->size >= left) {
        refuse(packets, SW_INVALID_REQUEST);
        return 0;
    }
    if (parts & SW_HAS_IMMEDIATE && !take_receive(packets))
        return 0;
    /* The memory is looked up for each packet, because it can be deregistered in between. */
    if (packet->size &&
        (sw_reach_remote(&pair->ibv, responder->rkey, responder->address + responder->arrived,
                         packet->size, IBV_ACCESS_REMOTE_WRITE, &memory) ||
         sw_copy_to(memory, packet->payload, packet->size))) {
        refuse(packets, SW_ACCESS_ERROR);
        return 0;
    }
    responder->arrived += packet->size;
    if (parts & SW_HAS_IMMEDIATE)
        finish(packets, IBV_WC_SUCCESS, packet, IBV_WC_RECV_RDMA_WITH_IMM);
    return 1;
}

/* The packet is the next one. */
static void carry_out(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_responder *responder = &packets->responder;
    unsigned int parts = sw_roce_parts((uint8_t)packet->opcode);

    if (!is_valid(packets, packet, parts)) {
        refuse(packets, SW_INVALID_REQUEST);
        return;
    }
    if (!(parts & (SW_IS_SEND | SW_IS_WRITE))) {
        if (packet->opcode == SW_RC_READ_REQUEST)
            read_requested(packets, packet);
        else
            atomic_requested(packets, packet);
        return;
    }
    if (!(parts & SW_IS_SEND ? place_send : place_write)(packets, packet, parts))
        return;
    responder->message = parts & SW_IS_LAST ? 0 : parts & (SW_IS_SEND | SW_IS_WRITE);
    if (parts & SW_IS_LAST)
        responder->messages++;
    advance(responder, 1);
    if (packet->acknowledge)
        owe(packets, SW_ACKNOWLEDGED | SW_NO_CREDITS);
}

/* UC: a message that lost a packet is dropped, and its receive is used for the next one. */
static int resynchronize(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_responder *responder = &packets->responder;

    if (packet->psn != responder->psn)
        responder->message = 0;
    responder->psn = packet->psn;
    if (sw_roce_parts((uint8_t)packet->opcode) & SW_IS_FIRST) {
        responder->message = 0;
        return 1;
    }
    if (responder->message)
        return 1;
    responder->psn = sw_psn(responder->psn + 1);
    return 0;
}

static void repeated(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    if (!(sw_roce_parts((uint8_t)packet->opcode) & (SW_IS_SEND | SW_IS_WRITE)))
        answer_again(packets, packet->psn);
    else if (packet->acknowledge)
        owe(packets, SW_ACKNOWLEDGED | SW_NO_CREDITS);
}

void sw_respond(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_responder *responder = &packets->responder;
    int32_t early = sw_psn_after(packet->psn, responder->psn);

    if (responder->is_ending)
        return;
    if (!packets->is_reliable) {
        if (resynchronize(packets, packet))
            carry_out(packets, packet);
        return;
    }
    if (early < 0) {
        repeated(packets, packet);
    } else if (early > 0) {
        if (!responder->has_complained)
            owe(packets, SW_OUT_OF_SEQUENCE);
        responder->has_complained = 1;
    } else {
        responder->has_complained = 0;
        carry_out(packets, packet);
    }
}

/* -- beginning and end ---------------------------------------------------------------------------- */

int sw_responder_begin(struct sw_packets *packets, const struct ibv_qp_attr *attr)
{
    struct sw_responder *responder = &packets->responder;
    uint32_t size = packets->is_reliable ? attr->max_dest_rd_atomic : 0;

    sw_responder_end(packets);
    if (size)
        responder->answers = calloc(size, sizeof(*responder->answers));
    if (size && !responder->answers)
        return ENOMEM;
    responder->answer_size = size;
    responder->psn = sw_psn(attr->rq_psn);
    responder->rest.expired = rested;
    return 0;
}

void sw_responder_end(struct sw_packets *packets)
{
    struct sw_responder *responder = &packets->responder;

    sw_cancel(&responder->rest);
    free(responder->answers);
    memset(responder, 0, sizeof(*responder));
}
