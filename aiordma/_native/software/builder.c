/*
 * Work requests that a program builds by calls. They are kept from wr_start to wr_complete, which
 * posts all of them, or none after a mistake. The builder is locked meanwhile, as the man page says.
 */
#include "builder.h"

#include <errno.h>
#include <string.h>

#include "blocks.h"
#include "work.h"

struct sw_builder {
    pthread_mutex_t lock;
    size_t mapped; /* bytes of this and of the arrays; only used requests cost memory */
    uint32_t most, count;
    int error; /* of this batch: the first mistake */
    struct ibv_send_wr *current;
    /* one more than `most`: calls after a mistake fill it */
    struct ibv_send_wr *requests;
    struct ibv_sge *parts; /* parts_each of the queue pair for each request */
    char *inlined;         /* max_inline_data for each request */
};

enum {
    DATAGRAM_OPERATIONS = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM,
    CONNECTED_OPERATIONS = DATAGRAM_OPERATIONS | IBV_QP_EX_WITH_RDMA_WRITE |
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD |
        IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV,
};

int sw_check_operations(enum ibv_qp_type type, uint64_t operations)
{
    uint64_t known = type == IBV_QPT_UD ? DATAGRAM_OPERATIONS : CONNECTED_OPERATIONS;

    return operations & ~known ? EOPNOTSUPP : 0;
}

static struct sw_queue_pair *pair_of(struct ibv_qp_ex *queue_pair)
{
    return (struct sw_queue_pair *)queue_pair;
}

static struct sw_builder *builder_of(struct ibv_qp_ex *queue_pair)
{
    return pair_of(queue_pair)->builder;
}

static void fail(struct sw_builder *builder, int error)
{
    if (!builder->error)
        builder->error = error;
}

/* -- the batch --------------------------------------------------------------------------------- */

static void start(struct ibv_qp_ex *queue_pair)
{
    struct sw_builder *builder = builder_of(queue_pair);

    pthread_mutex_lock(&builder->lock);
    builder->count = 0;
    builder->error = 0;
    builder->current = &builder->requests[builder->most];
}

static int complete(struct ibv_qp_ex *queue_pair)
{
    struct sw_builder *builder = builder_of(queue_pair);
    int error = builder->error;

    for (uint32_t i = 0; i + 1 < builder->count; i++)
        builder->requests[i].next = &builder->requests[i + 1];
    if (!error && builder->count)
        error = sw_post_all(&queue_pair->qp_base, builder->requests);
    pthread_mutex_unlock(&builder->lock);
    return error;
}

static void give_up(struct ibv_qp_ex *queue_pair)
{
    pthread_mutex_unlock(&builder_of(queue_pair)->lock);
}

/* -- the next request, and what it does --------------------------------------------------------- */

static struct ibv_send_wr *begin(struct ibv_qp_ex *queue_pair, enum ibv_wr_opcode opcode)
{
    struct sw_builder *builder = builder_of(queue_pair);
    uint32_t slot = builder->count;

    if (slot < builder->most)
        builder->count++;
    else
        fail(builder, ENOMEM);
    struct ibv_send_wr *request = &builder->requests[slot];
    memset(request, 0, sizeof(*request));
    request->wr_id = queue_pair->wr_id;
    request->send_flags = queue_pair->wr_flags & ~(unsigned int)IBV_SEND_INLINE;
    request->opcode = opcode;
    request->sg_list = builder->parts + (size_t)slot * pair_of(queue_pair)->parts_each;
    builder->current = request;
    return request;
}

static void begin_rdma(struct ibv_qp_ex *queue_pair, enum ibv_wr_opcode opcode, uint32_t rkey,
                       uint64_t remote_addr, uint32_t immediate)
{
    struct ibv_send_wr *request = begin(queue_pair, opcode);

    request->wr.rdma.rkey = rkey;
    request->wr.rdma.remote_addr = remote_addr;
    request->imm_data = immediate;
}

static void begin_atomic(struct ibv_qp_ex *queue_pair, enum ibv_wr_opcode opcode, uint32_t rkey,
                         uint64_t remote_addr, uint64_t compare_add, uint64_t swap)
{
    struct ibv_send_wr *request = begin(queue_pair, opcode);

    request->wr.atomic.rkey = rkey;
    request->wr.atomic.remote_addr = remote_addr;
    request->wr.atomic.compare_add = compare_add;
    request->wr.atomic.swap = swap;
}

static void atomic_cmp_swp(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr,
                           uint64_t compare, uint64_t swap)
{
    begin_atomic(queue_pair, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, remote_addr, compare, swap);
}

static void atomic_fetch_add(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr,
                             uint64_t add)
{
    begin_atomic(queue_pair, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, remote_addr, add, 0);
}

static void rdma_read(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr)
{
    begin_rdma(queue_pair, IBV_WR_RDMA_READ, rkey, remote_addr, 0);
}

static void rdma_write(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr)
{
    begin_rdma(queue_pair, IBV_WR_RDMA_WRITE, rkey, remote_addr, 0);
}

static void rdma_write_imm(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr,
                           uint32_t imm_data)
{
    begin_rdma(queue_pair, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, remote_addr, imm_data);
}

static void plain_send(struct ibv_qp_ex *queue_pair)
{
    begin(queue_pair, IBV_WR_SEND);
}

static void send_imm(struct ibv_qp_ex *queue_pair, uint32_t imm_data)
{
    begin(queue_pair, IBV_WR_SEND_WITH_IMM)->imm_data = imm_data;
}

