/* Calls that are repeated as long as there is no memory for them. */
#include "engine.h"

#include <time.h>

/* A call in C can lose its MemoryError, and then raises SystemError. A lock of Python's raises
   RuntimeError. */
static int is_without_memory(void)
{
    return PyErr_ExceptionMatches(PyExc_MemoryError) || PyErr_ExceptionMatches(PyExc_SystemError) ||
           PyErr_ExceptionMatches(PyExc_RuntimeError);
}

PyObject *engine_persist(PyObject *module, PyObject *function)
{
    const struct timespec pause = {0, 50000000};
    PyObject *result;

    (void)module;
    while (!(result = PyObject_CallNoArgs(function)) && is_without_memory()) {
        PyErr_Clear();
        Py_BEGIN_ALLOW_THREADS nanosleep(&pause, NULL);
        Py_END_ALLOW_THREADS
    }
    return result;
}
