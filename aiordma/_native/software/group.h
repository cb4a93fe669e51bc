/* Multicast groups of the connection manager's identifiers. */
#ifndef AIORDMA_SOFTWARE_GROUP_H
#define AIORDMA_SOFTWARE_GROUP_H

#include "identifier.h"

/* Leave all groups of an identifier that is being destroyed. */
void sw_groups_forget(struct sw_identifier *identifier);

void sw_fill_group(struct aiordma_provider *table);

#endif
