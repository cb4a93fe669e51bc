/* What a work request (request.c), an await of it (request_await.c) and the type (request_type.c)
   know of each other. */
#ifndef AIORDMA_ENGINE_REQUEST_H
#define AIORDMA_ENGINE_REQUEST_H

#include "engine.h"

/* Free a request whose references are released, or keep its memory for a new one. */
void engine_unmake(Request *request);
/* Hold all items of a tuple of memory; with an exception, none of them. */
int engine_hold_all(PyObject *held);
/* Forget what the request calls when it ends. */
void engine_forget_subject(Request *request);
/* End a request, which is in flight, without a completion. */
void engine_fail(Request *request, PyObject *error);
/* Return a copy of the error for each caller: a raise adds the caller's frames to an exception. */
PyObject *engine_own_error(Request *request);

/* request_await.c: */
PyObject *engine_await_itself(Request *request);

#endif
