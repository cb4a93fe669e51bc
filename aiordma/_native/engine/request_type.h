/* The type of work requests, and how they are made. */
#ifndef AIORDMA_ENGINE_REQUEST_TYPE_H
#define AIORDMA_ENGINE_REQUEST_TYPE_H

#include "request.h"

extern PyTypeObject engine_request_type;

Request *engine_request(Port *port, PyObject *operation, Py_ssize_t length, PyObject *memory,
                        PyObject *remote, int is_receive);

#endif
