/*
 * Queue pairs: created within limits, moved through their states, and destroyed.
 */
#include "states.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "builder.h"
#include "connected.h"
#include "datagram.h"
#include "guard.h"
#include "roce_pair.h"

static struct sw_queue_pair *pair_of(struct ibv_qp *queue_pair)
{
    return (struct sw_queue_pair *)queue_pair;
}

/* -- creating and destroying ------------------------------------------------------------- */

static int check_request(struct ibv_pd *domain, const struct ibv_qp_init_attr *attr)
{
    const struct ibv_qp_cap *cap = &attr->cap;

    if (attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UD &&
        !(attr->qp_type == IBV_QPT_UC && sw_is_roce(domain->context)))
        return EOPNOTSUPP;
    if (!attr->send_cq || !attr->recv_cq || attr->send_cq->context != domain->context ||
        attr->recv_cq->context != domain->context)
        return EINVAL;
    if (attr->srq && attr->srq->pd != domain)
        return EINVAL;
    if (cap->max_send_wr > SW_MOST_WORK_REQUESTS || cap->max_send_sge > SW_MOST_PARTS ||
        cap->max_inline_data > SW_MOST_INLINE)
        return EINVAL;
    if (!attr->srq &&
        (cap->max_recv_wr > SW_MOST_WORK_REQUESTS || cap->max_recv_sge > SW_MOST_PARTS))
        return EINVAL;
    return sw_device.counts.queue_pairs >= SW_MOST_QUEUE_PAIRS ? ENOMEM : 0;
}

static void free_pair(struct sw_queue_pair *pair)
{
    sw_unguard_all(pair);
    sw_free_builder(pair);
    sw_receives_free(&pair->receives);
    free(pair->taken.parts);
    sw_unmap(pair->sends, pair->sends_mapped);
    pthread_cond_destroy(&pair->ibv.cond);
    pthread_mutex_destroy(&pair->ibv.mutex);
    free(pair);
}

static int make_rings(struct sw_queue_pair *pair)
{
    const struct ibv_qp_cap *cap = &pair->capacity;
    uint32_t parts = cap->max_send_sge ? cap->max_send_sge : 1;

    for (pair->send_size = 1; pair->send_size < cap->max_send_wr;)
        pair->send_size *= 2;
    /* One mapping for the slots, their parts and their inline data. */
    const size_t slots = pair->send_size * sizeof(*pair->sends);
    const size_t all_parts = pair->send_size * parts * sizeof(struct ibv_sge);
    pair->sends_mapped = slots + all_parts + (size_t)pair->send_size * cap->max_inline_data;
    pair->sends = sw_map(pair->sends_mapped);
    uint32_t most = pair->shared ? pair->shared->receives.most_parts : cap->max_recv_sge;
    pair->taken.parts = calloc(most + 1, sizeof(struct ibv_sge));
    if (!pair->sends || !pair->taken.parts)
        return ENOMEM;
    pair->send_parts = (struct ibv_sge *)(void *)((char *)pair->sends + slots);
    pair->parts_each = parts;
    pair->inlined = (char *)pair->sends + slots + all_parts;
    return pair->shared ? 0
                        : sw_receives_make(&pair->receives, cap->max_recv_wr, cap->max_recv_sge);
}

static const struct sw_transport *transport_of(const struct ibv_qp *queue_pair)
{
    int is_datagram = queue_pair->qp_type == IBV_QPT_UD;

    if (sw_is_roce(queue_pair->context))
        return is_datagram ? &sw_roce_datagram_transport : &sw_roce_transport;
    return is_datagram ? &sw_datagram_transport : &sw_stream_transport;
}

static struct sw_queue_pair *new_pair(struct ibv_pd *domain, struct ibv_qp_init_attr *attr)
{
    struct sw_queue_pair *pair = calloc(1, sizeof(*pair));

