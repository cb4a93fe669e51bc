/* The atomics that peers request, carried out on registered memory. */
#ifndef AIORDMA_SOFTWARE_ATOMIC_H
#define AIORDMA_SOFTWARE_ATOMIC_H

#include "frame.h"
#include "mapping.h"

/* Carry one out on 8 aligned bytes. before: set to the old value. EFAULT: the memory is gone. */
int sw_carry_out_atomic(const struct sw_atomic_request *request, struct sw_memory memory,
                        uint64_t *before);

#endif
