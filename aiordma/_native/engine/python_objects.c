/* Python's objects that the engine uses, kept exceptions, the log, and the count of forks. */
#include "python_objects.h"

#include <pthread.h>

struct engine_python engine_python;
const struct aiordma_data_path *engine_path;

unsigned int engine_process;

static void forked(void)
{
    engine_process++;
}

/* The kept exception of this thread. A drain and all that it calls run in one thread. */
static _Thread_local PyObject *kept;

void engine_keep_error(void)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace)
        PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    if (kept)
        Py_XDECREF(value);
    else
        kept = value;
}

int engine_keep_interrupt(void)
{
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_Exception))
        return 0;
    engine_keep_error();
    return 1;
}

int engine_interrupted(void)
{
    PyObject *error = kept;

    if (!error)
        return 0;
    kept = NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return -1;
}

PyObject *engine_none_unless_interrupted(void)
{
    return engine_interrupted() ? NULL : Py_NewRef(Py_None);
}

PyObject *engine_put_aside(void)
{
    PyObject *aside = kept;

    kept = NULL;
    return aside;
}

void engine_put_back(PyObject *aside)
{
    if (!aside)
        return;
    Py_XDECREF(kept); /* a later one */
    kept = aside;
}

PyObject *engine_call_alone(PyObject *function, PyObject *const *arguments, size_t count)
{
    PyObject *aside = engine_put_aside();
    PyObject *result = PyObject_Vectorcall(function, arguments, count, NULL);

    engine_put_back(aside);
    return result;
}

PyObject *engine_call_method_alone(PyObject *name, PyObject *const *arguments, size_t count)
{
    PyObject *aside = engine_put_aside();
    PyObject *result = PyObject_VectorcallMethod(name, arguments, count, NULL);

    engine_put_back(aside);
    return result;
}

void engine_log(const char *text, PyObject *object)
{
    PyObject *type, *value, *trace;

    if (!PyErr_Occurred() || engine_keep_interrupt())
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace)
        PyException_SetTraceback(value, trace);
    PyObject *aside = engine_put_aside();
    PyObject *result = engine_python.log && value
                           ? PyObject_CallFunction(engine_python.log, "sOO", text, object, value)
                           : NULL;
    engine_put_back(aside);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    if (!result && !engine_keep_interrupt())
        PyErr_WriteUnraisable(object);
    Py_XDECREF(result);
}

int engine_intern(PyObject **place, const char *text)
{
    if (!*place)
        *place = PyUnicode_InternFromString(text);
    return *place ? 0 : -1;
}

int engine_prepare(void)
{
    static int prepared;
    const struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&engine_python.address, "address"},
        {&engine_python.length, "length"},
        {&engine_python.rkey, "rkey"},
        {&engine_python.call_soon, "call_soon"},
        {&engine_python.request_ended, "request_ended"},
        {&engine_python.request_failed, "request_failed"},
        {&engine_python.run_ended, "run_ended"},
        {&engine_python.hold, "_hold"},
        {&engine_python.release, "_release"},
        {&engine_python.waiter, "waiter"},
        {&engine_python.loop, "loop"},
        {&engine_python.wake, "wake"},
        {&engine_python.close, "close"},
        {&engine_python.destroy, "_destroy_if_unused"},
        {&engine_python.watch_over, "watch_over"},
        {&engine_python.drain_soon, "drain_soon"},
        {&engine_python.drain_failed, "drain_failed"},
        {&engine_python.post_refused, "post_refused"},
        {&engine_python.doorbell_failed, "doorbell_failed"},
        {&engine_python.grant, "grant"},
        {&engine_python.require_own_loop, "require_own_loop"},
        {&engine_python.is_closed, "is_closed"},
        {&engine_python.request_unretrieved, "request_unretrieved"},
        {&engine_python.throw, "throw"},
        {&engine_python.await_name, "__await__"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (engine_intern(names[i].place, names[i].text))
            return -1;
    if (!engine_python.with_context)
        engine_python.with_context = Py_BuildValue("(s)", "context");
    if (!engine_python.with_context)
        return -1;
    if (!prepared && pthread_atfork(NULL, NULL, forked)) {
        PyErr_SetString(PyExc_OSError, "pthread_atfork failed");
        return -1;
    }
    prepared = 1;
    return 0;
}
