/*
 * A queue pair's port: the plain requests (a message, a receive, READ, WRITE) of registered memory,
 * or of bytes that go inline, posted with one call. What is not plain gets None for an answer, and
 * goes the general way, through Python (work_queues.py), which also explains what is refused.
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

static int attribute(PyObject *object, PyObject *name, unsigned long long *value)
{
    PyObject *found = PyObject_GetAttr(object, name);
    PyObject *number = found ? PyNumber_Index(found) : NULL; /* numpy's are no ints */
    Py_XDECREF(found);
    if (!number)
        return -1;
    *value = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *value == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

/* 1: it is plain; 0: it is not; -1: an exception. */
static int read_local(Port *port, struct engine_plain *plain, PyObject *local, int is_target)
{
    if (PyObject_TypeCheck(local, &engine_part_type)) {
        Part *part = (Part *)local;
        RegionBase *region = part->region; /* NULL: a slice without its constructor */
        if (!region || !region->usable || region->domain != port->domain || !part->length ||
            (uint64_t)part->length > port->max_message || (uint64_t)part->length >> 32 ||
            (is_target && !region->writable))
            return 0;
        plain->part = part;
        plain->sge = (struct ibv_sge){part->address, (uint32_t)part->length, part->lkey};
        return 1;
    }
    if (is_target || !PyObject_CheckBuffer(local))
        return 0;
    if (PyObject_GetBuffer(local, &plain->view, PyBUF_SIMPLE)) {
        PyErr_Clear(); /* the general way says what is wrong with it */
        return 0;
    }
    if (!plain->view.len || plain->view.len > port->max_inline) {
        PyBuffer_Release(&plain->view);
        return 0;
    }
    plain->flags |= IBV_SEND_INLINE;
    plain->sge = (struct ibv_sge){(uintptr_t)plain->view.buf, (uint32_t)plain->view.len, 0};
    return 1;
}

/* What most requests aim at is what the one before aimed at. */
static int read_remote(Port *port, struct engine_plain *plain, PyObject *remote)
{
    unsigned long long address = port->remote_address, length = port->remote_length,
                       rkey = port->rkey;

    if (remote != port->remote) {
        if ((PyObject *)Py_TYPE(remote) != engine_given.remote_class)
            return 0;
        if (attribute(remote, engine_given.address, &address) ||
            attribute(remote, engine_given.length, &length) ||
            attribute(remote, engine_given.rkey, &rkey))
            return -1;
        port->remote_address = address;
        port->remote_length = length;
        port->rkey = (unsigned int)rkey;
        /* Freeing the old one may run the program's code, which may post to another one. */
        Py_XSETREF(port->remote, Py_NewRef(remote));
    }
    plain->remote = remote;
    plain->remote_address = address;
    plain->rkey = (unsigned int)rkey;
    return length == plain->sge.length;
}

/* Say what the driver did with it: 0, posted; else refused with an errno; negative: it has it, and
   could not be told. */
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

void engine_take_back(Port *port, Request *request)
{
    if (request->wr_id)
        Py_XDECREF(engine_table_take(port->drain->table, request->wr_id));
    engine_leave(port->open, request);
    engine_drop(request);
    engine_give_slot(request->is_receive ? port->receives : port->sends);
}

/* The device refused it: undo everything, and let Python raise why. */
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

/* The device has it, and could not be told: only the end of the queue pair decides it. */
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

/* Asked again where no more of the program's code can run before the device has the request. What
   was given runs such code as it is read (__index__, buffers), and so does the garbage collector,
   as the request is made; it may close the queue pair, or the region that was not held yet. */
static int is_still_usable(const Port *port, const Part *part, int is_receive)
{
    return engine_usable(port, is_receive ? port->can_receive : port->ready) &&
           (!part || part->region->usable);
}

