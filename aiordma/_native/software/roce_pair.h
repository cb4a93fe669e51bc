/* The transport of RC and UC queue pairs over RoCE, which the program connects by hand. */
#ifndef AIORDMA_SOFTWARE_ROCE_PAIR_H
#define AIORDMA_SOFTWARE_ROCE_PAIR_H

#include "roce_packets.h"

extern const struct sw_transport sw_roce_transport;

#endif
