/*
 * A shared receive queue's port: posts plain receives, each of one registered part, as one chain.
 * If one of them is not plain, none is posted, and all take the general path
 * (_connection/shared_receive.py).
 */
#include "engine.h"

#include <stdlib.h>

/* One receive of a chain. */
struct shared_receive {
    struct ibv_recv_wr work;
    struct ibv_sge sge;
    Request *request;
};

/* Undo all requests that were made. The exception that is set stays set. */
static void take_all_back(Port *port, struct shared_receive *all, Py_ssize_t made)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    for (Py_ssize_t i = 0; i < made; i++)
        engine_take_back(port, all[i].request);
    PyErr_Restore(type, value, trace);
}

/* Check again, because making the requests can run the collector, and so the program's code. */
static int are_still_plain(const Port *port, const struct shared_receive *all, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (!all[i].request->part->region->usable)
            return 0;
    return engine_usable(port, port->can_receive);
}

/* Make the requests, each with its slot, and hold their memory. 1: done; 0: one is not plain, or
   there are too few slots; -1: an exception. Sets *made to the number of requests made. */
static int make_all(Port *port, PyObject *parts, struct shared_receive *all, Py_ssize_t *made)
{
    for (*made = 0; *made < PyList_GET_SIZE(parts); ++*made) {
        struct shared_receive *one = &all[*made];
        struct engine_plain plain;
        PyObject *part = PyList_GET_ITEM(parts, *made);
        int is_plain = engine_read(port, ENGINE_RECEIVE, &part, &plain);
        if (is_plain <= 0)
            return is_plain;
        if (!engine_take_slot(port->receives))
            return 0;
        one->request = engine_plain_request(port, &plain, 1);
        if (!one->request)
            return -1;
        one->sge = plain.sge;
        one->work = (struct ibv_recv_wr){.sg_list = &one->sge, .num_sge = 1};
    }
    return 1;
}

/* Enter the requests before the device gets them. Returns -1 with an exception. */
static int enter_all(Port *port, struct shared_receive *all, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Request *request = all[i].request;
        request->wr_id = engine_table_add(port->drain->table, (PyObject *)request);
        if (!request->wr_id)
            return -1;
        engine_enter(port->open, request);
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
    int error = abs(engine_path->post_receives(NULL, port->shared, &all->work, &refused));
    for (*taken = 0; *taken < count && &all[*taken].work != refused; ++*taken)
        ;
    for (Py_ssize_t i = *taken; i < count; i++)
        engine_take_back(port, all[i].request);
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
    int is_plain = make_all(port, parts, all, &made);
    PyObject *list = is_plain > 0 ? list_all(all, count) : NULL, *result = NULL;

    if (is_plain > 0 && (!list || enter_all(port, all, made)))
        is_plain = -1;
    if (is_plain > 0 && !are_still_plain(port, all, count))
        is_plain = 0;
    if (is_plain > 0) {
        int error = give_to_device(port, all, made, &taken);
        result = answer(Py_NewRef(list), error, taken);
    } else {
        take_all_back(port, all, made);
        result = is_plain ? NULL : Py_NewRef(Py_None);
    }
    Py_XDECREF(list);
    for (Py_ssize_t i = 0; i < made; i++)
        Py_DECREF(all[i].request);
    return result;
}

static PyObject *shared_post(Port *port, PyObject *given)
{
    if (!port->shared || !engine_usable(port, port->can_receive) || !PyList_CheckExact(given))
        Py_RETURN_NONE;
    /* A copy, which no other code changes. */
    PyObject *parts = PyList_GetSlice(given, 0, PyList_GET_SIZE(given));
    if (!parts)
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(parts);
    if (count > port->receives->free) {
        port->drain->fruitless = 0;     /* do not skip this poll */
        port->drain->look(port->drain); /* requests that no task awaits may have completed */
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

static PyObject *shared_open(Port *port, PyObject *args)
{
    unsigned long long queue;
    if (!PyArg_ParseTuple(args, "KK", &queue, &port->max_message))
        return NULL;
    port->shared = (struct ibv_srq *)(uintptr_t)queue;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open_shared", (PyCFunction)shared_open, METH_VARARGS,
     "open_shared($self, queue, max_message, /)\n--\n\n"
     "There is a queue, at that address."},
    {"post", (PyCFunction)shared_post, METH_O,
     "post($self, parts, /)\n--\n\n"
     "Post a receive for each slice in the list, as one chain. Return the requests;\n"
     "(errno, those that were posted); or None: they are not plain, or too many."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject engine_shared_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.SharedPort",
    .tp_basicsize = sizeof(Port),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_base = &engine_port_type, /* with its functions for the collector */
    .tp_methods = methods,
};
