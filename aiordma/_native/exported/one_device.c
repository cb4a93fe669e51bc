/*
 * The device that libibverbs.so.1 contains, for both libraries.
 */
#include "one_device.h"

#include <errno.h>

#include "declarations/software.h"

EXPORTED const struct aiordma_provider *aiordma_exported_calls(void)
{
    const struct aiordma_provider *calls = aiordma_software();

    if (!calls)
        errno = ENOMEM;
    return calls;
}

EXPORTED void **aiordma_exported_slot(struct rdma_cm_id *id)
{
    return aiordma_software_slot(id);
}
