/* What Python calls on every wake and every post. */
#ifndef AIORDMA_DATA_PATH_H
#define AIORDMA_DATA_PATH_H

#include "provider.h"

#include "declarations/data_path.h"

/*
 * Take the events that the channel's armed queues have to give, and acknowledge them. Returns 0 or
 * -errno; `taken` is how many there were, in either case.
 */
int aiordma_take_events(const struct aiordma_provider *provider,
                        struct ibv_comp_channel *channel, struct aiordma_drained_queue *queues,
                        uint32_t count, uint32_t *taken);

#endif
