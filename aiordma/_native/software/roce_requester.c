/*
 * The requester. Each packet has a number. An acknowledgement covers all packets up to its number. A
 * READ takes as many numbers as its answer has packets, and only they cover it. If a packet is lost,
 * everything from it on is sent again ("go back N"): pair->next_send and requester->packet go back.
 *
 * A READ is requested in pieces of READ_PIECE packets, so that an answer never fills the buffer of
 * this host's socket, and a piece that is lost costs no more than that.
 */
#include "roce_requester.h"

#include <errno.h>
#include <string.h>

#include "engine.h"

enum {
    READ_PIECE = 16,
    FIRST_WINDOW = 32, /* packets, as the next ones */
    MOST_WINDOW = 128, /* as many as rxe's */
    LEAST_WINDOW = 4,
    SEVERAL = 4,       /* packets in flight: what is posted then can wait for the next post */
    LEAST_TIMEOUT = 8, /* milliseconds */
    MOST_TIMEOUT = 600000,
    FOR_EVER = 7, /* of rnr_retry */
};

static int is_question(const struct sw_send *send)
{
    return send->opcode == IBV_WR_RDMA_READ || send->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
           send->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static int is_local(const struct sw_send *send)
{
    return send->opcode == IBV_WR_LOCAL_INV || send->opcode == IBV_WR_BIND_MW;
}

static struct sw_send *send_at(const struct sw_queue_pair *pair, uint32_t counter)
{
    return &pair->sends[counter % pair->send_size];
}

/* Packets that were sent and are not covered. */
static uint32_t in_flight(const struct sw_packets *packets)
{
    const struct sw_queue_pair *pair = packets->pair;
    const struct sw_requester *requester = &packets->requester;
    uint32_t next = requester->psn;

    if (pair->next_send != pair->end) {
        const struct sw_send *send = send_at(pair, pair->next_send);
        if (send->stage != SW_POSTED && !is_local(send))
            next = sw_psn(send->psn + requester->packet);
    }
    return sw_psn(next - requester->oldest);
}

/* The request is the oldest one, and ends with an error, as does the connection. */
static void fail(struct sw_packets *packets, struct sw_send *send, enum ibv_wc_status status)
{
    struct sw_queue_pair *pair = packets->pair;

    sw_end_send(pair, send, status);
    sw_queue_pair_failed(pair);
}

/* -- sending -------------------------------------------------------------------------------------- */

/* Give a request its packet numbers. Returns an error that ends it. */
static enum ibv_wc_status number(struct sw_packets *packets, struct sw_send *send)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;

    if (is_question(send) && !pair->attributes.max_rd_atomic)
        return IBV_WC_LOC_QP_OP_ERR;
    if (!sw_is_reachable(pair, send, is_question(send) ? IBV_ACCESS_LOCAL_WRITE : 0))
        return IBV_WC_LOC_PROT_ERR;
    send->psn = requester->psn;
    send->packets = is_question(send) && send->opcode != IBV_WR_RDMA_READ
                        ? 1
                        : sw_packet_count(packets, send->length);
    requester->psn = sw_psn(requester->psn + send->packets);
    requester->packet = 0;
    send->stage = SW_BEGUN;
    return IBV_WC_SUCCESS;
}

/* The part of a READ that the next packet requests: up to the end of a piece. */
static uint32_t piece_of(const struct sw_send *send, uint32_t packet)
{
    uint32_t left = send->packets - packet, piece = READ_PIECE - packet % READ_PIECE;

    return left < piece ? left : piece;
}

