/*
 * The requests of one chain, until one call posts them. This file makes the plain requests. Python
 * makes all other requests (_connection/chain.py), and adds each of them in its place. Their works
 * come as one array when the chain is posted.
 */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <structmember.h>

struct engine_collected {
    Request *request;
    /* Only if it is plain. The fields that keep() and link_all() do not write are always zero. */
    struct ibv_send_wr work;
    struct ibv_sge sge; /* of inline data: its address is an offset into `bytes` */
    int is_plain;
};

/* The array of a finished chain is kept for the next one. Not with an address sanitizer, which has
   to see that the array is freed (as in request.c). */
#ifdef __SANITIZE_ADDRESS__
enum { FIRST_ROOM = 1, MOST_SPARE_ROOM = 0 };
#else
enum { FIRST_ROOM = 32, MOST_SPARE_ROOM = 256 };
#endif
static struct engine_collected *spare;
static Py_ssize_t spare_room;

static void forget_bytes(ChainPort *chain)
{
    PyMem_Free(chain->bytes);
    chain->bytes = NULL;
    chain->bytes_used = chain->bytes_room = 0;
}

static void forget_requests(ChainPort *chain)
{
    struct engine_collected *collected = chain->collected;
    Py_ssize_t count = chain->count, room = chain->room;

    forget_bytes(chain);
    chain->collected = NULL;
    chain->count = chain->room = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        Py_DECREF(collected[i].request);
    if (room > spare_room && room <= MOST_SPARE_ROOM) {
        PyMem_Free(spare);
        spare = collected;
        spare_room = room;
    } else {
        PyMem_Free(collected);
    }
}

static PyObject *chain_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"port", NULL};
    PyObject *port;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &engine_port_type, &port))
        return NULL;
    ChainPort *chain = (ChainPort *)type->tp_alloc(type, 0);
    if (chain)
        chain->port = (Port *)Py_NewRef(port);
    return (PyObject *)chain;
}

static int chain_traverse(ChainPort *chain, visitproc visit, void *arg)
{
    Py_VISIT(chain->port);
    for (Py_ssize_t i = 0; i < chain->count; i++)
        Py_VISIT(chain->collected[i].request);
    return 0;
}

static int chain_clear(ChainPort *chain)
{
    chain->over = 1;
    forget_requests(chain);
    return 0;
}

static void chain_dealloc(ChainPort *chain)
{
    PyObject_GC_UnTrack(chain);
    chain_clear(chain);
    Py_XDECREF(chain->port);
    Py_TYPE(chain)->tp_free((PyObject *)chain);
}

/* -- collecting --------------------------------------------------------------------------- */

static int no_memory(void)
{
    PyErr_NoMemory();
    return -1;
}

/* Reserve memory for one more request, and for so many inline bytes; -1 with an exception. */
static int reserve(ChainPort *chain, size_t bytes)
{
    if (!chain->room && spare) {
        chain->collected = spare;
        chain->room = spare_room;
        spare = NULL;
        spare_room = 0;
    }
    if (chain->count == chain->room) {
        Py_ssize_t room = chain->room ? 2 * chain->room : FIRST_ROOM;
        struct engine_collected *more =
            PyMem_Realloc(chain->collected, (size_t)room * sizeof(*more));
        if (!more)
            return no_memory();
        memset(more + chain->room, 0, (size_t)(room - chain->room) * sizeof(*more));
        chain->collected = more;
        chain->room = room;
    }
    if (bytes > chain->bytes_room - chain->bytes_used) {
        size_t room = 2 * chain->bytes_room + FIRST_ROOM * bytes;
        void *more = PyMem_Realloc(chain->bytes, room);
        if (!more)
            return no_memory();
        chain->bytes = more;
        chain->bytes_room = room;
    }
    return 0;
}

static unsigned int completes_as(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    default:
        return IBV_WC_SEND;
    }
}

/* Store the work of a request. Inline bytes are copied, because the program may change them. */
static void keep(ChainPort *chain, const struct engine_plain *plain, Request *request)
{
    struct engine_collected *kept = &chain->collected[chain->count++];

    kept->request = (Request *)Py_NewRef(request);
    kept->is_plain = 1;
    kept->work.num_sge = 1;
    kept->work.opcode = plain->opcode;
    kept->work.send_flags = plain->flags;
    kept->work.wr.rdma.remote_addr = plain->remote_address;
    kept->work.wr.rdma.rkey = plain->rkey;
    kept->sge = plain->sge;
    if (plain->part)
        return;
    memcpy(chain->bytes + chain->bytes_used, plain->view.buf, plain->sge.length);
    kept->sge.addr = chain->bytes_used;
    chain->bytes_used += plain->sge.length;
}