    if (!pair)
        return NULL;
    pthread_mutex_init(&pair->ibv.mutex, NULL);
    pthread_cond_init(&pair->ibv.cond, NULL);
    pair->ibv.context = domain->context;
    pair->ibv.qp_context = attr->qp_context;
    pair->ibv.pd = domain;
    pair->ibv.send_cq = attr->send_cq;
    pair->ibv.recv_cq = attr->recv_cq;
    pair->ibv.srq = attr->srq;
    pair->ibv.qp_type = attr->qp_type;
    pair->ibv.state = IBV_QPS_RESET;
    pair->shared = (struct sw_shared_receive *)attr->srq;
    pair->capacity = attr->cap;
    if (attr->srq)
        pair->capacity.max_recv_wr = pair->capacity.max_recv_sge = 0;
    pair->signals_all = attr->sq_sig_all;
    pair->transport = transport_of(&pair->ibv);
    if (make_rings(pair)) {
        free_pair(pair);
        return NULL;
    }
    return pair;
}

static void hook(struct sw_queue_pair *pair)
{
    sw_list_queue_pair(pair);
    ((struct sw_domain *)pair->ibv.pd)->objects++;
    ((struct sw_queue *)pair->ibv.send_cq)->users++;
    ((struct sw_queue *)pair->ibv.recv_cq)->users++;
    sw_serve_by_sends(&pair->ibv, 1);
    if (pair->shared)
        pair->shared->users++;
    sw_device.counts.queue_pairs++;
}

static void unhook(struct sw_queue_pair *pair)
{
    sw_unlist_queue_pair(pair);
    ((struct sw_domain *)pair->ibv.pd)->objects--;
    ((struct sw_queue *)pair->ibv.send_cq)->users--;
    ((struct sw_queue *)pair->ibv.recv_cq)->users--;
    sw_serve_by_sends(&pair->ibv, 0);
    if (pair->shared)
        pair->shared->users--;
    sw_device.counts.queue_pairs--;
}

static struct ibv_qp *create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *attr)
{
    struct sw_queue_pair *pair = NULL;
    int error = EINVAL;

    sw_lock();
    if (domain && attr)
        error = check_request(domain, attr);
    if (!error) {
        pair = new_pair(domain, attr);
        error = pair ? 0 : ENOMEM;
    }
    if (!error)
        error = pair->transport->open(pair);
    if (!error) {
        hook(pair);
        attr->cap = pair->capacity;
    } else if (pair) {
        free_pair(pair);
        pair = NULL;
    }
    sw_unlock();
    if (!pair)
        errno = error;
    return pair ? &pair->ibv : NULL;
}

static int destroy_qp(struct ibv_qp *queue_pair)
{
    struct sw_queue_pair *pair = pair_of(queue_pair);

    if (!queue_pair)
        return EINVAL;
    sw_lock();
    if (sw_datagrams_are_attached(pair)) {
        sw_unlock();
        return EBUSY;
    }
    if (pair->identifier)
        pair->reports->lost(pair->identifier);
    pair->ibv.state = IBV_QPS_RESET;
    pair->transport->close(pair);
    sw_stop_waiting(pair);
    sw_unbind_all(&pair->ibv);
    sw_forget_completions(pair->ibv.send_cq, pair->ibv.qp_num);
    sw_forget_completions(pair->ibv.recv_cq, pair->ibv.qp_num);
    unhook(pair);
    sw_forget_events(pair->ibv.context, &pair->subject, &pair->ibv.events_completed);
    sw_unlock();
    free_pair(pair);
    return 0;
}

/* A plain queue pair, or one whose work requests are built by calls (man ibv_create_qp_ex). */
static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    struct ibv_qp_init_attr plain;
    int error = 0;

    if (!context || !attr || !(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd ||
        attr->pd->context != context)
        error = EINVAL;
    else if (attr->comp_mask & ~(uint32_t)(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS |
                                           IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) ||
             (attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && attr->create_flags))
        error = EOPNOTSUPP;
    else if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
        error = sw_check_operations(attr->qp_type, attr->send_ops_flags);
    if (error) {
        errno = error;
        return NULL;
    }
    memcpy(&plain, attr, sizeof(plain)); /* the same members come first */
    struct ibv_qp *queue_pair = create_qp(attr->pd, &plain);
    if (!queue_pair)
        return NULL;
    if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS && sw_give_builder(pair_of(queue_pair))) {
        destroy_qp(queue_pair);
        errno = ENOMEM;
        return NULL;
    }
    attr->cap = plain.cap;
    return queue_pair;
}

/* -- states ------------------------------------------------------------------------------ */

struct transition {
    enum ibv_qp_state from, to;
    int required, optional;
};

enum {
    COMMON = IBV_QP_STATE | IBV_QP_CUR_STATE,
    INIT_ALWAYS = IBV_QP_PKEY_INDEX | IBV_QP_PORT,
};

