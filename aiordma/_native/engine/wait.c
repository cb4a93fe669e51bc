/*
 * A task's wait on an asyncio loop: both the awaitable and the future that the task waits for.
 * (asyncio accepts any object with _asyncio_future_blocking as a future.) If no task is running, a
 * drain runs the woken tasks directly. This is faster than the loop's next iteration.
 */
#include "wait.h"

#include <structmember.h>

/* Collects the waiters that are woken on this thread, and functions to be called after the drain;
   NULL: the waiters are scheduled on the loop. */
static _Thread_local PyObject *collecting;

static PyObject *running_loop;

int engine_wait_names(void)
{
    if (!running_loop) {
        PyObject *events = PyImport_ImportModule("asyncio.events");
        running_loop = events ? PyObject_GetAttrString(events, "_get_running_loop") : NULL;
        Py_XDECREF(events);
    }
    return running_loop ? 0 : -1;
}

Waiter *engine_waiter(PyObject *loop)
{
    Waiter *waiter = PyObject_GC_New(Waiter, &engine_waiter_type);
    if (!waiter)
        return NULL;
    waiter->loop = Py_XNewRef(loop);
    waiter->callback = waiter->context = waiter->message = NULL;
    waiter->awaited = NULL;
    waiter->calls = NULL;
    waiter->state = WAITING;
    waiter->blocking = waiter->pauses = 0;
    PyObject_GC_Track(waiter);
    return waiter;
}

void engine_await(Waiter *waiter, PyObject *awaited, const struct engine_awaited *calls)
{
    Py_XSETREF(waiter->awaited, Py_NewRef(awaited));
    waiter->calls = calls;
}

static int waiter_traverse(Waiter *waiter, visitproc visit, void *arg)
{
    Py_VISIT(waiter->loop);
    Py_VISIT(waiter->callback);
    Py_VISIT(waiter->context);
    Py_VISIT(waiter->message);
    Py_VISIT(waiter->awaited);
    return 0;
}

static int waiter_clear(Waiter *waiter)
{
    Py_CLEAR(waiter->callback);
    Py_CLEAR(waiter->context);
    Py_CLEAR(waiter->message);
    Py_CLEAR(waiter->awaited);
    return 0;
}

static void waiter_dealloc(Waiter *waiter)
{
    PyObject_GC_UnTrack(waiter);
    waiter_clear(waiter);
    Py_XDECREF(waiter->loop);
    PyObject_GC_Del(waiter);
}

/* -- waking ------------------------------------------------------------------------------- */

/* Whether the exception that is set means that the loop is closed, and runs no task any more. Then
   the exception is cleared. */
static int is_over(PyObject *loop)
{
    PyObject *type, *value, *trace;

    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return 0;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *closed = PyObject_CallMethodNoArgs(loop, engine_python.is_closed);
    int over = closed == Py_True;
    PyErr_Clear();
    Py_XDECREF(closed);
    if (!over) {
        PyErr_Restore(type, value, trace);
        return 0;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return 1;
}

/* Schedule the waiter itself, which calls its callback once. */
static int call_soon(Waiter *waiter)
{
    PyObject *arguments[] = {waiter->loop, (PyObject *)waiter, waiter->context};
    PyObject *handle = PyObject_VectorcallMethod(
        engine_python.call_soon, arguments, 2, waiter->context ? engine_python.with_context : NULL);
    Py_XDECREF(handle);
    return handle || is_over(waiter->loop) ? 0 : -1;
}

/* Call the callback, once. */
static PyObject *call_back(Waiter *waiter)
{
    PyObject *callback = waiter->callback;
    if (!callback)
        Py_RETURN_NONE;
    waiter->callback = NULL;
    PyObject *result = PyObject_CallOneArg(callback, (PyObject *)waiter);
    Py_DECREF(callback);
    return result;
}

static PyObject *waiter_call(Waiter *waiter, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    return call_back(waiter);
}

static int schedule(Waiter *waiter)
{
    return collecting ? PyList_Append(collecting, (PyObject *)waiter) : call_soon(waiter);
}

int engine_wake(PyObject *object)
{
    Waiter *waiter = (Waiter *)object;

    if (!Py_IS_TYPE(object, &engine_waiter_type)) {
        PyObject *result = engine_call_method_alone(engine_python.wake, &object, 1);
        Py_XDECREF(result);
        return result ? 0 : -1;
    }
    if (waiter->state != WAITING)
        return 0;
    waiter->state = WOKEN;
    return waiter->callback ? schedule(waiter) : 0;
}

void engine_collect_woken(PyObject *list)
{
    collecting = list;
}

/* Run a task's next step in its own context. 1: the context cannot be entered here; -1: an
   exception. */
static int step(Waiter *waiter)
{
    PyObject *context = Py_XNewRef(waiter->context), *result = NULL;
    int failed = 0;

    if (context && PyContext_Enter(context)) {
        PyErr_Clear();
        failed = 1;
    } else {
        result = call_back(waiter);
        failed = result ? 0 : -1;
        Py_XDECREF(result);
        if (context) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            if (PyContext_Exit(context))
                engine_log("leaving a task's context failed", (PyObject *)waiter);
            PyErr_Restore(type, value, trace);
        }
    }
    Py_XDECREF(context);
    return failed;
}

