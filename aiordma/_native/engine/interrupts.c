/*
 * Calls and coroutine steps that no SIGINT interrupts. Python runs signal handlers between bytecode
 * instructions of the main thread, so a KeyboardInterrupt can end a function of ours after any of
 * them. A deferring call has its own handler for SIGINT, which takes note; the program's handler is
 * called behind it. This is in C since no handler runs between two calls of C: in Python there would
 * be a moment before and a moment behind each call.
 */
#include "engine.h"

#include <structmember.h>
#include <time.h>

static PyObject *signal_number, *set_handler, *get_handler, *note; /* note: our handler */

/* Of the main thread: the others never run signal handlers. */
static struct {
    PyObject *program; /* its handler, while ours is in place */
    PyObject *error;   /* raised by a handler as ours was put in place or taken away */
    time_t since;      /* when the first of those noted came */
    int noted; /* at most two: a second one can mean more than the first (asyncio's runner) */
} deferred;

static _Thread_local int deferring;
static _Thread_local unsigned int elsewhere; /* 1 + the count of forks: this is no main thread */

static time_t now(void)
{
    struct timespec time = {0, 0};

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

/* A signal that comes seconds behind a noted one is for a call that does not end (a callback of the
   program's, say): the program's handler interrupts it. */
static PyObject *take_note(PyObject *module, PyObject *arguments)
{
    (void)module;
    if (deferred.noted && deferred.program && now() - deferred.since > ENGINE_DEFER_SECONDS)
        return PyObject_Call(deferred.program, arguments, NULL);
    if (!deferred.noted)
        deferred.since = now();
    if (deferred.noted < 2)
        deferred.noted++;
    Py_RETURN_NONE;
}

static PyMethodDef note_method = {"take_note", take_note, METH_VARARGS, NULL};

/* The exception that is set, if any: the first one is kept. */
static void keep(void)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    if (deferred.error)
        Py_XDECREF(value);
    else
        deferred.error = value;
}

/* Put a handler in place. Python runs the pending handlers first, and what these raise is kept.
   Returns whether it is in place. */
static int put(PyObject *handler)
{
    for (int i = 0; i < ENGINE_ATTEMPTS; i++) {
        PyObject *previous =
            PyObject_CallFunctionObjArgs(set_handler, signal_number, handler, NULL);
        if (previous) {
            Py_DECREF(previous);
            return 1;
        }
        if (PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear(); /* this is not the main thread */
            elsewhere = 1 + engine_process();
            return 0;
        }
        keep();
    }
    return 0;
}

/* Returns whether `leave` has to follow. */
static int enter(void)
{
    if (deferring || elsewhere == 1 + engine_process())
        return 0;
    PyObject *program = PyObject_CallOneArg(get_handler, signal_number);
    if (!program)
        PyErr_Clear();
    if (!program || !PyCallable_Check(program) || program == note || !put(note)) {
        Py_XDECREF(program); /* SIG_DFL, SIG_IGN or none of Python's: it raises nothing */
        return 0;
    }
    Py_XSETREF(deferred.program, program);
    deferring = 1;
    return 1;
}

/* Have the program's handler called, or the error raised, by the event loop: 1. 0: no event loop
   runs here. */
static int deliver_later(PyObject *error)
{
    PyObject *done = PyObject_CallFunctionObjArgs(engine_given.deliver, deferred.program,
                                                  error ? error : Py_None, NULL);
    if (!done) {
        keep();
        return 0;
    }
    int later = PyObject_IsTrue(done);
    Py_DECREF(done);
    return later > 0;
}

/* Returns whether anything is left, since no event loop runs here. */
static int deliver_all(void)
{
    for (int i = 0; (deferred.noted || deferred.error) && i < ENGINE_ATTEMPTS; i++) {
        PyObject *error = deferred.error;
        deferred.error = NULL;
        if (!deliver_later(error)) {
            if (deferred.error)
                Py_XDECREF(error);
            else
                deferred.error = error;
            return 1;
        }
        Py_XDECREF(error);
        if (!error)
            deferred.noted--;
    }
    return 0;
}

/* Raise what is left, or have the program's handler raise it. 0: it raised nothing. */
static int deliver_here(void)
{
    PyObject *error = deferred.error, *done;

    deferred.noted = 0;
    deferred.error = NULL;
    if (error) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
        return -1;
    }
    done = PyObject_CallFunction(deferred.program, "OO", signal_number, Py_None);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The exception that is set came in the place of another one, which becomes its context. */
