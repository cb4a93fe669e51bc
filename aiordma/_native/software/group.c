/*
 * Multicast groups of the connection manager's identifiers. Joining is a matter of this host only
 * (IGMP, MLD). The destination of a group is its address, of IPv4 as ::ffff:a.b.c.d.
 */
#include "group.h"

#include <stdlib.h>
#include <string.h>

#include "datagram.h"
#include "gids.h"
#include "udp.h"

struct sw_membership {
    struct sw_membership *next;
    union ibv_gid group;
    int is_open;     /* udp, which makes the host a member unless it only sends */
    int is_attached; /* the identifier's queue pair is attached */
    struct sw_udp udp;
    struct sw_watch watch; /* for no events: the child of a fork closes watched descriptors */
};

static struct sw_membership **find(struct sw_identifier *identifier, const union ibv_gid *group)
{
    struct sw_membership **link = &identifier->groups;

    while (*link && memcmp(&(*link)->group, group, sizeof(*group)))
        link = &(*link)->next;
    return link;
}

static void leave(struct sw_identifier *identifier, struct sw_membership **link)
{
    struct sw_membership *membership = *link;

    *link = membership->next;
    /* The queue pair can have been destroyed, which detached it. */
    if (membership->is_attached && identifier->ibv.qp)
        (void)sw_datagrams_detach((struct sw_queue_pair *)identifier->ibv.qp, &membership->group);
    if (membership->is_open) {
        sw_unwatch(&membership->watch);
        sw_udp_close(&membership->udp);
    }
    free(membership);
}

/* Compute the address vector of a group, and the interface to join it on. */
static int prepare(struct sw_identifier *identifier, const union ibv_gid *group,
                   struct ibv_ah_attr *attr, uint32_t *interface)
{
    struct ibv_gid_entry entry;
    union ibv_gid ours;

    sw_gid_of(&identifier->ibv.route.addr.src_addr, &ours);
    int index = sw_gid_index(&ours);
    if (index < 0)
        return errno;
    int error = sw_gid_entry(index, &entry);
    if (error)
        return error == ENODATA ? ENODEV : error;
    attr->is_global = 1;
    attr->port_num = 1;
    attr->grh.dgid = *group;
    attr->grh.sgid_index = (uint8_t)index;
    attr->grh.hop_limit = SW_HOP_LIMIT;
    attr->grh.traffic_class = identifier->has_tos ? identifier->tos : 0;
    *interface = entry.ndev_ifindex;
    return 0;
}

static int enter(struct sw_identifier *identifier, struct sw_membership *membership,
                 uint32_t interface, int send_only)
{
    struct in6_addr address;

    memcpy(&address, &membership->group, sizeof(address));
    int error = sw_udp_open_member(&membership->udp, &address, interface, send_only);
    if (error)
        return error;
    error = sw_watch(&membership->watch, membership->udp.fd, 0);
    if (error) {
        sw_udp_close(&membership->udp);
        return error;
    }
    membership->is_open = 1;
    if (send_only || !identifier->ibv.qp)
        return 0;
    error = sw_datagrams_attach((struct sw_queue_pair *)identifier->ibv.qp, &membership->group);
    membership->is_attached = !error;
    return error;
}

static int join(struct sw_identifier *identifier, const union ibv_gid *group, int send_only,
                void *context)
{
    struct sw_membership *membership = calloc(1, sizeof(*membership));
    struct sw_event *event = sw_new_event(identifier, RDMA_CM_EVENT_MULTICAST_JOIN, 0);
    uint32_t interface = 0;

    int error = membership && event
                    ? prepare(identifier, group, &event->ibv.param.ud.ah_attr, &interface)
                    : ENOMEM;
    if (error) {
        free(event);
        free(membership);
        return error;
    }
    membership->group = *group;
    membership->next = identifier->groups;
    identifier->groups = membership;
    event->ibv.param.ud.private_data = context;
    event->ibv.param.ud.qp_num = SW_QPN_GROUP;
    event->ibv.param.ud.qkey = RDMA_UDP_QKEY;
    error = enter(identifier, membership, interface, send_only);
    if (error) {
        /* The membership stays until the program leaves, like one that the network refused. */
        event->ibv.event = RDMA_CM_EVENT_MULTICAST_ERROR;
        event->ibv.status = -error;
    }
    sw_report(event);
    return 0;
}

/* Convert an address to a group. It must be of the identifier's family. */
static int group_of(const struct sw_identifier *identifier, const struct sockaddr *address,
                    union ibv_gid *group)
{
    if (!address || address->sa_family != identifier->ibv.route.addr.src_addr.sa_family)
        return EINVAL;
    sw_gid_of(address, group);
    return sw_roce_is_group((const struct in6_addr *)(const void *)group->raw) ? 0 : EINVAL;
}

static int join_group(struct rdma_cm_id *id, const struct sockaddr *address, int send_only,
                      void *context)
{
    struct sw_identifier *identifier = sw_identifier_of(id);
    union ibv_gid group;

    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    int error =
        id->ps == RDMA_PS_UDP && id->verbs &&
                (identifier->state == SW_CM_BOUND || identifier->state == SW_CM_ADDRESS_RESOLVED)
            ? group_of(identifier, address, &group)
            : EINVAL;
    if (!error && *find(identifier, &group))
        error = EADDRINUSE;
    if (!error)
        error = join(identifier, &group, send_only, context);
    sw_unlock();
    return sw_result(error);
}

static int join_multicast(struct rdma_cm_id *id, struct sockaddr *group, void *context)
{
    return join_group(id, group, 0, context);
}

static int join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr,
                             void *context)
{
    const uint32_t needed = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;

    if (!attr || attr->comp_mask != needed)
        return sw_result(attr && attr->comp_mask & ~needed ? EOPNOTSUPP : EINVAL);
    if (attr->join_flags != RDMA_MC_JOIN_FLAG_FULLMEMBER &&
        attr->join_flags != RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER)
        return sw_result(EINVAL);
    return join_group(id, attr->addr, attr->join_flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER,
                      context);
}

static int leave_multicast(struct rdma_cm_id *id, struct sockaddr *address)
{
    struct sw_identifier *identifier = sw_identifier_of(id);
    union ibv_gid group;

    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    int error = group_of(identifier, address, &group);
    if (!error && !*find(identifier, &group))
        error = EADDRNOTAVAIL;
    if (!error) {
        leave(identifier, find(identifier, &group));
        sw_drop_group_events(identifier, &group);
    }
    sw_unlock();
    return sw_result(error);
}

void sw_groups_forget(struct sw_identifier *identifier)
{
    while (identifier->groups)
        leave(identifier, &identifier->groups);
}

void sw_fill_group(struct aiordma_provider *table)
{
    table->join_multicast = join_multicast;
    table->join_multicast_ex = join_multicast_ex;
    table->leave_multicast = leave_multicast;
}
