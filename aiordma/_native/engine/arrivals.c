/* The queue of what arrived in pooled receives, for the task that receives. */
#include "arrivals.h"

#include <errno.h>
#include <structmember.h>

static PyObject *running_loop;

int engine_arrival_names(void)
{
    if (!running_loop) {
        PyObject *events = PyImport_ImportModule("asyncio.events");
        running_loop = events ? PyObject_GetAttrString(events, "_get_running_loop") : NULL;
        Py_XDECREF(events);
    }
    return running_loop ? 0 : -1;
}

/* Takes the reference, unless there is no memory (-1, without an exception). */
static int push(ArrivalQueue *queue, Lease *lease, const struct aiordma_completion *completion)
{
    if (queue->count == queue->room) {
        Py_ssize_t room = queue->room ? 2 * queue->room : 4;
        struct engine_arrival *more = PyMem_Malloc((size_t)room * sizeof(*more));
        if (!more)
            return -1;
        for (Py_ssize_t i = 0; i < queue->count; i++)
            more[i] = *engine_arrival_at(queue, i);
        PyMem_Free(queue->arrived);
        queue->arrived = more;
        queue->room = room;
        queue->first = 0;
    }
    queue->count++;
    *engine_arrival_at(queue, queue->count - 1) = (struct engine_arrival){lease, *completion};
    return 0;
}

/* Remove the first arrival, and return its block: a reference. */
Lease *engine_pop_arrival(ArrivalQueue *queue)
{
    Lease *lease = engine_arrival_at(queue, 0)->lease;
    queue->first = (queue->first + 1) & (queue->room - 1);
    queue->count--;
    return lease;
}

static void wake(ArrivalQueue *queue)
{
    PyObject *waiter = queue->waiter;
    int failed;

    if (!waiter)
        return;
    Py_INCREF(waiter);
    if (Py_IS_TYPE(waiter, &engine_waiter_type)) {
        failed = engine_wake((Waiter *)waiter);
    } else {
        PyObject *result = engine_call_method_alone(engine_given.wake, &waiter, 1);
        failed = result ? 0 : -1;
        Py_XDECREF(result);
    }
    Py_DECREF(waiter);
    if (failed)
        engine_log("waking the task that receives from %r failed", queue->port->owner);
}

/* Return the queue of an arrival; borrowed. NULL: its connection is closed. */
static ArrivalQueue *queue_of(const PooledReceives *receives, uint32_t qp_num)
{
    if (!receives->members)
        return receives->queue;
    PyObject *number = PyLong_FromUnsignedLong(qp_num);
    PyObject *queue = number ? PyDict_GetItemWithError(receives->members, number) : NULL;
    Py_XDECREF(number);
    if (!queue)
        PyErr_Clear();
    return queue && Py_IS_TYPE(queue, &engine_arrivals_type) ? (ArrivalQueue *)queue : NULL;
}

int engine_arrival_is_quiet(const Request *request, uint32_t qp_num)
{
    const PooledReceives *receives = request->pooled;

    /* Without a queue, the block would be posted again. The last posted block posts the others. */
    return !receives || (queue_of(receives, qp_num) && (receives->posted > 1 || !receives->count));
}

void engine_arrived(Request *request)
{
    PooledReceives *receives = request->pooled;
    Lease *lease = engine_keeps(request) ? NULL : (Lease *)request->memory;
    int has_succeeded = request->state == SUCCEEDED;

    request->pooled = NULL;
    if (lease)
        request->memory = NULL;
    receives->posted--;
    ArrivalQueue *queue =
        has_succeeded || !receives->members ? queue_of(receives, request->completion.qp_num) : NULL;
    Py_XINCREF(queue);
    if (has_succeeded && queue && push(queue, lease, &request->completion)) {
        engine_return_block(lease);
        engine_notify_refused(receives,
                              ENOMEM); /* the message is lost, so the endpoint has to end */
    } else if (lease && (!has_succeeded || !queue)) {
        if (receives->members)
            engine_give_back(receives, lease);
        else
            engine_return_block(lease);
    }
    if (queue)
        wake(queue);
    Py_XDECREF(queue);
    if (has_succeeded && !receives->posted)
        engine_post_unposted(receives); /* no block might be given back soon to complete a chain */
    Py_DECREF(receives);
}

/* Whether an arrival is there, and may be handed out without a pause. */
int engine_may_take(const ArrivalQueue *queue)
{
    return queue->count && queue->port->loop && !queue->busy && queue->at_once + 1 < queue->pause &&
           engine_is_here(queue->port) &&
           engine_leased_is_usable(engine_arrival_at(queue, 0)->lease);
}

