/*
 * The table of calls that a provider fills: rdma_core.c for the kernel's devices, software/ for the
 * software device.
 */
#ifndef AIORDMA_PROVIDER_H
#define AIORDMA_PROVIDER_H

#include "rdma_core.h"

#include "declarations/provider.h"

#endif
