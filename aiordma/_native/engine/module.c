/* The module: its types, and what Python gives it once. */
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

static int use(PyObject **place, PyObject *object)
{
    Py_XSETREF(*place, Py_NewRef(object));
    return 0;
}

static PyObject *give(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"completion", "remote", "wait_elsewhere", "log", NULL};
    PyObject *completion = NULL, *remote = NULL, *wait = NULL, *log = NULL;

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO", names, &completion, &remote, &wait,
                                     &log))
        return NULL;
    if (completion)
        use(&engine_given.completion_class, completion);
    if (remote)
        use(&engine_given.remote_class, remote);
    if (wait)
        use(&engine_given.wait_elsewhere, wait);
    if (log)
        use(&engine_given.log, log);
    Py_RETURN_NONE;
}

static int intern(void)
{
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
    return engine_given.with_context ? engine_port_names() : -1;
}

static PyMethodDef functions[] = {
    {"give", (PyCFunction)(void (*)(void))give, METH_VARARGS | METH_KEYWORDS,
     "give(completion=, remote=, wait_elsewhere=, log=): Python's part."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aiordma._native._engine",
    .m_doc = "The hot path in C.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__engine(void)
{
    const struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {
        {"InFlightTable", &engine_table_type}, {"RegionBase", &engine_region_type},
        {"Part", &engine_part_type},           {"Slots", &engine_slots_type},
        {"Drain", &engine_drain_type},         {"Port", &engine_port_type},
        {"WorkRequest", &engine_request_type}, {"Waiter", &engine_waiter_type},
        {"Spinner", &engine_spinner_type},
    };
    if (intern())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module && i < sizeof(types) / sizeof(types[0]); i++)
        if (PyType_Ready(types[i].type) ||
            PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type))
            Py_CLEAR(module);
    if (module && pthread_atfork(NULL, NULL, forked)) {
        PyErr_SetString(PyExc_OSError, "pthread_atfork failed");
        Py_CLEAR(module);
    }
    return module;
}