/* The number of bytes of the first arrival in its block. */
Py_ssize_t engine_contents_length(const ArrivalQueue *queue)
{
    const struct engine_arrival *arrival = engine_arrival_at(queue, 0);
    struct ibv_sge sge;

    if (arrival->completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM)
        return 0; /* the bytes of a WRITE are in the memory that it wrote to */
    engine_leased_block(arrival->lease, &sge);
    return arrival->completion.byte_len < sge.length ? arrival->completion.byte_len : sge.length;
}

/* Return a copy of the first arrival, which stays there. */
static PyObject *copy_data(const ArrivalQueue *queue)
{
    struct ibv_sge sge;

    if (!queue->count || !engine_leased_is_usable(engine_arrival_at(queue, 0)->lease)) {
        PyErr_SetString(PyExc_RuntimeError, "there is no arrival: wait until there is one");
        return NULL;
    }
    const char *block = engine_leased_block(engine_arrival_at(queue, 0)->lease, &sge);
    return PyBytes_FromStringAndSize(block, engine_contents_length(queue));
}

static PyObject *take_data(ArrivalQueue *queue)
{
    PyObject *data = copy_data(queue);
    if (data)
        engine_give_back(queue->receives, engine_pop_arrival(queue));
    return data;
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner", "receives", "port", "pause", "most_views", NULL};
    PyObject *owner, *receives, *port;
    Py_ssize_t pause, most_views;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!nn", names, &owner, &engine_pooled_type,
                                     &receives, &engine_port_type, &port, &pause, &most_views))
        return NULL;
    ArrivalQueue *queue = (ArrivalQueue *)type->tp_alloc(type, 0);
    if (!queue)
        return NULL;
    queue->owner = Py_NewRef(owner);
    queue->receives = (PooledReceives *)Py_NewRef(receives);
    queue->port = (Port *)Py_NewRef(port);
    queue->pause = pause;
    queue->most_views = most_views;
    return (PyObject *)queue;
}

static int queue_traverse(ArrivalQueue *queue, visitproc visit, void *arg)
{
    Py_VISIT(queue->owner);
    Py_VISIT(queue->receives);
    Py_VISIT(queue->port);
    Py_VISIT(queue->waiter);
    for (Py_ssize_t i = 0; i < queue->count; i++)
        Py_VISIT(engine_arrival_at(queue, i)->lease);
    return 0;
}

static int queue_clear(ArrivalQueue *queue)
{
    Py_CLEAR(queue->waiter);
    while (queue->count)
        Py_DECREF(engine_pop_arrival(queue));
    return 0;
}

static void queue_dealloc(ArrivalQueue *queue)
{
    PyObject_GC_UnTrack(queue);
    queue_clear(queue);
    PyMem_Free(queue->arrived);
    Py_XDECREF(queue->owner);
    Py_XDECREF(queue->receives);
    Py_XDECREF(queue->port);
    Py_TYPE(queue)->tp_free((PyObject *)queue);
}

static PyObject *queue_take_data_at_once(ArrivalQueue *queue, PyObject *none)
{
    (void)none;
    if (!engine_may_take(queue))
        Py_RETURN_NONE;
    queue->at_once++;
    return take_data(queue);
}

static PyObject *queue_take_data(ArrivalQueue *queue, PyObject *none)
{
    (void)none;
    return take_data(queue);
}

/* Remove the first arrival, of which the message was made, and return the message. Without memory
   for a message, the arrival stays. Takes the reference. */
static PyObject *pop_taken(ArrivalQueue *queue, const Lease *lease, PyObject *message)
{
    /* Making it can run the collector, and so code that takes or drops the arrival. */
    if (!queue->count || engine_arrival_at(queue, 0)->lease != lease) {
        Py_DECREF(message);
        PyErr_SetString(PyExc_RuntimeError, "the arrival was dropped while it was taken");
        return NULL;
    }
    engine_give_back(queue->receives, engine_pop_arrival(queue));
    return message;
}

static PyObject *take_datagram(ArrivalQueue *queue, PyObject *senders)
{
    struct ibv_sge sge;

    if (!queue->count || !engine_leased_is_usable(engine_arrival_at(queue, 0)->lease)) {
        PyErr_SetString(PyExc_RuntimeError, "there is no arrival: wait until there is one");
        return NULL;
    }
    const char *block = engine_leased_block(engine_arrival_at(queue, 0)->lease, &sge);
    struct aiordma_completion completion = engine_arrival_at(queue, 0)->completion;
    const Lease *lease = engine_arrival_at(queue, 0)->lease;
    PyObject *message = engine_datagram(senders, block, sge.length, &completion);
    if (!message)
        return NULL;
    return pop_taken(queue, lease, message);
}

