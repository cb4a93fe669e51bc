/*
 * Identifiers of librdmacm, and the calls that create events. An identifier without a channel of the
 * program's is synchronous: it has a channel of its own, and such a call waits for its event, which
 * stays in id->event until the next call (man rdma_create_id).
 */
#include <errno.h>
#include <stdlib.h>

#include "cm_calls.h"

enum { RESOLVE_MS = 2000 };

/* What an identifier has more than the device's. Only a synchronous one, or an endpoint, has it. */
struct endpoint {
    struct rdma_event_channel *own; /* NULL: it has become asynchronous */
    int makes_queue_pairs;          /* rdma_get_request creates them: with these attributes */
    struct ibv_qp_init_attr attr;
};

static struct endpoint *endpoint_of(struct rdma_cm_id *id)
{
    return *aiordma_exported_slot(id);
}

static int is_synchronous(struct rdma_cm_id *id)
{
    struct endpoint *endpoint = endpoint_of(id);

    return endpoint && endpoint->own;
}

/* -- events of synchronous identifiers ---------------------------------------------------------- */

static void forget_event(struct rdma_cm_id *id)
{
    struct rdma_cm_event *event = id->event;

    id->event = NULL;
    if (event)
        cm_calls()->ack_cm_event(event);
}

/* Return the result of a call that creates an event. A synchronous identifier waits for it. */
static int complete(struct rdma_cm_id *id, int result)
{
    if (result || !is_synchronous(id))
        return result;
    forget_event(id);
    if (rdma_get_cm_event(id->channel, &id->event))
        return -1;
    if (!id->event->status)
        return 0;
    if (id->event->event == RDMA_CM_EVENT_REJECTED)
        return cm_fail(ECONNREFUSED);
    return cm_fail(abs(id->event->status));
}

/* -- identifiers -------------------------------------------------------------------------------- */

/* Make an identifier synchronous, which is on the channel `own`. */
static int make_synchronous(struct rdma_cm_id *id, struct rdma_event_channel *own)
{
    void **slot = aiordma_exported_slot(id);

    if (!*slot)
        *slot = calloc(1, sizeof(struct endpoint));
    if (!*slot)
        return cm_fail(ENOMEM);
    endpoint_of(id)->own = own;
    return 0;
}

static int create_synchronous(struct rdma_cm_id **id, void *context,
                              enum rdma_port_space port_space)
{
    struct rdma_event_channel *own = cm_calls()->create_event_channel();

    if (!own)
        return -1;
    if (cm_calls()->create_id(own, id, context, port_space)) {
        int error = errno;
        cm_calls()->destroy_event_channel(own);
        return cm_fail(error);
    }
    if (!make_synchronous(*id, own))
        return 0;
    cm_calls()->destroy_id(*id);
    cm_calls()->destroy_event_channel(own);
    return cm_fail(ENOMEM);
}

EXPORTED int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id,
                            void *context, enum rdma_port_space port_space)
{
    if (!cm_calls() || !id)
        return cm_fail(id ? ENOMEM : EINVAL);
    if (!channel)
        return create_synchronous(id, context, port_space);
    return cm_calls()->create_id(channel, id, context, port_space);
}

EXPORTED int rdma_destroy_id(struct rdma_cm_id *id)
{
    struct endpoint *endpoint = id ? endpoint_of(id) : NULL;
    struct rdma_event_channel *own = endpoint ? endpoint->own : NULL;

    if (own)
        forget_event(id);
    if (cm_calls()->destroy_id(id))
        return -1;
    if (own)
        cm_calls()->destroy_event_channel(own);
    free(endpoint);
    return 0;
}

EXPORTED int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *channel)
{
    struct rdma_event_channel *to = channel;

    if (!id)
        return cm_fail(EINVAL);
    struct rdma_event_channel *own = is_synchronous(id) ? endpoint_of(id)->own : NULL;
    if (!to)
        to = cm_calls()->create_event_channel();
    if (!to || (!channel && make_synchronous(id, to)))
        return -1;
    if (own)
        forget_event(id);
    if (cm_calls()->migrate_id(id, to))
        return -1;
    if (channel && own)
        endpoint_of(id)->own = NULL;
    if (own)
        cm_calls()->destroy_event_channel(own);
    return 0;
}

/* -- calls that create an event ----------------------------------------------------------------- */

EXPORTED int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *source,
                               struct sockaddr *destination, int timeout_ms)
{
    return complete(id, cm_calls()->resolve_addr(id, source, destination, timeout_ms));
}

