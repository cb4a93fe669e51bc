/* An arrival as a view of its block, copied nowhere: `async with connection.receive_view()`. */
#include "view.h"
#include "arrivals.h"
#include "wait.h"

static PyObject *view_name, *enter_name, *end_elsewhere_name, *release_later_name, *replace_name,
    *release_name;

int engine_view_names(void)
{
    return engine_intern(&view_name, "view") || engine_intern(&enter_name, "enter") ||
           engine_intern(&end_elsewhere_name, "end_elsewhere") ||
           engine_intern(&release_later_name, "release_later") ||
           engine_intern(&replace_name, "replace") || engine_intern(&release_name, "release");
}

/*
 * WAITING: for an arrival, here; IN_GENERAL: by Arrivals.enter in Python.
 * ENDING: end_view calls Python code, which can release the buffer, or end the view again.
 * KEPT: the block of the `async with` has ended, and the program still uses a part of the view. The
 * last release of the buffer then returns the block to the pool.
 */
enum view_state { NEW, ENTERED, WAITING_TO_ENTER, IN_GENERAL, OPEN, ENDING, ENDED, KEPT };

/* The context manager. It is also the exporter of the memoryview, and its own awaitable. */
typedef struct {
    PyObject_HEAD ArrivalQueue *queue;
    Lease *lease;
    PyObject *view;    /* the memoryview that the program gets */
    PyObject *inner;   /* what the task waits for: a waiter, or the iterator of Arrivals.enter */
    PyObject *after;   /* of a KEPT view: called at the last release */
    Py_buffer mapping; /* keeps the block's memory mapped */
    Py_ssize_t length, exports;
    char state;
} ArrivalView;

static PyObject *view_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"queue", NULL};
    PyObject *queue;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &engine_arrivals_type, &queue))
        return NULL;
    ArrivalView *view = (ArrivalView *)type->tp_alloc(type, 0);
    if (view)
        view->queue = (ArrivalQueue *)Py_NewRef(queue);
    return (PyObject *)view;
}

static int view_traverse(ArrivalView *view, visitproc visit, void *arg)
{
    Py_VISIT(view->queue);
    Py_VISIT(view->lease);
    Py_VISIT(view->view);
    Py_VISIT(view->inner);
    Py_VISIT(view->after);
    return 0;
}

/* The task waits no more. */
static void end_waiting(ArrivalView *view)
{
    if (view->state != WAITING_TO_ENTER)
        return;
    view->state = ENDED;
    engine_end_wait(view->queue);
}

/* Arrivals.enter has ended. */
static void end_general(ArrivalView *view)
{
    if (view->state == IN_GENERAL)
        view->state = ENDED;
    Py_CLEAR(view->inner);
}

static int view_clear(ArrivalView *view)
{
    end_waiting(view);
    Py_CLEAR(view->inner);
    Py_CLEAR(view->view);
    return 0;
}

static void view_dealloc(ArrivalView *view)
{
    PyObject_GC_UnTrack(view);
    view_clear(view);
    if (view->mapping.obj)
        PyBuffer_Release(&view->mapping);
    Py_XDECREF(view->queue);
    Py_XDECREF(view->lease);
    Py_XDECREF(view->after);
    Py_TYPE(view)->tp_free((PyObject *)view);
}

static int view_get_buffer(ArrivalView *view, Py_buffer *buffer, int flags)
{
    struct ibv_sge sge;

    if (!view->lease || view->state != OPEN) {
        buffer->obj = NULL;
        PyErr_SetString(PyExc_BufferError, "a message is viewed inside of its `async with` block");
        return -1;
    }
    char *block = engine_leased_block(view->lease, &sge);
    if (PyBuffer_FillInfo(buffer, (PyObject *)view, block, view->length, 1, flags))
        return -1;
    view->exports++;
    return 0;
}

static void view_release_buffer(ArrivalView *view, Py_buffer *buffer)
{
    PyObject *type, *value, *trace;

    (void)buffer;
    if (--view->exports || view->state != KEPT)
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *after = view->after;
    view->after = NULL;
    view->state = ENDED;
    PyObject *result = after ? PyObject_CallNoArgs(after) : NULL;
    if (after && !result)
        engine_log("releasing the block of %r failed", (PyObject *)view);
    Py_XDECREF(result);
    Py_XDECREF(after);
    Py_CLEAR(view->lease);
    PyBuffer_Release(&view->mapping);
    PyErr_Restore(type, value, trace);
}

/* Give back the block of an arrival that could not be opened. Keeps the exception. */
static void close_again(ArrivalView *view)
{
    PyObject *type, *value, *trace;
    Lease *lease = view->lease;

    PyErr_Fetch(&type, &value, &trace);
    view->state = ENDED;
    view->lease = NULL;
    if (view->mapping.obj)
        PyBuffer_Release(&view->mapping);
    engine_give_back(view->queue->receives, lease);
    PyErr_Restore(type, value, trace);
}

