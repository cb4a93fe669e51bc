/*
 * A queue pair's two queues: completions of sends, receives for arriving messages, and flushing.
 * work.c posts requests, and states.c creates queue pairs and moves them through their states.
 */
#include "queue_pair.h"

#include <string.h>

#include "../completion_opcodes.h"
#include "faults.h"
#include "ownership.h"

enum { BUCKETS = 4096 };

static struct sw_queue_pair *table[BUCKETS];

const struct sw_state sw_queue_pairs_state = {&table, sizeof(table)};

static struct sw_queue_pair **bucket_of(uint32_t qp_num)
{
    return &table[(qp_num ^ qp_num >> 12) % BUCKETS];
}

struct sw_queue_pair *sw_find_queue_pair(uint32_t qp_num)
{
    struct sw_queue_pair *pair = *bucket_of(qp_num);

    while (pair && pair->ibv.qp_num != qp_num)
        pair = pair->next;
    return pair;
}

uint32_t sw_new_queue_pair_number(void)
{
    uint32_t number;

    /* 0 and 1 are reserved for management, and the highest number for multicast. */
    do {
        number = sw_random() & 0xffffff;
    } while (number < 2 || number == 0xffffff || sw_find_queue_pair(number));
    return number;
}

static struct sw_queue_pair *pair_of(struct ibv_qp *queue_pair)
{
    return (struct sw_queue_pair *)queue_pair;
}

void sw_raise_queue_pair(struct ibv_qp *queue_pair, enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.qp = queue_pair, .event_type = type};

    sw_raise(queue_pair->context, &pair_of(queue_pair)->subject, &event);
}

void sw_list_queue_pair(struct sw_queue_pair *pair)
{
    struct sw_queue_pair **bucket = bucket_of(pair->ibv.qp_num);

    pair->next = *bucket;
    *bucket = pair;
}

void sw_unlist_queue_pair(struct sw_queue_pair *pair)
{
    struct sw_queue_pair **link = bucket_of(pair->ibv.qp_num);

    while (*link != pair)
        link = &(*link)->next;
    *link = pair->next;
}

/* -- completions of sends -------------------------------------------------------------- */

static int is_drained(const struct sw_queue_pair *pair)
{
    if (pair->next_send != pair->end) {
        /* Begun, or sent and to be sent again. */
        const struct sw_send *next = &pair->sends[pair->next_send % pair->send_size];
        if (next->stage != SW_POSTED && next->stage != SW_DONE)
            return 0;
    }
    for (uint32_t at = pair->oldest; at != pair->next_send; at++)
        if (pair->sends[at % pair->send_size].stage != SW_DONE)
            return 0;
    return 1;
}

void sw_tell_if_drained(struct sw_queue_pair *pair)
{
    if (pair->ibv.state != IBV_QPS_SQD || !is_drained(pair))
        return;
    pair->attributes.sq_draining = 0;
    if (pair->attributes.en_sqd_async_notify)
        sw_raise_queue_pair(&pair->ibv, IBV_EVENT_SQ_DRAINED);
    pair->attributes.en_sqd_async_notify = 0;
}

/* In a simulation: the program has the memory again. Was it the device's until now? */
static void give_back(const struct sw_queue_pair *pair, const struct sw_send *send)
{
    if (send->status == IBV_WC_SUCCESS && send->sum &&
        send->sum != sw_owned_sum(pair->ibv.pd, send->parts, send->part_count, send->length))
        sw_system->misused(AIORDMA_SIMULATED_CHANGED, send->wr_id, pair->ibv.qp_num, send->length);
    sw_unguard(pair, send->wr_id);
}

