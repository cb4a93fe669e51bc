/* What the fuzzers of the connection manager's two port spaces share: the program's side. */
#ifndef AIORDMA_FUZZ_MANAGER_H
#define AIORDMA_FUZZ_MANAGER_H

#include "software/identifier.h"
#include "world.h"

/* An identifier that listens at a port of its own, which is returned. */
uint16_t start_listening(struct rdma_event_channel *channel, enum rdma_port_space port_space,
                         struct rdma_cm_id **listener);
/*
 * Take what there is. note sees each event before it is acknowledged; a request that is not kept
 * then is destroyed.
 */
void take_all_events(struct rdma_event_channel *channel, void (*note)(struct rdma_cm_event *),
                     int (*is_kept)(const struct rdma_cm_id *));

#endif
