/* Blocks of registered memory, and their places in the peer's, which one object moves. */
#ifndef AIORDMA_ENGINE_BLOCK_PORT_H
#define AIORDMA_ENGINE_BLOCK_PORT_H

#include "port.h"

extern PyTypeObject engine_block_port_type;

#endif
