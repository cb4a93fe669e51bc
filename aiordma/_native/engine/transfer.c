/*
 * What Stream.receive, receive_into and send await. It does in C what most calls do: it takes what
 * has arrived, or waits for it, or posts one message. For the rest it awaits the general path, a
 * coroutine of stream.py.
 */
#include "transfer.h"
#include "description.h"
#include "wait.h"

enum call_state { NEW, WAITING_TO_RECEIVE, IN_GENERAL, OVER };

typedef struct {
    PyObject_HEAD StreamPath *path;
    PyObject *general, *arguments, *keywords; /* of the general path; keywords: a dict, or NULL */
    PyObject *inner; /* the waiter, or the iterator of the general path; or NULL */
    char kind, state;
} Transfer;

enum { PAUSE = 16 }; /* PAUSE in stream.py */

/* Whether the task may go on without a pause, and without the checks in Python. 1: it may; 0: take
   the general path; -1: an exception. */
static int may_go_on(StreamPath *path)
{
    /* The call that pauses is Python's, which counts from 0 again. */
    if (!path->is_cancelled || path->is_cancelled == Py_None || path->at_once + 1 >= PAUSE)
        return 0;
    path->at_once++;
    PyObject *cancelled = PyObject_CallNoArgs(path->is_cancelled);
    int may = cancelled ? cancelled == Py_False : -1;
    Py_XDECREF(cancelled);
    return may;
}

/* Whether the stream is open, and its loop, which is asyncio's, runs here. */
static int is_open_here(const StreamPath *path)
{
    const Port *port = path->port;
    return port->loop && !path->closed && engine_is_here(port);
}

/* The only argument behind the stream; borrowed. NULL: there are others. */
static PyObject *only_argument(const Transfer *transfer)
{
    return !transfer->keywords && PyTuple_GET_SIZE(transfer->arguments) == 2
               ? PyTuple_GET_ITEM(transfer->arguments, 1)
               : NULL;
}

enum { USUAL_LIMIT = 65536 }; /* of Stream.receive */

/* The limit of a call of receive; 0: take the general path. */
static Py_ssize_t limit_of(const Transfer *transfer)
{
    if (!transfer->keywords && PyTuple_GET_SIZE(transfer->arguments) == 1)
        return USUAL_LIMIT;
    PyObject *given = only_argument(transfer);
    if (!given || !PyLong_CheckExact(given))
        return 0;
    Py_ssize_t limit = PyLong_AsSsize_t(given);
    if (limit == -1 && PyErr_Occurred())
        PyErr_Clear();
    return limit > 0 ? limit : 0;
}

/* Whether the call has a limit, or a buffer, that bytes can be copied to. */
static int has_target(const Transfer *transfer)
{
    PyObject *buffer = only_argument(transfer);
    Py_buffer target;

    if (transfer->kind == RECEIVE)
        return limit_of(transfer) > 0;
    if (!buffer || engine_get_buffer(buffer, &target, PyBUF_WRITABLE)) {
        PyErr_Clear(); /* the general path raises the error */
        return 0;
    }
    int has_room = target.len > 0;
    PyBuffer_Release(&target);
    return has_room;
}

/* Take what has arrived. 1: *result is set; 0: take the general path; -1: an exception. */
static int take_arrived(Transfer *transfer, PyObject **result)
{
    StreamPath *path = transfer->path;
    Py_buffer target;

    if (transfer->kind == RECEIVE) {
        Py_ssize_t limit = limit_of(transfer);
        *result = limit ? engine_stream_read(path, limit) : NULL;
        return !limit ? 0 : *result ? 1 : -1;
    }
    PyObject *buffer = only_argument(transfer);
    if (!buffer || engine_get_buffer(buffer, &target, PyBUF_WRITABLE)) {
        PyErr_Clear(); /* the general path raises the error */
        return 0;
    }
    /* Exporting a buffer can run the program's code. */
    Py_ssize_t length = target.len && path->readable ? engine_stream_read_into(path, &target) : 0;
    PyBuffer_Release(&target);
    if (!length)
        return 0;
    *result = PyLong_FromSsize_t(length);
    return *result ? 1 : -1;
}

