/* Functions for the fuzzers of the connection manager's two port spaces: the program's side. */
#ifndef AIORDMA_FUZZ_MANAGER_H
#define AIORDMA_FUZZ_MANAGER_H

#include "software/identifier.h"
#include "world.h"

/* Make an identifier that listens on a new port. Returns the port. */
uint16_t start_listening(struct rdma_event_channel *channel, enum rdma_port_space port_space,
                         struct rdma_cm_id **listener);
/*
 * Take all pending events. note() is called with each event before it is acknowledged. After that,
 * the identifier of a connection request is destroyed unless is_kept() returns true.
 */
void take_all_events(struct rdma_event_channel *channel, void (*note)(struct rdma_cm_event *),
                     int (*is_kept)(const struct rdma_cm_id *));

#endif