EXPORTED int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms)
{
    return complete(id, cm_calls()->resolve_route(id, timeout_ms));
}

EXPORTED int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
    return complete(id, cm_calls()->connect(id, parameters));
}

EXPORTED int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
    int result = cm_calls()->accept(id, parameters);

    /* The answer of a datagram service has no event. */
    if (!result && id->qp_type == IBV_QPT_UD && is_synchronous(id)) {
        forget_event(id);
        return 0;
    }
    return complete(id, result);
}

EXPORTED int rdma_disconnect(struct rdma_cm_id *id)
{
    return complete(id, cm_calls()->disconnect(id));
}

EXPORTED int rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *group, void *context)
{
    return complete(id, cm_calls()->join_multicast(id, group, context));
}

EXPORTED int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr,
                                    void *context)
{
    return complete(id, cm_calls()->join_multicast_ex(id, attr, context));
}

/* -- endpoints ---------------------------------------------------------------------------------- */

/* Prepare the identifier of a request: synchronous, as its listener, with a queue pair. */
static int prepare_request(struct rdma_cm_id *listener, struct rdma_cm_id *id)
{
    struct endpoint *endpoint = endpoint_of(listener);

    if (rdma_migrate_id(id, NULL))
        return -1;
    if (!endpoint->makes_queue_pairs)
        return 0;
    struct ibv_qp_init_attr attr = endpoint->attr;
    return rdma_create_qp(id, listener->pd, &attr);
}

EXPORTED int rdma_get_request(struct rdma_cm_id *listener, struct rdma_cm_id **id)
{
    struct rdma_cm_event *event;

    if (!listener || !id || !is_synchronous(listener))
        return cm_fail(EINVAL);
    forget_event(listener);
    if (rdma_get_cm_event(listener->channel, &event))
        return -1;
    if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
        listener->event = event;
        return cm_fail(EINVAL);
    }
    if (prepare_request(listener, event->id)) {
        int error = errno;
        struct rdma_cm_id *failed = event->id;
        cm_calls()->reject(failed, NULL, 0);
        cm_calls()->cm_destroy_qp(failed);
        cm_calls()->ack_cm_event(event);
        rdma_destroy_id(failed);
        return cm_fail(error);
    }
    *id = event->id;
    (*id)->event = event;
    return 0;
}

static int begin_active(struct rdma_cm_id *id, const struct rdma_addrinfo *result,
                        struct ibv_pd *domain, struct ibv_qp_init_attr *attr)
{
    if (rdma_resolve_addr(id, result->ai_src_addr, result->ai_dst_addr, RESOLVE_MS) ||
        rdma_resolve_route(id, RESOLVE_MS))
        return -1;
    if (!attr)
        return 0;
    attr->qp_type = (enum ibv_qp_type)result->ai_qp_type;
    return rdma_create_qp(id, domain, attr);
}

static int begin_passive(struct rdma_cm_id *id, const struct rdma_addrinfo *result,
                         struct ibv_pd *domain, const struct ibv_qp_init_attr *attr)
{
    struct endpoint *endpoint = endpoint_of(id);

    if (rdma_bind_addr(id, result->ai_src_addr))
        return -1;
    if (domain)
        id->pd = domain;
    if (attr) {
        endpoint->makes_queue_pairs = 1;
        endpoint->attr = *attr;
        endpoint->attr.qp_type = (enum ibv_qp_type)result->ai_qp_type;
    }
    return 0;
}

EXPORTED int rdma_create_ep(struct rdma_cm_id **id, struct rdma_addrinfo *result,
                            struct ibv_pd *domain, struct ibv_qp_init_attr *attr)
{
    struct rdma_cm_id *made;

    if (!id || !result)
        return cm_fail(EINVAL);
    if (rdma_create_id(NULL, &made, NULL, (enum rdma_port_space)result->ai_port_space))
        return -1;
    if (result->ai_flags & RAI_PASSIVE ? begin_passive(made, result, domain, attr)
                                       : begin_active(made, result, domain, attr)) {
        int error = errno;
        cm_calls()->cm_destroy_qp(made);
        rdma_destroy_id(made);
        return cm_fail(error);
    }
    *id = made;
    return 0;
}

EXPORTED void rdma_destroy_ep(struct rdma_cm_id *id)
{
    if (!id)
        return;
    cm_calls()->cm_destroy_qp(id);
    rdma_destroy_srq(id);
    rdma_destroy_id(id);
}
