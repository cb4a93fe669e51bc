/* Receives of registered memory, posted as one chain; and the port of a shared receive queue. */
#ifndef AIORDMA_ENGINE_SHARED_H
#define AIORDMA_ENGINE_SHARED_H

#include "port.h"

extern PyTypeObject engine_shared_type;

/* A method of both types of ports. */
PyObject *engine_receive_all(Port *port, PyObject *given);
#define ENGINE_RECEIVE_ALL                                                                     \
    {"receive_all", (PyCFunction)engine_receive_all, METH_O,                                   \
     "receive_all($self, parts, /)\n--\n\n"                                                    \
     "Post a receive for each item of the list, as one chain. An item is registered memory,\n" \
     "or a list of it. Return the requests; or the errno, and the posted requests; or None:\n" \
     "the general path has to post them."}

#endif
