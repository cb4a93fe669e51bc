/* The type of OpenRequests (request.c): the counters, and the interface for Python. */
#include "open_requests.h"
#include "request_type.h"

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

/* -- counting ------------------------------------------------------------------------------ */

/* Add a counter that is not 0 to a dict; -1 with an exception. */
static int add_counter(PyObject *counters, unsigned int key, unsigned long long value)
{
    if (!value)
        return 0;
    PyObject *number = PyLong_FromUnsignedLong(key);
    PyObject *count = number ? PyLong_FromUnsignedLongLong(value) : NULL;
    int failed = count ? PyDict_SetItem(counters, number, count) : -1;
    Py_XDECREF(number);
    Py_XDECREF(count);
    return failed;
}

static PyObject *open_counters(OpenRequests *open, PyObject *none)
{
    (void)none;
    PyObject *completed = PyDict_New(), *failed = PyDict_New();
    /* A copy: making further objects can run the collector, and so code that ends requests. */
    const struct engine_ended ended = open->ended;
    unsigned long long sends = ended.sends, receives = ended.receives, in_flight = 0;

    for (const Request *request = open->first; request; request = request->later) {
        if (!request->wr_id)
            continue; /* of a chain that is not posted yet */
        in_flight++;
        if (request->is_receive)
            receives++;
        else
            sends++;
    }
    int wrong = !completed || !failed;
    for (unsigned int i = 0; !wrong && i < ENGINE_OPCODES; i++)
        wrong = add_counter(completed, engine_opcode_at(i), ended.completed[i]);
    for (unsigned int i = 0; !wrong && i < ENGINE_STATUSES; i++)
        wrong = add_counter(failed, i, ended.failed[i]);
    PyObject *all = wrong
                        ? NULL
                        : Py_BuildValue("(KKKKKKOO)", sends, receives, in_flight, ended.discarded,
                                        ended.bytes_sent, ended.bytes_received, completed, failed);
    Py_XDECREF(completed);
    Py_XDECREF(failed);
    return all;
}

/* -- the interface for Python ---------------------------------------------------------------- */

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

/* Whether the request takes a receive of the peer's. */
static int is_message(const Request *request)
{
    switch (request->is_receive ? IBV_WR_RDMA_READ : (enum ibv_wr_opcode)request->opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return 1;
    default:
        return 0;
    }
}

static PyObject *open_oldest_message(OpenRequests *open, void *closure)
{
    const Request *request = open->first;

    (void)closure;
    while (request && !(request->wr_id && is_message(request)))
        request = request->later;
    return PyLong_FromUnsignedLongLong(request ? request->wr_id : 0);
}

static PyGetSetDef properties[] = {
    {"oldest_message", (getter)open_oldest_message, NULL,
     "The wr_id of the oldest request in flight that takes a receive of the peer's; 0: none.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"add", (PyCFunction)open_add, METH_O,
     "add($self, request, /)\n--\n\n"
     "Add a request."},
    {"discard", (PyCFunction)open_discard, METH_O,
     "discard($self, request, /)\n--\n\n"
     "Remove a request, if it is in the list."},
    {"counters", (PyCFunction)open_counters, METH_NOARGS,
     "counters($self, /)\n--\n\n"
     "Return the counters of the posted requests: the sends and the receives, how many are in\n"
     "flight, how many ended without a completion, the bytes sent and received, the completed\n"
     "requests by opcode, the failed ones by status."},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods sequence = {
    .sq_length = (lenfunc)open_count,
    .sq_contains = (objobjproc)open_has,
};

PyTypeObject engine_open_requests_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.OpenRequests",
    .tp_basicsize = sizeof(OpenRequests),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)open_dealloc,
    .tp_traverse = (traverseproc)open_traverse,
    .tp_clear = (inquiry)open_clear,
    .tp_iter = (getiterfunc)open_iterate,
    .tp_methods = methods,
    .tp_getset = properties,
    .tp_as_sequence = &sequence,
};
