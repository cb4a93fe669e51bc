/*
 * Posting of work requests. They are checked and copied, so that the program can reuse its lists.
 */
#include "work.h"

#include <errno.h>
#include <string.h>

#include "faults.h"
#include "ownership.h"

/* -- posting sends ----------------------------------------------------------------------- */

static int is_datagram_opcode(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
}

static int is_atomic(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static int is_connected_opcode(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_RDMA_READ:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
    case IBV_WR_LOCAL_INV:
    case IBV_WR_BIND_MW:
        return 1;
    default:
        return 0;
    }
}

/* UC has no answers, so no READs and atomics, and nothing that depends on an order with them. */
static int is_unreliable_opcode(enum ibv_wr_opcode opcode)
{
    return is_datagram_opcode(opcode) || opcode == IBV_WR_RDMA_WRITE ||
           opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* Check a request. Its memory is checked when the request is carried out. */
static int check_send(const struct sw_queue_pair *pair, const struct ibv_send_wr *request,
                      uint64_t *length)
{
    const unsigned int known = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED |
                               IBV_SEND_INLINE | IBV_SEND_IP_CSUM;
    enum ibv_wr_opcode opcode = request->opcode;

    if (request->send_flags & ~known)
        return EINVAL;
    if (request->num_sge < 0 || (uint32_t)request->num_sge > pair->capacity.max_send_sge ||
        (request->num_sge && !request->sg_list))
        return EINVAL;
    *length = 0;
    for (int i = 0; i < request->num_sge; i++)
        *length += request->sg_list[i].length;
    if (*length > SW_MOST_MESSAGE)
        return EINVAL;
    if (pair->ibv.qp_type == IBV_QPT_UD) {
        if (!is_datagram_opcode(opcode) || !request->wr.ud.ah ||
            request->wr.ud.ah->pd != pair->ibv.pd)
            return EINVAL;
    } else if (!is_connected_opcode(opcode) ||
               (pair->ibv.qp_type == IBV_QPT_UC && !is_unreliable_opcode(opcode))) {
        return EINVAL;
    }
    if (request->send_flags & IBV_SEND_INLINE) {
        if (opcode == IBV_WR_RDMA_READ || is_atomic(opcode) || opcode == IBV_WR_LOCAL_INV ||
            opcode == IBV_WR_BIND_MW || *length > pair->capacity.max_inline_data)
            return EINVAL;
    }
    if (is_atomic(opcode) && (*length != 8 || request->wr.atomic.remote_addr % 8))
        return EINVAL;
    if (opcode == IBV_WR_BIND_MW &&
        (!request->bind_mw.mw || request->bind_mw.mw->type != IBV_MW_TYPE_2 ||
         request->bind_mw.mw->pd != pair->ibv.pd))
        return EINVAL;
    return 0;
}

static struct sw_send *next_slot(struct sw_queue_pair *pair)
{
    if (pair->end - pair->oldest >= pair->capacity.max_send_wr)
        return NULL;
    return &pair->sends[pair->end % pair->send_size];
}

static void copy_inline(struct sw_send *send, const struct ibv_send_wr *request)
{
    char *to = send->inlined;

    for (int i = 0; i < request->num_sge; i++) {
        memcpy(to, (const void *)(uintptr_t)request->sg_list[i].addr, request->sg_list[i].length);
        to += request->sg_list[i].length;
    }
}

static void copy_send(struct sw_queue_pair *pair, struct sw_send *send,
                      const struct ibv_send_wr *request, uint32_t length)
{
    const size_t slot = (size_t)(send - pair->sends);
    struct ibv_sge *parts = pair->send_parts + slot * pair->parts_each;

    memset(send, 0, sizeof(*send));
    send->parts = parts;
    send->inlined = pair->inlined + slot * pair->capacity.max_inline_data;
    send->wr_id = request->wr_id;
    send->opcode = request->opcode;
    send->flags = request->send_flags | (pair->signals_all ? IBV_SEND_SIGNALED : 0);
    send->length = length;
    if (send->flags & IBV_SEND_INLINE) {
        copy_inline(send, request);
    } else {
        send->part_count = request->num_sge;
        for (int i = 0; i < request->num_sge; i++)
            parts[i] = request->sg_list[i];
    }
    if (send->opcode == IBV_WR_SEND_WITH_INV || send->opcode == IBV_WR_LOCAL_INV)
        send->invalidated = request->invalidate_rkey;
    else
        send->immediate = request->imm_data;
    if (pair->ibv.qp_type == IBV_QPT_UD) {
        send->route = ((const struct sw_address_handle *)request->wr.ud.ah)->route;
        send->remote_qpn = request->wr.ud.remote_qpn;
        send->remote_qkey = request->wr.ud.remote_qkey;
    } else if (is_atomic(send->opcode)) {
        send->remote_address = request->wr.atomic.remote_addr;
        send->rkey = request->wr.atomic.rkey;
        send->compare_add = request->wr.atomic.compare_add;
        send->swap = request->wr.atomic.swap;
    } else if (send->opcode == IBV_WR_BIND_MW) {
        send->window = request->bind_mw.mw;
        send->window_key = request->bind_mw.rkey;
        send->bind = request->bind_mw.bind_info;
    } else {
        send->remote_address = request->wr.rdma.remote_addr;
        send->rkey = request->wr.rdma.rkey;
    }
}

static int can_send(const struct sw_queue_pair *pair)
{
    switch (pair->ibv.state) {
    case IBV_QPS_RTS:
    case IBV_QPS_SQD:
    case IBV_QPS_SQE:
    case IBV_QPS_ERR:
        return 1;
    default:
        return 0;
    }
}

/* Transmit the posted requests, or flush them. */
static void go(struct sw_queue_pair *pair)
{
    if (pair->works)
        pair->works();
    if (pair->ibv.state == IBV_QPS_ERR)
        sw_flush_sends(pair);
    else
        pair->transport->transmit(pair);
}

static int writes_memory(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_RDMA_READ || is_atomic(opcode);
}

/* Whether an earlier request of this queue pair, or one of its first receives, writes the memory. */
static int is_written_twice(const struct sw_queue_pair *pair, uint32_t receives,
                            const struct ibv_sge *parts, int count)
{
    for (uint32_t at = pair->oldest; at != pair->end; at++) {
        const struct sw_send *other = &pair->sends[at % pair->send_size];
        if (other->stage != SW_DONE && writes_memory(other->opcode) &&
            sw_overlaps(other->parts, other->part_count, parts, count))
            return 1;
    }
    if (pair->has_taken && sw_overlaps(pair->taken.parts, pair->taken.part_count, parts, count))
        return 1;
    for (uint32_t i = 0; i < receives; i++) {
        const struct sw_receive *other =
            &pair->receives.ring[(pair->receives.head + i) % pair->receives.size];
        if (sw_overlaps(other->parts, other->part_count, parts, count))
            return 1;
    }
    return 0;
}

/* In a simulation: the device owns the memory of a receive from now on. */
static void take_over_receive(const struct sw_queue_pair *pair, const struct ibv_recv_wr *request)
{
    uint32_t size = sw_take_over_receive(pair, pair->ibv.qp_num, pair->ibv.pd, request);

    if (is_written_twice(pair, pair->receives.count - 1, request->sg_list, request->num_sge))
        sw_system->misused(AIORDMA_SIMULATED_TWICE, request->wr_id, pair->ibv.qp_num, size);
}

/* In a simulation: from now on the device owns the memory. */
static void take_over(const struct sw_queue_pair *pair, struct sw_send *send)
{
    const struct sw_posted posted = {pair, send->wr_id, pair->ibv.qp_num};

    sw_system->posted(send->wr_id, pair->ibv.qp_num);
    if (writes_memory(send->opcode) &&
        is_written_twice(pair, pair->receives.count, send->parts, send->part_count))
        sw_system->misused(AIORDMA_SIMULATED_TWICE, send->wr_id, pair->ibv.qp_num, send->length);
    if (writes_memory(send->opcode))
        sw_poison(pair->ibv.pd, send->parts, send->part_count, send->length);
    else if (send->part_count)
        send->sum = sw_owned_sum(pair->ibv.pd, send->parts, send->part_count, send->length);
    sw_guard_parts(&posted, pair->ibv.pd, send->parts, send->part_count, send->length,
                   writes_memory(send->opcode));
}

/* refused: gets the request that was refused. NULL: those before it are refused, too. */
static int post_send(struct ibv_qp *queue_pair, struct ibv_send_wr *request,
                     struct ibv_send_wr **refused)
{
    struct sw_queue_pair *pair = (struct sw_queue_pair *)queue_pair;
    struct aiordma_fault fault;
    uint64_t length = 0;
    int error = 0;

    sw_lock();
    const uint32_t before = pair->end;
    if (!can_send(pair))
        error = EINVAL;
    for (; !error && request; request = request->next) {
        error = check_send(pair, request, &length);
        if (!error && sw_fault(AIORDMA_FAULT_POST_REFUSED, &fault))
            error = (int)fault.error;
        struct sw_send *send = next_slot(pair);
        if (!error && !send)
            error = ENOMEM;
        if (error)
            break;
        copy_send(pair, send, request, (uint32_t)length);
        if (sw_system->is_simulated)
            take_over(pair, send);
        pair->end++;
    }
    if (error && refused)
        *refused = request;
    else if (error)
        pair->end = before;
    go(pair);
    sw_unlock();
    return error;
}

int sw_post_all(struct ibv_qp *queue_pair, struct ibv_send_wr *first)
{
    return post_send(queue_pair, first, NULL);
}

/* Bind a type 1 window. Its new rkey is set at once, but valid only when this is carried out. */
static int bind_mw(struct ibv_qp *queue_pair, struct ibv_mw *window, struct ibv_mw_bind *bind)
{
    struct sw_queue_pair *pair = (struct sw_queue_pair *)queue_pair;
    int error = 0;

    sw_lock();
    struct sw_send *send = next_slot(pair);
    if (pair->ibv.qp_type != IBV_QPT_RC || !can_send(pair) || window->pd != pair->ibv.pd ||
        bind->send_flags & ~(unsigned int)(IBV_SEND_FENCE | IBV_SEND_SIGNALED))
        error = EINVAL;
    else if (!send)
        error = ENOMEM;
    if (!error) {
        struct ibv_send_wr request = {
            .wr_id = bind->wr_id, .opcode = IBV_WR_BIND_MW, .send_flags = bind->send_flags};
        request.bind_mw.mw = window;
        request.bind_mw.rkey = ibv_inc_rkey(window->rkey);
        request.bind_mw.bind_info = bind->bind_info;
        copy_send(pair, send, &request, 0);
        window->rkey = send->window_key;
        pair->end++;
        go(pair);
    }
    sw_unlock();
    return error;
}

/* -- posting receives -------------------------------------------------------------------- */

static int post_recv(struct ibv_qp *queue_pair, struct ibv_recv_wr *request,
                     struct ibv_recv_wr **refused)
{
    struct sw_queue_pair *pair = (struct sw_queue_pair *)queue_pair;
    struct aiordma_fault fault;
    int error = 0;

    sw_lock();
    if (pair->ibv.state == IBV_QPS_RESET || pair->shared)
        error = EINVAL;
    for (; !error && request; request = request->next) {
        if (sw_fault(AIORDMA_FAULT_POST_REFUSED, &fault))
            error = (int)fault.error;
        else
            error = sw_receives_add(&pair->receives, request);
        if (error)
            break;
        if (sw_system->is_simulated)
            take_over_receive(pair, request);
    }
    if (error)
        *refused = request;
    if (pair->ibv.state == IBV_QPS_ERR)
        sw_flush_receives(pair);
    else if (pair->is_waiting && pair->receives.count && !pair->unready.deadline) {
        pair->is_waiting = 0;
        pair->transport->resume(pair);
    }
    sw_unlock();
    return error;
}

void sw_fill_work(struct ibv_context_ops *operations)
{
    operations->post_send = post_send;
    operations->post_recv = post_recv;
    operations->bind_mw = bind_mw;
}
