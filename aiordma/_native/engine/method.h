/* Methods whose calls run no Python code, but post through a port. */
#ifndef AIORDMA_ENGINE_METHOD_H
#define AIORDMA_ENGINE_METHOD_H

#include "python_objects.h"

extern PyTypeObject engine_method_type;

PyObject *engine_method(PyObject *module, PyObject *args);

#endif
