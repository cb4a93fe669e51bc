/* Fork safety. */
#ifndef AIORDMA_SOFTWARE_FORK_H
#define AIORDMA_SOFTWARE_FORK_H

#include "device.h"

/* From now on, a forked child begins without the parent's objects. 0 or an errno. */
int sw_prepare_forks(void);

#endif
