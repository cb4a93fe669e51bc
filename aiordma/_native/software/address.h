/* rdma_getaddrinfo. */
#ifndef AIORDMA_SOFTWARE_ADDRESS_H
#define AIORDMA_SOFTWARE_ADDRESS_H

#include "../provider.h"

void sw_fill_address(struct aiordma_provider *table);

#endif