static void send_inv(struct ibv_qp_ex *queue_pair, uint32_t invalidate_rkey)
{
    begin(queue_pair, IBV_WR_SEND_WITH_INV)->invalidate_rkey = invalidate_rkey;
}

static void local_inv(struct ibv_qp_ex *queue_pair, uint32_t invalidate_rkey)
{
    begin(queue_pair, IBV_WR_LOCAL_INV)->invalidate_rkey = invalidate_rkey;
}

static void bind_mw(struct ibv_qp_ex *queue_pair, struct ibv_mw *window, uint32_t rkey,
                    const struct ibv_mw_bind_info *bind)
{
    struct ibv_send_wr *request = begin(queue_pair, IBV_WR_BIND_MW);

    request->bind_mw.mw = window;
    request->bind_mw.rkey = rkey;
    request->bind_mw.bind_info = *bind;
}

/* -- setters of the current request ------------------------------------------------------------- */

static void set_ud_addr(struct ibv_qp_ex *queue_pair, struct ibv_ah *ah, uint32_t remote_qpn,
                        uint32_t remote_qkey)
{
    struct ibv_send_wr *request = builder_of(queue_pair)->current;

    request->wr.ud.ah = ah;
    request->wr.ud.remote_qpn = remote_qpn;
    request->wr.ud.remote_qkey = remote_qkey;
}

static void set_sge_list(struct ibv_qp_ex *queue_pair, size_t count, const struct ibv_sge *parts)
{
    struct sw_builder *builder = builder_of(queue_pair);

    if (count > pair_of(queue_pair)->capacity.max_send_sge) {
        fail(builder, EINVAL);
        return;
    }
    builder->current->num_sge = (int)count;
    for (size_t i = 0; i < count; i++)
        builder->current->sg_list[i] = parts[i];
}

static void set_sge(struct ibv_qp_ex *queue_pair, uint32_t lkey, uint64_t address, uint32_t length)
{
    const struct ibv_sge part = {.addr = address, .length = length, .lkey = lkey};

    set_sge_list(queue_pair, 1, &part);
}

static void set_inline_data_list(struct ibv_qp_ex *queue_pair, size_t count,
                                 const struct ibv_data_buf *buffers)
{
    struct sw_builder *builder = builder_of(queue_pair);
    struct ibv_send_wr *request = builder->current;
    const uint32_t most = pair_of(queue_pair)->capacity.max_inline_data;
    char *to = builder->inlined + (size_t)(request - builder->requests) * most;
    struct ibv_sge part = {.addr = (uintptr_t)to};

    for (size_t i = 0; i < count; i++) {
        if (buffers[i].length > most - part.length) {
            fail(builder, EINVAL);
            return;
        }
        if (buffers[i].length)
            memcpy(to + part.length, buffers[i].addr, buffers[i].length);
        part.length += (uint32_t)buffers[i].length;
    }
    request->send_flags |= IBV_SEND_INLINE;
    set_sge_list(queue_pair, part.length ? 1 : 0, &part);
}

static void set_inline_data(struct ibv_qp_ex *queue_pair, void *address, size_t length)
{
    const struct ibv_data_buf buffer = {.addr = address, .length = length};

    set_inline_data_list(queue_pair, 1, &buffer);
}

/* -- given and freed ---------------------------------------------------------------------------- */

static void give_functions(struct ibv_qp_ex *queue_pair)
{
    queue_pair->wr_send = plain_send;
    queue_pair->wr_send_imm = send_imm;
    queue_pair->wr_set_inline_data = set_inline_data;
    queue_pair->wr_set_inline_data_list = set_inline_data_list;
    queue_pair->wr_set_sge = set_sge;
    queue_pair->wr_set_sge_list = set_sge_list;
    queue_pair->wr_start = start;
    queue_pair->wr_complete = complete;
    queue_pair->wr_abort = give_up;
    if (queue_pair->qp_base.qp_type == IBV_QPT_UD) {
        queue_pair->wr_set_ud_addr = set_ud_addr;
        return;
    }
    queue_pair->wr_atomic_cmp_swp = atomic_cmp_swp;
    queue_pair->wr_atomic_fetch_add = atomic_fetch_add;
    queue_pair->wr_bind_mw = bind_mw;
    queue_pair->wr_local_inv = local_inv;
    queue_pair->wr_rdma_read = rdma_read;
    queue_pair->wr_rdma_write = rdma_write;
    queue_pair->wr_rdma_write_imm = rdma_write_imm;
    queue_pair->wr_send_inv = send_inv;
}

int sw_give_builder(struct sw_queue_pair *pair)
{
    const size_t slots = (size_t)pair->capacity.max_send_wr + 1;
    const size_t requests = slots * sizeof(struct ibv_send_wr);
    const size_t parts = slots * pair->parts_each * sizeof(struct ibv_sge);
    const size_t size =
        sizeof(struct sw_builder) + requests + parts + slots * pair->capacity.max_inline_data;
    struct sw_builder *builder = sw_map(size);

    if (!builder)
        return ENOMEM;
    pthread_mutex_init(&builder->lock, NULL);
    builder->mapped = size;
    builder->most = pair->capacity.max_send_wr;
    builder->requests = (struct ibv_send_wr *)(void *)(builder + 1);
    builder->parts = (struct ibv_sge *)(void *)((char *)builder->requests + requests);
    builder->inlined = (char *)builder->parts + parts;
    pair->builder = builder;
    give_functions(&pair->extended);
    return 0;
}

void sw_free_builder(struct sw_queue_pair *pair)
{
    struct sw_builder *builder = pair->builder;

    if (!builder)
        return;
    pthread_mutex_destroy(&builder->lock);
    sw_unmap(builder, builder->mapped);
}