static PyObject *queue_take_datagram_at_once(ArrivalQueue *queue, PyObject *senders)
{
    if (!engine_may_take(queue))
        Py_RETURN_NONE;
    queue->at_once++;
    return take_datagram(queue, senders);
}

static PyObject *queue_take_datagram(ArrivalQueue *queue, PyObject *senders)
{
    return take_datagram(queue, senders);
}

/* A field of a message: a number, or None. */
static PyObject *field(int is_there, uint32_t value)
{
    return is_there ? PyLong_FromUnsignedLong(value) : Py_NewRef(Py_None);
}

/* Make a Message, a named tuple, without running its constructor, which is Python's. */
static PyObject *make_message(PyTypeObject *type, PyObject *data,
                              const struct aiordma_completion *completion)
{
    int is_written = completion->opcode == IBV_WC_RECV_RDMA_WITH_IMM;
    int has_immediate = is_written || completion->wc_flags & IBV_WC_WITH_IMM;
    int has_invalidated = !has_immediate && completion->wc_flags & IBV_WC_WITH_INV;
    PyObject *immediate = field(has_immediate, completion->immediate);
    PyObject *invalidated = field(has_invalidated, completion->immediate);
    PyObject *written = field(is_written, completion->byte_len);
    PyObject *fields = immediate && invalidated && written
                           ? PyTuple_Pack(4, data, immediate, invalidated, written)
                           : NULL;
    PyObject *arguments = fields ? PyTuple_Pack(1, fields) : NULL;
    PyObject *message = arguments ? PyTuple_Type.tp_new(type, arguments, NULL) : NULL;

    Py_XDECREF(immediate);
    Py_XDECREF(invalidated);
    Py_XDECREF(written);
    Py_XDECREF(fields);
    Py_XDECREF(arguments);
    return message;
}

static PyObject *take_message(ArrivalQueue *queue, PyObject *type)
{
    if (!PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "a class of tuples is expected");
        return NULL;
    }
    struct aiordma_completion completion =
        queue->count ? engine_arrival_at(queue, 0)->completion : (struct aiordma_completion){0};
    PyObject *data = copy_data(queue);
    const Lease *lease = data ? engine_arrival_at(queue, 0)->lease : NULL;
    PyObject *message = data ? make_message((PyTypeObject *)type, data, &completion) : NULL;
    Py_XDECREF(data);
    if (!message)
        return NULL;
    return pop_taken(queue, lease, message);
}

static PyObject *queue_take_message_at_once(ArrivalQueue *queue, PyObject *type)
{
    if (!engine_may_take(queue))
        Py_RETURN_NONE;
    queue->at_once++;
    return take_message(queue, type);
}

static PyObject *queue_take_message(ArrivalQueue *queue, PyObject *type)
{
    return take_message(queue, type);
}

int engine_runs_here(PyObject *loop)
{
    PyObject *running = PyObject_CallNoArgs(running_loop);
    int is_it = running == loop;

    if (!running)
        PyErr_Clear();
    Py_XDECREF(running);
    return is_it;
}

/* Whether a task may wait here without further checks in Python. */
static int may_wait(const ArrivalQueue *queue)
{
    const Port *port = queue->port;
    return port->loop && queue->fed && !queue->busy && !queue->count &&
           queue->views < queue->most_views &&
           engine_usable(port, port->ready || port->can_receive);
}

PyObject *engine_begin_wait(ArrivalQueue *queue)
{
    if (!may_wait(queue) || !engine_runs_here(queue->port->loop))
        return NULL;
    engine_post_unposted(queue->receives);
    queue->port->drain->poll_now(queue->port->drain);
    if (engine_interrupted() || !may_wait(queue))
        return NULL; /* it has arrived, or the post has ended the endpoint */
    PyObject *waiter = (PyObject *)engine_waiter(queue->port->loop);
    if (!waiter || queue->busy || queue->count) { /* the collector ran the program's code */
        Py_XDECREF(waiter);
        return NULL;
    }
    Py_XSETREF(queue->waiter, Py_NewRef(waiter));
    queue->busy = 1;
    return waiter;
}

void engine_end_wait(ArrivalQueue *queue)
{
    queue->busy = 0;
    queue->at_once = 0;
    Py_CLEAR(queue->waiter);
}

static PyObject *queue_begin_wait(ArrivalQueue *queue, PyObject *none)
{
    (void)none;
    PyObject *waiter = engine_begin_wait(queue);
    return waiter || PyErr_Occurred() ? waiter : Py_NewRef(Py_None);
}

static PyObject *queue_end_wait(ArrivalQueue *queue, PyObject *none)
{
    (void)none;
    engine_end_wait(queue);
    Py_RETURN_NONE;
}

