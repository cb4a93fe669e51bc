/*
 * Pooled receives post the blocks of a pool, again and again, in chains. A block goes round without
 * Python code: it is posted, its request completes, it waits in the queue of its endpoint, the program
 * gets its contents, and it is posted again.
 */
#include "arrivals.h"
#include "datagrams.h"
#include "request.h"
#include "request_type.h"
#include "post.h"
#include "shared.h"
#include "wait.h"

#include <errno.h>
#include <structmember.h>

/* Posts the blocks of a pool. */
struct PooledReceives {
    PyObject_HEAD Port *port;
    Pool *pool;
    PyObject *refused; /* called with the errno of a failed post; 0: the port was not usable */
    PyObject
        *members; /* a dict: the queues by queue pair number; NULL: all arrivals are `queue`'s */
    ArrivalQueue *queue; /* or NULL */
    Lease **unposted;    /* blocks for the next chain; references */
    Py_ssize_t count, room;
    Py_ssize_t posted, chain;
};

static PyObject *recv_name;

int engine_arrival_names(void)
{
    return engine_intern(&recv_name, "RECV");
}

/* -- posting blocks ---------------------------------------------------------------------------- */

static const struct engine_poster pooled_calls;

/* One block of a chain. */
struct block {
    struct ibv_recv_wr work;
    struct ibv_sge sge;
    Request *request;
};

enum { ON_STACK = 16 };

/* Return the block to the pool, and drop the reference. */
void engine_return_block(Lease *lease)
{
    if (engine_return_lease(lease))
        engine_log("returning the block %r failed", (PyObject *)lease);
    Py_DECREF(lease);
}

static void notify_refused(PooledReceives *receives, int error)
{
    PyObject *number = PyLong_FromLong(error);
    PyObject *result = number ? engine_call_alone(receives->refused, &number, 1) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(result);
    if (!result)
        engine_log("a refused receive of %r could not be handled", receives->port->owner);
}

/* Not engine_usable: a queue's members can have moved on to another thread with their loop. */
static int is_usable(const Port *port)
{
    return port->can_receive && (port->queue_pair || port->shared) &&
           port->drain->process == engine_process;
}

/* Make the request of a block, with its slot. It holds the block. Returns an errno. */
static int make(PooledReceives *receives, Lease *lease, struct block *block)
{
    Port *port = receives->port;

    if (!engine_take_slot(port->receives))
        return ENOMEM;
    engine_leased_block(lease, &block->sge);
    block->request = engine_request(port, recv_name, block->sge.length, (PyObject *)lease, NULL, 1);
    if (!block->request) {
        PyErr_Clear();
        engine_give_slot(port->receives);
        return ENOMEM;
    }
    block->request->poster = Py_NewRef(receives);
    block->request->calls = &pooled_calls;
    block->request->retrieved = 1; /* its error is the endpoint's cause, which reports it */
    block->work = (struct ibv_recv_wr){.sg_list = &block->sge, .num_sge = 1};
    return 0;
}

/* Enter the requests before the device gets them. Returns an errno. */
static int enter(Port *port, struct block *blocks, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Request *request = blocks[i].request;
        if (!engine_put_in_flight(port, request)) {
            PyErr_Clear();
            return ENOMEM;
        }
        blocks[i].work.wr_id = request->wr_id;
        blocks[i].work.next = i + 1 < count ? &blocks[i + 1].work : NULL;
    }
    return 0;
}

/* Post the chain, and return the errno. The requests from *taken on were refused. */
static int give_to_device(Port *port, struct block *blocks, Py_ssize_t count, Py_ssize_t *taken)
{
    struct ibv_recv_wr *refused = NULL;

    port->drain->crossings++;
    int error =
        abs(engine_path->post_receives(port->queue_pair, port->shared, &blocks->work, &refused));
    for (*taken = 0; *taken < count && (!error || &blocks[*taken].work != refused); ++*taken)
        ;
    return error;
}

