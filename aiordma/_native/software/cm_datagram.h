/* The UDP port space, by SIDR_REQ and SIDR_REP. */
#ifndef AIORDMA_SOFTWARE_CM_DATAGRAM_H
#define AIORDMA_SOFTWARE_CM_DATAGRAM_H

#include "identifier.h"

extern const struct sw_port_space sw_datagram_space;

#endif