static enum sw_roce_opcode opcode_of(const struct sw_send *send, int is_first, int is_last)
{
    switch (send->opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        if (!is_last)
            return is_first ? SW_RC_WRITE_FIRST : SW_RC_WRITE_MIDDLE;
        if (send->opcode == IBV_WR_RDMA_WRITE)
            return is_first ? SW_RC_WRITE_ONLY : SW_RC_WRITE_LAST;
        return is_first ? SW_RC_WRITE_ONLY_IMMEDIATE : SW_RC_WRITE_LAST_IMMEDIATE;
    case IBV_WR_RDMA_READ:
        return SW_RC_READ_REQUEST;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return SW_RC_COMPARE_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return SW_RC_FETCH_ADD;
    default:
        if (!is_last)
            return is_first ? SW_RC_SEND_FIRST : SW_RC_SEND_MIDDLE;
        if (send->opcode == IBV_WR_SEND_WITH_IMM)
            return is_first ? SW_RC_SEND_ONLY_IMMEDIATE : SW_RC_SEND_LAST_IMMEDIATE;
        if (send->opcode == IBV_WR_SEND_WITH_INV)
            return is_first ? SW_RC_SEND_ONLY_INVALIDATE : SW_RC_SEND_LAST_INVALIDATE;
        return is_first ? SW_RC_SEND_ONLY : SW_RC_SEND_LAST;
    }
}

static void describe_question(const struct sw_packets *packets, const struct sw_send *send,
                              struct sw_roce_packet *packet)
{
    const uint32_t at = packets->requester.packet;

    packet->address = send->remote_address;
    if (send->opcode == IBV_WR_RDMA_READ) {
        uint64_t offset = (uint64_t)at * packets->mtu;
        uint64_t most = (uint64_t)piece_of(send, at) * packets->mtu;
        packet->address += offset;
        packet->length =
            send->length - offset < most ? (uint32_t)(send->length - offset) : (uint32_t)most;
    } else if (send->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        packet->swap_add = send->compare_add;
    } else {
        packet->swap_add = send->swap;
        packet->compare = send->compare_add;
    }
}

/* Whether a packet in the middle of a request is acknowledged: some of each window, and its last. */
static int ends_part(const struct sw_packets *packets)
{
    uint32_t used = in_flight(packets) + 1, window = packets->requester.window;

    return used >= window || used % (window / 4 + 1) == 0;
}

/* Compose the next packet of a request. EACCES: its memory is not accessible. */
static int send_packet(struct sw_packets *packets, const struct sw_send *send)
{
    const uint32_t at = packets->requester.packet;
    const int is_first = !at, is_last = at + 1 == send->packets;
    struct sw_roce_packet packet = {
        .opcode = opcode_of(send, is_first, is_last),
        .psn = sw_psn(send->psn + at),
        .rkey = send->rkey,
        .address = send->remote_address,
        .length = send->length,
        .immediate = send->immediate,
        .invalidated = send->invalidated,
        .solicited = is_last && send->flags & IBV_SEND_SOLICITED ? 1 : 0,
        .acknowledge = packets->is_reliable && (is_last || ends_part(packets)),
    };
    uint32_t size = 0;

    if (is_question(send))
        describe_question(packets, send, &packet);
    else
        packet.size = size = sw_packet_size(packets, send->length, at);
    uint8_t *payload = sw_packet_begin(packets, &packet);
    if (size && send->flags & IBV_SEND_INLINE)
        memcpy(payload, send->inlined + (size_t)at * packets->mtu, size);
    else if (size && sw_gather(packets->pair->ibv.pd, send->parts, send->part_count,
                               at * packets->mtu, payload, size))
        return EACCES;
    sw_packet_add(packets, payload, size);
    return 0;
}

static void retry_later(struct sw_packets *packets)
{
    struct sw_requester *requester = &packets->requester;
    const struct ibv_qp_attr *attributes = &packets->pair->attributes;

    /* 4.096 us to the power; 0: no limit. */
    if (!packets->is_reliable || !attributes->timeout || requester->retry.deadline)
        return;
    uint64_t wait = (4096ull << attributes->timeout) / 1000000;
    wait = wait < LEAST_TIMEOUT ? LEAST_TIMEOUT : wait > MOST_TIMEOUT ? MOST_TIMEOUT : wait;
    (void)sw_call_later(&requester->retry, (uint32_t)wait);
}

static void go_back(struct sw_packets *packets)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;

    requester->asked = 0;
    requester->packet = 0;
    pair->next_send = pair->oldest;
    if (pair->oldest == pair->end)
        return;
    const struct sw_send *send = send_at(pair, pair->oldest);
    if (send->stage != SW_POSTED && send->stage != SW_DONE && !is_local(send))
        requester->packet = sw_psn(requester->oldest - send->psn);
}

