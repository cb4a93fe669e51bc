/*
 * The hot path: one crossing into C per wake (drain) and one per post. Nothing here keeps
 * state of its own; errors go back as numbers for Python to explain.
 */
#include "data_path.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

enum { MOST_SGES = 64, POLL_CHUNK = 32 };

static void pack(struct aiordma_completion *out, const struct ibv_wc *wc)
{
    memset(out, 0, sizeof(*out));
    out->wr_id = wc->wr_id;
    out->status = wc->status;
    out->vendor_err = wc->vendor_err;
    out->qp_num = wc->qp_num;
    /* man ibv_poll_cq: on an error no other field is valid. */
    if (wc->status != IBV_WC_SUCCESS)
        return;
    out->opcode = wc->opcode;
    out->byte_len = wc->byte_len;
    if (wc->wc_flags & IBV_WC_WITH_IMM)
        out->immediate = ntohl(wc->imm_data);
    else if (wc->wc_flags & IBV_WC_WITH_INV)
        out->immediate = wc->invalidated_rkey;
    out->src_qp = wc->src_qp;
    out->wc_flags = wc->wc_flags;
    out->pkey_index = wc->pkey_index;
    out->slid = wc->slid;
    out->sl = wc->sl;
    out->dlid_path_bits = wc->dlid_path_bits;
}

int aiordma_poll(struct ibv_cq *queue, struct aiordma_completion *batch, int capacity)
{
    struct ibv_wc chunk[POLL_CHUNK];
    int count = 0;

    while (count < capacity) {
        int room = capacity - count < POLL_CHUNK ? capacity - count : POLL_CHUNK;
        int found = ibv_poll_cq(queue, room, chunk);
        if (found < 0)
            return count ? count : found;
        for (int i = 0; i < found; i++)
            pack(&batch[count + i], &chunk[i]);
        count += found;
        if (found < room)
            break;
    }
    return count;
}

int aiordma_request_notification(struct ibv_cq *queue, int solicited_only)
{
    return ibv_req_notify_cq(queue, solicited_only);
}

int aiordma_take_events(const struct aiordma_provider *provider,
                        struct ibv_comp_channel *channel, struct aiordma_drained_queue *queues,
                        uint32_t count, uint32_t *taken)
{
    uint32_t expected = 0;
    struct ibv_cq *queue;
    void *context;
    int error = EAGAIN;

    for (uint32_t i = 0; i < count; i++)
        expected += queues[i].armed;
    *taken = 0;
    /* An armed queue has one event to give. Asking until there are no more would cost each wake
       one more system call; should there be another one, the channel stays readable. */
    do {
        if (provider->get_cq_event(channel, &queue, &context)) {
            error = errno;
            break;
        }
        ++*taken;
        for (uint32_t i = 0; i < count; i++)
            if (queues[i].queue == queue) {
                queues[i].events++;
                break;
            }
    } while (*taken < expected);
    for (uint32_t i = 0; i < count; i++)
        if (queues[i].events) {
            /* Acking takes a lock: once per queue and wake, not once per event. */
            provider->ack_cq_events(queues[i].queue, queues[i].events);
            queues[i].events = 0;
            queues[i].armed = 0;
        }
    /* Acked in any case: what was taken and not acked blocks ibv_destroy_cq for ever. */
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR ? 0 : -error;
}

int aiordma_drain(const struct aiordma_provider *provider, struct aiordma_drain *drain)
{
    uint32_t count = 0;

    drain->more = 0;
    drain->events = 0;
    int failed = aiordma_take_events(provider, drain->channel, drain->queues,
                                     drain->queue_count, &drain->events);
    if (failed)
        return failed;
    for (uint32_t i = 0; i < drain->queue_count; i++)
        if (!drain->queues[i].armed) {
            int error = ibv_req_notify_cq(drain->queues[i].queue, 0);
            if (error)
                return -error;
            drain->queues[i].armed = 1;
        }
    for (uint32_t i = 0; i < drain->queue_count; i++) {
        int room = (int)(drain->capacity - count);
        int found = aiordma_poll(drain->queues[i].queue, drain->batch + count, room);
        if (found < 0) {
            if (!count)
                return -EIO;
            drain->more = 1; /* what was found is delivered first; the next call fails */
            break;
        }
        count += (uint32_t)found;
        if (found == room) {
            drain->more = 1;
            break;
        }
    }
    return (int)count;
}

