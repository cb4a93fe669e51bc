/* How a work request (request.c) is awaited: its waiters, and when an await has to suspend. */
#include "request_await.h"

static int add_waiter(Request *request, PyObject *waiter)
{
    if (!request->waiters && !(request->waiters = PyList_New(0)))
        return -1;
    return PyList_Append(request->waiters, waiter);
}

void engine_forget_waiter(Request *request, PyObject *waiter)
{
    PyObject *waiters = request->waiters;
    for (Py_ssize_t i = 0; waiters && i < PyList_GET_SIZE(waiters); i++)
        if (PyList_GET_ITEM(waiters, i) == waiter) {
            if (PySequence_DelItem(waiters, i))
                engine_log("removing a waiter of %r failed", (PyObject *)request);
            return;
        }
}

/* Make a waiter for the owner's loop: the engine's on asyncio, else the loop's own. */
static PyObject *make_waiter(Request *request)
{
    if (request->port && request->port->loop)
        return (PyObject *)engine_waiter(request->port->loop);
    PyObject *loop = PyObject_GetAttr(request->owner, engine_python.loop);
    PyObject *waiter = loop ? PyObject_CallMethodNoArgs(loop, engine_python.waiter) : NULL;
    Py_XDECREF(loop);
    return waiter;
}

static int has_ended(PyObject *awaited)
{
    return ((Request *)awaited)->state != IN_FLIGHT;
}

enum { AT_ONCE = 256 };

/* Whether the await has to suspend, because AT_ONCE awaits did not, and other tasks have to run. */
static int has_to_pause(Request *request)
{
    if (!request->at_once)
        return 0;
    request->at_once = 0;
    if (!request->port || ++request->port->drain->at_once < AT_ONCE)
        return 0;
    request->port->drain->at_once = 0;
    return 1;
}

static PyObject *awaited_result(PyObject *awaited)
{
    return engine_result((Request *)awaited);
}

static void awaited_forget(PyObject *awaited, PyObject *waiter)
{
    engine_forget_waiter((Request *)awaited, waiter);
}

static const struct engine_awaited awaited_calls = {
    .has_ended = has_ended,
    .result = awaited_result,
    .forget = awaited_forget,
};

static PyObject *await_elsewhere(PyObject *awaited, PyObject *waiter)
{
    PyObject *arguments[] = {awaited, waiter};
    if (!engine_python.wait_elsewhere) {
        PyErr_SetString(PyExc_RuntimeError, "the engine was not given wait_elsewhere");
        return NULL;
    }
    return PyObject_Vectorcall(engine_python.wait_elsewhere, arguments, 2, NULL);
}

/* Await a request that has ended, and suspend the task once. */
static PyObject *pause_once(Request *request, PyObject *awaited, const struct engine_awaited *calls)
{
    PyObject *made = make_waiter(request), *result = NULL;
    if (made && Py_IS_TYPE(made, &engine_waiter_type)) {
        Waiter *waiter = (Waiter *)made;
        engine_await(waiter, awaited, calls);
        waiter->pauses = 1;
        return made;
    }
    PyObject *woken = made ? PyObject_CallMethodNoArgs(made, engine_python.wake) : NULL;
    if (woken)
        result = await_elsewhere(awaited, made); /* suspends once, though the waiter is woken */
    Py_XDECREF(woken);
    Py_XDECREF(made);
    return result;
}

PyObject *engine_await_request(Request *request, PyObject *awaited,
                               const struct engine_awaited *calls)
{
    request->retrieved = 1; /* also if the await is cancelled, which abandons the result */
    if (request->state == IN_FLIGHT && request->port && engine_usable(request->port, 1))
        request->port->drain->poll_now(request->port->drain);
    if (engine_interrupted())
        return NULL;
    if (request->state != IN_FLIGHT) {
        /* The request as its own awaitable does not suspend. */
        return has_to_pause(request) ? pause_once(request, awaited, calls) : Py_NewRef(awaited);
    }
    if (!request->wr_id) {
        PyErr_Format(
            PyExc_RuntimeError,
            "%R is part of a chain that is posted when its block ends: await it after the block",
            request);
        return NULL;
    }
    if (request->port && !engine_is_here(request->port)) {
        PyObject *ours = PyObject_CallMethodNoArgs(request->owner, engine_python.require_own_loop);
        if (!ours)
            return NULL;
        Py_DECREF(ours);
    }
    PyObject *waiter = make_waiter(request), *result = NULL;
    if (!waiter || add_waiter(request, waiter)) {
        Py_XDECREF(waiter);
        return NULL;
    }
    if (Py_IS_TYPE(waiter, &engine_waiter_type)) {
        engine_await((Waiter *)waiter, awaited, calls);
        return waiter;
    }
    result = await_elsewhere(awaited, waiter);
    Py_DECREF(waiter);
    return result;
}

PyObject *engine_await_itself(Request *request)
{
    return engine_await_request(request, (PyObject *)request, &awaited_calls);
}