/* Begin to wait for an arrival. 1: it waits; 0: take the general path; -1: an exception. */
static int begin_to_wait(Transfer *transfer)
{
    StreamPath *path = transfer->path;
    Port *port = path->port;

    if (path->at_eof || path->failed || !path->begun || !port->ready ||
        !engine_runs_here(port->loop))
        return 0;
    PyObject *waiter = (PyObject *)engine_waiter(port->loop);
    if (!waiter)
        return -1;
    if (path->receiving || path->readable) { /* the collector ran the program's code */
        Py_DECREF(waiter);
        return 0;
    }
    path->receiving = 1;
    Py_XSETREF(path->reader, Py_NewRef(waiter));
    Py_XSETREF(transfer->inner, waiter);
    transfer->state = WAITING_TO_RECEIVE;
    return 1;
}

static void end_waiting(Transfer *transfer)
{
    if (transfer->state != WAITING_TO_RECEIVE)
        return;
    transfer->state = OVER;
    transfer->path->receiving = 0;
    Py_CLEAR(transfer->path->reader);
}

/* The first step of a receive; returns as begin_to_wait, or 2: *result is set. */
static int receive_arrived(Transfer *transfer, PyObject **result)
{
    StreamPath *path = transfer->path;

    if (!is_open_here(path) || path->receiving || !has_target(transfer))
        return 0;
    if (!path->readable)
        path->port->drain->poll_now(path->port->drain);
    if (!path->readable)
        return begin_to_wait(transfer);
    int may = may_go_on(path);
    if (may <= 0 || !path->readable || path->receiving || path->closed)
        return may < 0 ? -1 : 0;
    int taken = take_arrived(transfer, result);
    return taken > 0 ? 2 : taken;
}

/* Post the data as one message. Returns as `receive`. */
static int send_message(Transfer *transfer, PyObject **result)
{
    StreamPath *path = transfer->path;
    PyObject *item = only_argument(transfer);
    Py_buffer source;

    if (!item || !is_open_here(path) || path->sending || path->peer_disconnected ||
        !engine_stream_writable(path) || PyObject_TypeCheck(item, &engine_part_type) ||
        PyObject_TypeCheck(item, &engine_region_type) || !PyObject_CheckBuffer(item))
        return 0;
    int may = may_go_on(path);
    if (may <= 0)
        return may;
    if (engine_get_buffer(item, &source, PyBUF_SIMPLE)) {
        PyErr_Clear(); /* the general path raises the error */
        return 0;
    }
    Py_ssize_t posted = 0;
    /* Exporting a buffer can run the program's code. */
    if (source.len && source.len <= engine_stream_writable(path) &&
        source.len <= engine_stream_ring_room(path) && !path->sending && !path->closed)
        posted = engine_stream_write(path, source.buf, NULL, (struct ibv_sge){0}, source.len,
                                     source.len);
    Py_ssize_t length = source.len;
    PyBuffer_Release(&source);
    if (posted != length || !length)
        return 0; /* nothing was posted: a message has all the bytes or none */
    path->lacks_send = 0;
    *result = Py_NewRef(Py_None);
    return 2;
}

/* Go on in Python. */
static PySendResult go_general(Transfer *transfer, PyObject **result)
{
    PyObject *coroutine = PyObject_Call(transfer->general, transfer->arguments, transfer->keywords);
    PyObject *inner =
        coroutine ? PyObject_CallMethodNoArgs(coroutine, engine_python.await_name) : NULL;

    Py_XDECREF(coroutine);
    Py_XSETREF(transfer->inner, inner);
    transfer->state = inner ? IN_GENERAL : OVER;
    *result = NULL;
    return inner ? PyIter_Send(inner, Py_None, result) : PYGEN_ERROR;
}

/* After the wait: take what has arrived, if anything has. */
static PySendResult go_on(Transfer *transfer, PyObject **result)
{
    StreamPath *path = transfer->path;
    PySendResult waited = PyIter_Send(transfer->inner, Py_None, result);

    if (waited == PYGEN_NEXT)
        return waited;
    end_waiting(transfer);
    if (waited == PYGEN_ERROR)
        return waited;
    Py_CLEAR(*result);
    int taken = path->readable && !path->closed ? take_arrived(transfer, result) : 0;
    if (!taken)
        return go_general(transfer, result);
    return taken > 0 ? PYGEN_RETURN : PYGEN_ERROR;
}

