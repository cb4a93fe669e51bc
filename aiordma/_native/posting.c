/*
 * Chains: one crossing and one doorbell for many requests, of every kind.
 */
#include "posting.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The sges of a chain, aligned, and how far they have been handed out. */
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

static int copy_parts(struct parts *parts, const char *sges, size_t size)
{
    parts->used = 0;
    parts->count = size / sizeof(*parts->all);
    parts->all = malloc(size ? size : 1);
    if (!parts->all)
        return ENOMEM;
    memcpy(parts->all, sges, size);
    return 0;
}

/*
 * What a driver's answer says of a chain. Some answer with a negative errno, some with success
 * though they stopped before a request, and one that fails after it has taken them all (the
 * doorbell failed) names none: then they may be executed yet, and the answer is negative.
 */
static int outcome(int error, size_t refused, int is_refused, uint32_t count, uint32_t *posted)
{
    if (error < 0)
        error = error == -1 && errno ? errno : -error;
    *posted = is_refused ? (uint32_t)refused : count;
    if (is_refused)
        return error ? error : EINVAL;
    return -error;
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

struct ibv_send_wr *aiordma_fill_sends(const struct aiordma_send_request *requests,
                                       uint32_t count, const char *sges, size_t sges_size,
                                       int *error)
{
    struct ibv_send_wr *chain = calloc(1, count * sizeof(*chain) + sges_size);
    struct parts parts = {(struct ibv_sge *)(chain + count), sges_size / sizeof(*parts.all), 0};

    *error = chain ? 0 : ENOMEM;
    if (chain)
        memcpy(parts.all, sges, sges_size);
    for (uint32_t i = 0; !*error && i < count; i++) {
        *error = fill_send(&chain[i], &requests[i], &parts);
        chain[i].next = i + 1 < count ? &chain[i + 1] : NULL;
    }
    if (!*error)
        return chain;
    free(chain);
    return NULL;
}

int aiordma_post_send_chain(struct ibv_qp *queue_pair,
                            const struct aiordma_send_request *requests, uint32_t count,
                            const char *sges, size_t sges_size, uint32_t *posted)
{
    struct ibv_send_wr *chain, *refused = NULL;
    int error;

    *posted = 0;
    if (!count)
        return 0;
    chain = aiordma_fill_sends(requests, count, sges, sges_size, &error);
    if (!chain)
        return error;
    error = ibv_post_send(queue_pair, chain, &refused);
    error = outcome(error, (size_t)(refused - chain), refused != NULL, count, posted);
    free(chain);
    return error;
}

static struct ibv_recv_wr *receives(const struct aiordma_receive_request *requests,
                                    uint32_t count, struct parts *parts, int *error)
{
    struct ibv_recv_wr *chain = calloc(count, sizeof(*chain));

    *error = chain ? 0 : ENOMEM;
    for (uint32_t i = 0; !*error && i < count; i++) {
        chain[i].wr_id = requests[i].wr_id;
        chain[i].num_sge = (int)requests[i].sge_count;
        chain[i].next = i + 1 < count ? &chain[i + 1] : NULL;
        *error = take_parts(parts, requests[i].sge_count, &chain[i].sg_list);
    }
    return chain;
}

/* To one of the two; the other is NULL. */
static int post_receives(struct ibv_qp *queue_pair, struct ibv_srq *queue,
                         const struct aiordma_receive_request *requests, uint32_t count,
                         const char *sges, size_t sges_size, uint32_t *posted)
{
    struct ibv_recv_wr *chain = NULL, *refused = NULL;
    struct parts parts = {NULL, 0, 0};
    int error;

    *posted = 0;
    if (!count)
        return 0;
    error = copy_parts(&parts, sges, sges_size);
    if (!error)
        chain = receives(requests, count, &parts, &error);
    if (!error) {
        error = queue ? ibv_post_srq_recv(queue, chain, &refused)
                      : ibv_post_recv(queue_pair, chain, &refused);
        error = outcome(error, (size_t)(refused - chain), refused != NULL, count, posted);
    }
    free(parts.all);
    free(chain);
    return error;
}

int aiordma_post_recv_chain(struct ibv_qp *queue_pair,
                            const struct aiordma_receive_request *requests, uint32_t count,
                            const char *sges, size_t sges_size, uint32_t *posted)
{
    return post_receives(queue_pair, NULL, requests, count, sges, sges_size, posted);
}

int aiordma_post_srq_recv_chain(struct ibv_srq *queue,
                                const struct aiordma_receive_request *requests,
                                uint32_t count, const char *sges, size_t sges_size,
                                uint32_t *posted)
{
    return post_receives(NULL, queue, requests, count, sges, sges_size, posted);
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
