/*
 * Datagrams: their senders; and what arrives, in pooled receives or in the program's memory. See
 * _datagram/message.py.
 */
#include "datagrams.h"
#include "pool.h"
#include "request_await.h"
#include "request_type.h"

#include <structmember.h>

/* -- the addresses of a received datagram ------------------------------------------------------ */

enum { GRH = 40, GID = 16 };

static const unsigned char ipv4_mapped[GID - 4] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

/* The 20 bytes before an IPv4 header are old bytes of the buffer, and can look like a GRH. So only
   the IPv4 header itself is checked, with its checksum. */
static int is_ipv4(const unsigned char *header)
{
    unsigned int total = 0;

    if (header[0] != 0x45)
        return 0;
    for (int at = 0; at < 20; at += 2)
        total += (unsigned int)header[at] << 8 | header[at + 1];
    return (total & 0xffff) + (total >> 16) == 0xffff;
}

/* Write the GID of the sender, and that of the destination. The next header of a GRH is UDP (17) on
   RoCE v2, otherwise InfiniBand's own transport (27). RoCE v2 over IPv4 has an IPv4 header in the
   last 20 bytes in its place (man ibv_create_ah_from_wc). */
static void read_ends(const unsigned char *grh, unsigned char *ends)
{
    if (grh[0] >> 4 == 6 && (grh[6] == 17 || grh[6] == 27) && !is_ipv4(grh + 20)) {
        memcpy(ends, grh + 8, 2 * GID);
        return;
    }
    for (int i = 0; i < 2; i++) {
        memcpy(ends + i * GID, ipv4_mapped, sizeof(ipv4_mapped));
        memcpy(ends + i * GID + sizeof(ipv4_mapped), grh + 32 + 4 * i, 4);
    }
}

PyObject *engine_grh_ends(PyObject *module, PyObject *grh)
{
    unsigned char ends[2 * GID];

    (void)module;
    if (!PyBytes_Check(grh)) {
        PyErr_SetString(PyExc_TypeError, "a GRH is bytes");
        return NULL;
    }
    if (PyBytes_GET_SIZE(grh) != GRH)
        return PyErr_Format(PyExc_ValueError, "a GRH has 40 bytes, and this has %zd",
                            PyBytes_GET_SIZE(grh));
    read_ends((const unsigned char *)PyBytes_AS_STRING(grh), ends);
    return Py_BuildValue("(y#y#)", ends, (Py_ssize_t)GID, ends + GID, (Py_ssize_t)GID);
}

/* -- senders ----------------------------------------------------------------------------------- */

/* The base of Senders: the peers that sent datagrams. */
struct Senders {
    PyObject_HEAD PyObject *known; /* an OrderedDict: the peer by its key, the oldest first */
};

static PyObject *find_name, *move_name, *data_name;

int engine_datagram_names(void)
{
    return engine_intern(&find_name, "_find") || engine_intern(&move_name, "move_to_end") ||
           engine_intern(&data_name, "data");
}

/* Return what identifies the sender: its queue pair, LID and GID, and the destination's GID. */
static PyObject *sender_key(const struct aiordma_completion *completion, const char *grh)
{
    struct {
        uint32_t qp_num, lid;
        unsigned char ends[2 * GID];
    } key = {completion->src_qp, completion->slid, {0}};

    if (completion->wc_flags & IBV_WC_GRH)
        read_ends((const unsigned char *)grh, key.ends);
    return PyBytes_FromStringAndSize((const char *)&key, sizeof(key));
}

/* Return the sender; one that is not known is computed in Python. */
static PyObject *sender_of(Senders *senders, const struct aiordma_completion *completion,
                           const char *grh)
{
    PyObject *key = sender_key(completion, grh), *peer = NULL, *moved = NULL;

    if (!key)
        return NULL;
    if (senders->known && PyODict_Check(senders->known))
        peer = Py_XNewRef(PyDict_GetItemWithError(senders->known, key));
    if (peer) {
        moved = PyObject_CallMethodOneArg(senders->known, move_name, key);
        if (!moved)
            Py_CLEAR(peer);
        Py_XDECREF(moved);
    } else if (!PyErr_Occurred()) {
        PyObject *made = engine_completion(completion);
        PyObject *header = made ? PyBytes_FromStringAndSize(grh, GRH) : NULL;
        PyObject *arguments[] = {(PyObject *)senders, key, made, header};
        peer = header ? PyObject_VectorcallMethod(find_name, arguments, 4, NULL) : NULL;
        Py_XDECREF(header);
        Py_XDECREF(made);
    }
    Py_DECREF(key);
    return peer;
}