static PyObject *post(Port *port, const struct engine_plain *plain, int is_receive)
{
    Slots *slots = is_receive ? port->receives : port->sends;
    Drain *drain = port->drain;

    if (!engine_take_slot(slots)) {
        drain->fruitless = 0; /* this look is not one of those that may be left out */
        drain->look(drain);   /* some may have ended, that nobody awaits */
        if (engine_interrupted())
            return NULL;
        if (!engine_take_slot(slots))
            Py_RETURN_NONE; /* the general path raises, or waits */
    }
    Request *request = engine_request(port, plain->operation, plain->sge.length, plain->part,
                                      plain->remote, is_receive);
    if (!request) {
        engine_give_slot(slots);
        return NULL;
    }
    int is_usable = is_still_usable(port, plain->part, is_receive);
    /* Entered before the device can know of it; only its own refusal takes it out again. */
    if (is_usable)
        request->wr_id = engine_table_add(drain->table, (PyObject *)request);
    if (!request->wr_id) {
        engine_take_back(port, request);
        Py_DECREF(request);
        return is_usable ? NULL : Py_NewRef(Py_None); /* the general path says why */
    }
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

static PyObject *finish(Port *port, struct engine_plain *plain, int is_plain, int is_receive)
{
    PyObject *result = is_plain > 0   ? post(port, plain, is_receive)
                       : is_plain < 0 ? NULL
                                      : Py_NewRef(Py_None);
    if (plain->view.obj)
        PyBuffer_Release(&plain->view);
    if (engine_interrupted())
        Py_CLEAR(result);
    return result;
}

static PyObject *names[4];

int engine_read_send(Port *port, struct engine_plain *plain, PyObject *const *arguments)
{
    *plain = (struct engine_plain){.operation = names[0], .opcode = IBV_WR_SEND};
    return engine_usable(port, port->ready) ? read_local(port, plain, arguments[0], 0) : 0;
}

int engine_read_receive(Port *port, struct engine_plain *plain, PyObject *local)
{
    *plain = (struct engine_plain){.operation = names[1]};
    return engine_usable(port, port->can_receive) ? read_local(port, plain, local, 1) : 0;
}

static PyObject *receive(Port *port, PyObject *local)
{
    struct engine_plain plain;
    if (!port->queue_pair)
        Py_RETURN_NONE;
    return finish(port, &plain, engine_read_receive(port, &plain, local), 1);
}

/* Where the port feeds a queue of messages, its receives are not the user's. */
PyObject *engine_port_receive(Port *port, PyObject *const *arguments)
{
    return port->feeds ? Py_NewRef(Py_None) : receive(port, arguments[0]);
}

static int one_sided(Port *port, struct engine_plain *plain, PyObject *local, PyObject *remote,
                     int is_target)
{
    int is_plain = read_local(port, plain, local, is_target);
    return is_plain > 0 ? read_remote(port, plain, remote) : is_plain;
}

int engine_read_write(Port *port, struct engine_plain *plain, PyObject *const *arguments)
{
    *plain = (struct engine_plain){.operation = names[2], .opcode = IBV_WR_RDMA_WRITE};
    return engine_usable(port, port->ready) ? one_sided(port, plain, arguments[0], arguments[1], 0)
                                            : 0;
}

int engine_read_read(Port *port, struct engine_plain *plain, PyObject *const *arguments)
{
    *plain = (struct engine_plain){.operation = names[3], .opcode = IBV_WR_RDMA_READ};
    return engine_usable(port, port->ready && port->can_read)
               ? one_sided(port, plain, arguments[1], arguments[0], 1)
               : 0;
}

PyObject *engine_port_send(Port *port, PyObject *const *arguments)
{
    struct engine_plain plain;
    return finish(port, &plain, engine_read_send(port, &plain, arguments), 0);
}

PyObject *engine_port_write(Port *port, PyObject *const *arguments)
{
    struct engine_plain plain;
    return finish(port, &plain, engine_read_write(port, &plain, arguments), 0);
}

PyObject *engine_port_read(Port *port, PyObject *const *arguments)
{
    struct engine_plain plain;
    return finish(port, &plain, engine_read_read(port, &plain, arguments), 0);
}

static PyObject *port_send(Port *port, PyObject *local)
{
    return engine_port_send(port, &local);
}

static PyObject *two_sides(Port *port, PyObject *const *arguments, Py_ssize_t count,
                           PyObject *(*post)(Port *port, PyObject *const *arguments))
{
    if (count == 2)
        return post(port, arguments);
    PyErr_SetString(PyExc_TypeError, "one-sided operations have two sides");
    return NULL;
}

static PyObject *port_write(Port *port, PyObject *const *arguments, Py_ssize_t count)
{
    return two_sides(port, arguments, count, engine_port_write);
}

static PyObject *port_read(Port *port, PyObject *const *arguments, Py_ssize_t count)
{
    return two_sides(port, arguments, count, engine_port_read);
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
    {"receive", (PyCFunction)receive, METH_O,
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

int engine_port_names(void)
{
    static const char *const texts[] = {"SEND", "RECV", "RDMA_WRITE", "RDMA_READ"};
    for (int i = 0; i < 4; i++)
        if (!names[i] && !(names[i] = PyUnicode_InternFromString(texts[i])))
            return -1;
    return 0;
}
