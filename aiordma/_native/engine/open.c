/*
 * The requests of one queue pair that have not ended, as a linked list through the requests. A set
 * would be slower: its hashing took a quarter of the time of a request. The type has the interface
 * of OpenRequests in _requests/python.py.
 */
#include "engine.h"

static int open_traverse(OpenRequests *open, visitproc visit, void *arg)
{
    for (Request *request = open->first; request; request = request->later)
        Py_VISIT(request);
    return 0;
}

static int open_clear(OpenRequests *open)
{
    while (open->first)
        engine_leave(open, open->first);
    return 0;
}

static void open_dealloc(OpenRequests *open)
{
    PyObject_GC_UnTrack(open);
    open_clear(open);
    Py_TYPE(open)->tp_free((PyObject *)open);
}

static int is_request(PyObject *object)
{
    if (Py_IS_TYPE(object, &engine_request_type))
        return 1;
    PyErr_SetString(PyExc_TypeError, "only work requests are open");
    return 0;
}

static PyObject *open_add(OpenRequests *open, PyObject *request)
{
    if (!is_request(request))
        return NULL;
    if (((Request *)request)->open && ((Request *)request)->open != open) {
        PyErr_SetString(PyExc_ValueError, "a request is of one queue pair");
        return NULL;
    }
    engine_enter(open, (Request *)request);
    Py_RETURN_NONE;
}

static PyObject *open_discard(OpenRequests *open, PyObject *request)
{
    if (!is_request(request))
        return NULL;
    engine_leave(open, (Request *)request);
    Py_RETURN_NONE;
}

/* Iterate over a copy, because the caller's work on one request may end others. */
static PyObject *open_iterate(OpenRequests *open)
{
    PyObject *all = PyList_New(0), *iterator = NULL;
    int failed = !all;
    for (Request *request = open->first; request && !failed; request = request->later)
        failed = PyList_Append(all, (PyObject *)request);
    if (!failed)
        iterator = PyObject_GetIter(all);
    Py_XDECREF(all);
    return iterator;
}

static Py_ssize_t open_count(OpenRequests *open)
{
    return open->count;
}

static int open_has(OpenRequests *open, PyObject *object)
{
    return Py_IS_TYPE(object, &engine_request_type) && ((Request *)object)->open == open;
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)open_add, METH_O,
     "add($self, request, /)\n--\n\n"
     "Add a request."},
    {"discard", (PyCFunction)open_discard, METH_O,
     "discard($self, request, /)\n--\n\n"
     "Remove a request, if it is in the list."},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods sequence = {
    .sq_length = (lenfunc)open_count,
    .sq_contains = (objobjproc)open_has,
};

PyTypeObject engine_open_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.OpenRequests",
    .tp_basicsize = sizeof(OpenRequests),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)open_dealloc,
    .tp_traverse = (traverseproc)open_traverse,
    .tp_clear = (inquiry)open_clear,
    .tp_iter = (getiterfunc)open_iterate,
    .tp_methods = methods,
    .tp_as_sequence = &sequence,
};