static PySendResult transfer_send(Transfer *transfer, PyObject *value, PyObject **result)
{
    int done;

    *result = NULL;
    switch ((enum call_state)transfer->state) {
    case NEW:
        transfer->state = OVER;
        done = transfer->kind == SEND ? send_message(transfer, result)
                                      : receive_arrived(transfer, result);
        if (done < 0)
            return PYGEN_ERROR;
        if (done == 2)
            return PYGEN_RETURN;
        return done ? PyIter_Send(transfer->inner, Py_None, result) : go_general(transfer, result);
    case WAITING_TO_RECEIVE:
        return go_on(transfer, result);
    case IN_GENERAL:
        return PyIter_Send(transfer->inner, value, result);
    default:
        PyErr_SetString(PyExc_RuntimeError, "this call of a stream has ended: call it again");
        return PYGEN_ERROR;
    }
}

static PyObject *transfer_throw(Transfer *transfer, PyObject *arguments)
{
    PyObject *inner = Py_XNewRef(transfer->inner);

    end_waiting(transfer);
    PyObject *result = engine_throw_into(inner, arguments);
    Py_XDECREF(inner);
    return result;
}

static PyObject *transfer_close(Transfer *transfer, PyObject *none)
{
    PyObject *inner = Py_XNewRef(transfer->inner);

    (void)none;
    end_waiting(transfer);
    PyObject *result = engine_close_inner(inner);
    Py_XDECREF(inner);
    return result;
}

static int transfer_traverse(Transfer *transfer, visitproc visit, void *arg)
{
    Py_VISIT(transfer->path);
    Py_VISIT(transfer->general);
    Py_VISIT(transfer->arguments);
    Py_VISIT(transfer->keywords);
    Py_VISIT(transfer->inner);
    return 0;
}

static int transfer_clear(Transfer *transfer)
{
    end_waiting(transfer);
    Py_CLEAR(transfer->inner);
    return 0;
}

static void transfer_dealloc(Transfer *transfer)
{
    PyObject_GC_UnTrack(transfer);
    transfer_clear(transfer);
    Py_XDECREF(transfer->general);
    Py_XDECREF(transfer->arguments);
    Py_XDECREF(transfer->keywords);
    Py_XDECREF(transfer->path);
    PyObject_GC_Del(transfer);
}

static PyMethodDef transfer_methods[] = {
    {"send", engine_send_value, METH_O, NULL},
    {"throw", (PyCFunction)transfer_throw, METH_VARARGS, NULL},
    {"close", (PyCFunction)transfer_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyAsyncMethods transfer_awaiting = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)transfer_send,
};

PyTypeObject engine_transfer_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.StreamTransfer",
    .tp_doc = "A call of a stream's, to be awaited once.",
    .tp_basicsize = sizeof(Transfer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)transfer_dealloc,
    .tp_traverse = (traverseproc)transfer_traverse,
    .tp_clear = (inquiry)transfer_clear,
    .tp_methods = transfer_methods,
    .tp_as_async = &transfer_awaiting,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = engine_next,
};

PyObject *engine_stream_call(StreamPath *path, PyObject *const *arguments, Py_ssize_t count,
                             enum call_kind kind)
{
    if (count != 3 || !PyTuple_Check(arguments[1]) || !PyDict_Check(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "a function, a tuple and a dict are expected");
        return NULL;
    }
    Transfer *transfer = PyObject_GC_New(Transfer, &engine_transfer_type);
    if (!transfer)
        return NULL;
    transfer->path = (StreamPath *)Py_NewRef(path);
    transfer->general = Py_NewRef(arguments[0]);
    transfer->arguments = Py_NewRef(arguments[1]);
    transfer->keywords = PyDict_GET_SIZE(arguments[2]) ? Py_NewRef(arguments[2]) : NULL;
    transfer->inner = NULL;
    transfer->kind = (char)kind;
    transfer->state = NEW;
    PyObject_GC_Track(transfer);
    return (PyObject *)transfer;
}
