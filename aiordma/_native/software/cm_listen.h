/*
 * The TCP port space. Its table is in cm_listen.c, because that includes cm_stream.c's header.
 */
#ifndef AIORDMA_SOFTWARE_CM_LISTEN_H
#define AIORDMA_SOFTWARE_CM_LISTEN_H

#include "identifier.h"

extern const struct sw_port_space sw_stream_space;

#endif