static PyObject *add(ChainPort *chain, const struct engine_plain *plain)
{
    Port *port = chain->port;

    if (!engine_take_slot(port->sends))
        Py_RETURN_NONE; /* the general path raises */
    Request *request = engine_plain_request(port, plain, 0);
    if (!request)
        return NULL;
    /* Reserve memory only now: making the request can run the collector, and so the program's code,
       which may post the chain. */
    int is_usable = !chain->over && engine_is_still_usable(port, plain->part, 0);
    if (!is_usable || reserve(chain, plain->part ? 0 : plain->sge.length))
        return engine_withdraw(port, request, is_usable);
    request->completes_as = completes_as(plain->opcode);
    keep(chain, plain, request);
    /* If it is never posted, it fails when the queue pair ends. */
    engine_enter(port->open, request);
    return (PyObject *)request;
}

PyObject *engine_collect(ChainPort *chain, enum engine_kind kind, PyObject *const *arguments)
{
    struct engine_plain plain;

    if (chain->over || kind == ENGINE_RECEIVE)
        Py_RETURN_NONE;
    int is_plain = engine_read(chain->port, kind, arguments, &plain);
    PyObject *request = is_plain > 0   ? add(chain, &plain)
                        : is_plain < 0 ? NULL
                                       : Py_NewRef(Py_None);
    return engine_end_reading(&plain, request);
}

/* -- posting ------------------------------------------------------------------------------ */

static PyObject *list_requests(ChainPort *chain)
{
    Py_ssize_t count = chain->count; /* making the list can run the collector and program code */
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(chain->collected[i].request));
    return list;
}

/* Set the run of each request. Freeing its previous run may run the program's code. */
static void set_runs(ChainPort *chain, PyObject *run)
{
    for (Py_ssize_t i = 0; i < chain->count; i++)
        Py_XSETREF(chain->collected[i].request->run, Py_XNewRef(run));
}

/* Enter all requests into the in-flight table, and link their works in order. `general` has the
   works of the requests that are not plain. Returns the first work; NULL: there was no memory. */
static struct ibv_send_wr *link_all(ChainPort *chain, struct ibv_send_wr *general,
                                    const PyObject *run)
{
    struct ibv_send_wr *first = NULL, **place = &first;

    for (Py_ssize_t i = 0; i < chain->count; i++) {
        struct engine_collected *collected = &chain->collected[i];
        Request *request = collected->request;
        struct ibv_send_wr *work = collected->is_plain ? &collected->work : general++;
        if (collected->is_plain) {
            work->sg_list = &collected->sge;
            if (work->send_flags & IBV_SEND_INLINE)
                collected->sge.addr += (uintptr_t)chain->bytes;
        }
        request->wr_id = engine_table_add(chain->port->drain->table, (PyObject *)request);
        if (!request->wr_id)
            return NULL;
        work->wr_id = request->wr_id;
        work->send_flags |= run && i + 1 < chain->count ? 0 : IBV_SEND_SIGNALED;
        *place = work;
        place = &work->next;
    }
    *place = NULL;
    return first;
}

/* Post the chain, and set `posted`. Returns the result of aiordma_post_sends. */
static int give_to_device(ChainPort *chain, struct ibv_send_wr *general, const PyObject *run)
{
    struct ibv_send_wr *first = link_all(chain, general, run), *refused;

    if (!first) {
        PyErr_Clear(); /* reported as the device's ENOMEM would be */
        return ENOMEM;
    }
    chain->port->drain->crossings++;
    int error = engine_path->post_sends(chain->port->queue_pair, first, &refused);
    for (; first && first != refused; first = first->next)
        chain->posted++;
    return error;
}

static unsigned int count_general(const ChainPort *chain)
{
    unsigned int count = 0;
    for (Py_ssize_t i = 0; i < chain->count; i++)
        count += !chain->collected[i].is_plain;
    return count;
}