static void post_blocks(PooledReceives *receives, Lease **leases, Py_ssize_t count,
                        struct block *blocks)
{
    Port *port = receives->port;
    Py_ssize_t made = 0, taken = 0;
    int error = 0, usable = is_usable(port);

    while (usable && made < count && !(error = make(receives, leases[made], &blocks[made])))
        made++;
    if (usable && !error)
        error = enter(port, blocks, made);
    /* Making the requests can run the collector, and so the program's code. */
    usable = usable && is_usable(port);
    if (usable && !error)
        error = give_to_device(port, blocks, made, &taken);
    receives->posted += taken;
    for (Py_ssize_t i = taken; i < made; i++)
        engine_take_back(blocks[i].request); /* returns the block */
    for (Py_ssize_t i = 0; i < made; i++)
        Py_DECREF(blocks[i].request);
    for (Py_ssize_t i = 0; i < count; i++)
        if (i < made)
            Py_DECREF(leases[i]);
        else
            engine_return_block(leases[i]);
    if (taken)
        engine_watch_over(port->drain);
    if (error || !usable)
        notify_refused(receives, error);
}

/* Post blocks as one chain. Takes the references. Blocks that cannot be posted are returned. */
static void post(PooledReceives *receives, Lease **leases, Py_ssize_t count)
{
    struct block few[ON_STACK], *many = NULL;

    if (count > ON_STACK && !(many = PyMem_Calloc((size_t)count, sizeof(*many)))) {
        for (Py_ssize_t i = 0; i < count; i++)
            engine_return_block(leases[i]);
        notify_refused(receives, ENOMEM);
        return;
    }
    Py_INCREF(receives);
    post_blocks(receives, leases, count, many ? many : few);
    Py_DECREF(receives);
    PyMem_Free(many);
}

static void post_unposted(PooledReceives *receives)
{
    Lease *few[ON_STACK], **leases = few;
    Py_ssize_t count = receives->count;

    if (!count)
        return;
    /* Take the blocks first: a post can run code that gives back others. */
    if (count > ON_STACK) {
        leases = receives->unposted;
        receives->unposted = NULL;
        receives->room = 0;
    } else {
        memcpy(few, receives->unposted, (size_t)count * sizeof(*few));
    }
    receives->count = 0;
    post(receives, leases, count);
    if (leases != few)
        PyMem_Free(leases);
}

/* Reserve memory for more blocks; -1 without an exception. */
static int reserve(PooledReceives *receives, Py_ssize_t count)
{
    if (receives->count + count <= receives->room)
        return 0;
    Py_ssize_t room = receives->count + count < ON_STACK ? ON_STACK : 2 * (receives->count + count);
    Lease **more = PyMem_Realloc(receives->unposted, (size_t)room * sizeof(*more));
    if (!more)
        return -1;
    receives->unposted = more;
    receives->room = room;
    return 0;
}

/* Post a block again, with the next chain. Takes the reference. */
void engine_give_back(PooledReceives *receives, Lease *lease)
{
    if (reserve(receives, 1)) {
        engine_return_block(lease);
        notify_refused(receives, ENOMEM);
        return;
    }
    receives->unposted[receives->count++] = lease;
    if (receives->count >= receives->chain || !receives->posted)
        post_unposted(receives);
}

/* -- the queue ---------------------------------------------------------------------------------- */

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

    if (!waiter)
        return;
    Py_INCREF(waiter);
    if (engine_wake(waiter))
        engine_log("waking the task that receives from %r failed", queue->port->owner);
    Py_DECREF(waiter);
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

static int is_quiet(const Request *request, const struct aiordma_completion *completion)
{
    const PooledReceives *receives = (const PooledReceives *)request->poster;

    /* Without a queue, the block would be posted again. The last posted block posts the others. */
    return queue_of(receives, completion->qp_num) && (receives->posted > 1 || !receives->count);
}

