/*
 * The calls of librdmacm that create no event, and events and their channels.
 */
#include <errno.h>
#include <stdlib.h>

#include "cm_calls.h"

const struct aiordma_provider *cm_calls(void)
{
    return aiordma_exported_calls();
}

int cm_fail(int error)
{
    errno = error;
    return -1;
}

/* -- the default domain of the device ----------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ibv_pd *default_domain;

static struct ibv_pd *domain_of(struct ibv_context *context)
{
    pthread_mutex_lock(&lock);
    /* A fork's child has a context of its own. */
    if (!default_domain || default_domain->context != context)
        default_domain = cm_calls()->alloc_pd(context);
    struct ibv_pd *domain = default_domain;
    pthread_mutex_unlock(&lock);
    return domain;
}

void cm_set_domain(struct rdma_cm_id *id)
{
    if (id->verbs && !id->pd)
        id->pd = domain_of(id->verbs);
}

/* -- channels and events ------------------------------------------------------------------------ */

EXPORTED struct rdma_event_channel *rdma_create_event_channel(void)
{
    const struct aiordma_provider *calls = cm_calls();

    return calls ? calls->create_event_channel() : NULL;
}

EXPORTED void rdma_destroy_event_channel(struct rdma_event_channel *channel)
{
    cm_calls()->destroy_event_channel(channel);
}

EXPORTED int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
    int error = cm_calls()->get_cm_event(channel, event);

    if (!error)
        cm_set_domain((*event)->id);
    return error;
}

EXPORTED int rdma_ack_cm_event(struct rdma_cm_event *event)
{
    return cm_calls()->ack_cm_event(event);
}

EXPORTED const char *rdma_event_str(enum rdma_cm_event_type event)
{
#define NAMED(name) [RDMA_CM_EVENT_##name] = "RDMA_CM_EVENT_" #name
    static const char *const texts[] = {
        NAMED(ADDR_RESOLVED),  NAMED(ADDR_ERROR),      NAMED(ROUTE_RESOLVED),
        NAMED(ROUTE_ERROR),    NAMED(CONNECT_REQUEST), NAMED(CONNECT_RESPONSE),
        NAMED(CONNECT_ERROR),  NAMED(UNREACHABLE),     NAMED(REJECTED),
        NAMED(ESTABLISHED),    NAMED(DISCONNECTED),    NAMED(DEVICE_REMOVAL),
        NAMED(MULTICAST_JOIN), NAMED(MULTICAST_ERROR), NAMED(ADDR_CHANGE),
        NAMED(TIMEWAIT_EXIT),
    };
#undef NAMED

    return (size_t)event < sizeof(texts) / sizeof(*texts) ? texts[event] : "UNKNOWN EVENT";
}

/* -- addresses and devices ---------------------------------------------------------------------- */

EXPORTED struct ibv_context **rdma_get_devices(int *count)
{
    const struct aiordma_provider *calls = cm_calls();

    return calls ? calls->get_devices(count) : NULL;
}

EXPORTED void rdma_free_devices(struct ibv_context **list)
{
    cm_calls()->free_devices(list);
}

EXPORTED int rdma_getaddrinfo(const char *node, const char *service,
                              const struct rdma_addrinfo *hints, struct rdma_addrinfo **result)
{
    const struct aiordma_provider *calls = cm_calls();

    return calls ? calls->cm_getaddrinfo(node, service, hints, result) : -1;
}

EXPORTED void rdma_freeaddrinfo(struct rdma_addrinfo *result)
{
    cm_calls()->cm_freeaddrinfo(result);
}

EXPORTED int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address)
{
    int error = cm_calls()->bind_addr(id, address);

    if (!error)
        cm_set_domain(id);
    return error;
}

static uint16_t port_of(const struct sockaddr_storage *address)
{
    switch (address->ss_family) {
    case AF_INET:
        return ((const struct sockaddr_in *)(const void *)address)->sin_port;
    case AF_INET6:
        return ((const struct sockaddr_in6 *)(const void *)address)->sin6_port;
    default:
        return 0;
    }
}

EXPORTED uint16_t rdma_get_src_port(struct rdma_cm_id *id)
{
    return port_of(&id->route.addr.src_storage);
}

EXPORTED uint16_t rdma_get_dst_port(struct rdma_cm_id *id)
{
    return port_of(&id->route.addr.dst_storage);
}

EXPORTED int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t length)
{
    return cm_calls()->set_option(id, level, name, value, length);
}

/* -- queues ------------------------------------------------------------------------------------- */

EXPORTED int rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *domain,
                             struct ibv_srq_init_attr *attr)
{
    if (!id || id->srq || !id->verbs)
        return cm_fail(EINVAL);
    if (!domain)
        domain = id->pd;
    if (!domain || domain->context != id->verbs)
        return cm_fail(EINVAL);
    id->srq = cm_calls()->create_srq(domain, attr);
    if (!id->srq)
        return -1;
    id->pd = domain;
    return 0;
}

/* XRC is not supported, and a plain queue needs none of the other attributes. */
EXPORTED int rdma_create_srq_ex(struct rdma_cm_id *id, void *attr)
{
    (void)id;
    (void)attr;
    return cm_fail(EOPNOTSUPP);
}

EXPORTED void rdma_destroy_srq(struct rdma_cm_id *id)
{
    if (id && id->srq && !cm_calls()->destroy_srq(id->srq))
        id->srq = NULL;
}

EXPORTED int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *domain,
                            struct ibv_qp_init_attr *attr)
{
    if (id && attr && id->srq && !attr->srq)
        attr->srq = id->srq;
    return cm_calls()->cm_create_qp(id, domain, attr);
}

EXPORTED int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
    if (id && attr && id->srq && !attr->srq)
        attr->srq = id->srq;
    return cm_calls()->cm_create_qp_ex(id, attr);
}

EXPORTED void rdma_destroy_qp(struct rdma_cm_id *id)
{
    cm_calls()->cm_destroy_qp(id);
}

EXPORTED int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
    return cm_calls()->init_qp_attr(id, attr, mask);
}

/* -- connections -------------------------------------------------------------------------------- */

EXPORTED int rdma_listen(struct rdma_cm_id *id, int backlog)
{
    int error = cm_calls()->listen(id, backlog);

    if (!error)
        cm_set_domain(id);
    return error;
}

EXPORTED int rdma_reject(struct rdma_cm_id *id, const void *private_data, uint8_t length)
{
    return cm_calls()->reject(id, private_data, length);
}

EXPORTED int rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t length)
{
    return cm_calls()->reject_ece(id, private_data, length);
}

EXPORTED int rdma_establish(struct rdma_cm_id *id)
{
    return cm_calls()->establish(id);
}

EXPORTED int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event)
{
    return cm_calls()->notify(id, event);
}

EXPORTED int rdma_leave_multicast(struct rdma_cm_id *id, struct sockaddr *group)
{
    return cm_calls()->leave_multicast(id, group);
}

EXPORTED int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
    return cm_calls()->set_local_ece(id, ece);
}

EXPORTED int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
    return cm_calls()->get_remote_ece(id, ece);
}
