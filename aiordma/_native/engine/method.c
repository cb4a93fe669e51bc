/*
 * Methods such as post_write(local, remote, immediate=1), whose calls run no Python code, but post
 * through a queue pair's port. A call for which the port returns None is passed to the Python
 * function that the method was made of. That function takes the general path, has the documentation,
 * and raises the errors.
 */
#include "engine.h"

#include <structmember.h>

/* -- arguments ----------------------------------------------------------------------------- */

enum { MOST_ARGUMENTS = 6 };

struct parameter {
    const char *name;
    enum engine_argument argument;
};

/* The first `positional` parameters are required. The others are keywords. */
static const struct {
    const char *name;
    Py_ssize_t positional;
    struct parameter parameters[MOST_ARGUMENTS];
} kinds[ENGINE_KINDS] = {
    [ENGINE_SEND] = {"send",
                     1,
                     {{"data", ENGINE_LOCAL},
                      {"immediate", ENGINE_IMMEDIATE},
                      {"invalidate", ENGINE_INVALIDATE},
                      {"fence", ENGINE_FENCE},
                      {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_SENDV] = {"sendv",
                      1,
                      {{"parts", ENGINE_LOCAL},
                       {"immediate", ENGINE_IMMEDIATE},
                       {"invalidate", ENGINE_INVALIDATE},
                       {"fence", ENGINE_FENCE},
                       {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_RECEIVE] = {"receive", 1, {{"buffer", ENGINE_LOCAL}}},
    [ENGINE_RECEIVEV] = {"receivev", 1, {{"parts", ENGINE_LOCAL}}},
    [ENGINE_WRITE] = {"write",
                      2,
                      {{"local", ENGINE_LOCAL},
                       {"remote", ENGINE_REMOTE},
                       {"immediate", ENGINE_IMMEDIATE},
                       {"fence", ENGINE_FENCE},
                       {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_WRITEV] = {"writev",
                       2,
                       {{"parts", ENGINE_LOCAL},
                        {"remote", ENGINE_REMOTE},
                        {"immediate", ENGINE_IMMEDIATE},
                        {"fence", ENGINE_FENCE},
                        {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_READ] = {"read",
                     2,
                     {{"remote", ENGINE_REMOTE}, {"local", ENGINE_LOCAL}, {"fence", ENGINE_FENCE}}},
    [ENGINE_READV] =
        {"readv", 2, {{"remote", ENGINE_REMOTE}, {"parts", ENGINE_LOCAL}, {"fence", ENGINE_FENCE}}},
    [ENGINE_COMPARE_SWAP] = {"compare_swap",
                             4,
                             {{"local", ENGINE_LOCAL},
                              {"remote", ENGINE_REMOTE},
                              {"compare", ENGINE_COMPARE},
                              {"swap", ENGINE_SWAP},
                              {"fence", ENGINE_FENCE}}},
    [ENGINE_FETCH_ADD] = {"fetch_add",
                          3,
                          {{"local", ENGINE_LOCAL},
                           {"remote", ENGINE_REMOTE},
                           {"add", ENGINE_COMPARE},
                           {"fence", ENGINE_FENCE}}},
    [ENGINE_COMPARE_SWAP_VALUE] = {"compare_swap_value",
                                   3,
                                   {{"remote", ENGINE_REMOTE},
                                    {"compare", ENGINE_COMPARE},
                                    {"swap", ENGINE_SWAP}}},
    [ENGINE_FETCH_ADD_VALUE] = {"fetch_add_value",
                                2,
                                {{"remote", ENGINE_REMOTE}, {"add", ENGINE_COMPARE}}},
    [ENGINE_BIND] = {"bind",
                     3,
                     {{"window", ENGINE_WINDOW},
                      {"memory", ENGINE_LOCAL},
                      {"access", ENGINE_ACCESS},
                      {"fence", ENGINE_FENCE}}},
    [ENGINE_LOCAL_INVALIDATE] = {"local_invalidate",
                                 1,
                                 {{"window", ENGINE_WINDOW}, {"fence", ENGINE_FENCE}}},
    [ENGINE_UD_SEND] = {"ud_send",
                        2,
                        {{"data", ENGINE_LOCAL},
                         {"peer", ENGINE_REMOTE},
                         {"immediate", ENGINE_IMMEDIATE},
                         {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_UD_SENDV] = {"ud_sendv",
                         2,
                         {{"parts", ENGINE_LOCAL},
                          {"peer", ENGINE_REMOTE},
                          {"immediate", ENGINE_IMMEDIATE},
                          {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_UD_RECEIVE] = {"ud_receive", 1, {{"buffer", ENGINE_LOCAL}}},
    [ENGINE_UD_RECEIVEV] = {"ud_receivev", 1, {{"parts", ENGINE_LOCAL}}},
};

static PyObject *parameter_names[ENGINE_KINDS][MOST_ARGUMENTS]; /* interned */

int engine_method_names(void)
{
    for (int i = 0; i < ENGINE_KINDS; i++)
        for (int j = 0; j < MOST_ARGUMENTS && kinds[i].parameters[j].name; j++)
            if (!parameter_names[i][j] &&
                !(parameter_names[i][j] = PyUnicode_InternFromString(kinds[i].parameters[j].name)))
                return -1;
    return 0;
}

/* The names in a program's calls are interned; only those of `**keywords` may not be. -1: unknown. */
static int find_parameter(enum engine_kind kind, PyObject *name)
{
    PyObject *const *names = parameter_names[kind];

    for (int i = 0; i < MOST_ARGUMENTS && names[i]; i++)
        if (names[i] == name)
            return i;
    for (int i = 0; i < MOST_ARGUMENTS && names[i]; i++)
        if (PyUnicode_Compare(names[i], name) == 0)
            return i;
    return -1;
}

static int read_keyword(enum engine_kind kind, PyObject *name, PyObject *value, PyObject **given)
{
    int found = find_parameter(kind, name);
    if (found < 0)
        return 0;
    enum engine_argument argument = kinds[kind].parameters[found].argument;
    int is_new = !given[argument];
    given[argument] = value;
    return is_new;
}

int engine_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                     PyObject *keywords, PyObject **given)
{
    Py_ssize_t positional = kinds[kind].positional;
    Py_ssize_t keyword_count = keywords ? PyTuple_GET_SIZE(keywords) : 0;

    if (count > positional)
        return 0;
    for (int i = 0; i < ENGINE_ARGUMENTS; i++)
        given[i] = NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        given[kinds[kind].parameters[i].argument] = arguments[i];
    for (Py_ssize_t i = 0; i < keyword_count; i++)
        if (!read_keyword(kind, PyTuple_GET_ITEM(keywords, i), arguments[count + i], given))
            return 0;
    for (Py_ssize_t i = count; i < positional; i++)
        if (!given[kinds[kind].parameters[i].argument])
            return 0;
    return 1;
}

int engine_port_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                          PyObject *keywords, PyObject **given)
{
    if (engine_arguments(kind, arguments, count, keywords, given))
        return 1;
    PyErr_Format(PyExc_TypeError, "%s(): the arguments do not fit the signature", kinds[kind].name);
    return 0;
}

/* -- the method ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *general; /* the function */
    enum engine_kind kind;
    vectorcallfunc call;
} Method;

static PyObject *the_port; /* the attribute's name */

/* The program posts no receives of its own through a port that has pooled receives. */
static int is_for_user(const Method *method, const Port *port)
{
    return !port->has_pooled_receives ||
           (method->kind != ENGINE_RECEIVE && method->kind != ENGINE_RECEIVEV &&
            method->kind != ENGINE_UD_RECEIVE && method->kind != ENGINE_UD_RECEIVEV);
}

static PyObject *method_call(PyObject *callable, PyObject *const *arguments, size_t flags,
                             PyObject *keywords)
{
    Method *method = (Method *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *given[ENGINE_ARGUMENTS];

    if (count && engine_arguments(method->kind, arguments + 1, count - 1, keywords, given)) {
        PyObject *port = PyObject_GetAttr(arguments[0], the_port), *request = Py_None;
        if (!port)
            return NULL;
        if (Py_IS_TYPE(port, &engine_port_type) && is_for_user(method, (Port *)port))
            request = engine_post((Port *)port, method->kind, given);
        else if (Py_IS_TYPE(port, &engine_chain_type))
            request = engine_collect((ChainPort *)port, method->kind, given);
        else
            Py_INCREF(request);
        Py_DECREF(port);
        if (request != Py_None)
            return request;
        Py_DECREF(request);
    }
    return PyObject_Vectorcall(method->general, arguments, flags, keywords);
}

static PyObject *get(PyObject *method, PyObject *instance, PyObject *type)
{
    (void)type;
    return instance ? PyMethod_New(method, instance) : Py_NewRef(method);
}

/* All other attributes are the function's (__name__, __annotations__). */
static PyObject *get_attribute(Method *method, PyObject *name)
{
    PyObject *value = PyObject_GenericGetAttr((PyObject *)method, name);
    if (value || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return value;
    PyErr_Clear();
    return PyObject_GetAttr(method->general, name);
}

static PyObject *get_general(Method *method, void *name)
{
    return name ? PyObject_GetAttrString(method->general, name) : Py_NewRef(method->general);
}

static PyGetSetDef properties[] = {
    {"__wrapped__", (getter)get_general, NULL, NULL, NULL},
    {"__doc__", (getter)get_general, NULL, NULL, "__doc__"},
    {"__module__", (getter)get_general, NULL, NULL, "__module__"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *represent(Method *method)
{
    return PyObject_Repr(method->general);
}

static int method_traverse(Method *method, visitproc visit, void *arg)
{
    Py_VISIT(method->general);
    return 0;
}

static void method_dealloc(Method *method)
{
    PyObject_GC_UnTrack(method);
    Py_XDECREF(method->general);
    Py_TYPE(method)->tp_free((PyObject *)method);
}

PyObject *engine_method(PyObject *module, PyObject *args)
{
    const char *name;
    PyObject *general;

    (void)module;
    if (!PyArg_ParseTuple(args, "sO", &name, &general))
        return NULL;
    if (!the_port && !(the_port = PyUnicode_InternFromString("_port")))
        return NULL;
    for (int kind = 0; kind < ENGINE_KINDS; kind++) {
        if (strcmp(name, kinds[kind].name))
            continue;
        Method *method = (Method *)engine_method_type.tp_alloc(&engine_method_type, 0);
        if (!method)
            return NULL;
        method->general = Py_NewRef(general);
        method->kind = kind;
        method->call = method_call;
        return (PyObject *)method;
    }
    return PyErr_Format(PyExc_ValueError, "method(): %s: ports have no method of this name", name);
}

PyTypeObject engine_method_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Method",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Method, call),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = get,
    .tp_getattro = (getattrofunc)get_attribute,
    .tp_getset = properties,
    .tp_repr = (reprfunc)represent,
    .tp_dealloc = (destructor)method_dealloc,
    .tp_traverse = (traverseproc)method_traverse,
};
