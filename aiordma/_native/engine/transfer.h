/* What Stream.receive, receive_into and send await. */
#ifndef AIORDMA_ENGINE_TRANSFER_H
#define AIORDMA_ENGINE_TRANSFER_H

#include "stream_path.h"

extern PyTypeObject engine_transfer_type;

/* Make a call, of the arguments (general, arguments, keywords). */
enum call_kind { RECEIVE, RECEIVE_INTO, SEND };
PyObject *engine_stream_call(StreamPath *path, PyObject *const *arguments, Py_ssize_t count,
                             enum call_kind kind);

#endif
