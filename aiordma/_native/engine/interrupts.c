/*
 * Calls and coroutine steps that SIGINT does not interrupt. Python runs signal handlers between
 * bytecode instructions of the main thread, so a KeyboardInterrupt can end a function of aiordma's
 * after any of them. During a deferring call, SIGINT has a handler that only counts. The program's
 * handler is called after the call. This is in C because Python runs no handler between two C
 * calls. A decorator in Python would leave gaps before and after each call.
 */
#include "engine.h"

#include <structmember.h>
#include <time.h>

static PyObject *signal_number, *set_handler, *get_handler, *note; /* note: the counting handler */

/* The main thread's. Other threads never run signal handlers. */
static struct {
    PyObject *program; /* the program's handler, while `note` is installed */
    PyObject *error;   /* raised by a handler while `note` was installed or removed */
    time_t since;      /* the time of the first counted signal */
    int noted; /* signals, at most 2: to asyncio's runner, a second one means more than the first */
} deferred;

static _Thread_local int deferring;
static _Thread_local unsigned int elsewhere; /* 1 + the count of forks if not the main thread */

static time_t now(void)
{
    struct timespec time = {0, 0};

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

/* A signal that comes more than ENGINE_DEFER_SECONDS after the first one means that the call does
   not return (a callback of the program's, for example). Then the program's handler is called. */
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

/* Keep the exception that is set, if any, and clear it. Of several, the first is kept. */
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

/* Install a handler. Python runs the pending handlers first, and their exceptions are kept. Returns
   whether the handler is installed. */
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
        Py_XDECREF(program); /* SIG_DFL, SIG_IGN or not Python's: the handler raises nothing */
        return 0;
    }
    Py_XSETREF(deferred.program, program);
    deferring = 1;
    return 1;
}

/* Let the event loop call the program's handler, or raise the error. 1: it does; 0: no event loop
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

/* Let the event loop handle all deferred signals. Returns whether any are left, because no event
   loop runs here. */
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

/* Raise the kept error, or call the program's handler. -1: an exception is set; 0: none is. */
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

/* Make another exception, if there is one, the context of the exception that is set. */
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

/* End a deferring call. Returns its result, or NULL with an exception of the call or of the
   program's handler. */
static PyObject *leave(PyObject *result)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    deliver_all();
    PyObject *current = PyObject_CallOneArg(get_handler, signal_number);
    if (!current)
        PyErr_Clear();
    if (current == note)
        put(deferred.program); /* Python runs `note` first for the pending signals */
    Py_XDECREF(current);
    deferring = 0;
    int raised = deliver_all() && deliver_here();
    Py_CLEAR(deferred.program); /* asyncio's handler refers to its event loop */
    if (raised) {
        Py_CLEAR(result);
        follow(type, value, trace);
        return NULL;
    }
    PyErr_Restore(type, value, trace);
    return result;
}

int engine_defer_raised(void)
{
    PyObject *type, *value, *trace;

    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_Exception))
        return 0;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *done =
        PyObject_CallFunctionObjArgs(engine_given.deliver, Py_None, value ? value : Py_None, NULL);
    if (done != Py_True) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    } else {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
    int is_deferred = done == Py_True;
    Py_XDECREF(done);
    return is_deferred;
}

PyObject *engine_uninterrupted(PyObject *module, PyObject *const *arguments, Py_ssize_t count,
                               PyObject *keywords)
{
    (void)module;
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "uninterrupted(): the argument `function` is missing");
        return NULL;
    }
    int entered = enter();
    PyObject *result =
        PyObject_Vectorcall(arguments[0], arguments + 1, (size_t)count - 1, keywords);
    return entered ? leave(result) : result;
}

PyObject *engine_call_deferring(PyObject *object, PyObject *name, PyObject *argument)
{
    PyObject *aside = engine_put_aside();
    int entered = enter();
    PyObject *result = argument ? PyObject_CallMethodOneArg(object, name, argument)
                                : PyObject_CallMethodNoArgs(object, name);
    result = entered ? leave(result) : result;
    engine_put_back(aside);
    return result;
}

/* -- methods ------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD PyObject *function;
    PyObject *first; /* a function in C, which takes the same arguments; or NULL */
    vectorcallfunc call;
} DeferringMethod;

/* Raise an interrupt that was put aside, in place of a result. An exception becomes its context. */
static PyObject *interrupt(PyObject *result, PyObject *aside)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(result);
    engine_put_back(aside);
    (void)engine_interrupted();
    follow(type, value, trace);
    return NULL;
}

