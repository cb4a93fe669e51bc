/* The interface for Python of the requests that have not ended. */
#ifndef AIORDMA_ENGINE_OPEN_REQUESTS_H
#define AIORDMA_ENGINE_OPEN_REQUESTS_H

#include "request.h"

extern PyTypeObject engine_open_requests_type;

#endif
