/*
 * rdma_getaddrinfo: names and services by the C library's getaddrinfo. Nothing here takes the lock,
 * because a name lookup can block.
 */
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "address.h"

enum { KNOWN_FLAGS = RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY };

static int fail(int error)
{
    errno = error;
    return -1;
}

static void cm_freeaddrinfo(struct rdma_addrinfo *result)
{
    while (result) {
        struct rdma_addrinfo *next = result->ai_next;
        free(result->ai_src_addr);
        free(result->ai_dst_addr);
        free(result);
        result = next;
    }
}

static int to_socktype(int qp_type)
{
    switch (qp_type) {
    case IBV_QPT_RC:
    case IBV_QPT_UC:
    case IBV_QPT_XRC_SEND:
    case IBV_QPT_XRC_RECV:
        return SOCK_STREAM;
    case IBV_QPT_UD:
        return SOCK_DGRAM;
    default:
        return 0;
    }
}

static int to_protocol(int port_space)
{
    switch (port_space) {
    case RDMA_PS_TCP:
        return IPPROTO_TCP;
    case RDMA_PS_UDP:
    case RDMA_PS_IPOIB:
        return IPPROTO_UDP;
    default:
        return 0;
    }
}

static struct addrinfo to_system_hints(const struct rdma_addrinfo *hints)
{
    struct addrinfo system = {
        .ai_family = hints->ai_family,
        .ai_socktype = to_socktype(hints->ai_qp_type),
        .ai_protocol = to_protocol(hints->ai_port_space),
    };

    if (hints->ai_flags & RAI_PASSIVE)
        system.ai_flags |= AI_PASSIVE;
    if (hints->ai_flags & RAI_NUMERICHOST)
        system.ai_flags |= AI_NUMERICHOST;
    return system;
}

static int copy_address(struct sockaddr **to, socklen_t *to_size, const struct sockaddr *from,
                        socklen_t size)
{
    *to = malloc(size);
    if (!*to)
        return EAI_MEMORY;
    memcpy(*to, from, size);
    *to_size = size;
    return 0;
}

static int copy_found(struct rdma_addrinfo *to, const struct rdma_addrinfo *hints,
                      const struct addrinfo *found)
{
    to->ai_family = found->ai_family;
    to->ai_qp_type = hints->ai_qp_type;
    if (!to->ai_qp_type)
        to->ai_qp_type = found->ai_socktype == SOCK_DGRAM ? IBV_QPT_UD : IBV_QPT_RC;
    to->ai_port_space = hints->ai_port_space;
    if (!to->ai_port_space)
        to->ai_port_space = found->ai_protocol == IPPROTO_UDP ? RDMA_PS_UDP : RDMA_PS_TCP;
    if (hints->ai_flags & RAI_PASSIVE) {
        to->ai_flags = RAI_PASSIVE;
        return copy_address(&to->ai_src_addr, &to->ai_src_len, found->ai_addr, found->ai_addrlen);
    }
    return copy_address(&to->ai_dst_addr, &to->ai_dst_len, found->ai_addr, found->ai_addrlen);
}

static int look_up(const char *node, const char *service, const struct rdma_addrinfo *hints,
                   struct rdma_addrinfo *result)
{
    struct addrinfo system = to_system_hints(hints), *found;

    /* Return only the first answer, as librdmacm does. */
    int code = getaddrinfo(node, service, &system, &found);
    if (code)
        return code;
    code = copy_found(result, hints, found);
    freeaddrinfo(found);
    return code;
}

/* Without a node and a service, return the addresses of the hints. */
static int copy_hints(const struct rdma_addrinfo *hints, struct rdma_addrinfo *result)
{
    result->ai_flags = hints->ai_flags;
    result->ai_family = hints->ai_family;
    result->ai_qp_type = hints->ai_qp_type;
    result->ai_port_space = hints->ai_port_space;
    if (!hints->ai_dst_len)
        return 0;
    return copy_address(&result->ai_dst_addr, &result->ai_dst_len, hints->ai_dst_addr,
                        hints->ai_dst_len);
}

static int is_bad(const struct rdma_addrinfo *hints)
{
    return hints->ai_flags & ~KNOWN_FLAGS || (hints->ai_src_len && !hints->ai_src_addr) ||
           (hints->ai_dst_len && !hints->ai_dst_addr) ||
           hints->ai_src_len > sizeof(struct sockaddr_storage) ||
           hints->ai_dst_len > sizeof(struct sockaddr_storage);
}

/* Return 0, a code of getaddrinfo, or -1 with errno. */
static int cm_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
                          struct rdma_addrinfo **out)
{
    static const struct rdma_addrinfo none;

    if (!out || (!node && !service && !hints))
        return fail(EINVAL);
    if (!hints)
        hints = &none;
    if (is_bad(hints))
        return fail(EINVAL);
    struct rdma_addrinfo *result = calloc(1, sizeof(*result));
    if (!result)
        return fail(ENOMEM);
    int code = node || service ? look_up(node, service, hints, result) : copy_hints(hints, result);
    if (!code && !result->ai_src_len && hints->ai_src_len)
        code = copy_address(&result->ai_src_addr, &result->ai_src_len, hints->ai_src_addr,
                            hints->ai_src_len);
    if (code) {
        int error = errno;
        cm_freeaddrinfo(result);
        errno = code == EAI_SYSTEM ? error : 0; /* -1 is also EAI_BADFLAGS */
        return code;
    }
    *out = result;
    return 0;
}

void sw_fill_address(struct aiordma_provider *table)
{
    table->cm_getaddrinfo = cm_getaddrinfo;
    table->cm_freeaddrinfo = cm_freeaddrinfo;
}
