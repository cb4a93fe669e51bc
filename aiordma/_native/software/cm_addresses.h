/* Addresses of identifiers. */
#ifndef AIORDMA_SOFTWARE_CM_ADDRESSES_H
#define AIORDMA_SOFTWARE_CM_ADDRESSES_H

#include <netinet/in.h>

#include "identifier.h"

/* Of an address that a program gave: 0 where the family is none of ours. */
socklen_t sw_address_length(const struct sockaddr *address);
/* Where its port is, of IPv4 and IPv6 alike. */
in_port_t *sw_port_of(struct sockaddr *address);
/* Take an address for an identifier that has none: it is SW_CM_BOUND then. */
int sw_bind_to(struct sw_identifier *identifier, const struct sockaddr *address);
/*
 * Whether others of this process have the identifier's port, by the kernel's rules for RDMA,
 * which TCP's own are looser than. may_share: with those who share it.
 */
int sw_check_port(struct sw_identifier *identifier, int may_share);

/* ibv.verbs and ibv.port_num, from the local address; ENODEV where it is no address of ours. */
int sw_bind_device(struct sw_identifier *identifier);

void sw_fill_cm_addresses(struct aiordma_provider *table);

#endif
