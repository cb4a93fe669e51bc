/* The connection manager. */
#ifndef AIORDMA_SOFTWARE_CM_H
#define AIORDMA_SOFTWARE_CM_H

#include "../provider.h"

void sw_fill_cm(struct aiordma_provider *table);
/* The same calls, but for identifiers of the RoCE device. */
void sw_fill_roce_cm(struct aiordma_provider *table);

#endif
