/* The selector of a polling event loop. */
#ifndef AIORDMA_ENGINE_SELECT_H
#define AIORDMA_ENGINE_SELECT_H

#include "python_objects.h"

extern PyTypeObject engine_spinner_type;

#endif
