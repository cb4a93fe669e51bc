/* The type of work requests (request.c): how they are made and freed, and the interface for Python. */
#include "request_type.h"
#include "request_await.h"
#include "trace.h"

#include <structmember.h>

/*
 * The memory of finished requests is kept for new ones, because a program makes millions of them.
 * Not with an address sanitizer, which has to see that each one is freed.
 */
#ifdef __SANITIZE_ADDRESS__
enum { SPARE = 0 };
#else
enum { SPARE = 128 };
#endif
static Request *spare[SPARE + 1];
static int spare_count;

static Request *make(void)
{
    if (!spare_count)
        return (Request *)engine_request_type.tp_alloc(&engine_request_type, 0);
    Request *request = spare[--spare_count];
    _Py_NewReference((PyObject *)request);
    PyObject_GC_Track(request);
    return request;
}

static void unmake(Request *request)
{
    /* Python finalizes an object once, and would not finalize the next request in its place. */
    if (!SPARE || spare_count == SPARE || request->finalized) {
        Py_TYPE(request)->tp_free((PyObject *)request);
        return;
    }
    /* Its references are released already. Reset the numbers. */
    request->wr_id = 0;
    request->length = 0;
    request->opcode = 0;
    request->is_receive = request->state = request->at_once = request->retrieved = 0;
    request->stream_kind = 0;
    request->keeps = 0;
    request->stream_bytes = 0;
    request->posted = 0;
    request->weak = NULL;
    spare[spare_count++] = request;
}

Request *engine_request(Port *port, PyObject *operation, Py_ssize_t length, PyObject *memory,
                        PyObject *remote, int is_receive)
{
    Request *request = make();
    if (!request)
        return NULL;
    request->owner = Py_NewRef(port->owner);
    request->port = (Port *)Py_NewRef(port);
    request->operation = Py_NewRef(operation);
    request->length = length;
    request->remote = Py_XNewRef(remote);
    request->is_receive = (char)is_receive;
    request->memory = Py_XNewRef(memory);
    engine_hold_memory(request);
    return request;
}

static PyObject *request_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner", "operation", "length", "held", "remote", "is_receive", NULL};
    PyObject *owner, *operation, *held, *remote = Py_None;
    Py_ssize_t length;
    int is_receive = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUnO|O$p", names, &owner, &operation, &length,
                                     &held, &remote, &is_receive))
        return NULL;
    Request *request = (Request *)type->tp_alloc(type, 0);
    if (!request)
        return NULL;
    request->owner = Py_NewRef(owner);
    request->operation = Py_NewRef(operation);
    request->remote = remote == Py_None ? NULL : Py_NewRef(remote);
    request->length = length;
    request->is_receive = (char)is_receive;
    PyObject *all = PySequence_Tuple(held); /* a copy, which no other code changes */
    if (!all || engine_hold_all(all)) {
        Py_XDECREF(all);
        Py_DECREF(request);
        return NULL;
    }
    request->held = all;
    return (PyObject *)request;
}

static int request_traverse(Request *request, visitproc visit, void *arg)
{
    Py_VISIT(request->owner);
    Py_VISIT(request->held);
    Py_VISIT(request->remote);
    Py_VISIT(request->result);
    Py_VISIT(request->error);
    Py_VISIT(request->run);
    Py_VISIT(request->waiters);
    Py_VISIT(request->callbacks);
    Py_VISIT(request->inner);
    Py_VISIT(request->memory);
    Py_VISIT(request->handle);
    Py_VISIT(request->port);
    Py_VISIT(request->poster);
    Py_VISIT(request->subject);
    return 0;
}

/* The result and the error stay: exceptions and completions clear themselves. */
static int request_clear(Request *request)
{
    Py_CLEAR(request->run);
    Py_CLEAR(request->waiters);
    Py_CLEAR(request->callbacks);
    Py_CLEAR(request->inner);
    engine_forget_subject(request);
    return 0;
}

/* Report an error that was never retrieved, as asyncio does for a future. */
static void request_finalize(Request *request)
{
    PyObject *type, *value, *trace;

    request->finalized = 1;
    if (request->state != FAILED || request->retrieved || !request->owner)
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *arguments[] = {request->owner, (PyObject *)request};
    PyObject *result = engine_call_method_alone(engine_python.request_unretrieved, arguments, 2);
    Py_XDECREF(result);
    if (!result)
        engine_log("the failure of %r could not be reported", (PyObject *)request);
    request->retrieved = 1;
    PyErr_Restore(type, value, trace);
}

