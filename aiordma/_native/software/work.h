/* Posting of work requests. */
#ifndef AIORDMA_SOFTWARE_WORK_H
#define AIORDMA_SOFTWARE_WORK_H

#include "queue_pair.h"

void sw_fill_work(struct ibv_context_ops *operations);

#endif
