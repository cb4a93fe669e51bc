/*
 * A queue pair's port: posts a request in one call. If the port returns None, it cannot handle the
 * request, and the caller takes the general path through Python (_connection/posts.py), which also
 * raises the errors.
 */
#include "post.h"
#include "drain.h"
#include "open_requests.h"
#include "reading.h"
#include "request.h"
#include "shared.h"
#include "datagrams.h"
#include "window.h"

#include <structmember.h>

static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner",  "drain", "sends",  "receives",
                            "posted", "loop",  "domain", NULL};
    PyObject *owner, *drain, *sends, *receives, *open, *loop, *domain;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!O!OO", names, &owner, &engine_drain_type,
                                     &drain, &engine_slots_type, &sends, &engine_slots_type,
                                     &receives, &engine_open_requests_type, &open, &loop, &domain))
        return NULL;
    return (PyObject *)engine_new_port(type, owner, drain, sends, receives, open, loop, domain);
}

/* -- posting ------------------------------------------------------------------------------ */

enum { MOST_GATHERED = 4096 }; /* bytes: the largest max_inline_data of the options */

/* Post to the device. 0: the device accepted the request; a positive errno: it refused it; a
   negative errno: it accepted it, and the doorbell failed. */
static int give_to_device(Port *port, struct engine_work *work, uint64_t wr_id)
{
    char gathered[MOST_GATHERED];

    if (work->is_receive) {
        struct ibv_recv_wr receive = {
            .wr_id = wr_id, .sg_list = work->sges, .num_sge = work->count};
        struct ibv_recv_wr *refused;
        return abs(engine_path->post_receives(port->queue_pair, NULL, &receive, &refused));
    }
    if (work->copying == ENGINE_INLINE && work->count > 1 && work->length <= MOST_GATHERED) {
        engine_gather(work, gathered);
        work->sges[0] = (struct ibv_sge){(uintptr_t)gathered, (uint32_t)work->length, 0};
        work->count = 1;
    }
    struct ibv_send_wr send = engine_send_wr(work), *refused;
    send.wr_id = wr_id;
    send.sg_list = work->sges;
    send.send_flags |= IBV_SEND_SIGNALED;
    return engine_path->post_sends(port->queue_pair, &send, &refused);
}

/* The device refused the request: undo it, and let Python raise the error. */
static PyObject *refuse(Port *port, Request *request, int error)
{
    engine_take_back(request);
    PyObject *number = PyLong_FromLong(error);
    if (!number)
        return NULL;
    PyObject *arguments[] = {port->owner, number, request->is_receive ? Py_True : Py_False};
    PyObject *result = engine_call_method_alone(engine_python.post_refused, arguments, 3);
    Py_DECREF(number);
    if (result) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "a refused post was not explained");
    }
    return NULL;
}

static PyObject *post(Port *port, struct engine_work *work)
{
    Slots *slots = work->is_receive ? port->receives : port->sends;
    Drain *drain = port->drain;

    if (!engine_take_slot(slots)) {
        drain->fruitless = 0;   /* do not skip this poll */
        drain->poll_now(drain); /* requests that no task awaits may have completed */
        if (engine_interrupted())
            return NULL;
        if (!engine_take_slot(slots))
            Py_RETURN_NONE; /* the general path raises, or waits */
    }
    Request *request = engine_work_request(port, work);
    if (!request)
        return NULL;
    int is_usable = engine_is_still_usable(port, work);
    /* Enter it before the device gets it. Only the device's refusal removes it again. */
    if (!is_usable || !engine_put_in_flight(port, request))
        return engine_withdraw(request, is_usable);
    drain->crossings++;
    int error = give_to_device(port, work, request->wr_id);
    if (error > 0) {
        refuse(port, request, error);
        Py_DECREF(request);
        return NULL;
    }
    if (work->window)
        engine_note_window(work, request);
    if (error < 0)
        engine_doorbell_failed(port, -error);
    engine_watch_over(drain);
    if (!work->has_header)
        return (PyObject *)request;
    PyObject *receive = Py_NewRef(request->subject);
    Py_DECREF(request);
    return receive;
}

PyObject *engine_post(Port *port, enum engine_kind kind, PyObject *const *given)
{
    struct engine_work work;

    if (!port->queue_pair)
        Py_RETURN_NONE;
    int is_read = engine_read(port, kind, given, &work);
    PyObject *request = is_read > 0 ? post(port, &work) : is_read < 0 ? NULL : Py_NewRef(Py_None);
    return engine_end_reading(&work, request);
}

/* -- the interface for Python --------------------------------------------------------------- */

