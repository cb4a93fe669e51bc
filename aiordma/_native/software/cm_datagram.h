/* The UDP port space, by SIDR_REQ and SIDR_REP. */
#ifndef AIORDMA_SOFTWARE_CM_DATAGRAM_H
#define AIORDMA_SOFTWARE_CM_DATAGRAM_H

#include "identifier.h"
#include "roce_port.h"

extern const struct sw_port_space sw_datagram_space;

/* A packet to queue pair 1 has come to RoCE's port: as sw_services.arrived. */
void sw_datagram_came(const struct sw_udp_route *from, const struct sw_roce_packet *packet,
                      const uint8_t *bytes, size_t size, int is_passed);

#endif
