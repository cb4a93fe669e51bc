/*
 * Addresses of identifiers: bound, checked against those of other identifiers, and resolved.
 * Resolving uses only the routes of this system and sends nothing.
 */
#include "cm_addresses.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gids.h"

/* -- comparison -------------------------------------------------------------------------- */

socklen_t sw_address_length(const struct sockaddr *address)
{
    if (address && address->sa_family == AF_INET)
        return sizeof(struct sockaddr_in);
    if (address && address->sa_family == AF_INET6)
        return sizeof(struct sockaddr_in6);
    return 0;
}

in_port_t *sw_port_of(struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return &((struct sockaddr_in *)(void *)address)->sin_port;
    return &((struct sockaddr_in6 *)(void *)address)->sin6_port;
}

void sw_set_address(struct sockaddr_storage *to, const struct in6_addr *address, uint16_t port,
                    uint32_t interface)
{
    union ibv_gid gid;

    memcpy(&gid, address, sizeof(gid));
    sw_address_of(&gid, to);
    *sw_port_of((struct sockaddr *)to) = htons(port);
    if (IN6_IS_ADDR_LINKLOCAL(address))
        ((struct sockaddr_in6 *)(void *)to)->sin6_scope_id = interface;
}

static int is_wildcard(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return !((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr;
    return IN6_IS_ADDR_UNSPECIFIED(
        &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

/* A link-local address is usable only with its interface. */
static int lacks_scope(const struct sockaddr *address)
{
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)address;

    return address->sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr) &&
           !six->sin6_scope_id;
}

static int is_same_host(const struct sockaddr *one, const struct sockaddr *other)
{
    if (one->sa_family != other->sa_family)
        return 0;
    if (one->sa_family == AF_INET)
        return ((const struct sockaddr_in *)(const void *)one)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)(const void *)other)->sin_addr.s_addr;
    const struct sockaddr_in6 *a = (const struct sockaddr_in6 *)(const void *)one;
    const struct sockaddr_in6 *b = (const struct sockaddr_in6 *)(const void *)other;
    return IN6_ARE_ADDR_EQUAL(&a->sin6_addr, &b->sin6_addr) && a->sin6_scope_id == b->sin6_scope_id;
}

static int is_one_family(const struct sw_identifier *identifier)
{
    return identifier->ibv.route.addr.src_addr.sa_family == AF_INET || identifier->ipv6_only;
}

int sw_check_port(struct sw_identifier *identifier, int may_share)
{
    struct sockaddr *address = &identifier->ibv.route.addr.src_addr;
    in_port_t port = *sw_port_of(address);

    for (struct sw_identifier *each = sw_identifiers; each; each = each->next) {
        struct sockaddr *taken = &each->ibv.route.addr.src_addr;
        if (each == identifier || !each->has_port || each->ibv.ps != identifier->ibv.ps ||
            each->is_roce != identifier->is_roce || *sw_port_of(taken) != port)
            continue;
        if (may_share && identifier->reuse_address && each->reuse_address)
            continue;
        if (is_one_family(identifier) && is_one_family(each) &&
            address->sa_family != taken->sa_family)
            continue;
        if (is_wildcard(address) || is_wildcard(taken))
            return EADDRNOTAVAIL;
        if (is_same_host(address, taken))
            return EADDRINUSE;
    }
    return 0;
}

int sw_take_roce_port(struct sw_identifier *identifier, uint8_t space, struct sw_claim *claim)
{
    in_port_t *place = sw_port_of(&identifier->ibv.route.addr.src_addr);
    uint16_t number = ntohs(*place);
    union ibv_gid gid;

    sw_gid_of(&identifier->ibv.route.addr.src_addr, &gid);
    int error = sw_roce_port_claim(claim, space, (struct in6_addr *)(void *)&gid,
                                   identifier->reuse_address, &number);
    *place = htons(number);
    /* A simulated host has all ports in its list of identifiers. */
    for (uint32_t i = 0; !error && !number && i <= UINT16_MAX / 2; i++) {
        *place = htons((uint16_t)(UINT16_MAX / 2 + i));
        number = sw_check_port(identifier, 0) ? 0 : ntohs(*place);
    }
    if (!error && !number)
        error = EADDRNOTAVAIL;
    identifier->has_port = !error;
    return error;
}

