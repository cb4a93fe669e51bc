/*
 * The types of rdma-core's libraries and the verbs that run without a call into a library. The
 * package needs no header of rdma-core: the declarations are its own.
 *
 * A verb of the second kind is a call of a driver's function through a context's table. See its man
 * page for what it does.
 */
#ifndef AIORDMA_RDMA_CORE_H
#define AIORDMA_RDMA_CORE_H

#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "declarations/verbs.h"
#include "declarations/rdmacm.h"

/* -- the data path: one indirect call each ------------------------------------------------------ */

static inline int ibv_poll_cq(struct ibv_cq *queue, int most, struct ibv_wc *found)
{
    return queue->context->ops.poll_cq(queue, most, found);
}

static inline int ibv_req_notify_cq(struct ibv_cq *queue, int solicited_only)
{
    return queue->context->ops.req_notify_cq(queue, solicited_only);
}

static inline int ibv_post_send(struct ibv_qp *queue_pair, struct ibv_send_wr *first,
                                struct ibv_send_wr **refused)
{
    return queue_pair->context->ops.post_send(queue_pair, first, refused);
}

static inline int ibv_post_recv(struct ibv_qp *queue_pair, struct ibv_recv_wr *first,
                                struct ibv_recv_wr **refused)
{
    return queue_pair->context->ops.post_recv(queue_pair, first, refused);
}

static inline int ibv_post_srq_recv(struct ibv_srq *queue, struct ibv_recv_wr *first,
                                    struct ibv_recv_wr **refused)
{
    return queue->context->ops.post_srq_recv(queue, first, refused);
}

/* -- memory windows ----------------------------------------------------------------------------- */

static inline struct ibv_mw *ibv_alloc_mw(struct ibv_pd *domain, enum ibv_mw_type type)
{
    if (domain->context->ops.alloc_mw)
        return domain->context->ops.alloc_mw(domain, type);
    errno = EOPNOTSUPP;
    return NULL;
}

static inline int ibv_dealloc_mw(struct ibv_mw *window)
{
    return window->context->ops.dealloc_mw(window);
}

/* Drivers rely on these checks. */
static inline int ibv_bind_mw(struct ibv_qp *queue_pair, struct ibv_mw *window,
                              struct ibv_mw_bind *bind)
{
    const struct ibv_mw_bind_info *to = &bind->bind_info;
    int is_unbinding = !to->mr;

    if (window->type != IBV_MW_TYPE_1 || (is_unbinding && (to->addr || to->length)))
        return EINVAL;
    if (!is_unbinding && to->mr->pd != window->pd)
        return EPERM;
    return window->context->ops.bind_mw(queue_pair, window, bind);
}

/* The key of a window after its next bind: the last 8 bits count its binds. */
static inline uint32_t ibv_inc_rkey(uint32_t rkey)
{
    return (rkey & ~UINT32_C(0xff)) | ((rkey + 1) & 0xff);
}

/* -- extended contexts -------------------------------------------------------------------------- */

/* The abi_compat of a context that is part of a verbs_context. */
#define AIORDMA_EXTENDED ((void *)UINTPTR_MAX)

/*
 * Return the extended context if it has the member at this offset, or NULL: a library may have
 * allocated a shorter verbs_context than this package knows, one that lacks the first members.
 */
static inline struct verbs_context *verbs_context_with(struct ibv_context *context, size_t member)
{
    struct verbs_context *extended;

    if (context->abi_compat != AIORDMA_EXTENDED)
        return NULL;
    extended = (void *)((char *)context - offsetof(struct verbs_context, context));
    return extended->sz >= sizeof(*extended) - member ? extended : NULL;
}

static inline struct ibv_cq_ex *ibv_create_cq_ex(struct ibv_context *context,
                                                 struct ibv_cq_init_attr_ex *attr)
{
    struct verbs_context *extended =
        verbs_context_with(context, offsetof(struct verbs_context, create_cq_ex));

    if (extended && extended->create_cq_ex)
        return extended->create_cq_ex(context, attr);
    errno = EOPNOTSUPP;
    return NULL;
}

static inline int ibv_modify_cq(struct ibv_cq *queue, struct ibv_modify_cq_attr *attr)
{
    struct verbs_context *extended =
        verbs_context_with(queue->context, offsetof(struct verbs_context, modify_cq));

    return extended && extended->modify_cq ? extended->modify_cq(queue, attr) : EOPNOTSUPP;
}

static inline int ibv_advise_mr(struct ibv_pd *domain, enum ib_uverbs_advise_mr_advice advice,
                                uint32_t flags, struct ibv_sge *parts, uint32_t count)
{
    struct verbs_context *extended =
        verbs_context_with(domain->context, offsetof(struct verbs_context, advise_mr));

    return extended && extended->advise_mr
               ? extended->advise_mr(domain, advice, flags, parts, count)
               : EOPNOTSUPP;
}

static inline int ibv_query_rt_values_ex(struct ibv_context *context, struct ibv_values_ex *values)
{
    struct verbs_context *extended =
        verbs_context_with(context, offsetof(struct verbs_context, query_rt_values));

    return extended && extended->query_rt_values ? extended->query_rt_values(context, values)
                                                 : EOPNOTSUPP;
}

/* An extended queue begins with the members of a plain one. */
static inline struct ibv_cq *ibv_cq_ex_to_cq(struct ibv_cq_ex *queue)
{
    return (struct ibv_cq *)queue;
}

/* -- addresses of an identifier ----------------------------------------------------------------- */

static inline struct sockaddr *rdma_get_local_addr(struct rdma_cm_id *id)
{
    return &id->route.addr.src_addr;
}

static inline struct sockaddr *rdma_get_peer_addr(struct rdma_cm_id *id)
{
    return &id->route.addr.dst_addr;
}

#endif
