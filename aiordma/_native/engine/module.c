/* The module: its types, and what Python gives it once. */
#include "engine.h"

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

static PyMethodDef functions[] = {
    {"method", engine_method, METH_VARARGS,
     "method(name, function): the function as a method whose plain calls go to the port's\n"
     "send, receive, write or read without it."},
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
        {"Spinner", &engine_spinner_type},     {"OpenRequests", &engine_open_type},
        {"Method", &engine_method_type},       {"ChainPort", &engine_chain_type},
        {"SharedPort", &engine_shared_type},   {"CompletionFields", &engine_completion_type},
    };
    if (engine_prepare() || engine_port_names())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module && i < sizeof(types) / sizeof(types[0]); i++)
        if (PyType_Ready(types[i].type) ||
            PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type))
            Py_CLEAR(module);
    if (module && engine_completion_names())
        Py_CLEAR(module);
    return module;
}