/* Call a function of engine_call_at_end. The tasks that it wakes run after it. */
static int call_collected(PyObject *function, PyObject *list)
{
    collecting = list;
    PyObject *result = PyObject_CallNoArgs(function);
    collecting = NULL;
    Py_XDECREF(result);
    return result ? 0 : -1;
}

int engine_call_at_end(PyObject *function)
{
    if (!collecting)
        return 0;
    return PyList_Append(collecting, function) ? -1 : 1;
}

int engine_run_woken(PyObject *list)
{
    Py_ssize_t at = 0;
    PyObject *aside = engine_put_aside(); /* an interrupt of the drain is not the tasks' */
    int failed = 0;

    collecting = NULL;
    for (; at < PyList_GET_SIZE(list) && failed >= 0; at++) {
        PyObject *each = Py_NewRef(PyList_GET_ITEM(list, at));
        failed = Py_IS_TYPE(each, &engine_waiter_type) ? step((Waiter *)each)
                                                       : call_collected(each, list);
        if (failed > 0)
            failed = call_soon((Waiter *)each);
        Py_DECREF(each);
    }
    /* A task was interrupted (KeyboardInterrupt ends the loop). Schedule the other tasks. */
    if (at < PyList_GET_SIZE(list)) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        for (; at < PyList_GET_SIZE(list); at++) {
            PyObject *each = Py_NewRef(PyList_GET_ITEM(list, at));
            if (Py_IS_TYPE(each, &engine_waiter_type) ? call_soon((Waiter *)each)
                                                      : call_collected(each, list))
                engine_log("waking a task failed", each);
            Py_DECREF(each);
        }
        PyErr_Restore(type, value, trace);
    }
    engine_put_back(aside);
    if (PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL))
        return -1;
    return failed;
}

PyObject *engine_call_then_run(PyObject *function)
{
    if (collecting) /* a drain is under way, which runs the tasks */
        return PyObject_CallNoArgs(function);
    PyObject *woken = PyList_New(0);
    if (!woken)
        return NULL;
    collecting = woken;
    PyObject *result = PyObject_CallNoArgs(function);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (engine_run_woken(woken)) {
        if (type)
            engine_log("a woken task was interrupted", function);
        Py_CLEAR(result);
    }
    if (type)
        PyErr_Restore(type, value, trace);
    Py_DECREF(woken);
    return result;
}

/* -- awaiting ----------------------------------------------------------------------------- */

static void leave(Waiter *waiter)
{
    PyObject *awaited = waiter->awaited;
    if (awaited) {
        waiter->awaited = NULL;
        waiter->calls->forget(awaited, (PyObject *)waiter);
        Py_DECREF(awaited);
    }
}

static PyObject *take_result(Waiter *waiter)
{
    PyObject *awaited = waiter->awaited;
    waiter->awaited = NULL; /* an ended request keeps no list of waiters to be removed from */
    PyObject *result = waiter->calls->result(awaited);
    Py_DECREF(awaited);
    return result;
}

static PySendResult waiter_send(Waiter *waiter, PyObject *value, PyObject **result)
{
    (void)value;
    if (waiter->awaited) {
        if (waiter->calls->has_ended(waiter->awaited)) {
            if (!waiter->pauses) {
                *result = take_result(waiter);
                return *result ? PYGEN_RETURN : PYGEN_ERROR;
            }
            waiter->pauses = 0;
            waiter->state = WOKEN;
        }
    } else if (waiter->state == WOKEN) {
        *result = Py_NewRef(Py_None);
        return PYGEN_RETURN;
    }
    waiter->blocking = 1;
    *result = Py_NewRef(waiter);
    return PYGEN_NEXT;
}