static int carry_out_locally(struct sw_packets *packets, struct sw_send *send)
{
    struct sw_queue_pair *pair = packets->pair;
    int failed = send->opcode == IBV_WR_LOCAL_INV
                     ? sw_invalidate(&pair->ibv, send->invalidated, 0) != SW_REACHED
                     : sw_bind(&pair->ibv, send->window, send->window_key, &send->bind);

    if (!failed) {
        pair->next_send++;
        sw_end_send(pair, send, IBV_WC_SUCCESS);
    } else if (pair->oldest == pair->next_send) {
        fail(packets, send, IBV_WC_MW_BIND_ERR);
    }
    return !failed;
}

/* Begin or go on with a request: 1, and it has a packet to send; 0: not now. */
static int may_go(struct sw_packets *packets, struct sw_send *send)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;
    uint32_t needed = 1;

    if (send->stage == SW_POSTED) {
        /* In SQD no request is begun, but a begun one continues. */
        if (pair->ibv.state != IBV_QPS_RTS || (send->flags & IBV_SEND_FENCE && requester->asked))
            return 0;
        enum ibv_wc_status status = number(packets, send);
        if (status) {
            /* It fails after the earlier ones have ended: it ends the connection. */
            if (pair->oldest == pair->next_send)
                fail(packets, send, status);
            return 0;
        }
    }
    if (is_question(send)) {
        if (requester->asked >= pair->attributes.max_rd_atomic)
            return 0;
        needed = send->opcode == IBV_WR_RDMA_READ ? piece_of(send, requester->packet) : 1;
    }
    uint32_t used = in_flight(packets);
    return !packets->is_reliable || !used || used + needed <= requester->window;
}

/* Send a packet of this request. Returns whether there may be another. */
static int go_on(struct sw_packets *packets, struct sw_send *send)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;

    if (send_packet(packets, send)) {
        if (pair->oldest == pair->next_send)
            fail(packets, send, IBV_WC_LOC_PROT_ERR);
        return 0;
    }
    if (is_question(send))
        requester->asked++;
    requester->packet += send->opcode == IBV_WR_RDMA_READ ? piece_of(send, requester->packet) : 1;
    retry_later(packets);
    if (requester->packet < send->packets)
        return 1;
    requester->packet = 0;
    pair->next_send++;
    if (packets->is_reliable)
        send->stage = is_question(send) ? SW_ASKED : SW_SENT;
    else
        sw_end_send(pair, send, IBV_WC_SUCCESS); /* it is not acknowledged */
    return 1;
}

static void send_all(struct sw_packets *packets)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;

    while ((pair->ibv.state == IBV_QPS_RTS || pair->ibv.state == IBV_QPS_SQD) &&
           pair->next_send != pair->end && !requester->pause.deadline) {
        struct sw_send *send = send_at(pair, pair->next_send);
        if (send->stage == SW_DONE) { /* a local one, which waits for earlier ones to complete */
            pair->next_send++;
            continue;
        }
        if (is_local(send)) {
            if (pair->ibv.state != IBV_QPS_RTS || !carry_out_locally(packets, send))
                return;
            continue;
        }
        if (sw_turn_is_over()) {
            (void)sw_call_later(&requester->pause, 0);
            return;
        }
        if (!may_go(packets, send) || !go_on(packets, send))
            return;
    }
}

void sw_request(struct sw_packets *packets)
{
    send_all(packets);
    sw_roce_port_flush();
}

void sw_request_posted(struct sw_packets *packets)
{
    const int has_several = packets->is_reliable && in_flight(packets) >= SEVERAL;

    send_all(packets);
    if (has_several)
        sw_roce_port_flush_soon();
    else
        sw_roce_port_flush();
}

/* -- answers -------------------------------------------------------------------------------------- */

static void covered_until(struct sw_packets *packets, uint32_t psn)
{
    struct sw_requester *requester = &packets->requester;

    requester->gained += sw_psn(psn - requester->oldest);
    requester->oldest = psn;
    requester->tries = requester->unready_tries = 0;
    requester->has_progress = 1;
    requester->has_gone_back = 0;
    if (requester->gained < requester->window)
        return;
    requester->gained = 0;
    /* It grows fast before the first loss, and slowly after it. */
    requester->window += requester->has_lost ? 1 : requester->window;
    if (requester->window > MOST_WINDOW)
        requester->window = MOST_WINDOW;
}

