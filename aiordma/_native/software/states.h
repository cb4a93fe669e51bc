/* Queue pairs: created, moved through their states, destroyed. */
#ifndef AIORDMA_SOFTWARE_STATES_H
#define AIORDMA_SOFTWARE_STATES_H

#include "queue_pair.h"

void sw_fill_states(struct aiordma_provider *table, struct verbs_context *operations);

#endif
