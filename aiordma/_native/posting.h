#ifndef AIORDMA_POSTING_H
#define AIORDMA_POSTING_H

#include "provider.h"

#include "declarations/posting.h"

#endif
