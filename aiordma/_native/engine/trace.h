/* The trace: a record of each request that ends. */
#ifndef AIORDMA_ENGINE_TRACE_H
#define AIORDMA_ENGINE_TRACE_H

#include "python_objects.h"

struct engine_record {
    PyObject *owner, *operation; /* borrowed: the trace takes references of its own */
    long long posted;            /* of engine_trace_time */
    unsigned long long wr_id;
    Py_ssize_t bytes;
    long status; /* of the completion; -1: it ended without one */
};

/* Whether a trace is on. A request is then noted when it is posted, and when it ends. */
extern int engine_tracing;
long long engine_trace_time(void); /* nanoseconds of CLOCK_MONOTONIC */
/* Record a request that ends now. */
void engine_record(const struct engine_record *record);
PyObject *engine_begin_trace(PyObject *module, PyObject *most);
PyObject *engine_take_trace(PyObject *module, PyObject *none);

#endif