/*
 * The transitions that a program may request (InfiniBand specification, 10.3.1, and man
 * ibv_modify_qp). An iWARP queue pair gets from INIT to RTS only by a connection (RFC 5040 has no
 * queue pair without a stream). So RTR and RTS of these are missing.
 */
static const struct transition iwarp[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

enum {
    PEER = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
    ANSWERS = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    TRIES = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
    LATER = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE,
};

static const struct transition reliable[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR, PEER | ANSWERS, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS, TRIES | IBV_QP_SQ_PSN, LATER},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, LATER},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, LATER | TRIES | IBV_QP_PKEY_INDEX},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, LATER},
};

static const struct transition unreliable[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR, PEER, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE},
};

static const struct transition datagram[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, INIT_ALWAYS | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, INIT_ALWAYS | IBV_QP_QKEY},
    {IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_QKEY},
    {IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_QKEY},
};

static int check_transition(const struct sw_queue_pair *pair, enum ibv_qp_state to, int mask)
{
    const struct transition *all = iwarp;
    size_t count = sizeof(iwarp) / sizeof(*iwarp);

    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
        return mask & ~COMMON ? EINVAL : 0;
    if (pair->ibv.qp_type == IBV_QPT_UD) {
        all = datagram;
        count = sizeof(datagram) / sizeof(*datagram);
    } else if (pair->ibv.qp_type == IBV_QPT_UC) {
        all = unreliable;
        count = sizeof(unreliable) / sizeof(*unreliable);
    } else if (sw_is_roce(pair->ibv.context)) {
        all = reliable;
        count = sizeof(reliable) / sizeof(*reliable);
    }
    for (size_t i = 0; i < count; i++)
        if (all[i].from == pair->ibv.state && all[i].to == to) {
            if ((mask & all[i].required) != all[i].required)
                return EINVAL;
            return mask & ~(COMMON | all[i].required | all[i].optional) ? EINVAL : 0;
        }
    return EINVAL;
}

static int check_values(const struct ibv_qp_attr *attr, int mask)
{
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                       IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;

    if (mask & IBV_QP_PKEY_INDEX && attr->pkey_index)
        return EINVAL;
    if (mask & IBV_QP_PORT && attr->port_num != 1)
        return EINVAL;
    if (mask & IBV_QP_ACCESS_FLAGS && attr->qp_access_flags & ~(unsigned int)access)
        return EINVAL;
    if (mask & IBV_QP_MIN_RNR_TIMER && attr->min_rnr_timer > 31)
        return EINVAL;
    if (mask & IBV_QP_PATH_MTU && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096))
        return EINVAL;
    if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC && attr->max_dest_rd_atomic > SW_MOST_DEPTH) ||
        (mask & IBV_QP_MAX_QP_RD_ATOMIC && attr->max_rd_atomic > SW_MOST_DEPTH))
        return EINVAL;
    if ((mask & IBV_QP_TIMEOUT && attr->timeout > 31) ||
        (mask & IBV_QP_RETRY_CNT && attr->retry_cnt > 7) ||
        (mask & IBV_QP_RNR_RETRY && attr->rnr_retry > 7))
        return EINVAL;
    return 0;
}

static void keep_values(struct ibv_qp_attr *to, const struct ibv_qp_attr *from, int mask)
{
    if (mask & IBV_QP_PKEY_INDEX)
        to->pkey_index = from->pkey_index;
    if (mask & IBV_QP_PORT)
        to->port_num = from->port_num;
    if (mask & IBV_QP_QKEY)
        to->qkey = from->qkey;
    if (mask & IBV_QP_ACCESS_FLAGS)
        to->qp_access_flags = from->qp_access_flags;
    if (mask & IBV_QP_SQ_PSN)
        to->sq_psn = from->sq_psn & 0xffffff;
    if (mask & IBV_QP_MIN_RNR_TIMER)
        to->min_rnr_timer = from->min_rnr_timer;
    if (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY)
        to->en_sqd_async_notify = from->en_sqd_async_notify;
    if (mask & IBV_QP_AV)
        to->ah_attr = from->ah_attr;
    if (mask & IBV_QP_PATH_MTU)
        to->path_mtu = from->path_mtu;
    if (mask & IBV_QP_DEST_QPN)
        to->dest_qp_num = from->dest_qp_num & 0xffffff;
    if (mask & IBV_QP_RQ_PSN)
        to->rq_psn = from->rq_psn & 0xffffff;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
        to->max_dest_rd_atomic = from->max_dest_rd_atomic;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
        to->max_rd_atomic = from->max_rd_atomic;
    if (mask & IBV_QP_TIMEOUT)
        to->timeout = from->timeout;
    if (mask & IBV_QP_RETRY_CNT)
        to->retry_cnt = from->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY)
        to->rnr_retry = from->rnr_retry;
}

