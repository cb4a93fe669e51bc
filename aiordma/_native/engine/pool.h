/* Leases of registered blocks. */
#ifndef AIORDMA_ENGINE_POOL_H
#define AIORDMA_ENGINE_POOL_H

#include "regions.h"

typedef struct Pool Pool;
typedef struct Slab Slab;
typedef struct Lease Lease;
extern PyTypeObject engine_pool_type, engine_slab_type, engine_lease_type;

Lease *engine_lease(Pool *pool, Py_ssize_t length); /* NULL with an exception */
int engine_return_lease(Lease *lease);              /* idempotent; -1 with an exception */
void engine_return_after_error(Lease *lease);       /* an exception that is set stays set */
/* Returns the block's address in this process. */
char *engine_leased_block(const Lease *lease, struct ibv_sge *sge);
RegionBase *engine_leased_region(const Lease *lease); /* borrowed */
int engine_leased_is_usable(const Lease *lease);      /* whether its region is registered */
int engine_pool_names(void);

#endif
