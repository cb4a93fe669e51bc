/*
 * The table of calls that a provider fills: one C type for the kernel's devices
 * (rdma_core.c) and for any device that lives in this process.
 */
#ifndef AIORDMA_PROVIDER_H
#define AIORDMA_PROVIDER_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stddef.h>
#include <stdint.h>

#include "declarations/provider.h"

#endif
