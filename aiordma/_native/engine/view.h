/* An arrival as a view of its block. */
#ifndef AIORDMA_ENGINE_VIEW_H
#define AIORDMA_ENGINE_VIEW_H

#include "python_objects.h"

extern PyTypeObject engine_view_type;

int engine_view_names(void);

#endif