static void to_reset(struct sw_queue_pair *pair)
{
    /* Nothing is flushed. The queue pair's completions are removed from their queues. */
    pair->ibv.state = IBV_QPS_RESET;
    pair->transport->end(pair);
    sw_stop_waiting(pair);
    pair->oldest = pair->next_send = pair->end = 0;
    pair->receives.head = pair->receives.count = 0;
    pair->has_taken = 0;
    sw_unguard_all(pair);
    sw_unbind_all(&pair->ibv);
    sw_forget_completions(pair->ibv.send_cq, pair->ibv.qp_num);
    sw_forget_completions(pair->ibv.recv_cq, pair->ibv.qp_num);
}

int sw_modify_queue_pair(struct sw_queue_pair *pair, const struct ibv_qp_attr *attr, int mask)
{
    enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : pair->ibv.state;
    int error = 0;
    if (mask & IBV_QP_CUR_STATE && attr->cur_qp_state != pair->ibv.state)
        error = EINVAL;
    if (!error)
        error = check_transition(pair, to, mask);
    if (!error)
        error = check_values(attr, mask);
    if (!error && pair->transport->enter && mask & IBV_QP_STATE)
        error = pair->transport->enter(pair, to, attr);
    if (!error) {
        keep_values(&pair->attributes, attr, mask);
        if (to == IBV_QPS_ERR) {
            sw_queue_pair_failed(pair);
        } else if (to == IBV_QPS_RESET) {
            to_reset(pair);
        } else if (to != pair->ibv.state) {
            pair->ibv.state = to;
            pair->attributes.sq_draining = to == IBV_QPS_SQD;
            if (to == IBV_QPS_RTS)
                pair->transport->transmit(pair);
            sw_tell_if_drained(pair);
        }
    }
    return error;
}

static int modify_qp(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask)
{
    if (!queue_pair || !attr)
        return EINVAL;
    sw_lock();
    int error = sw_modify_queue_pair(pair_of(queue_pair), attr, mask);
    sw_unlock();
    return error;
}

static int query_qp(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask,
                    struct ibv_qp_init_attr *init)
{
    struct sw_queue_pair *pair = pair_of(queue_pair);

    (void)mask; /* all attributes are available */
    if (!queue_pair || !attr || !init)
        return EINVAL;
    sw_lock();
    *attr = pair->attributes;
    attr->qp_state = attr->cur_qp_state = pair->ibv.state;
    if (!attr->path_mtu)
        attr->path_mtu = IBV_MTU_4096;
    attr->path_mig_state = IBV_MIG_MIGRATED;
    attr->cap = pair->capacity;
    memset(init, 0, sizeof(*init));
    init->qp_context = pair->ibv.qp_context;
    init->send_cq = pair->ibv.send_cq;
    init->recv_cq = pair->ibv.recv_cq;
    init->srq = pair->ibv.srq;
    init->cap = pair->capacity;
    init->qp_type = pair->ibv.qp_type;
    init->sq_sig_all = pair->signals_all;
    sw_unlock();
    return 0;
}

/* Never: memcpy may write a message's bytes in any order. */
static int query_qp_data_in_order(struct ibv_qp *queue_pair, enum ibv_wr_opcode opcode,
                                  uint32_t flags)
{
    (void)queue_pair;
    (void)opcode;
    (void)flags;
    return 0;
}

void sw_fill_states(struct aiordma_provider *table, struct verbs_context *operations)
{
    operations->create_qp_ex = create_qp_ex;
    table->create_qp = create_qp;
    table->modify_qp = modify_qp;
    table->query_qp = query_qp;
    table->query_qp_data_in_order = query_qp_data_in_order;
    table->destroy_qp = destroy_qp;
}
