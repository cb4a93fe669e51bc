/* The interface for Python of the requests that have not ended. */
#ifndef AIORDMA_ENGINE_OPEN_H
#define AIORDMA_ENGINE_OPEN_H

#include "request.h"

extern PyTypeObject engine_open_type;

#endif