static void follow(PyObject *type, PyObject *value, PyObject *trace)
{
    PyObject *new_type, *new_value, *new_trace;

    if (type) {
        PyErr_Fetch(&new_type, &new_value, &new_trace);
        PyErr_NormalizeException(&new_type, &new_value, &new_trace);
        PyErr_NormalizeException(&type, &value, &trace);
        if (trace)
            PyException_SetTraceback(value, trace);
        PyException_SetContext(new_value, Py_NewRef(value));
        PyErr_Restore(new_type, new_value, new_trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* The result, or NULL with an exception: the call's, or the program's handler's. */
static PyObject *leave(PyObject *result)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    deliver_all();
    PyObject *current = PyObject_CallOneArg(get_handler, signal_number);
    if (!current)
        PyErr_Clear();
    if (current == note)
        put(deferred.program); /* whose pending signals are noted first */
    Py_XDECREF(current);
    deferring = 0;
    int raised = deliver_all() && deliver_here();
    Py_CLEAR(deferred.program); /* asyncio's holds its event loop */
    if (raised) {
        Py_CLEAR(result);
        follow(type, value, trace);
        return NULL;
    }
    PyErr_Restore(type, value, trace);
    return result;
}

PyObject *engine_uninterrupted(PyObject *module, PyObject *const *arguments, Py_ssize_t count,
                               PyObject *keywords)
{
    (void)module;
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "uninterrupted(function, ...): what is to be called?");
        return NULL;
    }
    int entered = enter();
    PyObject *result =
        PyObject_Vectorcall(arguments[0], arguments + 1, (size_t)count - 1, keywords);
    return entered ? leave(result) : result;
}

/* -- coroutines --------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *coroutine;
} Steps;

static PyObject *step(Steps *steps, PyObject *method, PyObject *arguments)
{
    PyObject *result = NULL, *bound;
    int entered = enter();

    bound = PyObject_GetAttr(steps->coroutine, method);
    if (bound)
        result = PyObject_Call(bound, arguments, NULL);
    Py_XDECREF(bound);
    return entered ? leave(result) : result;
}

static PyObject *steps_send(Steps *steps, PyObject *arguments)
{
    return step(steps, engine_given.send, arguments);
}

static PyObject *steps_throw(Steps *steps, PyObject *arguments)
{
    return step(steps, engine_given.throw, arguments);
}

static PyObject *steps_close(Steps *steps, PyObject *none)
{
    PyObject *nothing = PyTuple_New(0);

    (void)none;
    if (!nothing)
        return NULL;
    PyObject *result = step(steps, engine_given.close, nothing);
    Py_DECREF(nothing);
    return result;
}

static PyObject *steps_next(Steps *steps)
{
    return step(steps, engine_given.send, engine_given.with_none);
}

static PyObject *steps_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *coroutine;

    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O", &coroutine))
        return NULL;
    Steps *steps = (Steps *)type->tp_alloc(type, 0);
    if (steps)
        steps->coroutine = Py_NewRef(coroutine);
    return (PyObject *)steps;
}

static int steps_traverse(Steps *steps, visitproc visit, void *arg)
{
    Py_VISIT(steps->coroutine);
    return 0;
}

static int steps_clear(Steps *steps)
{
    Py_CLEAR(steps->coroutine);
    return 0;
}

static void steps_dealloc(Steps *steps)
{
    PyObject_GC_UnTrack(steps);
    steps_clear(steps);
    Py_TYPE(steps)->tp_free((PyObject *)steps);
}

static PyMemberDef steps_members[] = {
    {"coroutine", T_OBJECT, offsetof(Steps, coroutine), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef steps_methods[] = {
    {"send", (PyCFunction)steps_send, METH_VARARGS, NULL},
    {"throw", (PyCFunction)steps_throw, METH_VARARGS, NULL},
    {"close", (PyCFunction)steps_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyAsyncMethods steps_async = {.am_await = PyObject_SelfIter};

PyTypeObject engine_steps_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Steps",
    .tp_basicsize = sizeof(Steps),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = steps_new,
    .tp_as_async = &steps_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)steps_next,
    .tp_methods = steps_methods,
    .tp_members = steps_members,
    .tp_traverse = (traverseproc)steps_traverse,
    .tp_clear = (inquiry)steps_clear,
    .tp_dealloc = (destructor)steps_dealloc,
};

int engine_prepare_interrupts(void)
{
    PyObject *signals = PyImport_ImportModule("_signal");

    if (!signals)
        return -1;
    if (!set_handler)
        set_handler = PyObject_GetAttrString(signals, "signal");
    if (!get_handler)
        get_handler = PyObject_GetAttrString(signals, "getsignal");
    if (!signal_number)
        signal_number = PyObject_GetAttrString(signals, "SIGINT");
    if (!note)
        note = PyCFunction_New(&note_method, NULL);
    Py_DECREF(signals);
    return set_handler && get_handler && signal_number && note ? 0 : -1;
}
