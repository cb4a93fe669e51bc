/*
 * Work requests of every kind from Python's arrays: one call and one doorbell for several.
 */
#include "data_path.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The sges of a chain; used: those that requests have taken. */
struct parts {
    struct ibv_sge *all;
    size_t count;
    size_t used;
};

static int take_parts(struct parts *parts, uint32_t count, struct ibv_sge **list)
{
    if (count > parts->count - parts->used)
        return EINVAL;
    *list = parts->all + parts->used;
    parts->used += count;
    return 0;
}

/* Allocate `count` zeroed requests of this size, and copy the sges behind them. */
static void *allocate(uint32_t count, size_t size, const char *sges, size_t sges_size,
                      struct parts *parts)
{
    char *chain = calloc(1, count * size + sges_size);

    if (!chain)
        return NULL;
    *parts = (struct parts){(void *)(chain + count * size), sges_size / sizeof(*parts->all), 0};
    memcpy(parts->all, sges, sges_size);
    return chain;
}

static int fill_send(struct ibv_send_wr *to, const struct aiordma_send_request *from,
                     struct parts *parts)
{
    to->wr_id = from->wr_id;
    to->opcode = (enum ibv_wr_opcode)from->opcode;
    to->send_flags = from->send_flags;
    to->num_sge = (int)from->sge_count;
    switch (to->opcode) {
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_LOCAL_INV:
        to->invalidate_rkey = from->immediate;
        break;
    default:
        to->imm_data = htonl(from->immediate);
    }
    switch (to->opcode) {
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        to->wr.atomic.remote_addr = from->remote_address;
        to->wr.atomic.compare_add = from->compare_add;
        to->wr.atomic.swap = from->swap;
        to->wr.atomic.rkey = from->rkey;
        break;
    case IBV_WR_BIND_MW:
        to->bind_mw.mw = from->window;
        to->bind_mw.rkey = from->rkey;
        to->bind_mw.bind_info.mr = from->region;
        to->bind_mw.bind_info.addr = from->bind_address;
        to->bind_mw.bind_info.length = from->bind_length;
        to->bind_mw.bind_info.mw_access_flags = from->bind_access;
        break;
    default:
        if (from->address_handle) {
            to->wr.ud.ah = from->address_handle;
            to->wr.ud.remote_qpn = from->remote_qpn;
            to->wr.ud.remote_qkey = from->remote_qkey;
        } else {
            to->wr.rdma.remote_addr = from->remote_address;
            to->wr.rdma.rkey = from->rkey;
        }
    }
    return take_parts(parts, from->sge_count, &to->sg_list);
}

struct ibv_send_wr *aiordma_fill_sends(const void *requests, uint32_t count, const char *sges,
                                       size_t sges_size, int *error)
{
    struct parts parts;
    struct ibv_send_wr *chain = allocate(count, sizeof(*chain), sges, sges_size, &parts);

    *error = chain ? 0 : ENOMEM;
    for (uint32_t i = 0; !*error && i < count; i++) {
        struct aiordma_send_request request; /* Python's bytes need not be aligned */
        memcpy(&request, (const char *)requests + i * sizeof(request), sizeof(request));
        *error = fill_send(&chain[i], &request, &parts);
        chain[i].next = i + 1 < count ? &chain[i + 1] : NULL;
    }
    if (!*error)
        return chain;
    free(chain);
    return NULL;
}

int aiordma_post_send_chain(struct ibv_qp *queue_pair, const void *requests, uint32_t count,
                            const char *sges, size_t sges_size, uint32_t *posted)
{
    struct ibv_send_wr *chain, *refused;
    int error;

    *posted = 0;
    if (!count)
        return 0;
    chain = aiordma_fill_sends(requests, count, sges, sges_size, &error);
    if (!chain)
        return error;
    error = aiordma_post_sends(queue_pair, chain, &refused);
    *posted = refused ? (uint32_t)(refused - chain) : count;
    free(chain);
    return error;
}

static struct ibv_recv_wr *fill_receives(const void *requests, uint32_t count, const char *sges,
                                         size_t sges_size, int *error)
{
    struct parts parts;
    struct ibv_recv_wr *chain = allocate(count, sizeof(*chain), sges, sges_size, &parts);

    *error = chain ? 0 : ENOMEM;
    for (uint32_t i = 0; !*error && i < count; i++) {
        struct aiordma_receive_request request;
        memcpy(&request, (const char *)requests + i * sizeof(request), sizeof(request));
        chain[i].wr_id = request.wr_id;
        chain[i].num_sge = (int)request.sge_count;
        chain[i].next = i + 1 < count ? &chain[i + 1] : NULL;
        *error = take_parts(&parts, request.sge_count, &chain[i].sg_list);
    }
    if (!*error)
        return chain;
    free(chain);
    return NULL;
}

int aiordma_post_recv_chain(struct ibv_qp *queue_pair, struct ibv_srq *shared, const void *requests,
                            uint32_t count, const char *sges, size_t sges_size, uint32_t *posted)
{
    struct ibv_recv_wr *chain, *refused;
    int error;

    *posted = 0;
    if (!count)
        return 0;
    chain = fill_receives(requests, count, sges, sges_size, &error);
    if (!chain)
        return error;
    error = aiordma_post_receives(queue_pair, shared, chain, &refused);
    *posted = refused ? (uint32_t)(refused - chain) : count;
    free(chain);
    return error;
}

int aiordma_bind_window(struct ibv_qp *queue_pair, struct ibv_mw *window, uint64_t wr_id,
                        uint32_t send_flags, struct ibv_mr *region, uint64_t address,
                        uint64_t length, uint32_t access)
{
    struct ibv_mw_bind bind = {
        .wr_id = wr_id,
        .send_flags = send_flags,
        .bind_info = {region, address, length, access},
    };

    return ibv_bind_mw(queue_pair, window, &bind);
}
