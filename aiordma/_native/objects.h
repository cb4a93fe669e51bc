#ifndef AIORDMA_OBJECTS_H
#define AIORDMA_OBJECTS_H

#include "data_path.h"

#include "declarations/objects.h"

#endif
