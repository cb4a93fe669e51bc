/* Addresses of identifiers. */
#ifndef AIORDMA_SOFTWARE_CM_ADDRESSES_H
#define AIORDMA_SOFTWARE_CM_ADDRESSES_H

#include <netinet/in.h>

#include "identifier.h"
#include "roce_port.h"

/* The length of an address that a program passed. 0: its family is not supported. */
socklen_t sw_address_length(const struct sockaddr *address);
/* The place of the port in an IPv4 or IPv6 address. */
in_port_t *sw_port_of(struct sockaddr *address);
/* Fill in an address, which is IPv4 if it is ::ffff:a.b.c.d. interface: the scope of link-local. */
void sw_set_address(struct sockaddr_storage *to, const struct in6_addr *address, uint16_t port,
                    uint32_t interface);
/* Bind an identifier that has no address. Its state becomes SW_CM_BOUND. */
int sw_bind_to(struct sw_identifier *identifier, const struct sockaddr *address);
/*
 * Check the identifier's port against the other identifiers of this process. The kernel's rules for
 * RDMA apply, which are stricter than TCP's. may_share: identifiers with reuse_address can share a
 * port. Returns 0, EADDRINUSE or EADDRNOTAVAIL.
 */
int sw_check_port(struct sw_identifier *identifier, int may_share);

/*
 * Take the identifier's port on the RoCE device, for all processes of the host; 0: a free one, which
 * is stored in the identifier's address. space: as of sw_roce_port_claim.
 */
int sw_take_roce_port(struct sw_identifier *identifier, uint8_t space, struct sw_claim *claim);
/* The listener of that port space on the RoCE device for an address and a port. NULL: none. */
struct sw_identifier *sw_find_listener(const struct sw_port_space *space,
                                       const struct in6_addr *address, uint16_t port);

/* Set ibv.verbs and ibv.port_num from the local address. ENODEV: no interface has the address. */
int sw_bind_device(struct sw_identifier *identifier);

void sw_fill_cm_addresses(struct aiordma_provider *table);

#endif