static void request_dealloc(Request *request)
{
    if (request->state == FAILED && !request->retrieved &&
        PyObject_CallFinalizerFromDealloc((PyObject *)request))
        return; /* the report made a new reference to it */
    PyObject_GC_UnTrack(request);
    if (request->weak)
        PyObject_ClearWeakRefs((PyObject *)request);
    request_clear(request);
    Py_CLEAR(request->owner);
    Py_CLEAR(request->operation);
    Py_CLEAR(request->held);
    Py_CLEAR(request->remote);
    Py_CLEAR(request->result);
    Py_CLEAR(request->error);
    Py_CLEAR(request->memory);
    Py_CLEAR(request->handle);
    Py_CLEAR(request->port);
    Py_CLEAR(request->poster);
    unmake(request);
}

/* The request as its own awaitable returns its result at once. */
static PySendResult request_send(Request *request, PyObject *value, PyObject **result)
{
    (void)value;
    *result = engine_result(request);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *request_forget_waiter(Request *request, PyObject *waiter)
{
    engine_forget_waiter(request, waiter);
    Py_RETURN_NONE;
}

static PyObject *request_str(Request *request)
{
    if (!request->remote)
        return PyUnicode_FromFormat("%U of %zd bytes", request->operation, request->length);
    return PyUnicode_FromFormat("%U of %zd bytes (remote: %S)", request->operation, request->length,
                                request->remote);
}

static PyObject *request_repr(Request *request)
{
    static const char *const states[] = {"in flight", "done"};
    PyObject *number = PyLong_FromUnsignedLongLong(request->wr_id);
    PyObject *hex = number ? PyNumber_ToBase(number, 16) : NULL;
    PyObject *text = NULL;

    if (hex && request->state == FAILED)
        text = PyUnicode_FromFormat("<WorkRequest %S, wr_id %U, failed: %s>", request, hex,
                                    Py_TYPE(request->error)->tp_name);
    else if (hex)
        text = PyUnicode_FromFormat("<WorkRequest %S, wr_id %U, %s>", request, hex,
                                    states[request->state == SUCCEEDED]);
    Py_XDECREF(number);
    Py_XDECREF(hex);
    return text;
}

static PyObject *request_done(Request *request, PyObject *none)
{
    (void)none;
    return PyBool_FromLong(request->state != IN_FLIGHT);
}

static PyObject *request_result(Request *request, PyObject *none)
{
    (void)none;
    return engine_result(request);
}

static PyObject *request_exception(Request *request, PyObject *none)
{
    (void)none;
    return request->error ? engine_own_error(request) : Py_NewRef(Py_None);
}

static PyObject *request_stored_error(Request *request, PyObject *none)
{
    (void)none;
    return Py_NewRef(request->error ? request->error : Py_None);
}

static PyObject *call_now(Request *request, PyObject *callback)
{
    PyObject *result = PyObject_CallOneArg(callback, (PyObject *)request);
    Py_XDECREF(result);
    if (!result)
        engine_log("a callback of %r failed", (PyObject *)request);
    return engine_none_unless_interrupted();
}

static PyObject *request_add_done_callback(Request *request, PyObject *callback)
{
    if (request->state != IN_FLIGHT)
        return call_now(request, callback);
    if ((!request->callbacks && !(request->callbacks = PyList_New(0))) ||
        PyList_Append(request->callbacks, callback))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *request_set_on_done(Request *request, PyObject *callback)
{
    if (request->state != IN_FLIGHT)
        return call_now(request, callback);
    Py_XSETREF(request->inner, Py_NewRef(callback));
    Py_RETURN_NONE;
}

static PyObject *list_of(PyObject *list)
{
    return list ? PyList_GetSlice(list, 0, PyList_GET_SIZE(list)) : PyList_New(0);
}

static PyObject *request_remove_done_callback(Request *request, PyObject *callback)
{
    PyObject *known = list_of(request->callbacks), *kept = PyList_New(0);
    int failed = !known || !kept;

    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(known); i++) {
        int is_it = PyObject_RichCompareBool(PyList_GET_ITEM(known, i), callback, Py_EQ);
        failed = is_it < 0 || (!is_it && PyList_Append(kept, PyList_GET_ITEM(known, i)));
    }
    Py_ssize_t removed = failed ? 0 : PyList_GET_SIZE(known) - PyList_GET_SIZE(kept);
    /* Comparing runs the program's code, which may have ended the request. */
    if (!failed && removed && request->callbacks)
        Py_XSETREF(request->callbacks, Py_NewRef(kept));
    Py_XDECREF(known);
    Py_XDECREF(kept);
    return failed ? NULL : PyLong_FromSsize_t(removed);
}

static PyObject *request_cancelled(Request *request, PyObject *none)
{
    (void)request, (void)none;
    Py_RETURN_FALSE;
}

static PyObject *request_set_run(Request *request, PyObject *run)
{
    Py_ssize_t count = PySequence_Length(run);
    if (count < 0)
        return NULL;
    Py_XSETREF(request->run, count ? Py_NewRef(run) : NULL);
    Py_RETURN_NONE;
}

static PyObject *request_complete(Request *request, PyObject *raw)
{
    struct aiordma_completion c;
    if (!PyTuple_Check(raw)) {
        PyErr_SetString(PyExc_TypeError, "a completion is a tuple");
        return NULL;
    }
    if (engine_read_completion(raw, &c))
        return NULL;
    engine_complete(request, &c);
    return engine_none_unless_interrupted();
}

static PyObject *request_fail(Request *request, PyObject *error)
{
    if (request->state == IN_FLIGHT) {
        if (!PyExceptionInstance_Check(error)) {
            PyErr_SetString(PyExc_TypeError, "a request fails with an exception");
            return NULL;
        }
        engine_fail(request, error);
    }
    return engine_none_unless_interrupted();
}

static PyObject *request_keep_memory(Request *request, PyObject *none)
{
    (void)none;
    if (request->state == IN_FLIGHT)
        request->keeps = 1;
    Py_RETURN_NONE;
}

static PyObject *request_drop(Request *request, PyObject *none)
{
    (void)none;
    engine_drop(request);
    return engine_none_unless_interrupted();
}

static PyObject *request_waiters(Request *request, void *closure)
{
    (void)closure;
    return list_of(request->waiters);
}

static PyObject *request_callbacks(Request *request, void *closure)
{
    (void)closure;
    return list_of(request->callbacks);
}

static PyMethodDef methods[] = {
    {"done", (PyCFunction)request_done, METH_NOARGS,
     "done($self, /)\n--\n\n"
     "Return whether the request has ended.\n\n"
     "Raises: nothing."},
    {"result", (PyCFunction)request_result, METH_NOARGS,
     "result($self, /)\n--\n\n"
     "Return the completion of an ended request.\n\n"
     "Raises:\n"
     "    WorkCompletionError: the request failed.\n"
     "    NotPostedError, VerbsCallError: the request's chain was not posted.\n"
     "    RuntimeError: the request is still in flight."},
    {"exception", (PyCFunction)request_exception, METH_NOARGS,
     "exception($self, /)\n--\n\n"
     "Return the error of an ended request, None if it succeeded or is in flight. Each\n"
     "call returns an exception of its own, as each await raises one.\n\n"
     "Raises: nothing."},
    {"add_done_callback", (PyCFunction)request_add_done_callback, METH_O,
     "add_done_callback($self, callback, /)\n--\n\n"
     "Call a function with the request once it has ended: at once if it has ended, otherwise\n"
     "on the loop's thread when its completion is delivered. The function should be short.\n"
     "Its exceptions are logged.\n\n"
     "Args:\n"
     "    callback: a function of the request.\n\n"
     "Raises: nothing."},
    {"_stored_error", (PyCFunction)request_stored_error, METH_NOARGS,
     "_stored_error($self, /)\n--\n\n"
     "Return the error, or None. Unlike `exception`, it does not count as retrieved, and is no\n"
     "copy: do not raise it."},
    {"_set_on_done", (PyCFunction)request_set_on_done, METH_O,
     "_set_on_done($self, callback, /)\n--\n\n"
     "Set the done callback that runs no code of the program's: it may be called inside\n"
     "another request's post. It replaces the one before, and is called before the others."},
    {"remove_done_callback", (PyCFunction)request_remove_done_callback, METH_O,
     "remove_done_callback($self, callback, /)\n--\n\n"
     "Remove a callback, and return how often it had been added. For asyncio.wait.\n\n"
     "Args:\n"
     "    callback: the function that was added.\n\n"
     "Raises: nothing."},
    {"cancelled", (PyCFunction)request_cancelled, METH_NOARGS,
     "cancelled($self, /)\n--\n\n"
     "Return False: no verb cancels a posted request. For asyncio.wait.\n\n"
     "Raises: nothing."},
    {"_set_run", (PyCFunction)request_set_run, METH_O,
     "_set_run($self, run, /)\n--\n\n"
     "Complete the unsignaled requests before this one in a run, when this one\n"
     "completes."},
    {"_complete", (PyCFunction)request_complete, METH_O,
     "_complete($self, raw, /)\n--\n\n"
     "End the request with a completion."},
    {"_fail", (PyCFunction)request_fail, METH_O,
     "_fail($self, error, /)\n--\n\n"
     "End the request without a completion: the queue pair is destroyed, or the request was\n"
     "not posted. A request that has ended does not change. The error is stored: raise only\n"
     "copies of it."},
    {"_drop", (PyCFunction)request_drop, METH_NOARGS,
     "_drop($self, /)\n--\n\n"
     "Release the memory of a request that the device did not accept, or that has kept it."},
    {"_keep_memory", (PyCFunction)request_keep_memory, METH_NOARGS,
     "_keep_memory($self, /)\n--\n\n"
     "If the request fails, keep its memory until `_drop`: the device may still access it."},
    {"_forget_waiter", (PyCFunction)request_forget_waiter, METH_O,
     "_forget_waiter($self, waiter, /)\n--\n\n"
     "Do not wake a waiter any more."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"operation", T_OBJECT, offsetof(Request, operation), READONLY, NULL},
    {"length", T_PYSSIZET, offsetof(Request, length), READONLY, NULL},
    {"remote", T_OBJECT, offsetof(Request, remote), READONLY, NULL},
    {"is_receive", T_BOOL, offsetof(Request, is_receive), READONLY, NULL},
    {"_opcode", T_UINT, offsetof(Request, opcode), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *request_wr_id(Request *request, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(request->wr_id);
}

/* A request gets its wr_id when it is posted. */
static int request_set_wr_id(Request *request, PyObject *number, void *closure)
{
    (void)closure;
    unsigned long long wr_id = number ? PyLong_AsUnsignedLongLong(number) : 0;
    if (!number)
        PyErr_SetString(PyExc_TypeError, "the wr_id cannot be deleted");
    if (!number || (wr_id == (unsigned long long)-1 && PyErr_Occurred()))
        return -1;
    request->wr_id = wr_id;
    request->posted = wr_id && engine_tracing ? engine_trace_time() : 0;
    return 0;
}

static PyObject *request_completes_as(Request *request, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLong(aiordma_completes_as(request->opcode));
}

static PyGetSetDef properties[] = {
    {"wr_id", (getter)request_wr_id, (setter)request_set_wr_id,
     "The number of the request in its completion; 0: it is not posted.", NULL},
    {"_completes_as", (getter)request_completes_as, NULL, NULL, NULL},
    {"_waiters", (getter)request_waiters, NULL, NULL, NULL},
    {"_callbacks", (getter)request_callbacks, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyAsyncMethods awaiting = {
    .am_await = (unaryfunc)engine_await_itself,
    .am_send = (sendfunc)request_send,
};

PyTypeObject engine_request_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma.WorkRequest",
    .tp_doc =
        "WorkRequest(owner, operation, length, held, remote=None, *, is_receive=False)\n"
        "--\n\n"
        "A posted work request. Await it for its WorkCompletion; any number of tasks may,\n"
        "any number of times.\n\n"
        "`operation` is the name of the request (SEND, RECV, RDMA_READ, RDMA_WRITE, ...),\n"
        "`length` the number of its local bytes. If the program does not retrieve an error, by\n"
        "awaiting, `result` or `exception`, the error is reported (docs/guarantees.md).\n\n"
        "Raises:\n"
        "    WorkCompletionError: the awaited request failed.\n"
        "    NotPostedError, VerbsCallError: the awaited request's chain was not posted.\n"
        "    RuntimeError: the awaited request is of a chain that is not posted yet.\n"
        "    EventLoopError: the request was awaited outside of its event loop.\n\n"
        "Cancellation: the request stays in flight and holds its memory. Its completion is then\n"
        "discarded.",
    .tp_basicsize = sizeof(Request),
    .tp_weaklistoffset = offsetof(Request, weak),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = request_new,
    .tp_dealloc = (destructor)request_dealloc,
    .tp_finalize = (destructor)request_finalize,
    .tp_traverse = (traverseproc)request_traverse,
    .tp_clear = (inquiry)request_clear,
    .tp_str = (reprfunc)request_str,
    .tp_repr = (reprfunc)request_repr,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = properties,
    .tp_as_async = &awaiting,
    .tp_iter = PyObject_SelfIter, /* for `yield from` */
    .tp_iternext = engine_next,
};
