/*
 * The requests of one queue pair that have not ended, as a linked list through the requests. A set
 * would be slower: its hashing took a quarter of the time of a request.
 */
#include "engine.h"

/* -- the list ------------------------------------------------------------------------------ */

void engine_enter(OpenRequests *open, Request *request)
{
    if (request->open)
        return;
    request->open = open; /* borrowed: the list removes its requests before it is freed */
    request->later = NULL;
    request->earlier = open->last;
    if (open->last)
        open->last->later = request;
    else
        open->first = request;
    open->last = request;
    open->count++;
    Py_INCREF(request);
}

void engine_leave(OpenRequests *open, Request *request)
{
    if (!open || request->open != open)
        return;
    if (request->earlier)
        request->earlier->later = request->later;
    else
        open->first = request->later;
    if (request->later)
        request->later->earlier = request->earlier;
    else
        open->last = request->earlier;
    request->earlier = request->later = NULL;
    request->open = NULL;
    open->count--;
    Py_DECREF(request);
}

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

/* Send opcodes begin at 0, those of receives at IBV_WC_RECV. */
enum { OF_RECEIVES = 16 };

static unsigned int place_of(unsigned int opcode)
{
    return opcode & IBV_WC_RECV ? OF_RECEIVES + opcode % (ENGINE_OPCODES - OF_RECEIVES)
                                : opcode % OF_RECEIVES;
}

static unsigned int opcode_at(unsigned int place)
{
    return place < OF_RECEIVES ? place : IBV_WC_RECV + place - OF_RECEIVES;
}

void engine_count(const Request *request, const struct aiordma_completion *completion)
{
    if (!request->open || !request->wr_id)
        return; /* it was not posted */
    /* A receive of our own that the end of its queue flushes is neither traced nor a failure. */
    int is_unused = request->is_receive && (request->pooled || request->stream) &&
                    (!completion || completion->status == IBV_WC_WR_FLUSH_ERR);
    if (engine_tracing && !is_unused)
        engine_record(request, completion);
    struct engine_ended *ended = &request->open->ended;
    if (request->is_receive)
        ended->receives++;
    else
        ended->sends++;
    if (!completion || is_unused) {
        ended->discarded++;
        return;
    }
    if (completion->status) {
        uint32_t status = completion->status;
        ended->failed[status < ENGINE_STATUSES ? status : IBV_WC_GENERAL_ERR]++;
        return;
    }
    ended->completed[place_of(completion->opcode)]++;
    if (request->is_receive)
        ended->bytes_received += completion->byte_len;
    else if (completion->opcode == IBV_WC_RDMA_READ)
        ended->bytes_received += (unsigned long long)request->length;
    else if (completion->opcode == IBV_WC_SEND || completion->opcode == IBV_WC_RDMA_WRITE)
        ended->bytes_sent += (unsigned long long)request->length;
}

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
        wrong = add_counter(completed, opcode_at(i), ended.completed[i]);
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