static PyObject *chain_post(ChainPort *chain, PyObject *args)
{
    unsigned long long works = 0;
    const char *sges = "";
    Py_ssize_t size = 0;
    int signal_last_only, error = 0;

    if (!PyArg_ParseTuple(args, "p|Ky#", &signal_last_only, &works, &sges, &size))
        return NULL;
    unsigned int count = count_general(chain);
    if (!chain->count || chain->is_posted || (count && !works)) {
        PyErr_SetString(PyExc_ValueError, "a chain is posted once, if there is anything in it");
        return NULL;
    }
    chain->over = chain->is_posted = 1;
    PyObject *run = signal_last_only ? list_requests(chain) : NULL;
    if (signal_last_only && !run)
        return NULL;
    if (run)
        set_runs(chain, run);
    /* The program's code may have closed the queue pair. From here to the post it does not run. */
    if (!engine_usable(chain->port, chain->port->ready)) {
        Py_XDECREF(run);
        return PyLong_FromLong(ENOTCONN);
    }
    struct ibv_send_wr *general = NULL;
    if (count)
        general = engine_path->fill_sends((const void *)(uintptr_t)works, count, sges, (size_t)size,
                                          &error);
    if (!error)
        error = give_to_device(chain, general, run);
    free(general);
    Py_XDECREF(run);
    forget_bytes(chain);
    engine_watch_over(chain->port->drain);
    return engine_interrupted() ? NULL : PyLong_FromLong(error);
}

/* -- the interface for Python --------------------------------------------------------------- */

static PyObject *chain_send(ChainPort *chain, PyObject *local)
{
    return engine_collect(chain, ENGINE_SEND, &local);
}

static PyObject *chain_receive(ChainPort *chain, PyObject *local)
{
    return engine_collect(chain, ENGINE_RECEIVE, &local);
}

static PyObject *chain_write(ChainPort *chain, PyObject *const *arguments, Py_ssize_t count)
{
    return engine_has_two_sides(count) ? engine_collect(chain, ENGINE_WRITE, arguments) : NULL;
}

static PyObject *chain_read(ChainPort *chain, PyObject *const *arguments, Py_ssize_t count)
{
    return engine_has_two_sides(count) ? engine_collect(chain, ENGINE_READ, arguments) : NULL;
}

static PyObject *chain_add(ChainPort *chain, PyObject *request)
{
    if (!Py_IS_TYPE(request, &engine_request_type) || chain->over) {
        PyErr_SetString(PyExc_ValueError, "only a request is added, to a chain that is not over");
        return NULL;
    }
    if (reserve(chain, 0))
        return NULL;
    chain->collected[chain->count].request = (Request *)Py_NewRef(request);
    chain->collected[chain->count++].is_plain = 0;
    Py_RETURN_NONE;
}

static PyObject *chain_requests(ChainPort *chain, PyObject *none)
{
    (void)none;
    return list_requests(chain);
}

static PyMethodDef methods[] = {
    {"send", (PyCFunction)chain_send, METH_O,
     "send($self, data, /)\n--\n\n"
     "Collect a message; None: it is not a plain one."},
    {"receive", (PyCFunction)chain_receive, METH_O,
     "receive($self, memory, /)\n--\n\n"
     "None, always."},
    {"write", (PyCFunction)(void (*)(void))chain_write, METH_FASTCALL,
     "write($self, data, remote, /)\n--\n\n"
     "Collect a WRITE; None: it is not a plain one."},
    {"read", (PyCFunction)(void (*)(void))chain_read, METH_FASTCALL,
     "read($self, remote, memory, /)\n--\n\n"
     "Collect a READ; None: it is not a plain one."},
    {"add", (PyCFunction)chain_add, METH_O,
     "add($self, request, /)\n--\n\n"
     "One that is not plain is the next."},
    {"requests", (PyCFunction)chain_requests, METH_NOARGS,
     "requests($self, /)\n--\n\n"
     "All, in order."},
    {"post", (PyCFunction)chain_post, METH_VARARGS,
     "post($self, signal_last_only, works=0, sges=b'', /)\n--\n\n"
     "Post all, those that are not plain with the works at that\n"
     "address. Return an errno; a negative one: all were taken, and the device was not told."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"over", T_BOOL, offsetof(ChainPort, over), 0, "nothing is collected any more"},
    {"count", T_PYSSIZET, offsetof(ChainPort, count), READONLY, "how many there are"},
    {"posted", T_PYSSIZET, offsetof(ChainPort, posted), READONLY, "how many the device took"},
    {NULL, 0, 0, 0, NULL},
};

/* The checks of Python's require_usable, in one call. */
static PyObject *chain_usable(ChainPort *chain, void *closure)
{
    (void)closure;
    return PyBool_FromLong(engine_usable(chain->port, chain->port->ready));
}

static PyGetSetDef properties[] = {
    {"usable", (getter)chain_usable, NULL, "whether the queue pair may be posted on", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject engine_chain_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.ChainPort",
    .tp_basicsize = sizeof(ChainPort),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = chain_new,
    .tp_dealloc = (destructor)chain_dealloc,
    .tp_traverse = (traverseproc)chain_traverse,
    .tp_clear = (inquiry)chain_clear,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = properties,
};