static int listens(const struct sw_identifier *identifier, const struct in6_addr *address,
                   uint16_t port)
{
    struct sockaddr_storage bound = identifier->ibv.route.addr.src_storage;
    union ibv_gid gid, nowhere = {0};

    if (identifier->state != SW_CM_LISTENING || !identifier->is_roce ||
        *sw_port_of((struct sockaddr *)&bound) != htons(port))
        return 0;
    sw_gid_of((const struct sockaddr *)&bound, &gid);
    if (!memcmp(&gid, address, sizeof(gid)))
        return 1;
    if (bound.ss_family == AF_INET6)
        return !memcmp(&gid, &nowhere, sizeof(gid)) &&
               !(identifier->ipv6_only && IN6_IS_ADDR_V4MAPPED(address));
    return IN6_IS_ADDR_V4MAPPED(address) &&
           !((const struct sockaddr_in *)(const void *)&bound)->sin_addr.s_addr;
}

struct sw_identifier *sw_find_listener(const struct sw_port_space *space,
                                       const struct in6_addr *address, uint16_t port)
{
    struct sw_identifier *each = sw_identifiers;

    while (each && !(each->space == space && listens(each, address, port)))
        each = each->next;
    return each;
}

int sw_bind_device(struct sw_identifier *identifier)
{
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    struct rdma_ib_addr *gids = &addresses->addr.ibaddr;

    if (is_wildcard(&addresses->src_addr))
        return 0;
    sw_gid_of(&addresses->src_addr, &gids->sgid);
    int is_stream = sw_is_connected(identifier) && !identifier->is_roce;
    if (is_stream ? !sw_is_local(&gids->sgid) : sw_gid_index(&gids->sgid) < 0)
        return errno;
    if (addresses->dst_addr.sa_family)
        sw_gid_of(&addresses->dst_addr, &gids->dgid);
    gids->pkey = htobe16(0xffff);
    struct sw_context *context = sw_manager_context(identifier->is_roce);
    if (!context)
        return errno;
    identifier->ibv.verbs = &context->verbs.context;
    identifier->ibv.port_num = 1;
    return 0;
}

/* -- binding and resolving --------------------------------------------------------------- */

/* The system's default: sysctl net.ipv6.bindv6only. */
static int is_ipv6_alone_by_default(void)
{
    int only = 0, fd = sw_system->socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    socklen_t size = sizeof(only);

    if (fd < 0)
        return 0;
    if (sw_system->getsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, &size))
        only = 0;
    sw_system->close(fd);
    return !!only;
}

int sw_bind_to(struct sw_identifier *identifier, const struct sockaddr *address)
{
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    int error;

    if (lacks_scope(address))
        return EINVAL;
    if (address->sa_family == AF_INET6 && !identifier->has_ipv6_only)
        identifier->ipv6_only = (uint8_t)is_ipv6_alone_by_default();
    memset(&addresses->src_storage, 0, sizeof(addresses->src_storage));
    memcpy(&addresses->src_storage, address, sw_address_length(address));
    error = sw_bind_device(identifier);
    if (!error && *sw_port_of(&addresses->src_addr))
        error = sw_check_port(identifier, 1);
    if (!error)
        error = identifier->space->bind(identifier);
    if (error) {
        memset(&addresses->src_storage, 0, sizeof(addresses->src_storage));
        identifier->ibv.verbs = NULL;
        identifier->ibv.port_num = 0;
        return error;
    }
    identifier->has_port = 1;
    identifier->state = SW_CM_BOUND;
    return 0;
}

static int bind_addr(struct rdma_cm_id *id, struct sockaddr *address)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    if (!id || !sw_address_length(address))
        return sw_result(EINVAL);
    sw_lock();
    int error = identifier->state == SW_CM_IDLE ? sw_bind_to(identifier, address) : EINVAL;
    sw_unlock();
    return sw_result(error);
}

/* An address of this machine is its own source. A link-local one can be another machine's, too. */
static int is_own(const struct sockaddr *destination, struct sockaddr_storage *found)
{
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)destination;
    union ibv_gid gid;

    if (destination->sa_family == AF_INET6 &&
        (IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr) || IN6_IS_ADDR_V4MAPPED(&six->sin6_addr)))
        return 0;
    sw_gid_of(destination, &gid);
    if (!sw_has_gid(&gid))
        return 0;
    sw_address_of(&gid, found);
    return 1;
}

/*
 * Find the local address of the route to a destination: a connected UDP socket has it as its name.
 * Connecting a UDP socket sends nothing.
 */
