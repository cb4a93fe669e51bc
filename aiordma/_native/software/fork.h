/* Fork safety. */
#ifndef AIORDMA_SOFTWARE_FORK_H
#define AIORDMA_SOFTWARE_FORK_H

#include "device.h"

/* Guard all calls against objects of a parent process, and register for forks. 0 or an errno. */
int sw_guard(struct aiordma_provider *table);

#endif
