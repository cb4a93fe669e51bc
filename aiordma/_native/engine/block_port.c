/*
 * Blocks: any number of pieces of registered memory, each with its place in the peer's memory. One
 * object WRITEs or READs all of them: it posts chains of requests as slots come free, in the end of
 * the requests before them, and so without a turn of the event loop. Only the last request of a
 * chain is signaled, where the device keeps the order.
 */
#include "block_port.h"
#include "post.h"
#include "reading.h"
#include "request.h"
#include "request_type.h"

#include <arpa/inet.h>
#include <errno.h>
#include <structmember.h>

enum { MOST_CHAINED = 16 }; /* requests of one chain */

struct block {
    RegionBase *region; /* a reference, and a user of it; NULL: no bytes */
    PyObject *remote;   /* a reference: the RemoteMemory, for errors; or NULL */
    unsigned long long local, place, length; /* addresses here and at the peer, and bytes */
    unsigned int lkey, rkey;
};

typedef struct {
    PyObject_HEAD Port *port;
    PyObject *operation; /* the name of its requests */
    PyObject *changed;   /* called when something is to be done, see `tell`; NULL or None */
    PyObject *error;     /* of the first request that failed, or NULL */
    struct block *blocks;
    Py_ssize_t count, room;
    Py_ssize_t next;         /* the first block that is not posted, */
    unsigned long long done; /* and how many of its bytes are */
    unsigned long long total_bytes, completed_bytes;
    Py_ssize_t in_flight; /* requests */
    long long immediate;  /* of the last WRITE; -1: none */
    char is_read;
    char signals_all; /* each request is signaled: the device does not keep their order */
    char reports;     /* `changed` is also called after each chain */
    char stopped;     /* it posts no more */
    char posting;
} BlockPort;

static PyObject *blocks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"port", "operation", "is_read", "signals_all", NULL};
    PyObject *port, *operation;
    int is_read, signals_all;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!Upp", names, &engine_port_type, &port,
                                     &operation, &is_read, &signals_all))
        return NULL;
    BlockPort *blocks = (BlockPort *)type->tp_alloc(type, 0);
    if (!blocks)
        return NULL;
    blocks->port = (Port *)Py_NewRef(port);
    blocks->operation = Py_NewRef(operation);
    blocks->is_read = (char)is_read;
    blocks->signals_all = (char)signals_all;
    blocks->immediate = -1;
    return (PyObject *)blocks;
}

/* Release the memory of all blocks. Requests that are in flight hold theirs themselves. */
static void forget_blocks(BlockPort *blocks)
{
    struct block *all = blocks->blocks;
    Py_ssize_t count = blocks->count;

    blocks->blocks = NULL;
    blocks->count = blocks->room = blocks->next = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (all[i].region && engine_release_region(all[i].region))
            engine_log("releasing the memory of %r failed", (PyObject *)blocks);
        Py_XDECREF(all[i].region);
        Py_XDECREF(all[i].remote);
    }
    PyMem_Free(all);
}

static int blocks_traverse(BlockPort *blocks, visitproc visit, void *arg)
{
    Py_VISIT(blocks->port);
    Py_VISIT(blocks->changed);
    Py_VISIT(blocks->error);
    for (Py_ssize_t i = 0; i < blocks->count; i++) {
        Py_VISIT(blocks->blocks[i].region);
        Py_VISIT(blocks->blocks[i].remote);
    }
    return 0;
}

static int blocks_clear(BlockPort *blocks)
{
    blocks->stopped = 1;
    Py_CLEAR(blocks->changed);
    Py_CLEAR(blocks->error);
    forget_blocks(blocks);
    return 0;
}

static void blocks_dealloc(BlockPort *blocks)
{
    PyObject_GC_UnTrack(blocks);
    blocks_clear(blocks);
    Py_XDECREF(blocks->operation);
    Py_XDECREF(blocks->port);
    Py_TYPE(blocks)->tp_free((PyObject *)blocks);
}

/* -- collecting --------------------------------------------------------------------------- */

static int grow(BlockPort *blocks)
{
    Py_ssize_t room = blocks->room ? 2 * blocks->room : MOST_CHAINED;
    struct block *more = PyMem_Realloc(blocks->blocks, (size_t)room * sizeof(*more));

    if (!more) {
        PyErr_NoMemory();
        return -1;
    }
    blocks->blocks = more;
    blocks->room = room;
    return 0;
}

