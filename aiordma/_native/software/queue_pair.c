/*
 * Queue pairs: made within limits, moved through their states, flushed and destroyed. What is
 * posted to them is work.c's, what goes over the wire the stream's or the datagrams'.
 */
#include "software.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 4096 };

static struct sw_queue_pair *table[BUCKETS];

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

    /* 0 and 1 are the management's, the highest means a multicast group. */
    do {
        sw_random(&number, sizeof(number));
        number &= 0xffffff;
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

/* -- made and destroyed ------------------------------------------------------------------ */

static int check_request(struct ibv_pd *domain, const struct ibv_qp_init_attr *attr)
{
    const struct ibv_qp_cap *cap = &attr->cap;

    if (attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UD)
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
    sw_receives_free(&pair->receives);
    free(pair->taken.parts);
    free(pair->inlined);
    free(pair->send_parts);
    free(pair->sends);
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
    pair->sends = calloc(pair->send_size + 1, sizeof(*pair->sends));
    pair->send_parts = calloc((size_t)(pair->send_size + 1) * parts, sizeof(struct ibv_sge));
    pair->inlined = malloc((size_t)pair->send_size * cap->max_inline_data + 1);
    uint32_t most = pair->shared ? pair->shared->receives.most_parts : cap->max_recv_sge;
    pair->taken.parts = calloc(most + 1, sizeof(struct ibv_sge));
    if (!pair->sends || !pair->send_parts || !pair->inlined || !pair->taken.parts)
        return ENOMEM;
    for (uint32_t i = 0; i < pair->send_size; i++) {
        pair->sends[i].parts = pair->send_parts + (size_t)i * parts;
        pair->sends[i].inlined = pair->inlined + (size_t)i * cap->max_inline_data;
    }
    return pair->shared ? 0
                        : sw_receives_make(&pair->receives, cap->max_recv_wr, cap->max_recv_sge);
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
    if (make_rings(pair)) {
        free_pair(pair);
        return NULL;
    }
    return pair;
}

static void hook(struct sw_queue_pair *pair)
{
    struct sw_queue_pair **bucket = bucket_of(pair->ibv.qp_num);

    pair->next = *bucket;
    *bucket = pair;
    ((struct sw_domain *)pair->ibv.pd)->objects++;
    ((struct sw_queue *)pair->ibv.send_cq)->users++;
    ((struct sw_queue *)pair->ibv.recv_cq)->users++;
    if (pair->shared)
        pair->shared->users++;
    sw_device.counts.queue_pairs++;
}

static void unhook(struct sw_queue_pair *pair)
{
    struct sw_queue_pair **link = bucket_of(pair->ibv.qp_num);

    while (*link != pair)
        link = &(*link)->next;
    *link = pair->next;
    ((struct sw_domain *)pair->ibv.pd)->objects--;
    ((struct sw_queue *)pair->ibv.send_cq)->users--;
    ((struct sw_queue *)pair->ibv.recv_cq)->users--;
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
    if (!error && pair->ibv.qp_type == IBV_QPT_UD)
        error = sw_datagrams_open(pair);
    else if (!error)
        pair->ibv.qp_num = sw_new_queue_pair_number();
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

static void stop_waiting(struct sw_queue_pair *pair)
{
    sw_cancel(&pair->unready);
    if (!pair->is_waiting)
        return;
    struct sw_queue_pair *alone = NULL;
    struct sw_queue_pair **link = pair->shared ? &pair->shared->waiting : &alone;
    while (*link && *link != pair)
        link = &(*link)->next_waiting;
    if (*link)
        *link = pair->next_waiting;
    pair->next_waiting = NULL;
    pair->is_waiting = 0;
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
        sw_identifier_lost_queue_pair(pair->identifier);
    pair->ibv.state = IBV_QPS_RESET;
    sw_stream_end(pair);
    sw_datagrams_close(pair);
    stop_waiting(pair);
    sw_unbind_all(&pair->ibv);
    sw_forget_completions(pair->ibv.send_cq, pair->ibv.qp_num);
    sw_forget_completions(pair->ibv.recv_cq, pair->ibv.qp_num);
    unhook(pair);
    sw_forget_events(pair->ibv.context, &pair->subject, &pair->ibv.events_completed);
    sw_unlock();
    free_pair(pair);
    return 0;
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
 * What a program may do by itself. A connection is what brings an iWARP queue pair from INIT to
 * RTS (RFC 5040 has no queue pair without a stream), so that RC's RTR and RTS are not here.
 */
static const struct transition connected[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, INIT_ALWAYS | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
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
    const struct transition *all = connected;
    size_t count = sizeof(connected) / sizeof(*connected);

    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
        return mask & ~COMMON ? EINVAL : 0;
    if (pair->ibv.qp_type == IBV_QPT_UD) {
        all = datagram;
        count = sizeof(datagram) / sizeof(*datagram);
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
}

static void to_reset(struct sw_queue_pair *pair)
{
    /* Quietly: nothing is flushed, what is in the completion queues is taken out. */
    pair->ibv.state = IBV_QPS_RESET;
    sw_stream_end(pair);
    stop_waiting(pair);
    pair->oldest = pair->next_send = pair->end = 0;
    pair->receives.head = pair->receives.count = 0;
    pair->has_taken = 0;
    sw_forget_completions(pair->ibv.send_cq, pair->ibv.qp_num);
    sw_forget_completions(pair->ibv.recv_cq, pair->ibv.qp_num);
}

static int is_drained(const struct sw_queue_pair *pair)
{
    if (pair->next_send != pair->end &&
        pair->sends[pair->next_send % pair->send_size].stage == SW_BEGUN)
        return 0;
    for (uint32_t at = pair->oldest; at != pair->next_send; at++)
        if (pair->sends[at % pair->send_size].stage != SW_DONE)
            return 0;
    return 1;
}

static void tell_if_drained(struct sw_queue_pair *pair)
{
    if (pair->ibv.state != IBV_QPS_SQD || !is_drained(pair))
        return;
    pair->attributes.sq_draining = 0;
    if (pair->attributes.en_sqd_async_notify)
        sw_raise_queue_pair(&pair->ibv, IBV_EVENT_SQ_DRAINED);
    pair->attributes.en_sqd_async_notify = 0;
}

static void transmit(struct sw_queue_pair *pair)
{
    if (pair->ibv.qp_type == IBV_QPT_UD)
        sw_datagrams_transmit(pair);
    else
        sw_stream_transmit(pair);
}

static int modify_qp(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask)
{
    struct sw_queue_pair *pair = pair_of(queue_pair);

    if (!queue_pair || !attr)
        return EINVAL;
    sw_lock();
    enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : pair->ibv.state;
    int error = 0;
    if (mask & IBV_QP_CUR_STATE && attr->cur_qp_state != pair->ibv.state)
        error = EINVAL;
    if (!error)
        error = check_transition(pair, to, mask);
    if (!error)
        error = check_values(attr, mask);
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
                transmit(pair);
            tell_if_drained(pair);
        }
    }
    sw_unlock();
    return error;
}

static int query_qp(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask,
                    struct ibv_qp_init_attr *init)
{
    struct sw_queue_pair *pair = pair_of(queue_pair);

    (void)mask; /* everything is at hand */
    if (!queue_pair || !attr || !init)
        return EINVAL;
    sw_lock();
    *attr = pair->attributes;
    attr->qp_state = attr->cur_qp_state = pair->ibv.state;
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

void sw_queue_pair_ready(struct sw_queue_pair *pair)
{
    unsigned int access = IBV_ACCESS_REMOTE_WRITE;

    if (pair->attributes.max_dest_rd_atomic)
        access |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    pair->attributes.qp_access_flags |= access;
    pair->attributes.port_num = 1;
    pair->ibv.state = IBV_QPS_RTS;
}

/* -- the end of what was posted ---------------------------------------------------------- */

static enum ibv_wc_opcode opcode_of(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD;
    case IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV;
    case IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW;
    default:
        return IBV_WC_SEND;
    }
}

/* In the order of the posts: one that has ended waits for those before it. */
static void retire(struct sw_queue_pair *pair)
{
    while (pair->oldest != pair->end) {
        struct sw_send *send = &pair->sends[pair->oldest % pair->send_size];
        if (send->stage != SW_DONE)
            break;
        if (pair->next_send == pair->oldest)
            pair->next_send++;
        pair->oldest++;
        if (send->status == IBV_WC_SUCCESS && !(send->flags & IBV_SEND_SIGNALED))
            continue;
        struct ibv_wc completion = {
            .wr_id = send->wr_id,
            .status = send->status,
            .opcode = opcode_of(send->opcode),
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
    tell_if_drained(pair);
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
    tell_if_drained(pair);
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
    sw_stream_end(pair);
    stop_waiting(pair);
    sw_flush_sends(pair);
    if (pair->has_taken)
        flush_receive(pair);
    sw_flush_receives(pair);
    if (pair->shared)
        sw_raise_queue_pair(&pair->ibv, IBV_EVENT_QP_LAST_WQE_REACHED);
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

void sw_fill_queue_pair(struct aiordma_provider *table)
{
    table->create_qp = create_qp;
    table->modify_qp = modify_qp;
    table->query_qp = query_qp;
    table->destroy_qp = destroy_qp;
}
