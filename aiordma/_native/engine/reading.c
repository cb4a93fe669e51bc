/*
 * Reads the arguments of a post into a work description, and makes the request, whether the work is
 * posted (post.c, shared.c) or collected (chain.c).
 */
#include "reading.h"
#include "datagrams.h"
#include "window.h"
#include "request_type.h"

#include <arpa/inet.h>

enum { GRH_BYTES = 40 }; /* the header of a received datagram */

/* -- numbers and flags --------------------------------------------------------------------- */

/* Other integers than Python's take the general path, because converting them runs code. */
static int read_number(PyObject *given, unsigned long long most, unsigned long long *value)
{
    if (!PyLong_CheckExact(given))
        return 0;
    *value = PyLong_AsUnsignedLongLong(given);
    if (*value == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return *value <= most;
}

/* An operand of an atomic: a number of 64 bits, with or without a sign. */
static int read_operand(PyObject *given, unsigned long long *value)
{
    if (read_number(given, UINT64_MAX, value))
        return 1;
    long long negative = PyLong_CheckExact(given) ? PyLong_AsLongLong(given) : 0;
    PyErr_Clear();
    *value = (unsigned long long)negative;
    return negative < 0 && (negative != -1 || PyLong_AsLongLong(given) == -1);
}

static int read_flag(struct engine_work *work, PyObject *given, unsigned int flag)
{
    if (given == Py_True)
        work->flags |= flag;
    return !given || given == Py_True || given == Py_False;
}

static int read_flags(struct engine_work *work, PyObject *const *given)
{
    return read_flag(work, given[ENGINE_FENCE], IBV_SEND_FENCE) &&
           read_flag(work, given[ENGINE_SOLICITED], IBV_SEND_SOLICITED);
}

static int read_immediate(const Port *port, struct engine_work *work, PyObject *given)
{
    unsigned long long value;

    if (!given || given == Py_None)
        return 1;
    if (!port->can_immediate || !read_number(given, UINT32_MAX, &value))
        return 0;
    work->immediate = (uint32_t)value;
    work->opcode = work->opcode == IBV_WR_SEND ? IBV_WR_SEND_WITH_IMM : IBV_WR_RDMA_WRITE_WITH_IMM;
    return 1;
}

static int read_invalidate(const Port *port, struct engine_work *work, PyObject *given)
{
    unsigned long long value;

    if (!given || given == Py_None)
        return 1;
    if (work->opcode != IBV_WR_SEND || !port->can_invalidate ||
        !read_number(given, UINT32_MAX, &value))
        return 0;
    work->immediate = (uint32_t)value;
    work->opcode = IBV_WR_SEND_WITH_INV;
    return 1;
}

/* -- remote memory ------------------------------------------------------------------------- */

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

int engine_read_remote(PyObject *remote, unsigned long long *address, unsigned long long *length,
                       unsigned long long *rkey)
{
    if ((PyObject *)Py_TYPE(remote) != engine_python.remote_class)
        return 0;
    return attribute(remote, engine_python.address, address) ||
                   attribute(remote, engine_python.length, length) ||
                   attribute(remote, engine_python.rkey, rkey)
               ? -1
               : 1;
}

/* Read the target. Most requests have the same target as the request before them. 1: it was read;
   0: take the general path; -1: an exception. */
static int read_remote(Port *port, struct engine_work *work, PyObject *remote)
{
    unsigned long long address = port->remote_address, length = port->remote_length,
                       rkey = port->rkey;

    if (remote != port->remote) {
        int is_read = engine_read_remote(remote, &address, &length, &rkey);
        if (is_read <= 0)
            return is_read;
        port->remote_address = address;
        port->remote_length = length;
        port->rkey = (unsigned int)rkey;
        /* Freeing the old target may run the program's code, which may post to another target. */
        Py_XSETREF(port->remote, Py_NewRef(remote));
    }
    work->remote = remote;
    work->remote_address = address;
    work->rkey = (unsigned int)rkey;
    return length == work->length;
}

/* Read the memory for the previous value. Not given: a block is leased for it. */
static int read_value(const Port *port, struct engine_work *work, PyObject *given)
{
    if (given)
        return engine_read_target(port, work, given) && work->length == 8;
    work->copying = ENGINE_VALUE;
    work->length = 8;
    return port->pool != NULL;
}

static int read_atomic(Port *port, struct engine_work *work, PyObject *const *given)
{
    if (!port->can_atomics || !read_value(port, work, given[ENGINE_LOCAL]) ||
        !read_operand(given[ENGINE_COMPARE], &work->compare_add) ||
        (given[ENGINE_SWAP] && !read_operand(given[ENGINE_SWAP], &work->swap)))
        return 0;
    int is_read = read_remote(port, work, given[ENGINE_REMOTE]);
    return is_read > 0 ? !(work->remote_address % 8) : is_read;
}

/* -- all arguments ------------------------------------------------------------------------- */

static const enum ibv_wr_opcode opcodes[] = {
#define KIND(constant, name, opcode, parameters) opcode,
    ENGINE_EACH_KIND(KIND)
#undef KIND
};

static void begin(struct engine_work *work, enum engine_kind kind)
{
    /* Not one assignment, which would also clear the long arrays. */
    work->opcode = opcodes[kind];
    work->has_header = kind >= ENGINE_UD_RECEIVE;
    work->is_receive = kind >= ENGINE_RECEIVE;
    work->flags = 0;
    work->immediate = work->rkey = 0;
    work->remote_address = work->compare_add = work->swap = work->length = 0;
    work->remote = NULL;
    work->handle = NULL;
    work->window = NULL;
    work->bound = NULL;
    work->count = work->region_count = work->view_count = 0;
    work->copying = ENGINE_NOTHING;
    if (work->has_header)
        work->owners[work->count++] = NULL; /* it is leased when the request is made */
}

/* A datagram that is longer than its receive would end the socket on most devices. */
static int read_datagram_target(const Port *port, struct engine_work *work, PyObject *given,
                                int is_list)
{
    Py_ssize_t most = port->max_recv_sge - 1;
    int is_read = is_list ? engine_read_targets(port, work, given,
                                                most < ENGINE_PARTS - 1 ? most : ENGINE_PARTS - 1)
                          : engine_read_target(port, work, given);

    if (!is_read || !port->senders || !port->pool || work->length < port->max_datagram)
        return 0;
    work->length += GRH_BYTES;
    return 1;
}

static int read_memory(Port *port, enum engine_kind kind, PyObject *const *given,
                       struct engine_work *work)
{
    PyObject *local = given[ENGINE_LOCAL];

    switch (kind) {
    case ENGINE_SEND:
        return engine_read_source(port, work, local) && work->length <= port->max_sent;
    case ENGINE_SENDV:
        return engine_read_sources(port, work, local) && work->length <= port->max_sent;
    case ENGINE_WRITE:
    case ENGINE_UD_SEND:
        return engine_read_source(port, work, local);
    case ENGINE_WRITEV:
    case ENGINE_UD_SENDV:
        return engine_read_sources(port, work, local);
    case ENGINE_READ: /* of no bytes: the general path gives it a part on iWARP */
        return port->can_read && engine_read_target(port, work, local) && work->length;
    case ENGINE_READV:
        return port->can_read && engine_read_targets(port, work, local, port->max_read_sge) &&
               work->length;
    case ENGINE_RECEIVE:
        return engine_read_target(port, work, local);
    case ENGINE_RECEIVEV:
        return engine_read_targets(port, work, local, port->max_recv_sge);
    case ENGINE_UD_RECEIVE:
    case ENGINE_UD_RECEIVEV:
        return read_datagram_target(port, work, local, kind == ENGINE_UD_RECEIVEV);
    default:
        return 0;
    }
}

/* Read the peer of a datagram. A retired handle is destroyed when its last request completes. */
static int read_peer(const Port *port, struct engine_work *work, PyObject *peer)
{
    const struct engine_destination *to = engine_destination(&port->destinations, peer);

    if (!to || to->handle->retired || work->length > port->max_datagram)
        return 0;
    work->handle = (Handle *)Py_NewRef(to->handle);
    work->address_handle = to->address_handle;
    work->remote_qpn = to->qpn;
    work->remote_qkey = to->qkey;
    return 1;
}

static int is_atomic(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static int is_datagram(enum engine_kind kind)
{
    return kind == ENGINE_UD_SEND || kind == ENGINE_UD_SENDV;
}

int engine_read(Port *port, enum engine_kind kind, PyObject *const *given, struct engine_work *work)
{
    begin(work, kind);
    int may_post = work->is_receive    ? port->can_receive
                   : is_datagram(kind) ? port->can_send_datagrams
                                       : port->ready;
    if (!engine_usable(port, may_post) || !read_flags(work, given))
        return 0;
    if (is_atomic(work->opcode))
        return read_atomic(port, work, given);
    if (kind == ENGINE_BIND)
        return engine_read_bind(port, work, given);
    if (kind == ENGINE_LOCAL_INVALIDATE)
        return engine_read_local_invalidate(port, work, given);
    if (!read_memory(port, kind, given, work) ||
        !read_immediate(port, work, given[ENGINE_IMMEDIATE]) ||
        !read_invalidate(port, work, given[ENGINE_INVALIDATE]))
        return 0;
    if (is_datagram(kind))
        return read_peer(port, work, given[ENGINE_REMOTE]);
    return given[ENGINE_REMOTE] ? read_remote(port, work, given[ENGINE_REMOTE]) : 1;
}

/* -- the request --------------------------------------------------------------------------- */

/* The names of the operations, for messages: of the send queue by opcode, then of a receive. */
enum { RECV = IBV_WR_SEND_WITH_INV + 1 };
static const char *const operations[] = {
    [IBV_WR_SEND] = "SEND",
    [IBV_WR_SEND_WITH_IMM] = "SEND_WITH_IMM",
    [IBV_WR_SEND_WITH_INV] = "SEND_WITH_INV",
    [IBV_WR_RDMA_WRITE] = "RDMA_WRITE",
    [IBV_WR_RDMA_WRITE_WITH_IMM] = "RDMA_WRITE_WITH_IMM",
    [IBV_WR_RDMA_READ] = "RDMA_READ",
    [IBV_WR_ATOMIC_CMP_AND_SWP] = "COMPARE_SWAP",
    [IBV_WR_ATOMIC_FETCH_AND_ADD] = "FETCH_ADD",
    [IBV_WR_BIND_MW] = "BIND_MW",
    [IBV_WR_LOCAL_INV] = "LOCAL_INV",
    [RECV] = "RECV",
};
static PyObject *names[RECV + 1];

/* Lease a pool block, and copy the bytes to it. Returns the lease; NULL with an exception. If a
   region was closed meanwhile, nothing is copied; the caller checks the regions again before the
   post. */
static Lease *lease_block(const Port *port, struct engine_work *work)
{
    struct ibv_sge block;
    Lease *lease = engine_lease(port->pool, (Py_ssize_t)work->length);

    if (!lease)
        return NULL;
    char *to = engine_leased_block(lease, &block);
    if (work->copying == ENGINE_BLOCK && engine_regions_are_usable(work))
        engine_gather(work, to);
    work->sges[0] = block;
    work->count = 1;
    return lease;
}

/* Return a new reference to the memory that the request holds (see request.c). NULL without an
   exception: none. */
static PyObject *memory_of(const Port *port, struct engine_work *work)
{
    if (work->copying == ENGINE_BLOCK || work->copying == ENGINE_VALUE)
        return (PyObject *)lease_block(port, work);
    if (work->copying || !work->region_count)
        return NULL;
    if (work->region_count == 1)
        return Py_NewRef(work->regions[0]);
    PyObject *all = PyTuple_New(work->region_count);
    for (int i = 0; all && i < work->region_count; i++)
        PyTuple_SET_ITEM(all, i, Py_NewRef(work->regions[i]));
    return all;
}

Request *engine_work_request(Port *port, struct engine_work *work)
{
    DatagramReceive *receive = NULL;
    Request *request = NULL;
    PyObject *memory = memory_of(port, work);

    if (work->has_header && (memory || !PyErr_Occurred()))
        receive = engine_datagram_receive(port, &work->sges[0]);
    if (receive || (!work->has_header && (memory || !PyErr_Occurred())))
        request = engine_request(port, names[work->is_receive ? RECV : work->opcode],
                                 (Py_ssize_t)work->length, memory, work->remote, work->is_receive);
    if (request && !work->is_receive)
        request->opcode = work->opcode;
    if (request && receive)
        engine_set_receive(request, receive);
    Py_XDECREF(receive);
    if (request && work->copying == ENGINE_VALUE)
        request->on_end = engine_read_value;
    if (request && work->handle) {
        request->handle = (Handle *)Py_NewRef(work->handle);
        work->handle->holders++;
    }
    if (!request && memory && Py_IS_TYPE(memory, &engine_lease_type))
        engine_return_after_error((Lease *)memory);
    Py_XDECREF(memory);
    if (!request)
        engine_give_slot(work->is_receive ? port->receives : port->sends);
    return request;
}

int engine_is_still_usable(const Port *port, const struct engine_work *work)
{
    int may_post = work->is_receive ? port->can_receive
                   : work->handle   ? port->can_send_datagrams && !work->handle->retired
                                    : port->ready;
    return engine_regions_are_usable(work) && engine_usable(port, may_post) &&
           (!work->window || engine_window_is_still_usable(work));
}

struct ibv_send_wr engine_send_wr(const struct engine_work *work)
{
    struct ibv_send_wr send = {
        .num_sge = work->count,
        .opcode = work->opcode,
        .send_flags = work->flags,
    };

    switch (work->opcode) {
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        send.wr.atomic.remote_addr = work->remote_address;
        send.wr.atomic.compare_add = work->compare_add;
        send.wr.atomic.swap = work->swap;
        send.wr.atomic.rkey = work->rkey;
        return send;
    case IBV_WR_BIND_MW:
        engine_fill_bind(work, &send);
        return send;
    case IBV_WR_LOCAL_INV:
    case IBV_WR_SEND_WITH_INV:
        send.invalidate_rkey = work->immediate;
        return send;
    default:
        send.imm_data = htonl(work->immediate);
        if (work->handle) {
            send.wr.ud.ah = work->address_handle;
            send.wr.ud.remote_qpn = work->remote_qpn;
            send.wr.ud.remote_qkey = work->remote_qkey;
            return send;
        }
        send.wr.rdma.remote_addr = work->remote_address;
        send.wr.rdma.rkey = work->rkey;
        return send;
    }
}

int engine_work_names(void)
{
    for (int i = 0; i <= RECV; i++)
        if (engine_intern(&names[i], operations[i]))
            return -1;
    return 0;
}