/* Complete sends in the order of the posts: a send that has ended waits for the earlier ones. */
static void retire(struct sw_queue_pair *pair)
{
    while (pair->oldest != pair->end) {
        struct sw_send *send = &pair->sends[pair->oldest % pair->send_size];
        if (send->stage != SW_DONE)
            break;
        if (sw_system->is_simulated)
            give_back(pair, send);
        if (pair->next_send == pair->oldest)
            pair->next_send++;
        pair->oldest++;
        if (send->status == IBV_WC_SUCCESS && !(send->flags & IBV_SEND_SIGNALED))
            continue;
        struct ibv_wc completion = {
            .wr_id = send->wr_id,
            .status = send->status,
            .opcode = aiordma_completes_as(send->opcode),
            .qp_num = pair->ibv.qp_num,
        };
        if (completion.opcode == IBV_WC_RDMA_READ)
            completion.byte_len = send->length;
        else if (completion.opcode == IBV_WC_COMP_SWAP || completion.opcode == IBV_WC_FETCH_ADD)
            completion.byte_len = 8;
        sw_complete(pair->ibv.send_cq, &completion, 0);
    }
}

void sw_end_send(struct sw_queue_pair *pair, struct sw_send *send, enum ibv_wc_status status)
{
    send->stage = SW_DONE;
    send->status = status;
    retire(pair);
    sw_tell_if_drained(pair);
}

void sw_end_sent(struct sw_queue_pair *pair, uint32_t before)
{
    for (uint32_t at = pair->oldest; at != before; at++) {
        struct sw_send *send = &pair->sends[at % pair->send_size];
        if (send->stage == SW_SENT) {
            send->stage = SW_DONE;
            send->status = IBV_WC_SUCCESS;
        }
    }
    retire(pair);
    sw_tell_if_drained(pair);
}

/* -- receives for arriving messages ---------------------------------------------------- */

static void there_is_one(struct sw_waiter *waiter)
{
    struct sw_queue_pair *pair = SW_CONTAINER(waiter, struct sw_queue_pair, waiter);

    pair->is_waiting = 0;
    pair->transport->resume(pair);
}

static void wait_for_receive(struct sw_queue_pair *pair)
{
    if (pair->is_waiting)
        return;
    pair->is_waiting = 1;
    pair->waiter.resume = there_is_one;
    if (pair->shared)
        sw_shared_await(pair->shared, &pair->waiter);
}

/* The time of the fault is over: resume. */
static void ready_again(struct sw_timer *timer)
{
    struct sw_queue_pair *pair = SW_CONTAINER(timer, struct sw_queue_pair, unready);

    pair->is_waiting = 0;
    pair->transport->resume(pair);
}

static int is_unready(struct sw_queue_pair *pair)
{
    struct aiordma_fault fault;

    if (pair->unready.deadline)
        return 1;
    if (!sw_fault(AIORDMA_FAULT_NOT_READY, &fault))
        return 0;
    pair->unready.expired = ready_again;
    return !sw_call_later(&pair->unready, fault.milliseconds);
}

int sw_take_receive(struct sw_queue_pair *pair, int wait)
{
    if (wait && is_unready(pair)) {
        pair->is_waiting = 1;
        return 0;
    }
    int found = pair->shared ? sw_shared_take(pair->shared, &pair->taken)
                             : sw_receives_take(&pair->receives, &pair->taken);

    if (found)
        pair->has_taken = 1;
    else if (wait)
        wait_for_receive(pair);
    return found;
}

enum ibv_wc_status sw_scatter(struct ibv_pd *domain, const struct ibv_sge *parts, int count,
                              uint32_t offset, const void *bytes, uint32_t size)
{
    struct sw_span span = {domain, parts, count, offset, size};
    const char *from = bytes;
    struct sw_piece piece;

    for (; span.size; from += piece.size) {
        enum ibv_wc_status status = sw_next_piece(&span, IBV_ACCESS_LOCAL_WRITE, &piece);
        if (status)
            return status;
        if (sw_copy_to(piece.memory, from, piece.size))
            return IBV_WC_LOC_PROT_ERR;
    }
    return IBV_WC_SUCCESS;
}