static PyObject *deferring_call(PyObject *callable, PyObject *const *arguments, size_t flags,
                                PyObject *keywords)
{
    const DeferringMethod *method = (const DeferringMethod *)callable;

    /* `first` may have kept an interrupt, which must not end the function half way. */
    PyObject *aside = NULL;
    if (method->first) {
        PyObject *done = PyObject_Vectorcall(method->first, arguments, flags, keywords);
        int is_done = done == Py_True;
        Py_XDECREF(done);
        if (!done)
            return NULL;
        if (is_done)
            Py_RETURN_NONE;
        aside = engine_put_aside();
    }
    int entered = enter();
    PyObject *result = PyObject_Vectorcall(method->function, arguments, flags, keywords);
    result = entered ? leave(result) : result;
    return aside ? interrupt(result, aside) : result;
}

static PyObject *deferring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *function, *first = Py_None;

    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O|O", &function, &first))
        return NULL;
    DeferringMethod *method = (DeferringMethod *)type->tp_alloc(type, 0);
    if (method) {
        method->function = Py_NewRef(function);
        method->first = first == Py_None ? NULL : Py_NewRef(first);
        method->call = deferring_call;
    }
    return (PyObject *)method;
}

static PyObject *deferring_get(PyObject *method, PyObject *object, PyObject *type)
{
    (void)type;
    return object && object != Py_None ? PyMethod_New(method, object) : Py_NewRef(method);
}

static int deferring_traverse(DeferringMethod *method, visitproc visit, void *arg)
{
    Py_VISIT(method->function);
    Py_VISIT(method->first);
    return 0;
}

static int deferring_clear(DeferringMethod *method)
{
    Py_CLEAR(method->function);
    Py_CLEAR(method->first);
    return 0;
}

static void deferring_dealloc(DeferringMethod *method)
{
    PyObject_GC_UnTrack(method);
    deferring_clear(method);
    Py_TYPE(method)->tp_free((PyObject *)method);
}

enum { MOST_PARTIALS = 8 };

/* The function's name, for what describes a callback, as asyncio's debug mode does. Of a partial, the
   name of its function. (Of an object that makes each attribute up, this would find no end.) */
static PyObject *deferring_name(DeferringMethod *method, void *attribute)
{
    PyObject *function = Py_NewRef(method->function), *name;

    for (int partials = 0; !(name = PyObject_GetAttrString(function, attribute)) &&
                           partials < MOST_PARTIALS && PyErr_ExceptionMatches(PyExc_AttributeError);
         partials++) {
        PyErr_Clear();
        PyObject *inner = PyObject_GetAttrString(function, "func");
        if (!inner)
            break;
        Py_SETREF(function, inner);
    }
    Py_DECREF(function);
    return name;
}

static PyGetSetDef deferring_properties[] = {
    {"__name__", (getter)deferring_name, NULL, NULL, "__name__"},
    {"__qualname__", (getter)deferring_name, NULL, NULL, "__qualname__"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef deferring_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(DeferringMethod, function), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_deferring_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.DeferringMethod",
    .tp_basicsize = sizeof(DeferringMethod),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = deferring_new,
    .tp_vectorcall_offset = offsetof(DeferringMethod, call),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = deferring_get,
    .tp_members = deferring_members,
    .tp_getset = deferring_properties,
    .tp_traverse = (traverseproc)deferring_traverse,
    .tp_clear = (inquiry)deferring_clear,
    .tp_dealloc = (destructor)deferring_dealloc,
};

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

/* What stack dumps read of a coroutine: they follow `cr_await` from a task to what it waits for. */
static PyObject *steps_attribute(Steps *steps, void *attribute)
{
    return PyObject_GetAttrString(steps->coroutine, attribute);
}

static PyGetSetDef steps_properties[] = {
    {"__name__", (getter)steps_attribute, NULL, NULL, "__name__"},
    {"__qualname__", (getter)steps_attribute, NULL, NULL, "__qualname__"},
    {"cr_await", (getter)steps_attribute, NULL, NULL, "cr_await"},
    {"cr_code", (getter)steps_attribute, NULL, NULL, "cr_code"},
    {"cr_frame", (getter)steps_attribute, NULL, NULL, "cr_frame"},
    {"cr_running", (getter)steps_attribute, NULL, NULL, "cr_running"},
    {"cr_suspended", (getter)steps_attribute, NULL, NULL, "cr_suspended"},
    {NULL, NULL, NULL, NULL, NULL},
};

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
    .tp_getset = steps_properties,
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