/* Count a message that is a notification: immediate data, and no bytes. Returns whether it is one. */
static int is_counted(const ArrivalQueue *queue, const struct aiordma_completion *completion)
{
    int is_empty = completion->opcode == IBV_WC_RECV && !completion->byte_len &&
                   completion->wc_flags & IBV_WC_WITH_IMM;

    if (!queue->counters || !PyDict_CheckExact(queue->counters) ||
        (completion->opcode != IBV_WC_RECV_RDMA_WITH_IMM && !is_empty))
        return 0;
    PyObject *number = PyLong_FromUnsignedLong(completion->immediate);
    PyObject *count = number ? PyDict_GetItemWithError(queue->counters, number) : NULL;
    PyObject *result = count ? engine_call_alone(count, NULL, 0) : NULL;
    Py_XDECREF(number);
    if (!result && PyErr_Occurred())
        engine_log("counting a notification for %r failed", queue->owner);
    Py_XDECREF(result);
    return count != NULL;
}

static void arrived(Request *request)
{
    PooledReceives *receives = (PooledReceives *)request->poster;
    Lease *lease = engine_keeps(request) ? NULL : (Lease *)request->memory;
    int has_succeeded = request->state == SUCCEEDED;

    request->poster = NULL;
    if (lease)
        request->memory = NULL;
    receives->posted--;
    ArrivalQueue *queue =
        has_succeeded || !receives->members ? queue_of(receives, request->completion.qp_num) : NULL;
    Py_XINCREF(queue);
    if (has_succeeded && queue && is_counted(queue, &request->completion)) {
        engine_give_back(receives, lease);
    } else if (has_succeeded && queue && push(queue, lease, &request->completion)) {
        engine_return_block(lease);
        notify_refused(receives, ENOMEM); /* the message is lost, so the endpoint has to end */
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
        post_unposted(receives); /* no block might be given back soon to complete a chain */
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

static const struct engine_poster pooled_calls = {
    .ended = arrived,
    .is_quiet = is_quiet,
    .takes_memory = 1,
};

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
    Py_VISIT(queue->counters);
    for (Py_ssize_t i = 0; i < queue->count; i++)
        Py_VISIT(engine_arrival_at(queue, i)->lease);
    return 0;
}

static int queue_clear(ArrivalQueue *queue)
{
    Py_CLEAR(queue->waiter);
    Py_CLEAR(queue->counters);
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
    post_unposted(queue->receives);
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
    post_unposted(queue->receives);
    wake(queue);
    return engine_none_unless_interrupted();
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
    {"take_datagram", (PyCFunction)take_datagram, METH_O,
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
    {"counters", T_OBJECT, offsetof(ArrivalQueue, counters), 0,
     "What is called for the notifications with a number, by the number; None before."},
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

/* -- the type of pooled receives --------------------------------------------------------------- */

static PyObject *receives_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"port", "pool", "refused", "members", NULL};
    PyObject *port, *pool, *refused, *members = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O|O", names, &port, &engine_pool_type, &pool,
                                     &refused, &members))
        return NULL;
    if (!Py_IS_TYPE(port, &engine_port_type) && !Py_IS_TYPE(port, &engine_shared_type)) {
        PyErr_SetString(PyExc_TypeError, "port: a Port or a SharedPort");
        return NULL;
    }
    if (members != Py_None && !PyDict_Check(members)) {
        PyErr_SetString(PyExc_TypeError, "members: a dict");
        return NULL;
    }
    PooledReceives *receives = (PooledReceives *)type->tp_alloc(type, 0);
    if (!receives)
        return NULL;
    receives->port = (Port *)Py_NewRef(port);
    receives->pool = (Pool *)Py_NewRef(pool);
    receives->refused = Py_NewRef(refused);
    receives->members = members == Py_None ? NULL : Py_NewRef(members);
    receives->chain = 1;
    return (PyObject *)receives;
}

static int receives_traverse(PooledReceives *receives, visitproc visit, void *arg)
{
    Py_VISIT(receives->port);
    Py_VISIT(receives->pool);
    Py_VISIT(receives->refused);
    Py_VISIT(receives->members);
    Py_VISIT(receives->queue);
    for (Py_ssize_t i = 0; i < receives->count; i++)
        Py_VISIT(receives->unposted[i]);
    return 0;
}

