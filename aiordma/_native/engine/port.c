/*
 * A queue pair's port: posts a plain request in one call. A plain request is a message, a receive,
 * a READ or a WRITE of registered memory, or of bytes that go inline. For all other requests the
 * port returns None, and the caller takes the general path through Python
 * (_endpoint/work_queues.py), which also raises the errors.
 */
#include "engine.h"

#include <structmember.h>

static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner", "drain", "sends", "receives", "open", "loop", "domain", NULL};
    PyObject *owner, *drain, *sends, *receives, *open, *loop, *domain;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!O!OO", names, &owner, &engine_drain_type,
                                     &drain, &engine_slots_type, &sends, &engine_slots_type,
                                     &receives, &engine_open_type, &open, &loop, &domain))
        return NULL;
    Port *port = (Port *)type->tp_alloc(type, 0);
    if (!port)
        return NULL;
    port->owner = Py_NewRef(owner);
    port->drain = (Drain *)Py_NewRef(drain);
    port->sends = (Slots *)Py_NewRef(sends);
    port->receives = (Slots *)Py_NewRef(receives);
    port->open = (OpenRequests *)Py_NewRef(open);
    port->loop = loop == Py_None ? NULL : Py_NewRef(loop);
    port->domain = Py_NewRef(domain);
    port->process = engine_process();
    port->thread = PyThread_get_thread_ident();
    return (PyObject *)port;
}

static int port_traverse(Port *port, visitproc visit, void *arg)
{
    Py_VISIT(port->owner);
    Py_VISIT(port->drain);
    Py_VISIT(port->sends);
    Py_VISIT(port->receives);
    Py_VISIT(port->open);
    Py_VISIT(port->loop);
    Py_VISIT(port->domain);
    Py_VISIT(port->remote);
    return 0;
}

static int port_clear(Port *port)
{
    Py_CLEAR(port->remote);
    return 0;
}

static void port_dealloc(Port *port)
{
    PyObject_GC_UnTrack(port);
    port_clear(port);
    Py_XDECREF(port->owner);
    Py_XDECREF(port->drain);
    Py_XDECREF(port->sends);
    Py_XDECREF(port->receives);
    Py_XDECREF(port->open);
    Py_XDECREF(port->loop);
    Py_XDECREF(port->domain);
    Py_TYPE(port)->tp_free((PyObject *)port);
}

/* -- posting ------------------------------------------------------------------------------ */

/* Post to the device. 0: the device accepted the request; a positive errno: it refused it; a
   negative errno: it accepted it, and the doorbell failed. */
static int give_to_device(Port *port, const struct engine_plain *plain, uint64_t wr_id,
                          int is_receive)
{
    struct ibv_sge sge = plain->sge;

    if (is_receive) {
        struct ibv_recv_wr receive = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *none;
        return abs(engine_path->post_receives(port->queue_pair, NULL, &receive, &none));
    }
    struct ibv_send_wr send = {
        .wr_id = wr_id,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = plain->opcode,
        .send_flags = plain->flags | IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = plain->remote_address, .rkey = plain->rkey},
    };
    struct ibv_send_wr *refused;
    return engine_path->post_sends(port->queue_pair, &send, &refused);
}

/* The device refused the request: undo it, and let Python raise the error. */
static PyObject *refuse(Port *port, Request *request, int error)
{
    engine_take_back(port, request);
    PyObject *number = PyLong_FromLong(error);
    if (!number)
        return NULL;
    PyObject *arguments[] = {port->owner, number, request->is_receive ? Py_True : Py_False};
    PyObject *result = PyObject_VectorcallMethod(engine_given.post_refused, arguments, 3, NULL);
    Py_DECREF(number);
    if (result) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "a refused post was not explained");
    }
    return NULL;
}

/* The device accepted the request, but the doorbell failed: the device may still execute it, so the
   queue pair has to end. */
static void doorbell_failed(Port *port, int error)
{
    PyObject *number = PyLong_FromLong(error);
    PyObject *result =
        number ? PyObject_CallMethodOneArg(port->owner, engine_given.doorbell_failed, number)
               : NULL;
    Py_XDECREF(number);
    Py_XDECREF(result);
    if (!result)
        engine_log("ending %r failed", port->owner);
}