static int senders_traverse(Senders *senders, visitproc visit, void *arg)
{
    Py_VISIT(senders->known);
    return 0;
}

static int senders_clear(Senders *senders)
{
    Py_CLEAR(senders->known);
    return 0;
}

static void senders_dealloc(Senders *senders)
{
    PyObject_GC_UnTrack(senders);
    senders_clear(senders);
    Py_TYPE(senders)->tp_free((PyObject *)senders);
}

static PyMemberDef senders_members[] = {
    {"_known", T_OBJECT, offsetof(Senders, known), 0, "The peers, in order of use."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_senders_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.SendersBase",
    .tp_basicsize = sizeof(Senders),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)senders_dealloc,
    .tp_traverse = (traverseproc)senders_traverse,
    .tp_clear = (inquiry)senders_clear,
    .tp_members = senders_members,
};

/* -- arrivals ---------------------------------------------------------------------------------- */

/* The base of DatagramArrival. */
typedef struct {
    PyObject_HEAD Senders *senders;
    struct aiordma_completion completion;
    char grh[GRH];
} Arrival;

static PyObject *make_arrival(PyTypeObject *type, Senders *senders, const char *grh,
                              const struct aiordma_completion *completion)
{
    Arrival *arrival = (Arrival *)type->tp_alloc(type, 0);

    if (!arrival)
        return NULL;
    arrival->senders = (Senders *)Py_NewRef(senders);
    arrival->completion = *completion;
    memcpy(arrival->grh, grh, GRH);
    return (PyObject *)arrival;
}

static void arrival_dealloc(Arrival *arrival)
{
    Py_XDECREF(arrival->senders);
    Py_TYPE(arrival)->tp_free((PyObject *)arrival);
}

static Py_ssize_t payload(const struct aiordma_completion *completion)
{
    return completion->byte_len < GRH ? 0 : (Py_ssize_t)completion->byte_len - GRH;
}

static PyObject *arrival_length(Arrival *arrival, void *closure)
{
    (void)closure;
    return PyLong_FromSsize_t(payload(&arrival->completion));
}

static PyObject *arrival_immediate(Arrival *arrival, void *closure)
{
    (void)closure;
    if (!(arrival->completion.wc_flags & IBV_WC_WITH_IMM))
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(arrival->completion.immediate);
}

static PyObject *arrival_sender_qp_num(Arrival *arrival, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLong(arrival->completion.src_qp);
}

static PyObject *arrival_source(Arrival *arrival, void *closure)
{
    (void)closure;
    if (!arrival->senders) {
        PyErr_SetString(PyExc_RuntimeError, "this arrival was made without its constructor");
        return NULL;
    }
    return sender_of(arrival->senders, &arrival->completion, arrival->grh);
}

static PyObject *arrival_repr(Arrival *arrival)
{
    const struct aiordma_completion *completion = &arrival->completion;
    const char *name = strrchr(Py_TYPE(arrival)->tp_name, '.');
    char immediate[32] = "";

    if (completion->wc_flags & IBV_WC_WITH_IMM)
        PyOS_snprintf(immediate, sizeof(immediate), ", immediate 0x%x", completion->immediate);
    return PyUnicode_FromFormat("<%s of %zd bytes from 0x%x%s>",
                                name ? name + 1 : Py_TYPE(arrival)->tp_name, payload(completion),
                                completion->src_qp, immediate);
}

