/* The object of an asynchronous event: the union's member in use (man ibv_get_async_event). */
#ifndef AIORDMA_EVENT_SUBJECTS_H
#define AIORDMA_EVENT_SUBJECTS_H

#include "rdma_core.h"

enum aiordma_subject {
    AIORDMA_OF_NOTHING, /* an event that this version does not know */
    AIORDMA_OF_QUEUE_PAIR,
    AIORDMA_OF_COMPLETION_QUEUE,
    AIORDMA_OF_SHARED_RECEIVE,
    AIORDMA_OF_WORK_QUEUE,
    AIORDMA_OF_PORT,
    AIORDMA_OF_DEVICE, /* its event has no member */
};

static inline enum aiordma_subject aiordma_subject_of(enum ibv_event_type type)
{
    switch (type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        return AIORDMA_OF_QUEUE_PAIR;
    case IBV_EVENT_CQ_ERR:
        return AIORDMA_OF_COMPLETION_QUEUE;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        return AIORDMA_OF_SHARED_RECEIVE;
    case IBV_EVENT_WQ_FATAL:
        return AIORDMA_OF_WORK_QUEUE;
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_GID_CHANGE:
        return AIORDMA_OF_PORT;
    case IBV_EVENT_DEVICE_FATAL:
        return AIORDMA_OF_DEVICE;
    default:
        return AIORDMA_OF_NOTHING;
    }
}

#endif