/* Take the first arrival, which exists. Returns the memoryview. */
static PyObject *open_view(ArrivalView *view)
{
    ArrivalQueue *queue = view->queue;
    if (!queue->count || !engine_leased_is_usable(engine_arrival_at(queue, 0)->lease)) {
        PyErr_SetString(PyExc_RuntimeError, "there is no arrival: wait until there is one");
        return NULL;
    }
    view->length = engine_contents_length(queue);
    view->lease = engine_pop_arrival(queue); /* first: finding its memory runs Python code */
    PyObject *memory = PyObject_GetAttr((PyObject *)engine_leased_region(view->lease), view_name);
    int failed = !memory || PyObject_GetBuffer(memory, &view->mapping, PyBUF_SIMPLE);
    Py_XDECREF(memory);
    if (failed) {
        close_again(view);
        return NULL;
    }
    view->state = OPEN;
    view->view = PyMemoryView_FromObject((PyObject *)view);
    if (!view->view) {
        close_again(view);
        return NULL;
    }
    queue->views++;
    return Py_NewRef(view->view);
}

/* Return what returns the block to the pool at last; NULL: an exception is set. */
static PyObject *release_later(const ArrivalQueue *queue, PyObject *lease)
{
    PyObject *arguments[] = {queue->owner, lease};

    return engine_call_method_alone(release_later_name, arguments, 2);
}

/* Post another block in place of the view's, which the program still uses. */
static void replace_block(ArrivalView *view)
{
    ArrivalQueue *queue = view->queue;
    PyObject *lease = (PyObject *)view->lease, *arguments[] = {queue->owner, lease};

    /* First, so that the block is returned at last, whatever becomes of its replacement. */
    view->after = release_later(queue, lease);
    PyObject *result = view->after ? engine_call_method_alone(replace_name, arguments, 2) : NULL;
    if (!result)
        engine_log("replacing a block of %r failed", queue->port->owner);
    Py_XDECREF(result);
}

/* Give back the block of a view that is released, or another one while the program uses it. */
static void end_view(ArrivalView *view)
{
    ArrivalQueue *queue = view->queue;
    int is_replaced = view->exports > 0;

    queue->views--;
    if (is_replaced) {
        view->state = ENDING;
        replace_block(view);
    }
    if (view->exports) {
        view->state = KEPT;
        view->queue = NULL;
        Py_DECREF(queue);
        return;
    }
    Lease *lease = view->lease;
    view->state = ENDED;
    view->lease = NULL;
    Py_CLEAR(view->after);
    PyBuffer_Release(&view->mapping);
    if (is_replaced)
        engine_return_block(lease); /* its last part has gone meanwhile */
    else
        engine_give_back(queue->receives, lease);
}

static PyObject *view_enter(ArrivalView *view, PyObject *none)
{
    (void)none;
    if (view->state != NEW) {
        PyErr_SetString(PyExc_ValueError,
                        "a receive_view() is entered once: call it for each message");
        return NULL;
    }
    view->state = ENTERED;
    if (view->queue->port->loop)
        return Py_NewRef(view);
    return PyObject_CallMethodOneArg(view->queue->owner, enter_name, (PyObject *)view);
}

static PyObject *view_open(ArrivalView *view, PyObject *none)
{
    (void)none;
    if (view->state == ENTERED || view->state == IN_GENERAL)
        return open_view(view);
    PyErr_SetString(PyExc_RuntimeError, "this view is not being entered");
    return NULL;
}

static PyObject *view_end(ArrivalView *view, PyObject *none)
{
    (void)none;
    if (view->state == OPEN)
        end_view(view);
    return engine_none_unless_interrupted();
}

static PyObject *view_exit(ArrivalView *view, PyObject *const *arguments, Py_ssize_t count)
{
    (void)arguments, (void)count;
    if (view->state != OPEN) {
        PyErr_SetString(PyExc_ValueError, "this receive_view() was not entered");
        return NULL;
    }
    PyObject *memory = view->view;
    view->view = NULL;
    PyObject *released = PyObject_CallMethodNoArgs(memory, release_name);
    Py_DECREF(memory);
    if (!released) {
        if (!PyErr_ExceptionMatches(PyExc_BufferError))
            return NULL;
        PyErr_Clear(); /* an array was made of the view, and uses it */
    }
    Py_XDECREF(released);
    if (engine_is_here(view->queue->port)) {
        end_view(view);
    } else {
        PyObject *result =
            PyObject_CallMethodOneArg(view->queue->owner, end_elsewhere_name, (PyObject *)view);
        if (!result)
            return NULL;
        Py_DECREF(result);
    }
    return engine_interrupted() ? NULL : Py_NewRef(view);
}

static PySendResult returned(PyObject *value, PyObject **result)
{
    *result = value;
    return value ? PYGEN_RETURN : PYGEN_ERROR;
}

