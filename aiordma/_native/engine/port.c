/* What posting goes through; the types of ports are in post.c and shared.c. */
#include "port.h"

#include <structmember.h>

Port *engine_new_port(PyTypeObject *type, PyObject *owner, PyObject *drain, PyObject *sends,
                      PyObject *receives, PyObject *open, PyObject *loop, PyObject *domain)
{
    Port *port = (Port *)type->tp_alloc(type, 0);
    if (!port)
        return NULL;
    port->owner = Py_NewRef(owner);
    port->drain = (Drain *)Py_NewRef(drain);
    port->sends = (Slots *)Py_XNewRef(sends);
    port->receives = (Slots *)Py_NewRef(receives);
    port->open = (OpenRequests *)Py_NewRef(open);
    port->loop = loop == Py_None ? NULL : Py_NewRef(loop);
    port->domain = Py_NewRef(domain);
    engine_settle(port->drain);
    return port;
}

int engine_traverse_port(Port *port, visitproc visit, void *arg)
{
    Py_VISIT(port->owner);
    Py_VISIT(port->drain);
    Py_VISIT(port->sends);
    Py_VISIT(port->receives);
    Py_VISIT(port->open);
    Py_VISIT(port->loop);
    Py_VISIT(port->domain);
    Py_VISIT(port->pool);
    Py_VISIT(port->flushed);
    Py_VISIT(port->remote);
    Py_VISIT(port->senders);
    return engine_traverse_destinations(&port->destinations, visit, arg);
}

int engine_clear_port(Port *port)
{
    Py_CLEAR(port->flushed);
    Py_CLEAR(port->remote);
    Py_CLEAR(port->pool);
    Py_CLEAR(port->senders);
    engine_forget_destinations(&port->destinations);
    return 0;
}

void engine_free_port(Port *port)
{
    PyObject_GC_UnTrack(port);
    engine_clear_port(port);
    Py_XDECREF(port->owner);
    Py_XDECREF(port->drain);
    Py_XDECREF(port->sends);
    Py_XDECREF(port->receives);
    Py_XDECREF(port->open);
    Py_XDECREF(port->loop);
    Py_XDECREF(port->domain);
    Py_TYPE(port)->tp_free((PyObject *)port);
}

void engine_doorbell_failed(Port *port, int error)
{
    PyObject *number = PyLong_FromLong(error);
    PyObject *arguments[] = {port->owner, number};
    PyObject *result =
        number ? engine_call_method_alone(engine_python.doorbell_failed, arguments, 2) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(result);
    if (!result)
        engine_log("ending %r failed", port->owner);
}

/* -- slots of a work queue ---------------------------------------------------------------- */

static PyMemberDef slots_members[] = {
    {"total", T_PYSSIZET, offsetof(Slots, total), 0, "The queue's depth."},
    {"free", T_PYSSIZET, offsetof(Slots, free), 0,
     "The number of free slots; -1: none, and the reserved one is taken."},
    {"waiting", T_PYSSIZET, offsetof(Slots, waiting), 0,
     "The number of tasks that wait for a slot."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_slots_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Slots",
    .tp_basicsize = sizeof(Slots),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = slots_members,
};

void engine_grant_slot(Slots *slots)
{
    PyObject *result = engine_call_method_alone(engine_python.grant, (PyObject **)&slots, 1);
    Py_XDECREF(result);
    if (!result)
        engine_log("giving back a slot failed", (PyObject *)slots);
}
