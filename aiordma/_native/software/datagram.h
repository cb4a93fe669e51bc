/*
 * UD queue pairs. A queue pair's number has its UDP port in its low 16 bits, so that (address,
 * number) is enough to reach it.
 */
#ifndef AIORDMA_SOFTWARE_DATAGRAM_H
#define AIORDMA_SOFTWARE_DATAGRAM_H

#include "queue_pair.h"

extern const struct sw_transport sw_datagram_transport;

/* It gets a multicast group's datagrams, on the interface of its source if it has one. */
int sw_datagrams_attach(struct sw_queue_pair *pair, const union ibv_gid *group);
int sw_datagrams_detach(struct sw_queue_pair *pair, const union ibv_gid *group);
/* By the program itself, with ibv_attach_mcast: it is not destroyed before it is detached. */
int sw_datagrams_are_attached(const struct sw_queue_pair *pair);

void sw_fill_datagram(struct aiordma_provider *table); /* address handles, multicast */

#endif
