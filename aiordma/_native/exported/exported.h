/*
 * The software device for programs in C: libibverbs.so.1 contains the device, librdmacm.so.1 the
 * connection manager's calls, with rdma-core's symbol versions (*.map). An exported function calls
 * the device's table, and nothing here knows how the device works.
 *
 * A file is part of one of the two libraries (setup.py). librdmacm.so.1 reaches the device by the
 * functions of one_device.h, so that both share one.
 */
#ifndef AIORDMA_EXPORTED_H
#define AIORDMA_EXPORTED_H

#include "provider.h"

#define EXPORTED __attribute__((visibility("default")))

#endif
