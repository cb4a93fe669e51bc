/* A queue pair's port, which posts a request in one call. */
#ifndef AIORDMA_ENGINE_POST_H
#define AIORDMA_ENGINE_POST_H

#include "port.h"
#include "signatures.h"

extern PyTypeObject engine_port_type;

/* Post a request. Returns the new request, None if the general path has to post it, or NULL with an
   exception. */
PyObject *engine_post(Port *port, enum engine_kind kind, PyObject *const *given);

#endif
