/*
 * Contexts and protection domains, from which all other objects are created; the device's
 * attributes.
 */
#ifndef AIORDMA_SOFTWARE_CONTEXT_H
#define AIORDMA_SOFTWARE_CONTEXT_H

#include "events.h"

/*
 * Find or open the context that identifiers get, of either device. It is never closed: librdmacm,
 * too, keeps one of each device for the life of the process. NULL: ENOMEM, or no descriptor.
 */
struct sw_context *sw_manager_context(int of_roce);

/* Whether a context is one of the RoCE device. */
int sw_is_roce(const struct ibv_context *context);

struct sw_domain {
    struct ibv_pd ibv;
    uint32_t objects; /* regions, windows, queue pairs, ...: the domain outlives them */
};

void sw_fill_context(struct aiordma_provider *table, struct verbs_context *operations);

#endif
