/* Posting of work requests. */
#ifndef AIORDMA_SOFTWARE_WORK_H
#define AIORDMA_SOFTWARE_WORK_H

#include "queue_pair.h"

/*
 * Post linked requests to the send queue: all of them, or none. Takes the lock itself. Returns 0 or
 * an errno.
 */
int sw_post_all(struct ibv_qp *queue_pair, struct ibv_send_wr *first);

void sw_fill_work(struct ibv_context_ops *operations);

#endif
