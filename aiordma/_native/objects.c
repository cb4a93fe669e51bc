/*
 * The inline functions of verbs.h that create, query and free objects, and asynchronous events. No
 * fast path uses them.
 */
#define _GNU_SOURCE /* syscall */
#include "objects.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/membarrier.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

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
    copy->qp_num = aiordma_subject_of(event.event_type) == AIORDMA_OF_QUEUE_PAIR
                       ? event.element.qp->qp_num
                       : 0;
    copy->element = element_of(&event);
    provider->ack_async_event(&event);
    return 1;
}

int aiordma_query_device(const struct aiordma_provider *provider, struct ibv_context *context,
                         struct ibv_device_attr_ex *attr)
{
    struct verbs_context *extended =
        verbs_context_with(context, offsetof(struct verbs_context, query_device_ex));

    memset(attr, 0, sizeof(*attr));
    if (extended && extended->query_device_ex) {
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

int aiordma_outwait_receiving(void)
{
    return syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) ? errno : 0;
}

struct ibv_cq *aiordma_create_cq_ex(struct ibv_context *context, uint32_t entries,
                                    struct ibv_comp_channel *channel, uint32_t vector,
                                    uint32_t flags, uint64_t wc_flags)
{
    struct ibv_cq_init_attr_ex attr = {
        .cqe = entries,
        .channel = channel,
        .comp_vector = vector,
        .wc_flags = IBV_WC_STANDARD_FLAGS | wc_flags,
        .comp_mask = flags ? IBV_CQ_INIT_ATTR_MASK_FLAGS : 0,
        .flags = flags,
    };
    struct ibv_cq_ex *queue = ibv_create_cq_ex(context, &attr);

    return queue ? ibv_cq_ex_to_cq(queue) : NULL;
}

/* Copy the current completion. man ibv_create_cq_ex: of a failure, only these three are valid. */
static void copy_current(struct ibv_cq_ex *queue, struct ibv_wc *wc)
{
    memset(wc, 0, sizeof(*wc));
    wc->wr_id = queue->wr_id;
    wc->status = queue->status;
    wc->qp_num = queue->read_qp_num(queue);
    if (wc->status != IBV_WC_SUCCESS) {
        wc->vendor_err = queue->read_vendor_err(queue);
        return;
    }
    wc->opcode = queue->read_opcode(queue);
    wc->byte_len = queue->read_byte_len(queue);
    wc->wc_flags = queue->read_wc_flags(queue);
    /* One function reads both members of the union. */
    if (wc->wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV))
        wc->imm_data = queue->read_imm_data(queue);
    wc->src_qp = queue->read_src_qp(queue);
    wc->slid = (uint16_t)queue->read_slid(queue);
    wc->sl = queue->read_sl(queue);
    wc->dlid_path_bits = queue->read_dlid_path_bits(queue);
}

int aiordma_poll_timestamped(struct ibv_cq *public, struct aiordma_completion *batch,
                             uint64_t *timestamps, int most)
{
    struct ibv_cq_ex *queue = (struct ibv_cq_ex *)public;
    struct ibv_poll_cq_attr attr = {0};
    struct ibv_wc wc;
    int count = 0, error;

    if (most < 1)
        return 0;
    error = queue->start_poll(queue, &attr);
    if (error) /* then end_poll must not be called */
        return error == ENOENT ? 0 : -error;
    while (!error) {
        copy_current(queue, &wc);
        aiordma_pack_completion(&batch[count], &wc);
        timestamps[count] = queue->read_completion_ts(queue);
        if (++count == most)
            break;
        error = queue->next_poll(queue);
    }
    queue->end_poll(queue);
    return count;
}

int aiordma_moderate_cq(struct ibv_cq *queue, uint16_t count, uint16_t period)
{
    struct ibv_modify_cq_attr attr = {
        .attr_mask = IBV_CQ_ATTR_MODERATE,
        .moderate = {.cq_count = count, .cq_period = period},
    };

    return ibv_modify_cq(queue, &attr);
}

int aiordma_advise_mr(struct ibv_pd *domain, uint32_t advice, uint32_t flags, const char *sges,
                      uint32_t count)
{
    const size_t size = count * sizeof(struct ibv_sge);
    struct ibv_sge *parts = malloc(size ? size : 1); /* Python's bytes need not be aligned */

    if (!parts)
        return ENOMEM;
    memcpy(parts, sges, size);
    int error = ibv_advise_mr(domain, (enum ib_uverbs_advise_mr_advice)advice, flags, parts, count);
    free(parts);
    return error;
}

int aiordma_read_clock(struct ibv_context *context, uint64_t *ticks)
{
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    int error = ibv_query_rt_values_ex(context, &values);

    if (!error && !(values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK))
        error = EOPNOTSUPP;
    if (!error)
        *ticks = (uint64_t)values.raw_clock.tv_nsec;
    return error;
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
