/* How a work request is awaited. */
#ifndef AIORDMA_ENGINE_REQUEST_AWAIT_H
#define AIORDMA_ENGINE_REQUEST_AWAIT_H

#include "request.h"
#include "wait.h"

void engine_forget_waiter(Request *request, PyObject *waiter);
/* Await a request on behalf of `awaited`, which is its own awaitable once the request has ended. */
PyObject *engine_await_request(Request *request, PyObject *awaited,
                               const struct engine_awaited *calls);
PyObject *engine_await_itself(Request *request);

#endif
