/*
 * Pooled receives: they post the blocks of a pool, again and again, in chains. A block goes round
 * without Python code: it is posted, its request completes, it waits in the queue of its endpoint
 * (arrivals.c), the program gets its contents, and it is posted again.
 */
#include "arrivals.h"

#include <errno.h>
#include <structmember.h>

/* One block of a chain. */
struct block {
    struct ibv_recv_wr work;
    struct ibv_sge sge;
    Request *request;
};

enum { ON_STACK = 16 };

static PyObject *recv_name;

int engine_pooled_names(void)
{
    if (!recv_name)
        recv_name = PyUnicode_InternFromString("RECV");
    return recv_name ? 0 : -1;
}

/* Return the block to the pool, and drop the reference. */
void engine_return_block(Lease *lease)
{
    if (engine_return_lease(lease))
        engine_log("returning the block %r failed", (PyObject *)lease);
    Py_DECREF(lease);
}

void engine_notify_refused(PooledReceives *receives, int error)
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
           port->drain->process == engine_process();
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
    block->request->pooled = (PooledReceives *)Py_NewRef(receives);
    block->request->retrieved = 1; /* its error is the endpoint's cause, which reports it */
    block->work = (struct ibv_recv_wr){.sg_list = &block->sge, .num_sge = 1};
    return 0;
}

/* Enter the requests before the device gets them. Returns an errno. */
static int enter(Port *port, struct block *blocks, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Request *request = blocks[i].request;
        request->wr_id = engine_table_add(port->drain->table, (PyObject *)request);
        if (!request->wr_id) {
            PyErr_Clear();
            return ENOMEM;
        }
        engine_enter(port->open, request);
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
        engine_take_back(port, blocks[i].request); /* returns the block */
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
        engine_notify_refused(receives, error);
}

/* Post blocks as one chain. Takes the references. Blocks that cannot be posted are returned. */
static void post(PooledReceives *receives, Lease **leases, Py_ssize_t count)
{
    struct block few[ON_STACK], *many = NULL;

    if (count > ON_STACK && !(many = PyMem_Calloc((size_t)count, sizeof(*many)))) {
        for (Py_ssize_t i = 0; i < count; i++)
            engine_return_block(leases[i]);
        engine_notify_refused(receives, ENOMEM);
        return;
    }
    Py_INCREF(receives);
    post_blocks(receives, leases, count, many ? many : few);
    Py_DECREF(receives);
    PyMem_Free(many);
}

void engine_post_unposted(PooledReceives *receives)
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
        engine_notify_refused(receives, ENOMEM);
        return;
    }
    receives->unposted[receives->count++] = lease;
    if (receives->count >= receives->chain || !receives->posted)
        engine_post_unposted(receives);
}

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
    engine_post_unposted(receives);
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
    engine_post_unposted(receives);
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
