/* The drain: completes the requests whose completions were polled. */
#ifndef AIORDMA_ENGINE_DRAIN_H
#define AIORDMA_ENGINE_DRAIN_H

#include "poll.h"

extern PyTypeObject engine_drain_type;

long engine_deliver(Drain *drain, int direct); /* deliver the batch; returns the number */

#endif