/* Append a block, or lengthen the last one if this one continues it on both sides. */
static int append(BlockPort *blocks, const struct block *block)
{
    struct block *last = blocks->count ? &blocks->blocks[blocks->count - 1] : NULL;

    if (!block->length && block->region)
        return 0;
    blocks->total_bytes += block->length;
    if (last && last->region == block->region && last->lkey == block->lkey &&
        last->rkey == block->rkey && last->local + last->length == block->local &&
        last->place + last->length == block->place) {
        last->length += block->length;
        return 0;
    }
    if (blocks->count == blocks->room && grow(blocks))
        return -1;
    struct block *kept = &blocks->blocks[blocks->count++];
    *kept = *block;
    Py_XINCREF(kept->region);
    Py_XINCREF(kept->remote);
    if (kept->region)
        kept->region->users++;
    return 0;
}

/* Read a part of local memory that the device may use here. 0: Python explains why it may not. */
static int read_local(const BlockPort *blocks, PyObject *given, struct block *block)
{
    if (!PyObject_TypeCheck(given, &engine_part_type))
        return 0;
    Part *part = (Part *)given;
    block->region = part->region;
    if (!part->region || !part->region->usable || part->region->domain != blocks->port->domain ||
        (blocks->is_read && !part->region->writable))
        return 0;
    block->local = part->address;
    block->length = (unsigned long long)part->length;
    block->lkey = part->lkey;
    return 1;
}

/* Read the peer's memory. 1: it was read; 0: Python explains why it was not; -1: an exception. */
static int read_place(PyObject *given, struct block *block, unsigned long long *length)
{
    unsigned long long rkey;
    int is_read = engine_read_remote(given, &block->place, length, &rkey);

    if (is_read > 0) {
        block->rkey = (unsigned int)rkey;
        block->remote = given;
    }
    return is_read;
}

/* The result of both calls below: the number of the first block that cannot be moved; -1: none. */
static PyObject *number_or_none(Py_ssize_t refused)
{
    return PyLong_FromSsize_t(refused);
}

static PyObject *blocks_add_pairs(BlockPort *blocks, PyObject *pairs)
{
    if (!PyList_CheckExact(pairs))
        return PyErr_Format(PyExc_TypeError, "add_pairs() takes a list");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pairs); i++) {
        struct block block = {0};
        unsigned long long length = 0;
        PyObject *pair = PyList_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
            !read_local(blocks, PyTuple_GET_ITEM(pair, 0), &block))
            return number_or_none(i);
        int is_read = read_place(PyTuple_GET_ITEM(pair, 1), &block, &length);
        if (is_read < 0)
            return NULL;
        if (!is_read || length != block.length)
            return number_or_none(i);
        if (append(blocks, &block))
            return NULL;
    }
    return number_or_none(-1);
}

static int is_inside(unsigned long long offset, unsigned long long length, unsigned long long whole)
{
    return offset <= whole && length <= whole - offset;
}

/* Append the blocks of one piece of memory here and of `length` bytes there. Returns the number of the
   first one that is out of bounds, -1: none, -2: an exception. */
static Py_ssize_t append_all(BlockPort *blocks, const struct block *whole,
                             unsigned long long length, const Py_buffer *arrays)
{
    const unsigned long long *ours = arrays[0].buf, *theirs = arrays[1].buf,
                             *lengths = arrays[2].buf;

    for (Py_ssize_t i = 0; i < arrays[0].len / (Py_ssize_t)sizeof(*ours); i++) {
        struct block block = *whole;
        unsigned long long here, there;
        /* Once: the arrays are the program's, and may change meanwhile. */
        memcpy(&here, &ours[i], sizeof(here));
        memcpy(&there, &theirs[i], sizeof(there));
        memcpy(&block.length, &lengths[i], sizeof(block.length));
        if (!is_inside(here, block.length, whole->length) ||
            !is_inside(there, block.length, length))
            return i;
        block.local += here;
        block.place += there;
        if (append(blocks, &block))
            return -2;
    }
    return -1;
}

static PyObject *blocks_add_offsets(BlockPort *blocks, PyObject *args)
{
    PyObject *local, *remote, *result = NULL;
    Py_buffer arrays[3];
    unsigned long long length = 0;
    struct block whole = {0};

    if (!PyArg_ParseTuple(args, "OOy*y*y*", &local, &remote, &arrays[0], &arrays[1], &arrays[2]))
        return NULL;
    if (arrays[0].len != arrays[1].len || arrays[0].len != arrays[2].len) {
        PyErr_SetString(PyExc_ValueError, "add_offsets() takes arrays of the same length");
    } else if (!read_local(blocks, local, &whole)) {
        result = number_or_none(0);
    } else {
        Py_ssize_t refused = 0;
        int is_read = read_place(remote, &whole, &length);
        if (is_read > 0)
            refused = append_all(blocks, &whole, length, arrays);
        if (is_read >= 0 && refused > -2)
            result = number_or_none(refused);
    }
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&arrays[i]);
    return result;
}

