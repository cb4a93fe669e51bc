/* Faults on demand, as the other modules use them. A check is cheap while there are none. */
#ifndef AIORDMA_SOFTWARE_FAULTS_H
#define AIORDMA_SOFTWARE_FAULTS_H

#include "device.h"

#include "../declarations/faults.h"

extern int sw_has_faults;

/* Whether a fault of this kind strikes now. what: the fault, with the spread in milliseconds. */
int sw_strike(enum aiordma_fault_kind kind, struct aiordma_fault *what);

static inline int sw_fault(enum aiordma_fault_kind kind, struct aiordma_fault *what)
{
    return sw_has_faults && sw_strike(kind, what);
}

/* Set sw_has_faults: there are faults, or a simulation, which has some of its own. */
void sw_count_faults(void);

/* Whether a DROP_AFTER_BYTES strikes a stream that has carried this many bytes, which ends it. */
int sw_strikes_bytes(uint64_t carried);

#endif
