/* Queue pairs: created, moved through their states, destroyed. */
#ifndef AIORDMA_SOFTWARE_STATES_H
#define AIORDMA_SOFTWARE_STATES_H

#include "queue_pair.h"

/* ibv_modify_qp, with the lock held. */
int sw_modify_queue_pair(struct sw_queue_pair *pair, const struct ibv_qp_attr *attr, int mask);

void sw_fill_states(struct aiordma_provider *table, struct verbs_context *operations);

#endif