static PyObject *blocks_add_empty(BlockPort *blocks, PyObject *none)
{
    const struct block block = {0};

    (void)none;
    if (append(blocks, &block))
        return NULL;
    Py_RETURN_NONE;
}

/* -- posting ------------------------------------------------------------------------------ */

/* What one call of the device gets. */
struct chain {
    int count;
    Request *requests[MOST_CHAINED];
    struct ibv_send_wr works[MOST_CHAINED];
    struct ibv_sge sges[MOST_CHAINED];
};

static const struct engine_poster calls;

/* Whether requests may be posted. What ends posts before the program does in a later run of its
   loop, as in stream_path.c. */
static int is_usable(const BlockPort *blocks)
{
    const Port *port = blocks->port;
    return !blocks->stopped && !blocks->error && port->queue_pair && port->ready &&
           engine_is_in_thread(port);
}

/* Make the next request of the chain: of the next block, or of as much of it as one request moves.
   -1 with an exception. */
static int make_next(BlockPort *blocks, struct chain *chain)
{
    const struct block *block = &blocks->blocks[blocks->next];
    unsigned long long length = block->length - blocks->done, most = blocks->port->max_message;
    int at = chain->count;

    if (length > most)
        length = most;
    chain->sges[at] = (struct ibv_sge){block->local + blocks->done, (uint32_t)length, block->lkey};
    chain->works[at] = (struct ibv_send_wr){
        .sg_list = &chain->sges[at],
        .num_sge = block->region ? 1 : 0,
        .opcode = blocks->is_read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
        .send_flags = blocks->signals_all ? IBV_SEND_SIGNALED : 0,
        .wr.rdma = {block->place + blocks->done, block->rkey},
    };
    blocks->done += length;
    if (blocks->done == block->length) {
        blocks->done = 0;
        blocks->next++;
    }
    if (blocks->immediate >= 0 && blocks->next == blocks->count) {
        chain->works[at].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        chain->works[at].imm_data = htonl((uint32_t)blocks->immediate);
    }
    /* The collector, and so the program's code, can run here. It may stop this object. */
    Request *request = engine_request(blocks->port, blocks->operation, (Py_ssize_t)length,
                                      (PyObject *)block->region, block->remote, 0);
    if (!request)
        return -1;
    request->opcode = chain->works[at].opcode;
    request->poster = Py_NewRef(blocks);
    request->calls = &calls;
    chain->requests[chain->count++] = request;
    return 0;
}

/* Give back what the device did not get. */
static void withdraw_from(const struct chain *chain, int first)
{
    for (int i = first; i < chain->count; i++) {
        Py_CLEAR(chain->requests[i]->run);
        engine_take_back(chain->requests[i]);
        Py_DECREF(chain->requests[i]);
    }
}

/* Enter all requests into the in-flight table, and link their works. -1 with an exception. */
static int link_all(BlockPort *blocks, struct chain *chain)
{
    PyObject *run = blocks->signals_all ? NULL : PyList_New(chain->count);

    if (!blocks->signals_all && !run)
        return -1;
    for (int i = 0; i < chain->count; i++) {
        Request *request = chain->requests[i];
        if (run) {
            PyList_SET_ITEM(run, i, Py_NewRef(request));
            request->run = Py_NewRef(run);
        }
        chain->works[i].wr_id = engine_put_in_flight(blocks->port, request);
        chain->works[i].next = i + 1 < chain->count ? &chain->works[i + 1] : NULL;
        if (!chain->works[i].wr_id) {
            for (i++; run && i < chain->count; i++)
                PyList_SET_ITEM(run, i, Py_NewRef(Py_None));
            Py_XDECREF(run);
            return -1;
        }
    }
    chain->works[chain->count - 1].send_flags |= IBV_SEND_SIGNALED;
    Py_XDECREF(run);
    return 0;
}

