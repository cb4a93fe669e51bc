/* The device that libibverbs.so.1 contains, for both libraries. */
#ifndef AIORDMA_EXPORTED_ONE_DEVICE_H
#define AIORDMA_EXPORTED_ONE_DEVICE_H

#include "exported.h"

/* The device's table. NULL, with errno ENOMEM: out of memory, which only the first call finds. */
const struct aiordma_provider *aiordma_exported_calls(void);
/* See aiordma_software_slot. */
void **aiordma_exported_slot(struct rdma_cm_id *id);

#endif
