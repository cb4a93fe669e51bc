/* Forks: what a child finds of its parent's. */
#ifndef AIORDMA_SOFTWARE_FORK_H
#define AIORDMA_SOFTWARE_FORK_H

#include "device.h"

/* Have every call refuse what a parent made, and register for forks. 0 or an errno. */
int sw_guard(struct aiordma_provider *table);

#endif
