/*
 * Contexts and protection domains, which everything else is made from; what the device can.
 */
#ifndef AIORDMA_SOFTWARE_CONTEXT_H
#define AIORDMA_SOFTWARE_CONTEXT_H

#include "events.h"

/*
 * Find or make the context that identifiers are given, as librdmacm keeps one of each device for
 * the life of the process. NULL: ENOMEM, or no descriptor.
 */
struct sw_context *sw_manager_context(void);

struct sw_domain {
    struct ibv_pd ibv;
    uint32_t objects; /* regions, windows, queue pairs, ...: not freed before them */
};

void sw_fill_context(struct aiordma_provider *table, struct verbs_context *operations);

#endif
