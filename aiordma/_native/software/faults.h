/* Faults on demand: what the rooms ask of faults.c. Each is cheap while there are none. */
#ifndef AIORDMA_SOFTWARE_FAULTS_H
#define AIORDMA_SOFTWARE_FAULTS_H

#include "device.h"

#include "../declarations/faults.h"

extern int sw_has_faults;

/* Whether a fault of this kind strikes now; what has its milliseconds (spread added) and error. */
int sw_strike(enum aiordma_fault_kind kind, struct aiordma_fault *what);

static inline int sw_fault(enum aiordma_fault_kind kind, struct aiordma_fault *what)
{
    return sw_has_faults && sw_strike(kind, what);
}

/* DROP_AFTER_BYTES: a stream has carried so many so far. Strikes once for each stream. */
int sw_strikes_bytes(uint64_t carried);

#endif