static int find_source(const struct sockaddr *source, const struct sockaddr *destination,
                       struct sockaddr_storage *found)
{
    struct sockaddr_storage target, origin = {0};
    socklen_t size = sw_address_length(destination), found_size = sizeof(*found);

    if ((!source || is_wildcard(source)) && is_own(destination, found))
        return 0;
    memset(&target, 0, sizeof(target));
    memcpy(&target, destination, size);
    if (!*sw_port_of((struct sockaddr *)&target))
        *sw_port_of((struct sockaddr *)&target) = htons(1); /* connecting to port 0 fails */
    int fd = sw_system->socket(destination->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP);
    if (fd < 0)
        return errno;
    int error = 0;
    if (source && !is_wildcard(source)) {
        memcpy(&origin, source, size);
        *sw_port_of((struct sockaddr *)&origin) = 0;
        if (sw_system->bind(fd, (struct sockaddr *)&origin, size))
            error = errno;
    }
    if (!error && sw_system->connect(fd, (struct sockaddr *)&target, size))
        error = errno;
    if (!error && sw_system->getsockname(fd, (struct sockaddr *)found, &found_size))
        error = errno;
    sw_system->close(fd);
    return error;
}

static int resolve(struct sw_identifier *identifier, const struct sockaddr *destination)
{
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    struct sockaddr *source = identifier->state == SW_CM_BOUND ? &addresses->src_addr : NULL;
    struct sockaddr_storage found = {0};

    int error = find_source(source, destination, &found);
    if (error)
        return error;
    in_port_t port = source ? *sw_port_of(source) : 0;
    struct sockaddr_storage before = addresses->src_storage;
    addresses->src_storage = found;
    *sw_port_of(&addresses->src_addr) = port;
    memset(&addresses->dst_storage, 0, sizeof(addresses->dst_storage));
    memcpy(&addresses->dst_storage, destination, sw_address_length(destination));
    if (is_wildcard(destination)) {
        /* The wildcard address means this machine: use the source address. */
        port = *sw_port_of(&addresses->dst_addr);
        addresses->dst_storage = found;
        *sw_port_of(&addresses->dst_addr) = port;
    }
    error = sw_bind_device(identifier);
    if (error)
        addresses->src_storage = before;
    return error;
}

static int resolve_addr(struct rdma_cm_id *id, struct sockaddr *source,
                        struct sockaddr *destination, int timeout_ms)
{
    struct sw_identifier *identifier = sw_identifier_of(id);
    int error = 0;

    (void)timeout_ms; /* resolving uses local routes and does not wait */
    if (!id || !sw_address_length(destination) || lacks_scope(destination) ||
        (source && !sw_address_length(source)) ||
        (source && source->sa_family != destination->sa_family))
        return sw_result(EINVAL);
    sw_lock();
    if (identifier->state == SW_CM_IDLE) {
        if (source && (!is_wildcard(source) || *sw_port_of(source)))
            error = sw_bind_to(identifier, source);
    } else if (identifier->state != SW_CM_BOUND ||
               id->route.addr.src_addr.sa_family != destination->sa_family) {
        error = EINVAL;
    }
    struct sw_event *event = NULL;
    if (!error) {
        event = sw_new_event(identifier, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        error = event ? 0 : ENOMEM;
    }
    if (!error) {
        int reason = resolve(identifier, destination);
        if (reason) {
            event->ibv.event = RDMA_CM_EVENT_ADDR_ERROR;
            event->ibv.status = -reason;
        } else {
            identifier->state = SW_CM_ADDRESS_RESOLVED;
        }
        sw_report(event);
    }
    sw_unlock();
    return sw_result(error);
}

static int resolve_route(struct rdma_cm_id *id, int timeout_ms)
{
    struct sw_identifier *identifier = sw_identifier_of(id);
    struct sw_event *event = NULL;

    (void)timeout_ms;
    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    int error = identifier->state == SW_CM_ADDRESS_RESOLVED ? 0 : EINVAL;
    if (!error) {
        event = sw_new_event(identifier, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        error = event ? 0 : ENOMEM;
    }
    if (!error) {
        identifier->state = SW_CM_ROUTE_RESOLVED;
        sw_report(event);
    }
    sw_unlock();
    return sw_result(error);
}

void sw_fill_cm_addresses(struct aiordma_provider *table)
{
    table->bind_addr = bind_addr;
    table->resolve_addr = resolve_addr;
    table->resolve_route = resolve_route;
}
