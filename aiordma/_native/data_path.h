/* What Python calls on every wake and every post. */
#ifndef AIORDMA_DATA_PATH_H
#define AIORDMA_DATA_PATH_H

#include "provider.h"

#include "declarations/data_path.h"

#endif
