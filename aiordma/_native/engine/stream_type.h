/* The type of a stream's data path. */
#ifndef AIORDMA_ENGINE_STREAM_TYPE_H
#define AIORDMA_ENGINE_STREAM_TYPE_H

#include "python_objects.h"

extern PyTypeObject engine_stream_type;

#endif
