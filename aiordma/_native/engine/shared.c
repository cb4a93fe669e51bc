/*
 * Posts receives of registered memory as one chain, on a shared receive queue or on a queue pair. If
 * it cannot handle one of them, it posts none, and all take the general path (`post` of
 * _connection/shared_endpoint.py).
 */
#include "shared.h"
#include "drain.h"
#include "open_requests.h"
#include "reading.h"
#include "request.h"

#include <stdlib.h>
#include <structmember.h>

/* One receive of a chain. */
struct shared_receive {
    struct ibv_recv_wr work;
    struct ibv_sge sge; /* of a receive of one part */
    struct ibv_sge *sges;
    Request *request;
};

/* Undo all requests that were made. The exception that is set stays set. */
static void take_all_back(struct shared_receive *all, Py_ssize_t made)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    for (Py_ssize_t i = 0; i < made; i++)
        engine_take_back(all[i].request);
    PyErr_Restore(type, value, trace);
}

/* Check again, because making the requests can run the collector, and so the program's code. */
static int are_still_usable(const Port *port, const struct shared_receive *all, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (!engine_holds_usable(all[i].request))
            return 0;
    return engine_usable(port, port->can_receive);
}

/* Copy the sges to the receive. Returns -1 with an exception. */
static int keep_sges(struct shared_receive *one, const struct engine_work *work)
{
    one->work = (struct ibv_recv_wr){.sg_list = &one->sge, .num_sge = work->count};
    if (work->count)
        one->sge = work->sges[0];
    if (work->count < 2)
        return 0;
    one->sges = PyMem_Malloc((size_t)work->count * sizeof(*one->sges));
    if (!one->sges) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(one->sges, work->sges, (size_t)work->count * sizeof(*one->sges));
    one->work.sg_list = one->sges;
    return 0;
}

/* Make the request of one receive, with its slot, and hold its memory. 1: done; 0: the port cannot
   handle it, or no slot is free; -1: an exception. */
static int make_one(Port *port, PyObject *memory, struct shared_receive *one)
{
    PyObject *given[ENGINE_ARGUMENTS] = {[ENGINE_LOCAL] = memory};
    int is_list = PyList_CheckExact(memory) || PyTuple_CheckExact(memory);
    struct engine_work work;
    int is_read = engine_read(port, is_list ? ENGINE_RECEIVEV : ENGINE_RECEIVE, given, &work);

    if (is_read > 0 && keep_sges(one, &work))
        is_read = -1;
    if (is_read > 0 && !engine_take_slot(port->receives))
        is_read = 0;
    if (is_read > 0) {
        one->request = engine_work_request(port, &work);
        is_read = one->request ? 1 : -1;
    }
    engine_release_work(&work);
    return is_read;
}

/* Make all requests. Returns as make_one, and sets *made to the number of requests made. */
static int make_all(Port *port, PyObject *parts, struct shared_receive *all, Py_ssize_t *made)
{
    for (*made = 0; *made < PyList_GET_SIZE(parts); ++*made) {
        int is_made = make_one(port, PyList_GET_ITEM(parts, *made), &all[*made]);
        if (is_made <= 0)
            return is_made;
    }
    return 1;
}

/* Enter the requests before the device gets them. Returns -1 with an exception. */
static int enter_all(Port *port, struct shared_receive *all, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Request *request = all[i].request;
        if (!engine_put_in_flight(port, request))
            return -1;
        all[i].work.wr_id = request->wr_id;
        all[i].work.next = i + 1 < count ? &all[i + 1].work : NULL;
    }
    return 0;
}

/* Post the chain, and return the errno. The requests from *taken on were refused: undo them. */
static int give_to_device(Port *port, struct shared_receive *all, Py_ssize_t count,
                          Py_ssize_t *taken)
{
    struct ibv_recv_wr *refused;

    port->drain->crossings++;
    int error =
        abs(engine_path->post_receives(port->queue_pair, port->shared, &all->work, &refused));
    for (*taken = 0; *taken < count && &all[*taken].work != refused; ++*taken)
        ;
    for (Py_ssize_t i = *taken; i < count; i++)
        engine_take_back(all[i].request);
    engine_watch_over(port->drain);
    return error;
}