#define KIND(constant, name, opcode, parameters)                                                  \
    static PyObject *port_##name(Port *port, PyObject *const *arguments, Py_ssize_t count,        \
                                 PyObject *keywords)                                              \
    {                                                                                             \
        PyObject *given[ENGINE_ARGUMENTS];                                                        \
        if (engine_arguments(ENGINE_##constant, arguments, count, keywords, given))               \
            return engine_post(port, ENGINE_##constant, given);                                   \
        return PyErr_Format(PyExc_TypeError, #name "(): the arguments do not fit the signature"); \
    }
ENGINE_EACH_KIND(KIND)
#undef KIND

static PyObject *port_set_peer(Port *port, PyObject *args)
{
    struct engine_destination to;
    unsigned long long address;

    if (!PyArg_ParseTuple(args, "OO!KII", &to.peer, &engine_handle_type, &to.handle, &address,
                          &to.qpn, &to.qkey))
        return NULL;
    to.address_handle = (struct ibv_ah *)(uintptr_t)address;
    if (engine_add_destination(&port->destinations, &to))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *port_set_senders(Port *port, PyObject *senders)
{
    if (!PyObject_TypeCheck(senders, &engine_senders_type)) {
        PyErr_SetString(PyExc_TypeError, "set_senders() takes Senders");
        return NULL;
    }
    Py_XSETREF(port->senders, (Senders *)Py_NewRef(senders));
    Py_RETURN_NONE;
}

static PyObject *port_open(Port *port, PyObject *args)
{
    unsigned long long queue_pair, max_message;
    Py_ssize_t max_inline, max_send_sge, max_recv_sge, max_read_sge;
    PyObject *pool;
    if (!PyArg_ParseTuple(args, "KKnnnnO!", &queue_pair, &max_message, &max_inline, &max_send_sge,
                          &max_recv_sge, &max_read_sge, &engine_pool_type, &pool))
        return NULL;
    Py_XSETREF(port->pool, (Pool *)Py_NewRef(pool));
    port->max_message = port->max_sent = max_message;
    port->max_inline = max_inline;
    port->max_send_sge = max_send_sge;
    port->max_recv_sge = max_recv_sge;
    port->max_read_sge = max_read_sge < max_send_sge ? max_read_sge : max_send_sge;
    port->queue_pair = (struct ibv_qp *)(uintptr_t)queue_pair;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
#define KIND(constant, name, opcode, parameters)                                     \
    {#name, (PyCFunction)(void (*)(void))port_##name, METH_FASTCALL | METH_KEYWORDS, \
     #name "($self, " parameters ")\n--\n\nPost the request. None: take the general path."},
    ENGINE_EACH_KIND(KIND)
#undef KIND
        ENGINE_RECEIVE_ALL,
    {"open", (PyCFunction)port_open, METH_VARARGS,
     "open($self, queue_pair, max_message, max_inline, max_send_sge, max_recv_sge,\n"
     "     max_read_sge, pool, /)\n--\n\n"
     "Set the queue pair, by its address, its limits, and the pool of blocks."},
    {"set_peer", (PyCFunction)port_set_peer, METH_VARARGS,
     "set_peer($self, peer, handle, address_handle, qpn, qkey, /)\n--\n\n"
     "Remember a peer, by its identity, for the next datagrams: its address handle, with the\n"
     "address of the struct ibv_ah, its queue pair number and its qkey."},
    {"set_senders", (PyCFunction)port_set_senders, METH_O,
     "set_senders($self, senders, /)\n--\n\n"
     "Set what finds the senders of datagrams that arrive."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"ready", T_BOOL, offsetof(Port, ready), 0, "Whether sends may be posted."},
    {"flushed", T_OBJECT_EX, offsetof(Port, flushed), 0,
     "The error of flushed receives that no program sees: the cause of the end."},
    {"can_send_datagrams", T_BOOL, offsetof(Port, can_send_datagrams), 0,
     "Whether datagrams may be posted."},
    {"max_sent", T_ULONGLONG, offsetof(Port, max_sent), 0,
     "The length of the longest message that the peer can receive, as far as it is known."},
    {"max_datagram", T_ULONGLONG, offsetof(Port, max_datagram), 0,
     "The length of the longest datagram."},
    {"can_receive", T_BOOL, offsetof(Port, can_receive), 0, "Whether receives may be posted."},
    {"can_read", T_BOOL, offsetof(Port, can_read), 0, "Whether READs may be posted."},
    {"can_atomics", T_BOOL, offsetof(Port, can_atomics), 0, "Whether atomics may be posted."},
    {"can_immediate", T_BOOL, offsetof(Port, can_immediate), 0,
     "Whether requests may carry immediate data."},
    {"can_invalidate", T_BOOL, offsetof(Port, can_invalidate), 0,
     "Whether messages may invalidate an rkey."},
    {"can_bind", T_BOOL, offsetof(Port, can_bind), 0, "Whether windows may be bound."},
    {"has_pooled_receives", T_BOOL, offsetof(Port, has_pooled_receives), 0,
     "Whether its receives are pooled receives for messages, not the program's own."},
    {"notifies_owner", T_BOOL, offsetof(Port, notifies_owner), 0,
     "Whether the owner is notified of each completion."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_port_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Port",
    .tp_basicsize = sizeof(Port),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = port_new,
    .tp_dealloc = (destructor)engine_free_port,
    .tp_traverse = (traverseproc)engine_traverse_port,
    .tp_clear = (inquiry)engine_clear_port,
    .tp_methods = methods,
    .tp_members = members,
};
