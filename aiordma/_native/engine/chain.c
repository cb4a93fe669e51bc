/*
 * The requests of one chain, until one call posts them. Python makes the requests that the port
 * cannot handle (_connection/chain.py), and adds each of them in its place. Their works come as one
 * array when the chain is posted.
 */
#include "chain.h"
#include "post.h"
#include "reading.h"
#include "request.h"
#include "request_type.h"
#include "window.h"

#include <errno.h>
#include <stdlib.h>
#include <structmember.h>

struct engine_collected {
    Request *request;
    struct ibv_send_wr work; /* not used if the request is general */
    struct ibv_sge sge;      /* of a request with one part; inline: an offset into `bytes` */
    size_t first;            /* of the sges of a request with several parts, in `sges` */
    int is_general;          /* Python made the request */
};

/* The requests of a chain. */
struct ChainPort {
    PyObject_HEAD Port *port;
    struct engine_collected *collected;
    Py_ssize_t count, room;
    char *bytes; /* the inline data */
    size_t bytes_used, bytes_room;
    struct ibv_sge *sges; /* of the requests with several parts */
    size_t sges_used, sges_room;
    Py_ssize_t posted; /* how many requests the device accepted */
    char over;         /* the chain collects no more requests */
    char is_posted;
    char signal_last_only;
    int error; /* of a post at the end of the block */
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

static void forget_parts(ChainPort *chain)
{
    PyMem_Free(chain->bytes);
    chain->bytes = NULL;
    chain->bytes_used = chain->bytes_room = 0;
    PyMem_Free(chain->sges);
    chain->sges = NULL;
    chain->sges_used = chain->sges_room = 0;
}

static void forget_requests(ChainPort *chain)
{
    struct engine_collected *collected = chain->collected;
    Py_ssize_t count = chain->count, room = chain->room;

    forget_parts(chain);
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

/* Reserve memory for one more request; -1 with an exception. */
static int reserve_request(ChainPort *chain)
{
    if (!chain->room && spare) {
        chain->collected = spare;
        chain->room = spare_room;
        spare = NULL;
        spare_room = 0;
    }
    if (chain->count < chain->room)
        return 0;
    Py_ssize_t room = chain->room ? 2 * chain->room : FIRST_ROOM;
    struct engine_collected *more = PyMem_Realloc(chain->collected, (size_t)room * sizeof(*more));
    if (!more)
        return no_memory();
    chain->collected = more;
    chain->room = room;
    return 0;
}

/* Reserve memory for so many items of an array that has `used` of `*room`. Returns the array; NULL
   with an exception. */
static void *reserve_items(void *items, size_t used, size_t *room, size_t count, size_t size)
{
    if (items && count <= *room - used)
        return items;
    size_t wanted = 2 * *room + FIRST_ROOM * count;
    void *more = PyMem_Realloc(items, wanted * size);
    if (!more)
        PyErr_NoMemory();
    else
        *room = wanted;
    return more;
}

static int reserve(ChainPort *chain, const struct engine_work *work)
{
    if (reserve_request(chain))
        return -1;
    if (work->copying == ENGINE_INLINE && work->length) {
        char *bytes = reserve_items(chain->bytes, chain->bytes_used, &chain->bytes_room,
                                    (size_t)work->length, 1);
        if (!bytes)
            return -1;
        chain->bytes = bytes;
    } else if (work->count > 1) {
        struct ibv_sge *sges = reserve_items(chain->sges, chain->sges_used, &chain->sges_room,
                                             (size_t)work->count, sizeof(*sges));
        if (!sges)
            return -1;
        chain->sges = sges;
    }
    return 0;
}

/* Store the work of a request. Inline bytes are copied, because the program may change them. */
static void keep(ChainPort *chain, const struct engine_work *work, Request *request)
{
    struct engine_collected *kept = &chain->collected[chain->count++];

    kept->request = (Request *)Py_NewRef(request);
    kept->is_general = 0;
    kept->work = engine_send_wr(work);
    if (work->flags & IBV_SEND_INLINE) {
        engine_gather(work, chain->bytes + chain->bytes_used);
        kept->work.num_sge = 1;
        kept->sge = (struct ibv_sge){chain->bytes_used, (uint32_t)work->length, 0};
        chain->bytes_used += work->length;
    } else if (work->count > 1) {
        kept->first = chain->sges_used;
        memcpy(chain->sges + kept->first, work->sges, (size_t)work->count * sizeof(*work->sges));
        chain->sges_used += (size_t)work->count;
    } else if (work->count) {
        kept->sge = work->sges[0];
    }
}

static PyObject *add(ChainPort *chain, struct engine_work *work)
{
    Port *port = chain->port;

    if (!engine_take_slot(port->sends))
        Py_RETURN_NONE; /* the general path raises */
    Request *request = engine_work_request(port, work);
    if (!request)
        return NULL;
    /* Reserve memory only now: making the request can run the collector, and so the program's code,
       which may post the chain. */
    int is_usable = !chain->over && engine_is_still_usable(port, work);
    if (!is_usable || reserve(chain, work))
        return engine_withdraw(request, is_usable);
    request->opcode = work->opcode;
    keep(chain, work, request);
    /* If it is never posted, it fails when the queue pair ends. */
    engine_enter(port->open, request);
    if (work->window)
        engine_note_window(work, request);
    return (PyObject *)request;
}

PyObject *engine_collect(ChainPort *chain, enum engine_kind kind, PyObject *const *given)
{
    struct engine_work work;

    if (chain->over)
        Py_RETURN_NONE;
    int is_read = engine_read(chain->port, kind, given, &work);
    if (is_read > 0 && work.is_receive)
        is_read = 0; /* a chain is of the send queue */
    PyObject *request = is_read > 0 ? add(chain, &work) : is_read < 0 ? NULL : Py_NewRef(Py_None);
    return engine_end_reading(&work, request);
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
   works of the requests that Python made. Returns the first work; NULL: there was no memory. */
static struct ibv_send_wr *link_all(ChainPort *chain, struct ibv_send_wr *general,
                                    const PyObject *run)
{
    struct ibv_send_wr *first = NULL, **place = &first;

    for (Py_ssize_t i = 0; i < chain->count; i++) {
        struct engine_collected *collected = &chain->collected[i];
        Request *request = collected->request;
        struct ibv_send_wr *work = collected->is_general ? general++ : &collected->work;
        if (!collected->is_general) {
            work->sg_list = work->num_sge > 1 ? chain->sges + collected->first : &collected->sge;
            if (work->send_flags & IBV_SEND_INLINE)
                collected->sge.addr += (uintptr_t)chain->bytes;
        }
        if (!engine_put_in_flight(chain->port, request))
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
        count += chain->collected[i].is_general != 0;
    return count;
}

/*
 * Post the chain once; it is not empty. `works` and `sges` are of the requests that Python made.
 * Sets `error` to an errno. -1: an exception is set; unless is_posted is set as well, the chain is as
 * before. If the device refused requests, an interrupt stays kept: they have to fail first.
 */
static int post(ChainPort *chain, const void *works, const char *sges, size_t size, int *error)
{
    unsigned int count = count_general(chain);
    char was_over = chain->over;

    /* First: making the list can run the program's code, which might add to the chain. */
    chain->over = chain->is_posted = 1;
    PyObject *run = chain->signal_last_only ? list_requests(chain) : NULL;
    if (chain->signal_last_only && !run) {
        chain->over = was_over;
        chain->is_posted = 0;
        return -1;
    }
    if (run)
        set_runs(chain, run);
    /* The program's code may have closed the queue pair. From here to the post it does not run. */
    if (!engine_usable(chain->port, chain->port->ready)) {
        Py_XDECREF(run);
        *error = ENOTCONN;
        return 0;
    }
    struct ibv_send_wr *general = NULL;
    if (count)
        general = engine_path->fill_sends(works, count, sges, size, error);
    if (!*error)
        *error = give_to_device(chain, general, run);
    free(general);
    Py_XDECREF(run);
    forget_parts(chain);
    engine_watch_over(chain->port->drain);
    return *error ? 0 : engine_interrupted();
}

static PyObject *chain_post(ChainPort *chain, PyObject *args)
{
    unsigned long long works = 0;
    const char *sges = "";
    Py_ssize_t size = 0;
    int error = 0;

    if (!PyArg_ParseTuple(args, "|Ky#", &works, &sges, &size))
        return NULL;
    if (!chain->count || chain->is_posted || (count_general(chain) && !works)) {
        PyErr_SetString(PyExc_ValueError, "a chain is posted once, and must not be empty");
        return NULL;
    }
    return post(chain, (const void *)(uintptr_t)works, sges, (size_t)size, &error)
               ? NULL
               : PyLong_FromLong(error);
}

PyObject *engine_end_chain(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    static PyObject *name;

    (void)module;
    if (!name)
        name = PyUnicode_InternFromString("_port");
    ChainPort *chain =
        name && count == 4 ? (ChainPort *)PyObject_GetAttr(arguments[0], name) : NULL;
    if (!chain) {
        PyErr_Clear(); /* there was no memory: Python goes on, and fails the requests if it cannot */
        Py_RETURN_FALSE;
    }
    int failed = 0, is_posted = Py_IS_TYPE(chain, &engine_chain_type) && !chain->over &&
                                arguments[2] == Py_None && chain->count && !count_general(chain) &&
                                engine_usable(chain->port, chain->port->ready);
    if (is_posted)
        failed = post(chain, NULL, "", 0, &chain->error);
    if (failed && !chain->is_posted) {
        PyErr_Clear(); /* the same */
        failed = is_posted = 0;
    }
    int is_done = is_posted && !chain->error;
    Py_DECREF(chain);
    return failed ? NULL : PyBool_FromLong(is_done);
}

/* -- the interface for Python --------------------------------------------------------------- */

static PyObject *chain_add(ChainPort *chain, PyObject *request)
{
    if (!Py_IS_TYPE(request, &engine_request_type) || chain->over) {
        PyErr_SetString(PyExc_ValueError,
                        "add() takes a WorkRequest, and the chain must not be over");
        return NULL;
    }
    if (reserve_request(chain))
        return NULL;
    chain->collected[chain->count].request = (Request *)Py_NewRef(request);
    chain->collected[chain->count++].is_general = 1;
    Py_RETURN_NONE;
}

static PyObject *chain_requests(ChainPort *chain, PyObject *none)
{
    (void)none;
    return list_requests(chain);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)chain_add, METH_O,
     "add($self, request, /)\n--\n\n"
     "Append a request that Python made."},
    {"requests", (PyCFunction)chain_requests, METH_NOARGS,
     "requests($self, /)\n--\n\n"
     "Return all requests, in order."},
    {"post", (PyCFunction)chain_post, METH_VARARGS,
     "post($self, works=0, sges=b'', /)\n--\n\n"
     "Post all requests, those that Python made with the works at that address. Return\n"
     "an errno. A negative one: the device accepted all, and the doorbell failed."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"over", T_BOOL, offsetof(ChainPort, over), 0, "Whether it collects no more requests."},
    {"signal_last_only", T_BOOL, offsetof(ChainPort, signal_last_only), 0,
     "Whether only the last request is signaled."},
    {"error", T_INT, offsetof(ChainPort, error), 0,
     "The errno of a post at the end of the block, as of `post`."},
    {"count", T_PYSSIZET, offsetof(ChainPort, count), READONLY, "The number of requests."},
    {"posted", T_PYSSIZET, offsetof(ChainPort, posted), READONLY,
     "The number of requests that the device accepted."},
    {NULL, 0, 0, 0, NULL},
};

/* The checks of Python's require_usable, in one call. */
static PyObject *chain_usable(ChainPort *chain, void *closure)
{
    (void)closure;
    return PyBool_FromLong(engine_usable(chain->port, chain->port->ready));
}

static PyGetSetDef properties[] = {
    {"usable", (getter)chain_usable, NULL, "Whether requests may be posted on the queue pair.",
     NULL},
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