/* If the peer has more than was sent again, do not send that again. */
static void catch_up(struct sw_packets *packets, uint32_t next_before)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;

    if (pair->next_send != next_before)
        requester->packet = 0;
    if (pair->next_send == pair->end)
        return;
    const struct sw_send *send = send_at(pair, pair->next_send);
    if (send->stage == SW_POSTED || send->stage == SW_DONE || is_local(send))
        return;
    int32_t further = sw_psn_after(requester->oldest, sw_psn(send->psn + requester->packet));
    if (further > 0)
        requester->packet += (uint32_t)further;
}

/*
 * The peer has everything up to this PSN, except for READs and atomics: their answers carry data.
 * Returns whether there was none, so that everything is covered.
 */
static int cover(struct sw_packets *packets, uint32_t psn)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;
    const uint32_t next_before = pair->next_send;
    int is_whole = 1;

    while (pair->oldest != pair->end && is_whole) {
        struct sw_send *send = send_at(pair, pair->oldest);
        if (send->stage == SW_POSTED || sw_psn_after(psn, requester->oldest) < 0)
            break;
        if (is_question(send)) {
            is_whole = 0;
        } else if (sw_psn_after(psn, sw_psn(send->psn + send->packets - 1)) < 0) {
            covered_until(packets, sw_psn(psn + 1));
            break;
        } else {
            covered_until(packets, sw_psn(send->psn + send->packets));
            sw_end_send(pair, send, IBV_WC_SUCCESS);
        }
    }
    catch_up(packets, next_before);
    return is_whole;
}

/* Something was lost: send everything from the oldest packet on again. */
static void repeat(struct sw_packets *packets)
{
    struct sw_requester *requester = &packets->requester;

    if (requester->has_gone_back)
        return;
    requester->has_gone_back = requester->has_lost = 1;
    requester->window /= 2;
    if (requester->window < LEAST_WINDOW)
        requester->window = LEAST_WINDOW;
    go_back(packets);
}

/* A READ or an atomic has its answer, or the next packet of it. */
static void take_data(struct sw_packets *packets, struct sw_send *send, const void *bytes,
                      uint32_t size)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;
    const uint32_t packet = sw_psn(requester->oldest - send->psn), next_before = pair->next_send;

    if (sw_scatter(pair->ibv.pd, send->parts, send->part_count, packet * packets->mtu, bytes,
                   size)) {
        fail(packets, send, IBV_WC_LOC_PROT_ERR);
        return;
    }
    covered_until(packets, sw_psn(requester->oldest + 1));
    if (requester->asked && (packet + 1 == send->packets || (packet + 1) % READ_PIECE == 0))
        requester->asked--;
    if (packet + 1 == send->packets)
        sw_end_send(pair, send, IBV_WC_SUCCESS);
    catch_up(packets, next_before);
}

static void data_arrived(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;
    const int is_atomic = packet->opcode == SW_RC_ATOMIC_ACKNOWLEDGE;

    /* It comes after everything that was sent before its request. */
    if (!cover(packets, sw_psn(packet->psn - 1))) {
        repeat(packets);
        return;
    }
    struct sw_send *send = pair->oldest != pair->end ? send_at(pair, pair->oldest) : NULL;
    if (!send || send->stage == SW_POSTED || !is_question(send) ||
        packet->psn != requester->oldest || is_atomic != (send->opcode != IBV_WR_RDMA_READ))
        return;
    uint64_t original = packet->original;
    if (is_atomic)
        take_data(packets, send, &original, sizeof(original));
    else if (packet->size == sw_packet_size(packets, send->length, sw_psn(packet->psn - send->psn)))
        take_data(packets, send, packet->payload, packet->size);
    else
        fail(packets, send, IBV_WC_BAD_RESP_ERR);
}

static enum ibv_wc_status status_of(uint8_t syndrome)
{
    switch (syndrome) {
    case SW_ACCESS_ERROR:
        return IBV_WC_REM_ACCESS_ERR;
    case SW_OPERATION_ERROR:
        return IBV_WC_REM_OP_ERR;
    default:
        return IBV_WC_REM_INV_REQ_ERR;
    }
}