/* The list for Python is made before the post, because after the post nothing may fail. */
static PyObject *list_all(const struct shared_receive *all, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(all[i].request));
    return list;
}

/* The result for Python. Takes the reference to the list. */
static PyObject *answer(PyObject *list, int error, Py_ssize_t taken)
{
    if (!error)
        return list;
    if (PyList_SetSlice(list, taken, PyList_GET_SIZE(list), NULL)) {
        Py_DECREF(list);
        return NULL;
    }
    return Py_BuildValue("iN", error, list);
}

static PyObject *post_all(Port *port, PyObject *parts, struct shared_receive *all)
{
    Py_ssize_t made, taken, count = PyList_GET_SIZE(parts);
    int is_made = make_all(port, parts, all, &made);
    PyObject *list = is_made > 0 ? list_all(all, count) : NULL, *result = NULL;

    if (is_made > 0 && (!list || enter_all(port, all, made)))
        is_made = -1;
    if (is_made > 0 && !are_still_usable(port, all, count))
        is_made = 0;
    if (is_made > 0) {
        int error = give_to_device(port, all, made, &taken);
        result = answer(Py_NewRef(list), error, taken);
    } else {
        take_all_back(all, made);
        result = is_made ? NULL : Py_NewRef(Py_None);
    }
    Py_XDECREF(list);
    for (Py_ssize_t i = 0; i < made; i++)
        Py_DECREF(all[i].request);
    for (Py_ssize_t i = 0; i < count; i++)
        PyMem_Free(all[i].sges);
    return result;
}

PyObject *engine_receive_all(Port *port, PyObject *given)
{
    if (!engine_usable(port, port->can_receive) || !PyList_CheckExact(given))
        Py_RETURN_NONE;
    /* A copy, which no other code changes. */
    PyObject *parts = PyList_GetSlice(given, 0, PyList_GET_SIZE(given));
    if (!parts)
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(parts);
    if (count > port->receives->free) {
        port->drain->fruitless = 0;         /* do not skip this poll */
        port->drain->poll_now(port->drain); /* requests that no task awaits may have completed */
        if (engine_interrupted()) {
            Py_DECREF(parts);
            return NULL;
        }
    }
    if (!count || count > port->receives->free) {
        Py_DECREF(parts);
        Py_RETURN_NONE;
    }
    struct shared_receive *all = PyMem_Calloc((size_t)count, sizeof(*all));
    PyObject *result = all ? post_all(port, parts, all) : PyErr_NoMemory();
    PyMem_Free(all);
    Py_DECREF(parts);
    if (engine_interrupted())
        Py_CLEAR(result);
    return result;
}

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner", "drain", "receives", "posted", "loop", "domain", NULL};
    PyObject *owner, *drain, *receives, *open, *loop, *domain;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!OO", names, &owner, &engine_drain_type,
                                     &drain, &engine_slots_type, &receives,
                                     &engine_open_requests_type, &open, &loop, &domain))
        return NULL;
    return (PyObject *)engine_new_port(type, owner, drain, NULL, receives, open, loop, domain);
}

static PyObject *shared_open(Port *port, PyObject *args)
{
    unsigned long long queue;
    if (!PyArg_ParseTuple(args, "KKn", &queue, &port->max_message, &port->max_recv_sge))
        return NULL;
    port->shared = (struct ibv_srq *)(uintptr_t)queue;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", (PyCFunction)shared_open, METH_VARARGS,
     "open($self, queue, max_message, max_recv_sge, /)\n--\n\n"
     "Set the shared receive queue, by its address, and its limits."},
    ENGINE_RECEIVE_ALL,
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"can_receive", T_BOOL, offsetof(Port, can_receive), 0, "Whether receives may be posted."},
    {"notifies_owner", T_BOOL, offsetof(Port, notifies_owner), 0,
     "Whether the owner is notified of each completion."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_shared_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.SharedPort",
    .tp_basicsize = sizeof(Port),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = shared_new,
    .tp_dealloc = (destructor)engine_free_port,
    .tp_traverse = (traverseproc)engine_traverse_port,
    .tp_clear = (inquiry)engine_clear_port,
    .tp_methods = methods,
    .tp_members = members,
};