int aiordma_post_send(struct ibv_qp *queue_pair, uint64_t wr_id, uint32_t opcode,
                      uint32_t send_flags, const char *sges, int sge_count,
                      uint64_t remote_address, uint32_t rkey, uint32_t immediate)
{
    struct ibv_sge list[MOST_SGES];
    struct ibv_send_wr request, *refused = NULL;

    if (sge_count < 0 || sge_count > MOST_SGES)
        return EINVAL;
    memcpy(list, sges, (size_t)sge_count * sizeof(list[0]));
    memset(&request, 0, sizeof(request));
    request.wr_id = wr_id;
    request.sg_list = list;
    request.num_sge = sge_count;
    request.opcode = (enum ibv_wr_opcode)opcode;
    request.send_flags = send_flags;
    if (request.opcode == IBV_WR_SEND_WITH_INV)
        request.invalidate_rkey = immediate;
    else
        request.imm_data = htonl(immediate);
    request.wr.rdma.remote_addr = remote_address;
    request.wr.rdma.rkey = rkey;
    int error = ibv_post_send(queue_pair, &request, &refused);
    if (error < 0)
        error = error == -1 && errno ? errno : -error;
    /* Named as refused it is not in the queue; else it is, and the doorbell failed. */
    return refused && error ? error : refused ? EINVAL : -error;
}

int aiordma_post_recv(struct ibv_qp *queue_pair, uint64_t wr_id, const char *sges,
                      int sge_count)
{
    struct ibv_sge list[MOST_SGES];
    struct ibv_recv_wr request, *refused = NULL;

    if (sge_count < 0 || sge_count > MOST_SGES)
        return EINVAL;
    memcpy(list, sges, (size_t)sge_count * sizeof(list[0]));
    memset(&request, 0, sizeof(request));
    request.wr_id = wr_id;
    request.sg_list = list;
    request.num_sge = sge_count;
    return ibv_post_recv(queue_pair, &request, &refused);
}

int aiordma_query_port(const struct aiordma_provider *provider, struct ibv_context *context,
                       uint8_t port_num, struct ibv_port_attr *attr)
{
    struct verbs_context *extended = verbs_get_ctx_op(context, query_port);

    memset(attr, 0, sizeof(*attr));
    if (extended)
        return extended->query_port(context, port_num, attr, sizeof(*attr));
    return provider->query_port(context, port_num, (struct _compat_ibv_port_attr *)attr);
}

static void copy_connection(struct aiordma_cm_event *copy, const struct rdma_conn_param *from)
{
    copy->responder_resources = from->responder_resources;
    copy->initiator_depth = from->initiator_depth;
    copy->flow_control = from->flow_control;
    copy->retry_count = from->retry_count;
    copy->rnr_retry_count = from->rnr_retry_count;
    copy->srq = from->srq;
    copy->qp_num = from->qp_num;
}

int aiordma_next_cm_event(const struct aiordma_provider *provider,
                          struct rdma_event_channel *channel, struct aiordma_cm_event *copy)
{
    struct rdma_cm_event *event;
    const void *private_data;

    if (provider->get_cm_event(channel, &event))
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
    memset(copy, 0, sizeof(*copy));
    copy->id = (uintptr_t)event->id;
    copy->listen_id =
        event->event == RDMA_CM_EVENT_CONNECT_REQUEST ? (uintptr_t)event->listen_id : 0;
    copy->event = event->event;
    copy->status = event->status;
    if (event->id->ps == RDMA_PS_UDP || event->id->ps == RDMA_PS_IPOIB) {
        private_data = event->param.ud.private_data;
        copy->private_data_length = event->param.ud.private_data_len;
        copy->qp_num = event->param.ud.qp_num;
        copy->qkey = event->param.ud.qkey;
        copy->address = event->param.ud.ah_attr;
    } else {
        private_data = event->param.conn.private_data;
        copy->private_data_length = event->param.conn.private_data_len;
        copy_connection(copy, &event->param.conn);
    }
    /* A multicast event carries the user's context pointer here, and no bytes. */
    if (event->event == RDMA_CM_EVENT_MULTICAST_JOIN ||
        event->event == RDMA_CM_EVENT_MULTICAST_ERROR)
        copy->private_data_length = 0;
    if (private_data && copy->private_data_length)
        memcpy(copy->private_data, private_data, copy->private_data_length);
    else
        copy->private_data_length = 0;
    return provider->ack_cm_event(event) ? -errno : 1;
}

const char *aiordma_local_address(struct rdma_cm_id *id)
{
    return (const char *)rdma_get_local_addr(id);
}

const char *aiordma_peer_address(struct rdma_cm_id *id)
{
    return (const char *)rdma_get_peer_addr(id);
}