static PyGetSetDef arrival_properties[] = {
    {"length", (getter)arrival_length, NULL, "The length of the payload, in bytes.", NULL},
    {"immediate", (getter)arrival_immediate, NULL,
     "The sender's 32 bits of immediate data as an int, or None.", NULL},
    {"sender_qp_num", (getter)arrival_sender_qp_num, NULL, "The number of the sender's queue pair.",
     NULL},
    {"source", (getter)arrival_source, NULL,
     "The peer to reply to: `socket.send(data, message.source)`. Determined at each access.\n\n"
     "A datagram does not contain its sender's qkey. This peer has the local qkey, which is the\n"
     "same for all endpoints of the UDP port space.\n\n"
     "Raises:\n"
     "    VerbsCallError: the datagram's destination is not a local address any more.\n"
     "    ClosedError: the socket was closed, and the device with it.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject engine_datagram_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma.types.DatagramArrival",
    .tp_doc =
        "The arrival of a datagram: the `length` of its payload in bytes, and `immediate`, the\n"
        "sender's 32 bits of immediate data as an int, or None.",
    .tp_repr = (reprfunc)arrival_repr,
    .tp_basicsize = sizeof(Arrival),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_dealloc = (destructor)arrival_dealloc,
    .tp_getset = arrival_properties,
};

PyObject *engine_datagram(PyObject *senders, const char *block, Py_ssize_t size,
                          const struct aiordma_completion *completion)
{
    if (!PyObject_TypeCheck(senders, &engine_senders_type) || !engine_python.datagram_class ||
        size < GRH) {
        PyErr_SetString(PyExc_TypeError, "the block of a datagram, and its Senders, are expected");
        return NULL;
    }
    Py_ssize_t length = payload(completion) < size - GRH ? payload(completion) : size - GRH;
    char grh[GRH];
    memcpy(grh, block,
           GRH); /* making the message can run the collector, which may unmap the block */
    PyObject *data = PyBytes_FromStringAndSize(block + GRH, length);
    PyObject *made = data ? make_arrival((PyTypeObject *)engine_python.datagram_class,
                                         (Senders *)senders, grh, completion)
                          : NULL;
    if (made && PyObject_SetAttr(made, data_name, data))
        Py_CLEAR(made);
    Py_XDECREF(data);
    return made;
}

/* -- receives ---------------------------------------------------------------------------------- */

/* A receive that is posted into the program's memory. */
struct DatagramReceive {
    PyObject_HEAD Request *request;
    Senders *senders;
    Lease *header;     /* the block of the GRH, until the request has ended */
    PyObject *arrival; /* made when it is awaited */
    char grh[GRH];
};

/* Return the block to the pool. The device does not use it. */
static void return_header(DatagramReceive *receive)
{
    Lease *header = receive->header;

    if (!header)
        return;
    receive->header = NULL;
    engine_return_after_error(header);
    Py_DECREF(header);
}

static void receive_ended(Request *request)
{
    DatagramReceive *receive = (DatagramReceive *)request->subject;
    struct ibv_sge sge;

    if (request->state == SUCCEEDED && receive->header && engine_leased_is_usable(receive->header))
        memcpy(receive->grh, engine_leased_block(receive->header, &sge), GRH);
    return_header(receive);
}

static DatagramReceive *make_receive(Senders *senders, Lease *header)
{
    DatagramReceive *receive =
        (DatagramReceive *)engine_receive_type.tp_alloc(&engine_receive_type, 0);
    if (!receive)
        return NULL;
    receive->senders = (Senders *)Py_NewRef(senders);
    receive->header = (Lease *)Py_NewRef(header);
    return receive;
}

DatagramReceive *engine_datagram_receive(Port *port, struct ibv_sge *header)
{
    Lease *lease = engine_lease(port->pool, GRH);
    DatagramReceive *receive = lease ? make_receive(port->senders, lease) : NULL;

    if (receive)
        engine_leased_block(lease, header);
    else if (lease)
        engine_return_after_error(lease);
    Py_XDECREF(lease);
    return receive;
}

void engine_set_receive(Request *request, DatagramReceive *receive)
{
    receive->request = (Request *)Py_NewRef(request); /* a cycle until the request ends */
    Py_XSETREF(request->subject, Py_NewRef(receive));
    request->on_end = receive_ended;
}

/* For the general path, whose request was posted at once: it has not ended. */
static PyObject *receive_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"request", "header", "senders", NULL};
    PyObject *request, *header, *senders;

    (void)type;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!", names, &engine_request_type, &request,
                                     &engine_lease_type, &header, &engine_senders_type, &senders))
        return NULL;
    if (((Request *)request)->state != IN_FLIGHT || ((Request *)request)->subject) {
        PyErr_SetString(PyExc_ValueError, "the request is in flight, and of no other receive");
        return NULL;
    }
    DatagramReceive *receive = make_receive((Senders *)senders, (Lease *)header);
    if (receive)
        engine_set_receive((Request *)request, receive);
    return (PyObject *)receive;
}

static int receive_traverse(DatagramReceive *receive, visitproc visit, void *arg)
{
    Py_VISIT(receive->request);
    Py_VISIT(receive->senders);
    Py_VISIT(receive->header);
    Py_VISIT(receive->arrival);
    return 0;
}

static int receive_clear(DatagramReceive *receive)
{
    Py_CLEAR(receive->request);
    Py_CLEAR(receive->arrival);
    return 0;
}

