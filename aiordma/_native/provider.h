/*
 * The table of calls that a provider fills: rdma_core.c for the kernel's devices, software/ for the
 * software device.
 */
#ifndef AIORDMA_PROVIDER_H
#define AIORDMA_PROVIDER_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stddef.h>
#include <stdint.h>

#include "declarations/provider.h"

#endif
