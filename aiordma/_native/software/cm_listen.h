/* The TCP port space, whole: the passive side knows the active one. */
#ifndef AIORDMA_SOFTWARE_CM_LISTEN_H
#define AIORDMA_SOFTWARE_CM_LISTEN_H

#include "identifier.h"

extern const struct sw_port_space sw_stream_space;

#endif
