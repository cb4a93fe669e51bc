/* The simulated system: see the .c file. */
#ifndef AIORDMA_SOFTWARE_SIMULATED_H
#define AIORDMA_SOFTWARE_SIMULATED_H

#include "network.h"

extern const struct sw_system_calls sw_simulated_system;

#endif
