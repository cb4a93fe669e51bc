/* UDP of simulated hosts. */
#ifndef AIORDMA_SOFTWARE_SIMULATED_UDP_H
#define AIORDMA_SOFTWARE_SIMULATED_UDP_H

#include "descriptors.h"

uint32_t sw_sim_datagram_events(struct sw_object *object);
ssize_t sw_sim_send_datagram(struct sw_object *object, const struct msghdr *message);
ssize_t sw_sim_recvmsg(int fd, struct msghdr *message, int flags);

#endif
