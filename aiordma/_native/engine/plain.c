/*
 * Plain requests: reads the arguments of a post, and makes the request, whether it is posted
 * (port.c, shared.c) or collected (chain.c).
 */
#include "engine.h"

/* -- reading ------------------------------------------------------------------------------- */

static int attribute(PyObject *object, PyObject *name, unsigned long long *value)
{
    PyObject *found = PyObject_GetAttr(object, name);
    PyObject *number = found ? PyNumber_Index(found) : NULL; /* numpy's integers are no ints */
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
        RegionBase *region = part->region; /* NULL: its constructor did not run */
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
        PyErr_Clear(); /* the general path raises the error */
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

/* Read the target. Most requests have the same target as the request before them. */
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
        /* Freeing the old target may run the program's code, which may post to another target. */
        Py_XSETREF(port->remote, Py_NewRef(remote));
    }
    plain->remote = remote;
    plain->remote_address = address;
    plain->rkey = (unsigned int)rkey;
    return length == plain->sge.length;
}

static int one_sided(Port *port, struct engine_plain *plain, PyObject *local, PyObject *remote,
                     int is_target)
{
    int is_plain = read_local(port, plain, local, is_target);
    return is_plain > 0 ? read_remote(port, plain, remote) : is_plain;
}

static PyObject *operations[4];

int engine_read(Port *port, enum engine_kind kind, PyObject *const *arguments,
                struct engine_plain *plain)
{
    static const enum ibv_wr_opcode opcodes[] = {
        [ENGINE_SEND] = IBV_WR_SEND,
        [ENGINE_WRITE] = IBV_WR_RDMA_WRITE,
        [ENGINE_READ] = IBV_WR_RDMA_READ,
    };
    int may = kind == ENGINE_RECEIVE ? port->can_receive : port->ready;

    *plain = (struct engine_plain){.operation = operations[kind], .opcode = opcodes[kind]};
    if (!engine_usable(port, may))
        return 0;
    switch (kind) {
    case ENGINE_WRITE:
        return one_sided(port, plain, arguments[0], arguments[1], 0);
    case ENGINE_READ:
        return port->can_read ? one_sided(port, plain, arguments[1], arguments[0], 1) : 0;
    default:
        return read_local(port, plain, arguments[0], kind == ENGINE_RECEIVE);
    }
}

PyObject *engine_end_reading(struct engine_plain *plain, PyObject *request)
{
    if (plain->view.obj)
        PyBuffer_Release(&plain->view);
    if (engine_interrupted())
        Py_CLEAR(request);
    return request;
}

int engine_has_two_sides(Py_ssize_t count)
{
    if (count == 2)
        return 1;
    PyErr_SetString(PyExc_TypeError, "one-sided operations have two sides");
    return 0;
}

/* -- the request --------------------------------------------------------------------------- */

Request *engine_plain_request(Port *port, const struct engine_plain *plain, int is_receive)
{
    Request *request = engine_request(port, plain->operation, plain->sge.length, plain->part,
                                      plain->remote, is_receive);

    if (!request)
        engine_give_slot(is_receive ? port->receives : port->sends);
    return request;
}

int engine_is_still_usable(const Port *port, const Part *part, int is_receive)
{
    return engine_usable(port, is_receive ? port->can_receive : port->ready) &&
           (!part || part->region->usable);
}

void engine_take_back(Port *port, Request *request)
{
    if (request->wr_id)
        Py_XDECREF(engine_table_take(port->drain->table, request->wr_id));
    engine_leave(port->open, request);
    engine_drop(request);
    engine_give_slot(request->is_receive ? port->receives : port->sends);
}

PyObject *engine_withdraw(Port *port, Request *request, int has_failed)
{
    engine_take_back(port, request);
    Py_DECREF(request);
    return has_failed ? NULL : Py_NewRef(Py_None); /* the general path raises the error */
}

int engine_plain_names(void)
{
    static const char *const texts[] = {"SEND", "RECV", "RDMA_WRITE", "RDMA_READ"};
    for (int i = 0; i < 4; i++)
        if (!operations[i] && !(operations[i] = PyUnicode_InternFromString(texts[i])))
            return -1;
    return 0;
}
