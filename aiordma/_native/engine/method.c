/*
 * Methods such as post_write(local, remote, immediate=1), whose calls run no Python code, but post
 * through a queue pair's port. A call for which the port returns None is passed to the Python
 * function that the method was made of. That function takes the general path, has the documentation,
 * and raises the errors.
 */
#include "method.h"
#include "chain.h"
#include "post.h"
#include "signatures.h"

typedef struct {
    PyObject_HEAD PyObject *general; /* the function */
    enum engine_kind kind;
    vectorcallfunc call;
} Method;

static PyObject *the_port; /* the attribute's name */

/* The program posts no receives of its own through a port that has pooled receives. */
static int is_for_user(const Method *method, const Port *port)
{
    return !port->has_pooled_receives || method->kind < ENGINE_RECEIVE;
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
    if (engine_intern(&the_port, "_port"))
        return NULL;
    int kind = engine_kind_of(name);
    if (kind == ENGINE_KINDS)
        return PyErr_Format(PyExc_ValueError, "method(): %s: ports have no method of this name",
                            name);
    Method *method = (Method *)engine_method_type.tp_alloc(&engine_method_type, 0);
    if (!method)
        return NULL;
    method->general = Py_NewRef(general);
    method->kind = kind;
    method->call = method_call;
    return (PyObject *)method;
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