static void receive_dealloc(DatagramReceive *receive)
{
    PyObject_GC_UnTrack(receive);
    return_header(receive); /* of a request that was not posted */
    receive_clear(receive);
    Py_XDECREF(receive->senders);
    Py_TYPE(receive)->tp_free((PyObject *)receive);
}

static PyObject *receive_result(DatagramReceive *receive, PyObject *none)
{
    (void)none;
    if (!receive->request) {
        PyErr_SetString(PyExc_RuntimeError, "this receive is not posted");
        return NULL;
    }
    if (receive->request->state != SUCCEEDED)
        return engine_result(receive->request); /* an exception */
    if (!receive->arrival) /* making it can run the collector, and so this function again */
        Py_XSETREF(receive->arrival, make_arrival(&engine_datagram_type, receive->senders,
                                                  receive->grh, &receive->request->completion));
    return Py_XNewRef(receive->arrival);
}

static int has_ended(PyObject *awaited)
{
    const Request *request = ((DatagramReceive *)awaited)->request;
    return !request || request->state != IN_FLIGHT;
}

static PyObject *awaited_result(PyObject *awaited)
{
    return receive_result((DatagramReceive *)awaited, NULL);
}

static void awaited_forget(PyObject *awaited, PyObject *waiter)
{
    Request *request = ((DatagramReceive *)awaited)->request;
    if (request)
        engine_forget_waiter(request, waiter);
}

static const struct engine_awaited awaited_calls = {
    .has_ended = has_ended,
    .result = awaited_result,
    .forget = awaited_forget,
};

static PyObject *receive_await(DatagramReceive *receive)
{
    if (!receive->request) {
        PyErr_SetString(PyExc_RuntimeError, "this receive is not posted");
        return NULL;
    }
    return engine_await_request(receive->request, (PyObject *)receive, &awaited_calls);
}

/* A completed receive as its own awaitable does not suspend. */
static PySendResult receive_send(DatagramReceive *receive, PyObject *value, PyObject **result)
{
    (void)value;
    *result = receive_result(receive, NULL);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *receive_done(DatagramReceive *receive, PyObject *none)
{
    (void)none;
    return PyBool_FromLong(has_ended((PyObject *)receive));
}

static PyObject *receive_forget_waiter(DatagramReceive *receive, PyObject *waiter)
{
    awaited_forget((PyObject *)receive, waiter);
    Py_RETURN_NONE;
}

static PyObject *receive_repr(DatagramReceive *receive)
{
    return PyUnicode_FromFormat("<DatagramReceive %R>", receive->request);
}

static PyMethodDef receive_methods[] = {
    {"done", (PyCFunction)receive_done, METH_NOARGS,
     "done($self, /)\n--\n\n"
     "Return whether the receive has completed.\n\n"
     "Raises: nothing."},
    {"result", (PyCFunction)receive_result, METH_NOARGS,
     "result($self, /)\n--\n\n"
     "Return the arrival of a completed receive.\n\n"
     "Raises:\n"
     "    WorkCompletionError: the receive failed.\n"
     "    RuntimeError: the receive is still in flight."},
    {"_forget_waiter", (PyCFunction)receive_forget_waiter, METH_O,
     "_forget_waiter($self, waiter, /)\n--\n\n"
     "Do not wake a waiter any more."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef receive_members[] = {
    {"request", T_OBJECT, offsetof(DatagramReceive, request), READONLY, "The WorkRequest."},
    {NULL, 0, 0, 0, NULL},
};

static PyAsyncMethods receive_awaiting = {
    .am_await = (unaryfunc)receive_await,
    .am_send = (sendfunc)receive_send,
};

PyTypeObject engine_receive_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma.types.DatagramReceive",
    .tp_doc =
        "DatagramReceive(request, header, senders)\n"
        "--\n\n"
        "A receive that is posted into your own memory. Await it for its DatagramArrival. Any\n"
        "number of tasks may await it, any number of times.\n\n"
        "`request` is the WorkRequest. The byte_len of its completion includes the 40 bytes of\n"
        "the GRH, which are stored in separate memory.\n\n"
        "Raises:\n"
        "    as `WorkRequest`.\n\n"
        "Cancellation: the receive stays posted, and its memory is held.",
    .tp_basicsize = sizeof(DatagramReceive),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = receive_new,
    .tp_dealloc = (destructor)receive_dealloc,
    .tp_traverse = (traverseproc)receive_traverse,
    .tp_clear = (inquiry)receive_clear,
    .tp_repr = (reprfunc)receive_repr,
    .tp_methods = receive_methods,
    .tp_members = receive_members,
    .tp_as_async = &receive_awaiting,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = engine_next,
};