static int receives_clear(PooledReceives *receives)
{
    Py_ssize_t count = receives->count;

    Py_CLEAR(receives->queue);
    receives->count = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        Py_DECREF(receives->unposted[i]);
    return 0;
}

static void receives_dealloc(PooledReceives *receives)
{
    PyObject_GC_UnTrack(receives);
    receives_clear(receives);
    Py_XDECREF(receives->port);
    Py_XDECREF(receives->pool);
    Py_XDECREF(receives->refused);
    Py_XDECREF(receives->members);
    PyMem_Free(receives->unposted);
    Py_TYPE(receives)->tp_free((PyObject *)receives);
}

static PyObject *receives_fill(PooledReceives *receives, PyObject *args)
{
    Py_ssize_t count, size;

    if (!PyArg_ParseTuple(args, "nn", &count, &size))
        return NULL;
    if (size < 1) {
        PyErr_SetString(PyExc_ValueError, "fill(): the size of a block is at least 1");
        return NULL;
    }
    while (count-- > 0) {
        Lease *lease = engine_lease(receives->pool, size);
        if (!lease)
            return NULL; /* the caller closes the endpoint */
        if (reserve(receives, 1)) {
            engine_return_block(lease);
            return PyErr_NoMemory();
        }
        receives->unposted[receives->count++] = lease;
    }
    post_unposted(receives);
    return engine_none_unless_interrupted();
}

static PyObject *receives_give_back(PooledReceives *receives, PyObject *lease)
{
    if (!Py_IS_TYPE(lease, &engine_lease_type)) {
        PyErr_SetString(PyExc_TypeError, "give_back() takes a Lease");
        return NULL;
    }
    engine_give_back(receives, (Lease *)Py_NewRef(lease));
    return engine_none_unless_interrupted();
}

static PyObject *receives_post_unposted(PooledReceives *receives, PyObject *none)
{
    (void)none;
    post_unposted(receives);
    return engine_none_unless_interrupted();
}

static PyObject *receives_set_queue(PooledReceives *receives, PyObject *queue)
{
    if (!Py_IS_TYPE(queue, &engine_arrivals_type)) {
        PyErr_SetString(PyExc_TypeError, "set_queue() takes an ArrivalQueue");
        return NULL;
    }
    Py_XSETREF(receives->queue, (ArrivalQueue *)Py_NewRef(queue));
    Py_RETURN_NONE;
}

static PyMethodDef receives_methods[] = {
    {"fill", (PyCFunction)receives_fill, METH_VARARGS,
     "fill($self, count, size, /)\n--\n\n"
     "Lease `count` blocks of `size` bytes, and post them in one call."},
    {"give_back", (PyCFunction)receives_give_back, METH_O,
     "give_back($self, lease, /)\n--\n\n"
     "Post a block again, with the next chain. If it cannot be posted, it is released."},
    {"post_unposted", (PyCFunction)receives_post_unposted, METH_NOARGS,
     "post_unposted($self, /)\n--\n\n"
     "Post the chain of blocks that were given back."},
    {"set_queue", (PyCFunction)receives_set_queue, METH_O,
     "set_queue($self, queue, /)\n--\n\n"
     "Set the queue of all arrivals."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef receives_members[] = {
    {"posted", T_PYSSIZET, offsetof(PooledReceives, posted), READONLY,
     "The number of posted blocks."},
    {"unposted", T_PYSSIZET, offsetof(PooledReceives, count), READONLY,
     "The number of blocks in the next chain."},
    {"chain", T_PYSSIZET, offsetof(PooledReceives, chain), 0,
     "The number of blocks that are posted together."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_pooled_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.PooledReceives",
    .tp_basicsize = sizeof(PooledReceives),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = receives_new,
    .tp_dealloc = (destructor)receives_dealloc,
    .tp_traverse = (traverseproc)receives_traverse,
    .tp_clear = (inquiry)receives_clear,
    .tp_methods = receives_methods,
    .tp_members = receives_members,
};