enum ibv_wc_status sw_gather(struct ibv_pd *domain, const struct ibv_sge *parts, int count,
                             uint32_t offset, void *bytes, uint32_t size)
{
    struct sw_span span = {domain, parts, count, offset, size};
    struct sw_piece piece;
    char *to = bytes;

    for (; span.size; to += piece.size) {
        enum ibv_wc_status status = sw_next_piece(&span, 0, &piece);
        if (status)
            return status;
        if (sw_copy_from(to, piece.memory, piece.size))
            return IBV_WC_LOC_PROT_ERR;
    }
    return IBV_WC_SUCCESS;
}

enum ibv_wc_status sw_fill_receive(struct sw_queue_pair *pair, uint32_t offset, const void *bytes,
                                   uint32_t size)
{
    return sw_scatter(pair->ibv.pd, pair->taken.parts, pair->taken.part_count, offset, bytes, size);
}

void sw_finish_receive(struct sw_queue_pair *pair, struct ibv_wc *what, int solicited)
{
    what->wr_id = pair->taken.wr_id;
    what->qp_num = pair->ibv.qp_num;
    pair->has_taken = 0;
    if (sw_system->is_simulated)
        sw_unguard(pair->shared ? (void *)pair->shared : pair, what->wr_id);
    sw_complete(pair->ibv.recv_cq, what, solicited);
}

/* -- connected, failed, flushed -------------------------------------------------------- */

void sw_queue_pair_ready(struct sw_queue_pair *pair)
{
    unsigned int access = IBV_ACCESS_REMOTE_WRITE;

    if (pair->attributes.max_dest_rd_atomic)
        access |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    pair->attributes.qp_access_flags |= access;
    pair->attributes.port_num = 1;
    pair->broken = 0;
    pair->ibv.state = IBV_QPS_RTS;
}

void sw_stop_waiting(struct sw_queue_pair *pair)
{
    sw_cancel(&pair->unready);
    if (pair->is_waiting && pair->shared)
        sw_shared_leave(pair->shared, &pair->waiter);
    pair->is_waiting = 0;
}

static void flush_receive(struct sw_queue_pair *pair)
{
    struct ibv_wc completion = {.status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV};

    sw_finish_receive(pair, &completion, 0);
}

void sw_queue_pair_failed(struct sw_queue_pair *pair)
{
    if (pair->ibv.state == IBV_QPS_ERR)
        return;
    pair->ibv.state = IBV_QPS_ERR;
    pair->transport->end(pair);
    sw_stop_waiting(pair);
    sw_flush_sends(pair);
    if (pair->has_taken)
        flush_receive(pair);
    sw_flush_receives(pair);
    if (pair->shared)
        sw_raise_queue_pair(&pair->ibv, IBV_EVENT_QP_LAST_WQE_REACHED);
}

int sw_is_reachable(const struct sw_queue_pair *pair, const struct sw_send *send, int access)
{
    struct sw_memory memory;

    if (send->flags & IBV_SEND_INLINE)
        return 1;
    for (int i = 0; i < send->part_count; i++)
        if (send->parts[i].length && sw_reach_local(pair->ibv.pd, &send->parts[i], access, &memory))
            return 0;
    return 1;
}

void sw_flush_sends(struct sw_queue_pair *pair)
{
    for (uint32_t at = pair->oldest; at != pair->end; at++) {
        struct sw_send *send = &pair->sends[at % pair->send_size];
        if (send->stage == SW_DONE)
            continue;
        send->stage = SW_DONE;
        send->status = IBV_WC_WR_FLUSH_ERR;
    }
    retire(pair);
}

void sw_flush_receives(struct sw_queue_pair *pair)
{
    while (!pair->shared && sw_receives_take(&pair->receives, &pair->taken)) {
        pair->has_taken = 1;
        flush_receive(pair);
    }
}

void sw_queue_pairs_forked(void)
{
    memset(table, 0, sizeof(table));
}