/* What `send` and `__next__` return after a step. Takes the reference of its result. */
static PyObject *after_step(PySendResult step, PyObject *result)
{
    if (step != PYGEN_RETURN)
        return step == PYGEN_NEXT ? result : NULL;
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    if (stop)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

PyObject *engine_send_value(PyObject *awaitable, PyObject *value)
{
    PyObject *result;
    PySendResult step = PyIter_Send(awaitable, value, &result);

    return after_step(step, result);
}

PyObject *engine_next(PyObject *awaitable)
{
    return engine_send_value(awaitable, Py_None);
}

static PyObject *waiter_next(Waiter *waiter)
{
    PyObject *result = NULL;
    PySendResult step = waiter_send(waiter, Py_None, &result);

    if (step == PYGEN_RETURN && result == Py_None) {
        Py_DECREF(result);
        return NULL;
    }
    return after_step(step, result);
}

static PyObject *waiter_throw(Waiter *waiter, PyObject *const *arguments, Py_ssize_t count)
{
    leave(waiter);
    if (count < 1 || count > 3) {
        PyErr_SetString(PyExc_TypeError, "throw takes an exception");
        return NULL;
    }
    PyObject *thrown = arguments[0];
    if (PyExceptionInstance_Check(thrown)) {
        PyErr_SetObject((PyObject *)Py_TYPE(thrown), thrown);
    } else if (PyExceptionClass_Check(thrown)) {
        PyErr_SetObject(thrown, count > 1 ? arguments[1] : NULL);
    } else {
        PyErr_SetString(PyExc_TypeError, "throw takes an exception");
    }
    return NULL;
}

static PyObject *waiter_close(Waiter *waiter, PyObject *none)
{
    (void)none;
    leave(waiter);
    Py_RETURN_NONE;
}

static PyObject *waiter_wait(PyObject *waiter, PyObject *none)
{
    (void)none;
    return Py_NewRef(waiter);
}

static PyObject *waiter_wake(PyObject *waiter, PyObject *none)
{
    (void)none;
    if (engine_wake(waiter) || engine_interrupted())
        return NULL;
    Py_RETURN_NONE;
}

PyObject *engine_throw_into(PyObject *inner, PyObject *arguments)
{
    PyObject *method = inner ? PyObject_GetAttr(inner, engine_python.throw) : NULL, *result = NULL;

    if (method)
        result = PyObject_Call(method, arguments, NULL);
    else if (!inner && PyTuple_GET_SIZE(arguments) &&
             PyExceptionInstance_Check(PyTuple_GET_ITEM(arguments, 0)))
        PyErr_SetObject((PyObject *)Py_TYPE(PyTuple_GET_ITEM(arguments, 0)),
                        PyTuple_GET_ITEM(arguments, 0));
    else if (!inner)
        PyErr_SetString(PyExc_TypeError, "throw takes an exception");
    Py_XDECREF(method);
    return result;
}

PyObject *engine_close_inner(PyObject *inner)
{
    return inner ? PyObject_CallMethodNoArgs(inner, engine_python.close) : Py_NewRef(Py_None);
}

int engine_runs_here(PyObject *loop)
{
    PyObject *running = PyObject_CallNoArgs(running_loop);
    int is_it = running == loop;

    if (!running)
        PyErr_Clear();
    Py_XDECREF(running);
    return is_it;
}

/* -- the future that the task sees -------------------------------------------------------- */

static PyObject *waiter_add_done_callback(Waiter *waiter, PyObject *const *arguments,
                                          Py_ssize_t count, PyObject *keywords)
{
    if (count != 1 || (keywords && PyTuple_GET_SIZE(keywords) > 1)) {
        PyErr_SetString(PyExc_TypeError, "add_done_callback(callback, *, context)");
        return NULL;
    }
    if (waiter->callback) {
        PyErr_SetString(PyExc_RuntimeError, "a task waits here already");
        return NULL;
    }
    waiter->callback = Py_NewRef(arguments[0]);
    if (keywords && PyTuple_GET_SIZE(keywords))
        waiter->context = Py_NewRef(arguments[1]);
    if (waiter->state != WAITING && (call_soon(waiter) || engine_interrupted()))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *waiter_remove_done_callback(Waiter *waiter, PyObject *callback)
{
    int is_it = waiter->callback ? PyObject_RichCompareBool(waiter->callback, callback, Py_EQ) : 0;
    if (is_it < 0)
        return NULL;
    if (is_it)
        Py_CLEAR(waiter->callback);
    return PyLong_FromLong(is_it);
}

static PyObject *waiter_cancel(Waiter *waiter, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"msg", NULL};
    PyObject *message = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &message))
        return NULL;
    if (waiter->state != WAITING)
        Py_RETURN_FALSE;
    waiter->state = CANCELLED;
    Py_XSETREF(waiter->message, Py_NewRef(message));
    leave(waiter);
    if (waiter->callback && (call_soon(waiter) || engine_interrupted()))
        return NULL;
    Py_RETURN_TRUE;
}