static PyObject *post(Port *port, const struct engine_plain *plain, int is_receive)
{
    Slots *slots = is_receive ? port->receives : port->sends;
    Drain *drain = port->drain;

    if (!engine_take_slot(slots)) {
        drain->fruitless = 0; /* do not skip this poll */
        drain->look(drain);   /* requests that no task awaits may have completed */
        if (engine_interrupted())
            return NULL;
        if (!engine_take_slot(slots))
            Py_RETURN_NONE; /* the general path raises, or waits */
    }
    Request *request = engine_plain_request(port, plain, is_receive);
    if (!request)
        return NULL;
    int is_usable = engine_is_still_usable(port, plain->part, is_receive);
    /* Enter it before the device gets it. Only the device's refusal removes it again. */
    if (is_usable)
        request->wr_id = engine_table_add(drain->table, (PyObject *)request);
    if (!request->wr_id)
        return engine_withdraw(port, request, is_usable);
    engine_enter(port->open, request);
    drain->crossings++;
    int error = give_to_device(port, plain, request->wr_id, is_receive);
    if (error > 0) {
        refuse(port, request, error);
        Py_DECREF(request);
        return NULL;
    }
    if (error < 0)
        doorbell_failed(port, -error);
    engine_watch_over(drain);
    return (PyObject *)request;
}

PyObject *engine_post(Port *port, enum engine_kind kind, PyObject *const *arguments)
{
    struct engine_plain plain;

    if (kind == ENGINE_RECEIVE && !port->queue_pair)
        Py_RETURN_NONE;
    int is_plain = engine_read(port, kind, arguments, &plain);
    PyObject *request = is_plain > 0   ? post(port, &plain, kind == ENGINE_RECEIVE)
                        : is_plain < 0 ? NULL
                                       : Py_NewRef(Py_None);
    return engine_end_reading(&plain, request);
}

/* -- the interface for Python --------------------------------------------------------------- */

static PyObject *port_send(Port *port, PyObject *local)
{
    return engine_post(port, ENGINE_SEND, &local);
}

static PyObject *port_receive(Port *port, PyObject *local)
{
    return engine_post(port, ENGINE_RECEIVE, &local);
}

static PyObject *port_write(Port *port, PyObject *const *arguments, Py_ssize_t count)
{
    return engine_has_two_sides(count) ? engine_post(port, ENGINE_WRITE, arguments) : NULL;
}

static PyObject *port_read(Port *port, PyObject *const *arguments, Py_ssize_t count)
{
    return engine_has_two_sides(count) ? engine_post(port, ENGINE_READ, arguments) : NULL;
}

static PyObject *port_open(Port *port, PyObject *args)
{
    unsigned long long queue_pair, max_message;
    Py_ssize_t max_inline;
    if (!PyArg_ParseTuple(args, "KKn", &queue_pair, &max_message, &max_inline))
        return NULL;
    port->max_message = max_message;
    port->max_inline = max_inline;
    port->queue_pair = (struct ibv_qp *)(uintptr_t)queue_pair;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", (PyCFunction)port_open, METH_VARARGS,
     "open($self, queue_pair, max_message, max_inline, /)\n--\n\n"
     "There is a queue pair, at that address."},
    {"send", (PyCFunction)port_send, METH_O,
     "send($self, data, /)\n--\n\n"
     "Post a message; None: it is not a plain one."},
    {"receive", (PyCFunction)port_receive, METH_O,
     "receive($self, memory, /)\n--\n\n"
     "Post a receive; None: it is not a plain one."},
    {"write", (PyCFunction)(void (*)(void))port_write, METH_FASTCALL,
     "write($self, data, remote, /)\n--\n\n"
     "Post a WRITE; None: it is not a plain one."},
    {"read", (PyCFunction)(void (*)(void))port_read, METH_FASTCALL,
     "read($self, remote, memory, /)\n--\n\n"
     "Post a READ; None: it is not a plain one."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"ready", T_BOOL, offsetof(Port, ready), 0, "sends may be posted"},
    {"can_receive", T_BOOL, offsetof(Port, can_receive), 0, "receives may be posted"},
    {"can_read", T_BOOL, offsetof(Port, can_read), 0, "READs were agreed on"},
    {"feeds", T_BOOL, offsetof(Port, feeds), 0, "its receives are a queue of messages'"},
    {"tells", T_BOOL, offsetof(Port, tells), 0, "the owner wants to hear of each end"},
    {"thread", T_ULONG, offsetof(Port, thread), 0, "the only thread that may post"},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_port_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Port",
    .tp_basicsize = sizeof(Port),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = port_new,
    .tp_dealloc = (destructor)port_dealloc,
    .tp_traverse = (traverseproc)port_traverse,
    .tp_clear = (inquiry)port_clear,
    .tp_methods = methods,
    .tp_members = members,
};