/* How long to wait, in units of 0.01 ms (InfiniBand specification, table 45). */
static uint32_t unready_milliseconds(uint8_t syndrome)
{
    static const uint32_t times[] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                     16,    24,   32,   48,    64,    96,    128,   192,
                                     256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                     4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};

    return (times[syndrome & 0x1f] + 99) / 100;
}

static void is_unready(struct sw_packets *packets, struct sw_send *send, uint8_t syndrome)
{
    struct sw_requester *requester = &packets->requester;
    const uint32_t most = packets->pair->attributes.rnr_retry;

    if (requester->pause.deadline && requester->unready_tries)
        return; /* it waits already */
    if (most != FOR_EVER && requester->unready_tries >= most) {
        fail(packets, send, IBV_WC_RNR_RETRY_EXC_ERR);
        return;
    }
    requester->unready_tries++;
    requester->tries = 0; /* it answers */
    requester->has_progress = 1;
    go_back(packets);
    (void)sw_call_later(&requester->pause, unready_milliseconds(syndrome));
}

/* The peer did not carry out this packet, and nothing after it. */
static void refused(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_queue_pair *pair = packets->pair;

    int is_whole = cover(packets, sw_psn(packet->psn - 1));
    if (pair->oldest == pair->end || packet->syndrome == SW_OUT_OF_SEQUENCE || !is_whole) {
        repeat(packets);
        return;
    }
    struct sw_send *send = send_at(pair, pair->oldest);
    if (send->stage == SW_POSTED || packet->psn != packets->requester.oldest)
        return;
    if ((packet->syndrome & SW_KIND) == SW_NOT_READY)
        is_unready(packets, send, packet->syndrome);
    else
        fail(packets, send, status_of(packet->syndrome));
}

void sw_answered(struct sw_packets *packets, const struct sw_roce_packet *packet)
{
    struct sw_requester *requester = &packets->requester;

    /* Old, or for what was never sent. */
    if (sw_psn_after(packet->psn, requester->oldest) < 0 ||
        sw_psn_after(packet->psn, requester->psn) >= 0)
        return;
    if (packet->opcode != SW_RC_ACKNOWLEDGE)
        data_arrived(packets, packet);
    else if ((packet->syndrome & SW_KIND) != SW_ACKNOWLEDGED)
        refused(packets, packet);
    else if (!cover(packets, packet->psn))
        repeat(packets);
    if (packets->pair->ibv.state != IBV_QPS_ERR)
        sw_roce_port_after(&packets->due);
}

/* -- time ----------------------------------------------------------------------------------------- */

static void unanswered(struct sw_timer *timer)
{
    struct sw_packets *packets = SW_CONTAINER(timer, struct sw_packets, requester.retry);
    struct sw_requester *requester = &packets->requester;
    struct sw_queue_pair *pair = packets->pair;

    if (!in_flight(packets))
        return;
    if (!requester->has_progress && !requester->pause.deadline) {
        if (requester->tries >= pair->attributes.retry_cnt) {
            fail(packets, send_at(pair, pair->oldest), IBV_WC_RETRY_EXC_ERR);
            return;
        }
        requester->tries++;
        requester->has_gone_back = 0;
        repeat(packets);
        sw_request(packets);
    }
    requester->has_progress = 0;
    if (pair->ibv.state != IBV_QPS_ERR)
        retry_later(packets);
}

static void paused(struct sw_timer *timer)
{
    sw_request(SW_CONTAINER(timer, struct sw_packets, requester.pause));
}

void sw_requester_begin(struct sw_packets *packets, const struct ibv_qp_attr *attr)
{
    struct sw_requester *requester = &packets->requester;

    sw_requester_end(packets);
    requester->psn = requester->oldest = sw_psn(attr->sq_psn);
    requester->window = FIRST_WINDOW;
    requester->retry.expired = unanswered;
    requester->pause.expired = paused;
}

void sw_requester_end(struct sw_packets *packets)
{
    struct sw_requester *requester = &packets->requester;

    sw_cancel(&requester->retry);
    sw_cancel(&requester->pause);
    memset(requester, 0, sizeof(*requester));
}
