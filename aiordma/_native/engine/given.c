/* What all rooms use of Python's, the log, and the count of forks. */
#include "engine.h"

#include <pthread.h>

struct engine_given engine_given;

static unsigned int forks;

static void forked(void)
{
    forks++;
}

unsigned int engine_process(void)
{
    return forks;
}

void engine_log(const char *text, PyObject *object)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace)
        PyException_SetTraceback(value, trace);
    PyObject *result = engine_given.log && value
                           ? PyObject_CallFunction(engine_given.log, "sOO", text, object, value)
                           : NULL;
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    if (!result)
        PyErr_WriteUnraisable(object);
    Py_XDECREF(result);
}

int engine_prepare(void)
{
    static int prepared;
    const struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&engine_given.address, "address"},
        {&engine_given.length, "length"},
        {&engine_given.rkey, "rkey"},
        {&engine_given.call_soon, "call_soon"},
        {&engine_given.request_ended, "request_ended"},
        {&engine_given.request_failed, "request_failed"},
        {&engine_given.run_ended, "run_ended"},
        {&engine_given.hold, "hold"},
        {&engine_given.release, "release"},
        {&engine_given.complete, "complete"},
        {&engine_given.waiter, "waiter"},
        {&engine_given.loop, "loop"},
        {&engine_given.wake, "wake"},
        {&engine_given.close, "close"},
        {&engine_given.watch_over, "watch_over"},
        {&engine_given.drain_soon, "drain_soon"},
        {&engine_given.drain_failed, "drain_failed"},
        {&engine_given.post_refused, "post_refused"},
        {&engine_given.doorbell_failed, "doorbell_failed"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (!*names[i].place &&
            !(*names[i].place = PyUnicode_InternFromString(names[i].text)))
            return -1;
    if (!engine_given.with_context)
        engine_given.with_context = Py_BuildValue("(s)", "context");
    if (!engine_given.with_context)
        return -1;
    if (!prepared && pthread_atfork(NULL, NULL, forked)) {
        PyErr_SetString(PyExc_OSError, "pthread_atfork failed");
        return -1;
    }
    prepared = 1;
    return 0;
}