/* Keep the exception that is set as the error of this object. */
static void fail_with_exception(BlockPort *blocks)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (!blocks->error)
        blocks->error = Py_XNewRef(value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* The device refused requests of a chain: let Python make the error. */
static void refused(BlockPort *blocks, int error, int has_posted)
{
    PyObject *number = PyLong_FromLong(error);
    PyObject *arguments[] = {blocks->port->owner, number, Py_False};
    PyObject *result =
        number ? engine_call_method_alone(engine_python.post_refused, arguments, 3) : NULL;

    Py_XDECREF(number);
    Py_XDECREF(result);
    if (!result)
        fail_with_exception(blocks);
    /* The signaled request was refused, so that the others would not complete. */
    if (has_posted && !blocks->signals_all)
        engine_doorbell_failed(blocks->port, error);
}

static void give_to_device(BlockPort *blocks, struct chain *chain)
{
    Port *port = blocks->port;
    struct ibv_send_wr *bad = NULL;
    int posted = 0;

    port->drain->crossings++;
    int error = engine_path->post_sends(port->queue_pair, chain->works, &bad);
    while (posted < chain->count && (error <= 0 || &chain->works[posted] != bad))
        posted++;
    blocks->in_flight += posted;
    withdraw_from(chain, posted);
    for (int i = 0; i < posted; i++)
        Py_DECREF(chain->requests[i]);
    if (posted)
        engine_watch_over(port->drain);
    if (error > 0)
        refused(blocks, error, posted > 0);
    if (error < 0)
        engine_doorbell_failed(port, -error);
}

/* Post the next blocks with slots that were taken. */
static void post_chain(BlockPort *blocks, int slots)
{
    Py_ssize_t next = blocks->next;
    unsigned long long done = blocks->done;
    struct chain chain = {.count = 0};
    int failed = 0;

    while (!failed && chain.count < slots && is_usable(blocks) && blocks->next < blocks->count)
        failed = make_next(blocks, &chain);
    for (int i = chain.count; i < slots; i++)
        engine_give_slot(blocks->port->sends);
    /* Making the requests can run the program's code, which may stop this object. */
    if (!failed && is_usable(blocks))
        failed = link_all(blocks, &chain);
    if (!failed && is_usable(blocks)) {
        give_to_device(blocks, &chain);
        return;
    }
    if (failed)
        fail_with_exception(blocks);
    withdraw_from(&chain, 0);
    blocks->next = next;
    blocks->done = done;
}

/* Post chains while there is room for them: a quarter of the slots stays free for others. `slots`:
   of those that are taken already. */
static void post_all(BlockPort *blocks, int slots)
{
    Slots *queue = blocks->port->sends;
    Py_ssize_t part = queue->total / 4 > 1 ? queue->total / 4 : 1;
    Py_ssize_t limit = queue->total - part > 0 ? queue->total - part : 1;
    Py_ssize_t most = part < MOST_CHAINED ? part : MOST_CHAINED;

    blocks->posting = 1;
    while (is_usable(blocks) && blocks->next < blocks->count) {
        Py_ssize_t room = limit - blocks->in_flight;
        if (room < most && blocks->in_flight)
            break; /* a whole chain has room soon */
        while (slots < most && slots < room && engine_take_slot(queue))
            slots++;
        if (!slots)
            break;
        post_chain(blocks, slots);
        slots = 0;
    }
    for (; slots; slots--)
        engine_give_slot(queue);
    blocks->posting = 0;
}

/* -- the end of a request ------------------------------------------------------------------ */

static void forget_if_over(BlockPort *blocks)
{
    int is_over = blocks->error || blocks->next == blocks->count;

    if (blocks->stopped || (!blocks->in_flight && is_over))
        forget_blocks(blocks);
}

/* Tell Python that all have ended, or that there is no slot; or, where it asks for reports, how far
   this object came. */
static void tell(BlockPort *blocks, int has_posted)
{
    if (!blocks->changed || blocks->changed == Py_None ||
        (blocks->in_flight && !(blocks->reports && has_posted)))
        return;
    PyObject *changed = Py_NewRef(blocks->changed);
    PyObject *result = engine_call_alone(changed, NULL, 0);
    if (!result)
        engine_log("the progress callback of %r failed", (PyObject *)blocks);
    Py_XDECREF(result);
    Py_DECREF(changed);
}

static void ended(Request *request)
{
    BlockPort *blocks = (BlockPort *)request->poster;
    Py_ssize_t next = blocks->next;
    unsigned long long done = blocks->done;

    request->poster = NULL;
    request->retrieved = 1; /* `error` reports it */
    blocks->in_flight--;
    if (request->state == SUCCEEDED)
        blocks->completed_bytes += (unsigned long long)request->length;
    else if (!blocks->error)
        blocks->error = Py_XNewRef(request->error);
    if (!blocks->posting) { /* else what posts goes on */
        post_all(blocks, 0);
        int has_posted = next != blocks->next || done != blocks->done;
        forget_if_over(blocks);
        tell(blocks, has_posted);
    }
    Py_DECREF(blocks);
}

static int is_quiet(const Request *request, const struct aiordma_completion *completion)
{
    (void)completion;
    return !((const BlockPort *)request->poster)->reports;
}

static const struct engine_poster calls = {.ended = ended, .is_quiet = is_quiet};

/* -- the interface for Python --------------------------------------------------------------- */

static PyObject *blocks_post(BlockPort *blocks, PyObject *has_slot)
{
    int slots = PyObject_IsTrue(has_slot);

    if (slots < 0)
        return NULL;
    if (blocks->posting) {
        PyErr_SetString(PyExc_RuntimeError, "post() was called in post()");
        return NULL;
    }
    post_all(blocks, slots);
    forget_if_over(blocks);
    return engine_none_unless_interrupted();
}

static PyObject *blocks_stop(BlockPort *blocks, PyObject *none)
{
    (void)none;
    blocks->stopped = 1;
    if (!blocks->posting)
        forget_if_over(blocks);
    return engine_none_unless_interrupted();
}

static PyMethodDef methods[] = {
    {"add_pairs", (PyCFunction)blocks_add_pairs, METH_O,
     "add_pairs($self, pairs, /)\n--\n\n"
     "Add blocks, and hold their memory: a list of tuples of a slice and a RemoteMemory. Return\n"
     "the number of the first one that cannot be moved; -1: none."},
    {"add_offsets", (PyCFunction)blocks_add_offsets, METH_VARARGS,
     "add_offsets($self, local, remote, ours, theirs, lengths, /)\n--\n\n"
     "Add blocks of a slice and a RemoteMemory, by arrays of 64-bit offsets and lengths. Return\n"
     "the number of the first one that is out of bounds; -1: none."},
    {"add_empty", (PyCFunction)blocks_add_empty, METH_NOARGS,
     "add_empty($self, /)\n--\n\n"
     "Add a block of no bytes, for immediate data alone."},
    {"post", (PyCFunction)blocks_post, METH_O,
     "post($self, has_slot, /)\n--\n\n"
     "Post as much as there are slots for. has_slot: one was taken, which this call uses or\n"
     "gives back."},
    {"stop", (PyCFunction)blocks_stop, METH_NOARGS,
     "stop($self, /)\n--\n\n"
     "Post no more. The memory of requests in flight stays held until they complete."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"changed", T_OBJECT, offsetof(BlockPort, changed), 0,
     "Called when no request is in flight, and, with `reports`, after each chain."},
    {"reports", T_BOOL, offsetof(BlockPort, reports), 0, "See `changed`."},
    {"error", T_OBJECT, offsetof(BlockPort, error), READONLY,
     "The error of the first request that failed."},
    {"stopped", T_BOOL, offsetof(BlockPort, stopped), READONLY, "Whether `stop` was called."},
    {"immediate", T_LONGLONG, offsetof(BlockPort, immediate), 0,
     "The immediate data of the last WRITE; -1: none."},
    {"in_flight", T_PYSSIZET, offsetof(BlockPort, in_flight), READONLY, "Requests in flight."},
    {"total_bytes", T_ULONGLONG, offsetof(BlockPort, total_bytes), READONLY,
     "The bytes of all blocks; 0 before the transfer begins."},
    {"completed_bytes", T_ULONGLONG, offsetof(BlockPort, completed_bytes), READONLY,
     "The bytes of the requests that have completed."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *is_over(BlockPort *blocks, void *closure)
{
    (void)closure;
    return PyBool_FromLong(!blocks->in_flight && (blocks->error || blocks->next == blocks->count));
}

static PyGetSetDef properties[] = {
    {"is_over", (getter)is_over, NULL,
     "Whether no request is in flight, and none will be: all were posted, or one failed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject engine_block_port_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.BlockPort",
    .tp_basicsize = sizeof(BlockPort),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = blocks_new,
    .tp_dealloc = (destructor)blocks_dealloc,
    .tp_traverse = (traverseproc)blocks_traverse,
    .tp_clear = (inquiry)blocks_clear,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = properties,
};
