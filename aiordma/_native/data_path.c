/*
 * The data path: posting, draining, CM events. It has no state of its own. It returns errors as
 * numbers, from which Python makes exceptions.
 */
#include "data_path.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { POLL_CHUNK = 32 };

void aiordma_pack_completion(struct aiordma_completion *out, const struct ibv_wc *wc)
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
            aiordma_pack_completion(&batch[count + i], &chunk[i]);
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

/* -- draining ------------------------------------------------------------------------------ */

/* Acknowledge once per queue and wake-up, not once per event, because each call takes a lock. */
static void acknowledge(struct aiordma_drain *drain)
{
    for (uint32_t i = 0; i < drain->queue_count; i++)
        if (drain->queues[i].events) {
            drain->provider->ack_cq_events(drain->queues[i].queue, drain->queues[i].events);
            drain->queues[i].events = 0;
            drain->queues[i].armed = 0;
        }
}

static int take_events(struct aiordma_drain *drain)
{
    uint32_t expected = 0, taken = 0;
    struct ibv_cq *queue;
    void *context;
    int error = EAGAIN;

    for (uint32_t i = 0; i < drain->queue_count; i++)
        expected += drain->queues[i].armed;
    /* An armed queue makes one event. To read until the channel is empty would cost one more system
       call per wake-up. If there is another event, the channel stays readable. */
    do {
        if (drain->provider->get_cq_event(drain->channel, &queue, &context)) {
            error = errno;
            break;
        }
        taken++;
        uint32_t at = 0;
        while (at < drain->queue_count && drain->queues[at].queue != queue)
            at++;
        if (at < drain->queue_count)
            drain->queues[at].events++;
        else /* the queue is being destroyed, which waits for this */
            drain->provider->ack_cq_events(queue, 1);
    } while (taken < expected);
    drain->events += taken;
    /* After an error, too: an event that is not acknowledged blocks ibv_destroy_cq for ever. */
    acknowledge(drain);
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR ? 0 : -error;
}

static int arm_queues(struct aiordma_drain *drain)
{
    for (uint32_t i = 0; i < drain->queue_count; i++)
        if (!drain->queues[i].armed) {
            int error = ibv_req_notify_cq(drain->queues[i].queue, 0);
            if (error)
                return -abs(error);
            drain->queues[i].armed = 1;
        }
    return 0;
}

static int poll_queues(struct aiordma_drain *drain)
{
    uint32_t count = 0, first = drain->next;

    drain->more = 0;
    for (uint32_t polled = 0; polled < drain->queue_count; polled++) {
        uint32_t i = (first + polled) % drain->queue_count;
        int room = (int)(drain->capacity - count);
        int found = aiordma_poll(drain->queues[i].queue, drain->batch + count, room);
        if (found < 0) {
            if (!count)
                return -EIO;
            drain->more = 1; /* the completions are delivered first; the next call fails */
            drain->next = i;
            break;
        }
        count += (uint32_t)found;
        if (found == room) {
            drain->more = 1;
            drain->next = (i + 1) % drain->queue_count;
            break;
        }
    }
    return (int)count;
}

/* -- posting ------------------------------------------------------------------------------- */

/*
 * Convert a driver's result of a post. Some drivers return a negative errno. Some return success,
 * although they refused a request. A driver whose doorbell failed after it accepted all requests
 * returns an error and no refused request.
 */
static int outcome(int error, int is_refused)
{
    if (error == -1)
        error = errno ? errno : EIO;
    if (error < 0)
        error = -error;
    if (is_refused)
        return error ? error : EINVAL;
    return -error;
}

int aiordma_post_sends(struct ibv_qp *queue_pair, struct ibv_send_wr *first,
                       struct ibv_send_wr **refused)
{
    *refused = NULL;
    errno = 0; /* a driver that returns -1 may not set it */
    int error = ibv_post_send(queue_pair, first, refused);
    return outcome(error, *refused != NULL);
}

int aiordma_post_receives(struct ibv_qp *queue_pair, struct ibv_srq *shared,
                          struct ibv_recv_wr *first, struct ibv_recv_wr **refused)
{
    *refused = NULL;
    errno = 0;
    int error = queue_pair ? ibv_post_recv(queue_pair, first, refused)
                           : ibv_post_srq_recv(shared, first, refused);
    return outcome(error, *refused != NULL);
}

const struct aiordma_data_path *aiordma_data_path(void)
{
    static const struct aiordma_data_path path = {
        .take_events = take_events,
        .arm_queues = arm_queues,
        .poll_queues = poll_queues,
        .post_sends = aiordma_post_sends,
        .post_receives = aiordma_post_receives,
        .fill_sends = aiordma_fill_sends,
    };
    return &path;
}

/* -- the port and the connection manager ---------------------------------------------------- */

int aiordma_query_port(const struct aiordma_provider *provider, struct ibv_context *context,
                       uint8_t port_num, struct ibv_port_attr *attr)
{
    struct verbs_context *extended =
        verbs_context_with(context, offsetof(struct verbs_context, query_port));

    memset(attr, 0, sizeof(*attr));
    if (extended && extended->query_port)
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
    /* A multicast event has the user's context pointer here, and no private data. */
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