static void raise_cancelled(PyObject *message)
{
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    PyObject *type = asyncio ? PyObject_GetAttrString(asyncio, "CancelledError") : NULL;
    PyObject *error = !type                ? NULL
                      : message == Py_None ? PyObject_CallNoArgs(type)
                                           : PyObject_CallOneArg(type, message);
    if (error)
        PyErr_SetObject(type, error);
    Py_XDECREF(asyncio);
    Py_XDECREF(type);
    Py_XDECREF(error);
}

static PyObject *waiter_result(Waiter *waiter, PyObject *none)
{
    (void)none;
    if (waiter->state == CANCELLED) {
        raise_cancelled(waiter->message);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *waiter_done(Waiter *waiter, PyObject *none)
{
    (void)none;
    return PyBool_FromLong(waiter->state != WAITING);
}

static PyObject *waiter_cancelled(Waiter *waiter, PyObject *none)
{
    (void)none;
    return PyBool_FromLong(waiter->state == CANCELLED);
}

static PyObject *waiter_get_loop(Waiter *waiter, PyObject *none)
{
    (void)none;
    return Py_NewRef(waiter->loop ? waiter->loop : Py_None);
}

static PyObject *waiter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)type;
    PyObject *loop;
    if ((kwargs && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "O", &loop))
        return NULL;
    return (PyObject *)engine_waiter(loop);
}

/* No method `send`: with it, the waiter would be a collections.abc.Coroutine, which an event loop in
   debug mode refuses to schedule. Python sends by am_send. */
static PyMethodDef methods[] = {
    {"wake", (PyCFunction)waiter_wake, METH_NOARGS,
     "wake($self, /)\n--\n\n"
     "Wake the waiting task. Idempotent. A wake before the wait is not lost."},
    {"wait", waiter_wait, METH_NOARGS,
     "wait($self, /)\n--\n\n"
     "Return an awaitable, to be awaited once."},
    {"throw", (PyCFunction)(void (*)(void))waiter_throw, METH_FASTCALL, NULL},
    {"close", (PyCFunction)waiter_close, METH_NOARGS, NULL},
    {"add_done_callback", (PyCFunction)(void (*)(void))waiter_add_done_callback,
     METH_FASTCALL | METH_KEYWORDS, NULL},
    {"remove_done_callback", (PyCFunction)waiter_remove_done_callback, METH_O, NULL},
    {"cancel", (PyCFunction)(void (*)(void))waiter_cancel, METH_VARARGS | METH_KEYWORDS, NULL},
    {"result", (PyCFunction)waiter_result, METH_NOARGS, NULL},
    {"done", (PyCFunction)waiter_done, METH_NOARGS, NULL},
    {"cancelled", (PyCFunction)waiter_cancelled, METH_NOARGS, NULL},
    {"get_loop", (PyCFunction)waiter_get_loop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_asyncio_future_blocking", T_BOOL, offsetof(Waiter, blocking), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyAsyncMethods awaiting = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)waiter_send,
};

PyTypeObject engine_waiter_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Waiter",
    .tp_doc = "One task's wait for one wake-up, on an asyncio loop.",
    .tp_basicsize = sizeof(Waiter),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = waiter_new,
    .tp_dealloc = (destructor)waiter_dealloc,
    .tp_traverse = (traverseproc)waiter_traverse,
    .tp_clear = (inquiry)waiter_clear,
    .tp_call = (ternaryfunc)waiter_call,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)waiter_next,
    .tp_methods = methods,
    .tp_members = members,
    .tp_as_async = &awaiting,
};
