/*
 * UD queue pairs. The low 16 bits of a queue pair's number are its UDP port. So an address and a
 * number are enough to reach it. Those of the RoCE device share RoCE's port.
 */
#ifndef AIORDMA_SOFTWARE_DATAGRAM_H
#define AIORDMA_SOFTWARE_DATAGRAM_H

#include "queue_pair.h"

extern const struct sw_transport sw_datagram_transport;      /* each with a UDP port */
extern const struct sw_transport sw_roce_datagram_transport; /* on RoCE's port */

/* Compute the path to a peer from an address vector. EINVAL: there is none. */
int sw_find_route(const struct ibv_ah_attr *attr, struct sw_udp_route *route);

/* Attach a queue pair to a multicast group, on the interface of its source if it has one. */
int sw_datagrams_attach(struct sw_queue_pair *pair, const union ibv_gid *group);
int sw_datagrams_detach(struct sw_queue_pair *pair, const union ibv_gid *group);
/* Whether the program attached it (ibv_attach_mcast), and so has to detach it before the end. */
int sw_datagrams_are_attached(const struct sw_queue_pair *pair);

void sw_fill_datagram(struct aiordma_provider *table); /* address handles, multicast */

#endif
