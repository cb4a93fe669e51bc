/* The TCP port space over RoCE: InfiniBand's connection manager. */
#ifndef AIORDMA_SOFTWARE_CM_ROCE_H
#define AIORDMA_SOFTWARE_CM_ROCE_H

#include "identifier.h"
#include "roce_port.h"

extern const struct sw_port_space sw_roce_space;
extern const struct sw_services sw_roce_services; /* what arrives for queue pair 1 */

#endif