static PyObject *queue_set_waiter(ArrivalQueue *queue, PyObject *waiter)
{
    Py_XSETREF(queue->waiter, Py_NewRef(waiter));
    Py_RETURN_NONE;
}

static PyObject *queue_wake(ArrivalQueue *queue, PyObject *none)
{
    (void)none;
    wake(queue);
    return engine_none_unless_interrupted();
}

static PyObject *queue_discard(ArrivalQueue *queue, PyObject *none)
{
    (void)none;
    while (queue->count)
        engine_give_back(queue->receives, engine_pop_arrival(queue));
    engine_post_unposted(queue->receives);
    wake(queue);
    return engine_none_unless_interrupted();
}

static PyObject *queue_view(ArrivalQueue *queue, PyObject *none)
{
    (void)none;
    return engine_view(queue);
}

static PyMethodDef queue_methods[] = {
    {"take_data_at_once", (PyCFunction)queue_take_data_at_once, METH_NOARGS,
     "take_data_at_once($self, /)\n--\n\n"
     "Return a copy of the first arrival, and give back its block. None: wait first."},
    {"take_data", (PyCFunction)queue_take_data, METH_NOARGS,
     "take_data($self, /)\n--\n\n"
     "Return a copy of the first arrival, which exists, and give back its block."},
    {"take_datagram_at_once", (PyCFunction)queue_take_datagram_at_once, METH_O,
     "take_datagram_at_once($self, senders, /)\n--\n\n"
     "Return the first arrival as a datagram, and give back its block. None: wait first."},
    {"take_datagram", (PyCFunction)queue_take_datagram, METH_O,
     "take_datagram($self, senders, /)\n--\n\n"
     "Return the first arrival, which exists, as a datagram, and give back its block."},
    {"take_message_at_once", (PyCFunction)queue_take_message_at_once, METH_O,
     "take_message_at_once($self, message, /)\n--\n\n"
     "Return the first arrival as a message of this class, and give back its block. None: wait\n"
     "first."},
    {"take_message", (PyCFunction)queue_take_message, METH_O,
     "take_message($self, message, /)\n--\n\n"
     "Return the first arrival, which exists, as a message of this class, and give back its block."},
    {"begin_wait", (PyCFunction)queue_begin_wait, METH_NOARGS,
     "begin_wait($self, /)\n--\n\n"
     "Post the chain, poll, and return a waiter for the next arrival; then call `end_wait`.\n"
     "None: an arrival is there, or Python has to check whether the task may wait."},
    {"end_wait", (PyCFunction)queue_end_wait, METH_NOARGS,
     "end_wait($self, /)\n--\n\n"
     "Forget the waiter: the task waits no longer."},
    {"set_waiter", (PyCFunction)queue_set_waiter, METH_O,
     "set_waiter($self, waiter, /)\n--\n\n"
     "Wake this waiter at the next arrival."},
    {"wake", (PyCFunction)queue_wake, METH_NOARGS,
     "wake($self, /)\n--\n\n"
     "Wake the task that waits."},
    {"discard", (PyCFunction)queue_discard, METH_NOARGS,
     "discard($self, /)\n--\n\n"
     "Drop all arrivals: give back their blocks."},
    {"view", (PyCFunction)queue_view, METH_NOARGS,
     "view($self, /)\n--\n\n"
     "Return a context manager for the next arrival, which hands out its block as a view."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef queue_members[] = {
    {"arrived", T_PYSSIZET, offsetof(ArrivalQueue, count), READONLY, "The number of arrivals."},
    {"at_once", T_PYSSIZET, offsetof(ArrivalQueue, at_once), 0,
     "How many arrivals were handed out since the task last paused."},
    {"pause", T_PYSSIZET, offsetof(ArrivalQueue, pause), READONLY,
     "How many arrivals are handed out before other tasks run."},
    {"views", T_PYSSIZET, offsetof(ArrivalQueue, views), READONLY,
     "The number of blocks that the program holds by views."},
    {"most_views", T_PYSSIZET, offsetof(ArrivalQueue, most_views), READONLY,
     "With so many views, nothing more can arrive."},
    {"busy", T_BOOL, offsetof(ArrivalQueue, busy), 0, "Whether a task is receiving."},
    {"fed", T_BOOL, offsetof(ArrivalQueue, fed), 0, "Whether blocks are posted for it."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_arrivals_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.ArrivalQueue",
    .tp_basicsize = sizeof(ArrivalQueue),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = queue_new,
    .tp_dealloc = (destructor)queue_dealloc,
    .tp_traverse = (traverseproc)queue_traverse,
    .tp_clear = (inquiry)queue_clear,
    .tp_methods = queue_methods,
    .tp_members = queue_members,
};
