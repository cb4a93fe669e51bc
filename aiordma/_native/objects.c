/*
 * The inline functions of verbs.h that create, query and free objects, and asynchronous events. No
 * fast path uses them.
 */
#include "objects.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "event_subjects.h"

static uint64_t element_of(const struct ibv_async_event *event)
{
    switch (aiordma_subject_of(event->event_type)) {
    case AIORDMA_OF_QUEUE_PAIR:
        return (uintptr_t)event->element.qp;
    case AIORDMA_OF_COMPLETION_QUEUE:
        return (uintptr_t)event->element.cq;
    case AIORDMA_OF_SHARED_RECEIVE:
        return (uintptr_t)event->element.srq;
    case AIORDMA_OF_WORK_QUEUE:
        return (uintptr_t)event->element.wq;
    case AIORDMA_OF_DEVICE:
        return 0;
    default: /* also for unknown events: they may belong to a port */
        return (uint64_t)event->element.port_num;
    }
}

int aiordma_next_async_event(const struct aiordma_provider *provider, struct ibv_context *context,
                             struct aiordma_async_event *copy)
{
    struct ibv_async_event event;

    if (provider->get_async_event(context, &event))
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
    copy->event = event.event_type;
    copy->reserved = 0;
    copy->element = element_of(&event);
    provider->ack_async_event(&event);
    return 1;
}

int aiordma_query_device(const struct aiordma_provider *provider, struct ibv_context *context,
                         struct ibv_device_attr_ex *attr)
{
    struct verbs_context *extended = verbs_get_ctx_op(context, query_device_ex);

    memset(attr, 0, sizeof(*attr));
    if (extended) {
        int error = extended->query_device_ex(context, NULL, attr, sizeof(*attr));
        if (error != EOPNOTSUPP && error != ENOSYS)
            return error;
        memset(attr, 0, sizeof(*attr));
    }
    return provider->query_device(context, &attr->orig_attr);
}

struct ibv_mw *aiordma_alloc_window(struct ibv_pd *domain, uint32_t type)
{
    return ibv_alloc_mw(domain, (enum ibv_mw_type)type);
}

int aiordma_dealloc_window(struct ibv_mw *window)
{
    return ibv_dealloc_mw(window);
}

struct ibv_cq *aiordma_create_cq_ex(struct ibv_context *context, uint32_t entries,
                                    struct ibv_comp_channel *channel, uint32_t vector,
                                    uint32_t flags)
{
    struct ibv_cq_init_attr_ex attr = {
        .cqe = entries,
        .channel = channel,
        .comp_vector = vector,
        .wc_flags = IBV_WC_STANDARD_FLAGS,
        .comp_mask = flags ? IBV_CQ_INIT_ATTR_MASK_FLAGS : 0,
        .flags = flags,
    };
    struct ibv_cq_ex *queue = ibv_create_cq_ex(context, &attr);

    return queue ? ibv_cq_ex_to_cq(queue) : NULL;
}

int aiordma_address_of_sender(const struct aiordma_provider *provider, struct ibv_context *context,
                              uint8_t port_num, const struct aiordma_completion *completion,
                              const char *grh, struct ibv_ah_attr *attr)
{
    struct ibv_wc wc;
    struct ibv_grh header;

    memset(&wc, 0, sizeof(wc));
    wc.qp_num = completion->qp_num;
    wc.src_qp = completion->src_qp;
    wc.wc_flags = completion->wc_flags;
    wc.pkey_index = completion->pkey_index;
    wc.slid = completion->slid;
    wc.sl = completion->sl;
    wc.dlid_path_bits = completion->dlid_path_bits;
    memcpy(&header, grh, sizeof(header));
    if (provider->init_ah_from_wc(context, port_num, &wc, &header, attr))
        return errno ? errno : EINVAL;
    return 0;
}
