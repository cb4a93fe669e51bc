/* Work requests that a program builds by calls (man ibv_wr_post), instead of in a list. */
#ifndef AIORDMA_SOFTWARE_BUILDER_H
#define AIORDMA_SOFTWARE_BUILDER_H

#include "queue_pair.h"

/* Whether queue pairs of this type have these operations (IBV_QP_EX_WITH_...): 0 or EOPNOTSUPP. */
int sw_check_operations(enum ibv_qp_type type, uint64_t operations);
/* Give a queue pair that no other thread knows the functions of ibv_qp_ex. 0 or ENOMEM. */
int sw_give_builder(struct sw_queue_pair *pair);
void sw_free_builder(struct sw_queue_pair *pair); /* does nothing if it has none */

#endif