/* A step of Arrivals.enter, which opens the view. */
static PySendResult step_in_general(ArrivalView *view, PyObject *value, PyObject **result)
{
    PySendResult stepped = PyIter_Send(view->inner, value, result);

    if (stepped != PYGEN_NEXT)
        end_general(view);
    return stepped;
}

static PySendResult go_general(ArrivalView *view, PyObject **result)
{
    PyObject *coroutine =
        PyObject_CallMethodOneArg(view->queue->owner, enter_name, (PyObject *)view);

    view->inner = coroutine ? PyObject_CallMethodNoArgs(coroutine, engine_python.await_name) : NULL;
    Py_XDECREF(coroutine);
    if (!view->inner)
        return returned(NULL, result);
    view->state = IN_GENERAL;
    return step_in_general(view, Py_None, result);
}

/* The first step: take an arrival that is there, or begin to wait. */
static PySendResult begin(ArrivalView *view, PyObject **result)
{
    if (engine_may_take(view->queue)) {
        view->queue->at_once++;
        return returned(open_view(view), result);
    }
    view->inner = engine_begin_wait(view->queue);
    if (view->inner) {
        view->state = WAITING_TO_ENTER;
        return PyIter_Send(view->inner, Py_None, result);
    }
    return PyErr_Occurred() ? returned(NULL, result) : go_general(view, result);
}

/* After the wait: take what has arrived, if anything has. */
static PySendResult go_on(ArrivalView *view, PyObject **result)
{
    PySendResult waited = PyIter_Send(view->inner, Py_None, result);

    if (waited == PYGEN_NEXT)
        return waited;
    end_waiting(view);
    Py_CLEAR(view->inner);
    if (waited == PYGEN_ERROR)
        return waited;
    Py_CLEAR(*result);
    view->state = ENTERED;
    return view->queue->count ? returned(open_view(view), result) : go_general(view, result);
}

/* Await the view on entering, for the memoryview, and on leaving. */
static PySendResult view_send(ArrivalView *view, PyObject *value, PyObject **result)
{
    *result = NULL;
    switch ((enum view_state)view->state) {
    case ENTERED:
        return begin(view, result);
    case WAITING_TO_ENTER:
        return go_on(view, result);
    case IN_GENERAL:
        return step_in_general(view, value, result);
    default:
        return returned(Py_NewRef(Py_None), result);
    }
}

static PyObject *view_throw(ArrivalView *view, PyObject *arguments)
{
    int is_general = view->state == IN_GENERAL;

    end_waiting(view);
    PyObject *inner = Py_XNewRef(view->inner);
    PyObject *result = engine_throw_into(inner, arguments);
    if (is_general && !result)
        end_general(view);
    Py_XDECREF(inner);
    return result;
}

static PyObject *view_close(ArrivalView *view, PyObject *none)
{
    int is_general = view->state == IN_GENERAL;

    (void)none;
    end_waiting(view);
    PyObject *inner = Py_XNewRef(view->inner);
    PyObject *result = engine_close_inner(inner);
    if (is_general)
        end_general(view);
    Py_XDECREF(inner);
    return result;
}

static PyMethodDef view_methods[] = {
    {"__aenter__", (PyCFunction)view_enter, METH_NOARGS, NULL},
    {"__aexit__", (PyCFunction)(void (*)(void))view_exit, METH_FASTCALL, NULL},
    {"send", engine_send_value, METH_O, NULL},
    {"throw", (PyCFunction)view_throw, METH_VARARGS, NULL},
    {"close", (PyCFunction)view_close, METH_NOARGS, NULL},
    {"_open", (PyCFunction)view_open, METH_NOARGS,
     "_open($self, /)\n--\n\n"
     "Take the first arrival, which exists, and return the memoryview."},
    {"_end", (PyCFunction)view_end, METH_NOARGS,
     "_end($self, /)\n--\n\n"
     "Give back the block of a view that is released."},
    {NULL, NULL, 0, NULL},
};

static PyAsyncMethods view_awaiting = {
    .am_await = PyObject_SelfIter,
    .am_send = (sendfunc)view_send,
};

static PyBufferProcs view_buffer = {
    .bf_getbuffer = (getbufferproc)view_get_buffer,
    .bf_releasebuffer = (releasebufferproc)view_release_buffer,
};

PyTypeObject engine_view_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.ArrivalView",
    .tp_doc = "The next arrival of a queue as a view of its block, in an `async with` block.",
    .tp_basicsize = sizeof(ArrivalView),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = view_new,
    .tp_dealloc = (destructor)view_dealloc,
    .tp_traverse = (traverseproc)view_traverse,
    .tp_clear = (inquiry)view_clear,
    .tp_methods = view_methods,
    .tp_as_async = &view_awaiting,
    .tp_as_buffer = &view_buffer,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = engine_next,
};
