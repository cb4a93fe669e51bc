/* A posted work request; its counterpart is in _requests/python.py. */
#include "engine.h"

#include <structmember.h>

/*
 * The memory of finished requests is kept for new ones, because a program makes millions of them.
 * Not with an address sanitizer, which has to see that each one is freed.
 */
#ifdef __SANITIZE_ADDRESS__
enum { SPARE = 0 };
#else
enum { SPARE = 128 };
#endif
static Request *spare[SPARE + 1];
static int spare_count;

static Request *make(void)
{
    if (!spare_count)
        return (Request *)engine_request_type.tp_alloc(&engine_request_type, 0);
    Request *request = spare[--spare_count];
    _Py_NewReference((PyObject *)request);
    PyObject_GC_Track(request);
    return request;
}

static void unmake(Request *request)
{
    /* Python finalizes an object once, and would not finalize the next request in its place. */
    if (!SPARE || spare_count == SPARE || request->finalized) {
        Py_TYPE(request)->tp_free((PyObject *)request);
        return;
    }
    /* Its references are released already. Reset the numbers. */
    request->wr_id = 0;
    request->length = 0;
    request->completes_as = 0;
    request->is_receive = request->state = request->at_once = request->retrieved = 0;
    request->stream_kind = 0;
    request->keeps = 0;
    request->stream_bytes = 0;
    request->posted = 0;
    request->weak = NULL;
    spare[spare_count++] = request;
}

/* -- the memory of requests that the engine makes: a region, a lease, or a tuple of regions -- */

/* The number of objects in `memory`, which is not NULL. */
static Py_ssize_t count_of(PyObject *memory)
{
    return PyTuple_CheckExact(memory) ? PyTuple_GET_SIZE(memory) : 1;
}

static PyObject *object_at(PyObject *memory, Py_ssize_t at)
{
    return PyTuple_CheckExact(memory) ? PyTuple_GET_ITEM(memory, at) : memory;
}

/* A lease holds its block from the start. */
static void hold(PyObject *object)
{
    if (!Py_IS_TYPE(object, &engine_lease_type))
        ((RegionBase *)object)->users++;
}

Request *engine_request(Port *port, PyObject *operation, Py_ssize_t length, PyObject *memory,
                        PyObject *remote, int is_receive)
{
    Request *request = make();
    if (!request)
        return NULL;
    request->owner = Py_NewRef(port->owner);
    request->port = (Port *)Py_NewRef(port);
    request->operation = Py_NewRef(operation);
    request->length = length;
    request->remote = Py_XNewRef(remote);
    request->is_receive = (char)is_receive;
    request->memory = Py_XNewRef(memory);
    for (Py_ssize_t i = 0; memory && i < count_of(memory); i++)
        hold(object_at(memory, i));
    return request;
}

int engine_holds_usable(const Request *request)
{
    PyObject *memory = request->memory;
    for (Py_ssize_t i = 0; memory && i < count_of(memory); i++) {
        PyObject *object = object_at(memory, i);
        if (!Py_IS_TYPE(object, &engine_lease_type) && !((RegionBase *)object)->usable)
            return 0;
    }
    return 1;
}

/* -- memory that Python gave, held by methods ------------------------------------------------ */

/* Release the first `count` items of a tuple of memory. */
static void release_held(PyObject *held, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *memory = PyTuple_GET_ITEM(held, i);
        PyObject *result = engine_call_deferring(memory, engine_given.release, NULL);
        Py_XDECREF(result);
        if (!result)
            engine_log("releasing the memory of %r failed", memory);
    }
}

/* Hold all items of a tuple of memory; with an exception, none of them. */
static int hold_all(PyObject *held)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(held); i++) {
        PyObject *result = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(held, i), engine_given.hold);
        Py_XDECREF(result);
        if (!result) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            release_held(held, i);
            PyErr_Restore(type, value, trace);
            return -1;
        }
    }
    return 0;
}

static PyObject *request_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner", "operation", "length", "held", "remote", "is_receive", NULL};
    PyObject *owner, *operation, *held, *remote = Py_None;
    Py_ssize_t length;
    int is_receive = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUnO|O$p", names, &owner, &operation, &length,
                                     &held, &remote, &is_receive))
        return NULL;
    Request *request = (Request *)type->tp_alloc(type, 0);
    if (!request)
        return NULL;
    request->owner = Py_NewRef(owner);
    request->operation = Py_NewRef(operation);
    request->remote = remote == Py_None ? NULL : Py_NewRef(remote);
    request->length = length;
    request->is_receive = (char)is_receive;
    PyObject *all = PySequence_Tuple(held); /* a copy, which no other code changes */
    if (!all || hold_all(all)) {
        Py_XDECREF(all);
        Py_DECREF(request);
        return NULL;
    }
    request->held = all;
    return (PyObject *)request;
}

static int request_traverse(Request *request, visitproc visit, void *arg)
{
    Py_VISIT(request->owner);
    Py_VISIT(request->held);
    Py_VISIT(request->remote);
    Py_VISIT(request->result);
    Py_VISIT(request->error);
    Py_VISIT(request->run);
    Py_VISIT(request->waiters);
    Py_VISIT(request->callbacks);
    Py_VISIT(request->inner);
    Py_VISIT(request->memory);
    Py_VISIT(request->handle);
    Py_VISIT(request->port);
    Py_VISIT(request->pooled);
    Py_VISIT(request->stream);
    Py_VISIT(request->subject);
    return 0;
}

static void forget_subject(Request *request)
{
    request->on_end = NULL;
    Py_CLEAR(request->subject);
}

/* The result and the error stay: exceptions and completions clear themselves. */
static int request_clear(Request *request)
{
    Py_CLEAR(request->run);
    Py_CLEAR(request->waiters);
    Py_CLEAR(request->callbacks);
    Py_CLEAR(request->inner);
    forget_subject(request);
    return 0;
}

/* Report an error that was never retrieved, as asyncio does for a future. */
static void request_finalize(Request *request)
{
    PyObject *type, *value, *trace;

    request->finalized = 1;
    if (request->state != FAILED || request->retrieved || !request->owner)
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *arguments[] = {request->owner, (PyObject *)request};
    PyObject *result = engine_call_method_alone(engine_given.request_unretrieved, arguments, 2);
    Py_XDECREF(result);
    if (!result)
        engine_log("the failure of %r could not be reported", (PyObject *)request);
    request->retrieved = 1;
    PyErr_Restore(type, value, trace);
}

static void request_dealloc(Request *request)
{
    if (request->state == FAILED && !request->retrieved &&
        PyObject_CallFinalizerFromDealloc((PyObject *)request))
        return; /* the report made a new reference to it */
    PyObject_GC_UnTrack(request);
    if (request->weak)
        PyObject_ClearWeakRefs((PyObject *)request);
    request_clear(request);
    Py_CLEAR(request->owner);
    Py_CLEAR(request->operation);
    Py_CLEAR(request->held);
    Py_CLEAR(request->remote);
    Py_CLEAR(request->result);
    Py_CLEAR(request->error);
    Py_CLEAR(request->memory);
    Py_CLEAR(request->handle);
    Py_CLEAR(request->port);
    Py_CLEAR(request->pooled);
    Py_CLEAR(request->stream);
    unmake(request);
}

/* -- the list of requests that have not ended (open.c) ------------------------------------- */

void engine_enter(OpenRequests *open, Request *request)
{
    if (request->open)
        return;
    request->open = open; /* borrowed: the list removes its requests before it is freed */
    request->later = NULL;
    request->earlier = open->last;
    if (open->last)
        open->last->later = request;
    else
        open->first = request;
    open->last = request;
    open->count++;
    Py_INCREF(request);
}

void engine_leave(OpenRequests *open, Request *request)
{
    if (!open || request->open != open)
        return;
    if (request->earlier)
        request->earlier->later = request->later;
    else
        open->first = request->later;
    if (request->later)
        request->later->earlier = request->earlier;
    else
        open->last = request->earlier;
    request->earlier = request->later = NULL;
    request->open = NULL;
    open->count--;
    Py_DECREF(request);
}

/* -- completion --------------------------------------------------------------------------- */

/* Releasing the last block of a slab, or the last use of a retired region, closes a region, which
   can fail. */
static void release_object(PyObject *object, const Request *request)
{
    if (Py_IS_TYPE(object, &engine_lease_type)) {
        if (engine_return_lease((Lease *)object))
            engine_log("releasing the memory of %r failed", (PyObject *)request);
        return;
    }
    if (engine_release_region((RegionBase *)object))
        engine_log("releasing the memory of %r failed", (PyObject *)request);
}

static void release_memory(Request *request)
{
    PyObject *memory = request->memory;
    if (!memory)
        return;
    request->memory = NULL;
    for (Py_ssize_t i = 0; i < count_of(memory); i++)
        release_object(object_at(memory, i), request);
    Py_DECREF(memory);
}

static void release_handle(Request *request)
{
    Handle *handle = request->handle;
    if (!handle)
        return;
    request->handle = NULL;
    handle->holders--;
    if (handle->retired && !handle->holders) {
        PyObject *result = engine_call_deferring((PyObject *)handle, engine_given.destroy, NULL);
        Py_XDECREF(result);
        if (!result)
            engine_log("destroying the address handle of %r failed", (PyObject *)request);
    }
    Py_DECREF(handle);
}

/* A value that there is no memory for fails the request: its completion is not the result. */
void engine_read_value(Request *request)
{
    uint64_t value;
    struct ibv_sge sge;

    if (request->state != SUCCEEDED)
        return;
    memcpy(&value, engine_leased_block((const Lease *)request->memory, &sge), sizeof(value));
    Py_XSETREF(request->result, PyLong_FromUnsignedLongLong(value));
    if (request->result)
        return;
    PyObject *type, *trace;
    PyErr_Fetch(&type, &request->error, &trace);
    PyErr_NormalizeException(&type, &request->error, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    request->state = FAILED;
}

static void release(Request *request)
{
    PyObject *held = request->held;
    if (!request->pooled) /* engine_arrived moves the block on */
        release_memory(request);
    release_handle(request);
    if (!held)
        return;
    request->held = NULL;
    release_held(held, PyTuple_GET_SIZE(held));
    Py_DECREF(held);
}

/* Whether the end is reported to the owner: one that waits for its requests gets that of the last
 * receive, and of each send. */
static int notifies_owner(const Request *request, const Port *port)
{
    int others_remain = request->open == port->open && request->open && request->open->count > 1;
    return port->notifies_owner && (!request->is_receive || port->shared || !others_remain);
}

static void account(Request *request)
{
    Port *port = request->port;
    if (port && !notifies_owner(request, port)) {
        engine_leave(port->open, request);
        engine_give_slot(request->is_receive ? port->receives : port->sends);
        return;
    }
    PyObject *result =
        engine_call_deferring(request->owner, engine_given.request_ended, (PyObject *)request);
    Py_XDECREF(result);
    if (!result)
        engine_log("the end of %r could not be accounted for", (PyObject *)request);
}

static void wake_all(Request *request)
{
    PyObject *waiters = request->waiters;
    if (!waiters)
        return;
    request->waiters = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(waiters); i++) {
        PyObject *waiter = PyList_GET_ITEM(waiters, i);
        int failed;
        if (Py_IS_TYPE(waiter, &engine_waiter_type)) {
            failed = engine_wake((Waiter *)waiter);
        } else {
            PyObject *result = engine_call_method_surely(engine_given.wake, &waiter, 1);
            failed = result ? 0 : -1;
            Py_XDECREF(result);
        }
        if (failed)
            engine_log("waking the tasks that await %r failed", (PyObject *)request);
    }
    Py_DECREF(waiters);
}

/* The inner callback may run twice, so an interrupt half way loses nothing. */
static void call_inner(Request *request)
{
    PyObject *inner = request->inner;
    if (!inner)
        return;
    request->inner = NULL;
    PyObject *result = engine_call_surely(inner, (PyObject **)&request, 1);
    Py_DECREF(inner);
    if (!result)
        engine_log("a callback of %r failed", (PyObject *)request);
    Py_XDECREF(result);
}

static void call_all(Request *request)
{
    PyObject *callbacks = request->callbacks;
    if (!callbacks)
        return;
    request->callbacks = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(callbacks); i++) {
        PyObject *result =
            engine_call_alone(PyList_GET_ITEM(callbacks, i), (PyObject **)&request, 1);
        Py_XDECREF(result);
        if (!result)
            engine_log("a callback of %r failed", (PyObject *)request);
    }
    Py_DECREF(callbacks);
}

int engine_keeps(const Request *request)
{
    return request->keeps && request->state == FAILED;
}

static void end(Request *request)
{
    Py_INCREF(request);
    if (!engine_keeps(request)) {
        if (request->on_end)
            request->on_end(request);
        forget_subject(request);
        release(request);
    }
    account(request);
    wake_all(request);
    call_inner(request);
    if (request->pooled)
        engine_arrived(request);
    if (request->stream)
        engine_stream_ended(request);
    call_all(request);
    Py_DECREF(request);
}

static void fail(Request *request, PyObject *error)
{
    PyObject *run = request->run;
    if (run && PyList_CheckExact(run) && PyList_GET_SIZE(run) &&
        PyList_GET_ITEM(run, PyList_GET_SIZE(run) - 1) != (PyObject *)request)
        request->retrieved = 1; /* the last request of its run reports the error */
    request->error = error;     /* takes the reference */
    request->state = FAILED;
}

/* Whether it is a receive that no program sees, and was flushed. There are hundreds at the end of a
   connection, and the cause of the end explains them all. */
static int is_one_of_many_flushed(const Request *request,
                                  const struct aiordma_completion *completion)
{
    return completion->status == IBV_WC_WR_FLUSH_ERR && request->is_receive && request->port &&
           !request->port->shared && (request->pooled || request->stream);
}

static void remember_flushed(Port *port, PyObject *error)
{
    PyObject *cause = PyException_GetCause(error);
    if (cause)
        Py_XSETREF(port->flushed, Py_NewRef(error));
    Py_XDECREF(cause);
}

static void explain(Request *request, const struct aiordma_completion *completion)
{
    int is_one_of_many = is_one_of_many_flushed(request, completion);
    if (is_one_of_many && request->port->flushed) {
        fail(request, Py_NewRef(request->port->flushed));
        return;
    }
    PyObject *raw = engine_completion_tuple(completion);
    PyObject *error = NULL;
    if (raw) {
        PyObject *arguments[] = {request->owner, (PyObject *)request, raw};
        error = engine_call_method_surely(engine_given.request_failed, arguments, 3);
        Py_DECREF(raw);
    }
    if (!error && engine_keep_interrupt())
        PyErr_SetString(PyExc_RuntimeError, "interrupts kept the failure from being explained");
    if (error && !PyExceptionInstance_Check(error)) {
        PyErr_Format(PyExc_TypeError, "request_failed of %R returned %R, no exception",
                     request->owner, error);
        Py_CLEAR(error);
    }
    if (!error) {
        /* The request fails with this exception instead, because it must not hang. */
        PyObject *type, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        Py_XDECREF(type);
        Py_XDECREF(trace);
    } else if (is_one_of_many) {
        remember_flushed(request->port, error);
    }
    fail(request, error);
}

/* Returns a borrowed reference to a request of a run; NULL at the last one, which ends the run. */
static Request *earlier_in_run(PyObject *run, Py_ssize_t at, const Request *last)
{
    PyObject *earlier = PySequence_Fast_GET_ITEM(run, at);
    return earlier != (const PyObject *)last && Py_IS_TYPE(earlier, &engine_request_type)
               ? (Request *)earlier
               : NULL;
}

int engine_run_is_quiet(const Request *last)
{
    if (!PyList_CheckExact(last->run))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(last->run); i++) {
        const Request *earlier = earlier_in_run(last->run, i, last);
        if (!earlier)
            break;
        if (earlier->state == IN_FLIGHT &&
            (earlier->port != last->port || earlier->callbacks || earlier->held))
            return 0;
    }
    return 1;
}

/* Complete an earlier request of a run that succeeded. 0: the owner has to do it. */
static int end_with(Request *earlier, const Request *last)
{
    if (last->state != SUCCEEDED || !earlier->port)
        return 0;
    Py_CLEAR(earlier->run); /* or each request would search through all before it */
    Py_XDECREF(engine_table_take(earlier->port->drain->table, earlier->wr_id));
    earlier->at_once = last->at_once;
    struct aiordma_completion completion = {
        .wr_id = earlier->wr_id,
        .opcode = earlier->completes_as,
        .qp_num = last->completion.qp_num,
    };
    engine_complete(earlier, &completion);
    return 1;
}

/* Complete the unsignaled requests before it in its run. */
static void end_run(Request *request)
{
    PyObject *run = request->run;
    if (!run)
        return;
    request->run = NULL;
    PyObject *all = PySequence_Fast(run, "a run is a sequence");
    for (Py_ssize_t i = 0; all && i < PySequence_Fast_GET_SIZE(all); i++) {
        Request *earlier = earlier_in_run(all, i, request);
        if (!earlier)
            break;
        if (earlier->state != IN_FLIGHT)
            continue;
        Py_INCREF(earlier);
        if (!end_with(earlier, request)) {
            earlier->retrieved = 1; /* if it fails, the last request reports the error */
            PyObject *arguments[] = {request->owner, (PyObject *)earlier, (PyObject *)request};
            PyObject *result = engine_call_method_surely(engine_given.run_ended, arguments, 3);
            Py_XDECREF(result);
            if (!result)
                engine_log("the run of %r could not be ended", (PyObject *)request);
        }
        Py_DECREF(earlier);
    }
    if (!all)
        engine_log("the run of %r could not be ended", (PyObject *)request);
    Py_XDECREF(all);
    Py_DECREF(run);
}

void engine_complete(Request *request, const struct aiordma_completion *completion)
{
    if (request->state != IN_FLIGHT)
        return;
    engine_count(request, completion);
    if (completion->status) {
        explain(request, completion);
    } else {
        request->completion = *completion;
        request->state = SUCCEEDED;
    }
    end_run(request);
    end(request);
}

void engine_drop(Request *request)
{
    Py_INCREF(request); /* its subject may have the last reference */
    Py_CLEAR(request->pooled);
    Py_CLEAR(request->stream);
    if (engine_keeps(request) && request->on_end)
        request->on_end(request);
    forget_subject(request);
    release(request);
    Py_DECREF(request);
}

/* A copy for each caller that gets the error: a raise adds the caller's frames to an exception. */
static PyObject *own_error(Request *request)
{
    request->retrieved = 1;
    return engine_given.detached ? PyObject_CallOneArg(engine_given.detached, request->error)
                                 : Py_NewRef(request->error);
}

PyObject *engine_result(Request *request)
{
    PyObject *error;

    switch (request->state) {
    case SUCCEEDED:
        if (!request->result) /* making it can run the collector, and so this function again */
            Py_XSETREF(request->result, engine_completion(&request->completion));
        return Py_XNewRef(request->result);
    case FAILED:
        error = own_error(request);
        if (error) {
            PyErr_SetObject((PyObject *)Py_TYPE(error), error);
            Py_DECREF(error);
        }
        return NULL;
    default:
        PyErr_Format(PyExc_RuntimeError, "%R has not ended: await it", request);
        return NULL;
    }
}

/* -- awaiting ----------------------------------------------------------------------------- */

static int add_waiter(Request *request, PyObject *waiter)
{
    if (!request->waiters && !(request->waiters = PyList_New(0)))
        return -1;
    return PyList_Append(request->waiters, waiter);
}

void engine_forget_waiter(Request *request, PyObject *waiter)
{
    PyObject *waiters = request->waiters;
    for (Py_ssize_t i = 0; waiters && i < PyList_GET_SIZE(waiters); i++)
        if (PyList_GET_ITEM(waiters, i) == waiter) {
            if (PySequence_DelItem(waiters, i))
                engine_log("removing a waiter of %r failed", (PyObject *)request);
            return;
        }
}

/* Make a waiter for the owner's loop: the engine's on asyncio, else the loop's own. */
static PyObject *make_waiter(Request *request)
{
    if (request->port && request->port->loop)
        return (PyObject *)engine_waiter(request->port->loop);
    PyObject *loop = PyObject_GetAttr(request->owner, engine_given.loop);
    PyObject *waiter = loop ? PyObject_CallMethodNoArgs(loop, engine_given.waiter) : NULL;
    Py_XDECREF(loop);
    return waiter;
}

static int has_ended(PyObject *awaited)
{
    return ((Request *)awaited)->state != IN_FLIGHT;
}

enum { AT_ONCE = 256 };

/* Whether the await has to suspend, because AT_ONCE awaits did not, and other tasks have to run. */
static int has_to_pause(Request *request)
{
    if (!request->at_once)
        return 0;
    request->at_once = 0;
    if (!request->port || ++request->port->drain->at_once < AT_ONCE)
        return 0;
    request->port->drain->at_once = 0;
    return 1;
}

static PyObject *awaited_result(PyObject *awaited)
{
    return engine_result((Request *)awaited);
}

static void awaited_forget(PyObject *awaited, PyObject *waiter)
{
    engine_forget_waiter((Request *)awaited, waiter);
}

static const struct engine_awaited awaited_calls = {
    .has_ended = has_ended,
    .result = awaited_result,
    .forget = awaited_forget,
};

static PyObject *await_elsewhere(PyObject *awaited, PyObject *waiter)
{
    PyObject *arguments[] = {awaited, waiter};
    if (!engine_given.wait_elsewhere) {
        PyErr_SetString(PyExc_RuntimeError, "the engine was not given wait_elsewhere");
        return NULL;
    }
    return PyObject_Vectorcall(engine_given.wait_elsewhere, arguments, 2, NULL);
}

/* Await a request that has ended, and suspend the task once. */
static PyObject *pause_once(Request *request, PyObject *awaited, const struct engine_awaited *calls)
{
    PyObject *made = make_waiter(request), *result = NULL;
    if (made && Py_IS_TYPE(made, &engine_waiter_type)) {
        Waiter *waiter = (Waiter *)made;
        engine_await(waiter, awaited, calls);
        waiter->pauses = 1;
        return made;
    }
    PyObject *woken = made ? PyObject_CallMethodNoArgs(made, engine_given.wake) : NULL;
    if (woken)
        result = await_elsewhere(awaited, made); /* suspends once, though the waiter is woken */
    Py_XDECREF(woken);
    Py_XDECREF(made);
    return result;
}

PyObject *engine_await_request(Request *request, PyObject *awaited,
                               const struct engine_awaited *calls)
{
    request->retrieved = 1; /* also if the await is cancelled, which abandons the result */
    if (request->state == IN_FLIGHT && request->port && engine_usable(request->port, 1))
        request->port->drain->poll_now(request->port->drain);
    if (engine_interrupted())
        return NULL;
    if (request->state != IN_FLIGHT) {
        /* The request as its own awaitable does not suspend. */
        return has_to_pause(request) ? pause_once(request, awaited, calls) : Py_NewRef(awaited);
    }
    if (!request->wr_id) {
        PyErr_Format(PyExc_RuntimeError, "%R is part of a chain that is not posted yet", request);
        return NULL;
    }
    if (request->port && request->port->thread != PyThread_get_thread_ident()) {
        PyObject *ours = PyObject_CallMethodNoArgs(request->owner, engine_given.require_own_loop);
        if (!ours)
            return NULL;
        Py_DECREF(ours);
    }
    PyObject *waiter = make_waiter(request), *result = NULL;
    if (!waiter || add_waiter(request, waiter)) {
        Py_XDECREF(waiter);
        return NULL;
    }
    if (Py_IS_TYPE(waiter, &engine_waiter_type)) {
        engine_await((Waiter *)waiter, awaited, calls);
        return waiter;
    }
    result = await_elsewhere(awaited, waiter);
    Py_DECREF(waiter);
    return result;
}

static PyObject *request_await(Request *request)
{
    return engine_await_request(request, (PyObject *)request, &awaited_calls);
}

/* The request as its own awaitable returns its result at once. */
static PySendResult request_send(Request *request, PyObject *value, PyObject **result)
{
    (void)value;
    *result = engine_result(request);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

PyObject *engine_stop_iteration(PyObject *result)
{
    if (!result)
        return NULL;
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
    if (stop)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *request_next(Request *request)
{
    return engine_stop_iteration(engine_result(request));
}

/* For `yield from`, which calls iter(). */
static PyObject *request_itself(PyObject *request)
{
    return Py_NewRef(request);
}

static PyObject *request_forget_waiter(Request *request, PyObject *waiter)
{
    engine_forget_waiter(request, waiter);
    Py_RETURN_NONE;
}

/* -- the interface for Python --------------------------------------------------------------- */

static PyObject *request_str(Request *request)
{
    if (!request->remote)
        return PyUnicode_FromFormat("%U of %zd bytes", request->operation, request->length);
    return PyUnicode_FromFormat("%U of %zd bytes (remote: %S)", request->operation, request->length,
                                request->remote);
}

static PyObject *request_repr(Request *request)
{
    static const char *const states[] = {"in flight", "done"};
    PyObject *number = PyLong_FromUnsignedLongLong(request->wr_id);
    PyObject *hex = number ? PyNumber_ToBase(number, 16) : NULL;
    PyObject *text = NULL;

    if (hex && request->state == FAILED)
        text = PyUnicode_FromFormat("<WorkRequest %S, wr_id %U, failed: %s>", request, hex,
                                    Py_TYPE(request->error)->tp_name);
    else if (hex)
        text = PyUnicode_FromFormat("<WorkRequest %S, wr_id %U, %s>", request, hex,
                                    states[request->state == SUCCEEDED]);
    Py_XDECREF(number);
    Py_XDECREF(hex);
    return text;
}

static PyObject *request_done(Request *request, PyObject *none)
{
    (void)none;
    return PyBool_FromLong(request->state != IN_FLIGHT);
}

static PyObject *request_result(Request *request, PyObject *none)
{
    (void)none;
    return engine_result(request);
}

static PyObject *request_exception(Request *request, PyObject *none)
{
    (void)none;
    return request->error ? own_error(request) : Py_NewRef(Py_None);
}

static PyObject *request_stored_error(Request *request, PyObject *none)
{
    (void)none;
    return Py_NewRef(request->error ? request->error : Py_None);
}

static PyObject *call_now(Request *request, PyObject *callback)
{
    PyObject *result = PyObject_CallOneArg(callback, (PyObject *)request);
    Py_XDECREF(result);
    if (!result)
        engine_log("a callback of %r failed", (PyObject *)request);
    return engine_none_unless_interrupted();
}

static PyObject *request_add_done_callback(Request *request, PyObject *callback)
{
    if (request->state != IN_FLIGHT)
        return call_now(request, callback);
    if ((!request->callbacks && !(request->callbacks = PyList_New(0))) ||
        PyList_Append(request->callbacks, callback))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *request_on_done(Request *request, PyObject *callback)
{
    if (request->state != IN_FLIGHT)
        return call_now(request, callback);
    Py_XSETREF(request->inner, Py_NewRef(callback));
    Py_RETURN_NONE;
}

static PyObject *list_of(PyObject *list)
{
    return list ? PyList_GetSlice(list, 0, PyList_GET_SIZE(list)) : PyList_New(0);
}

static PyObject *request_remove_done_callback(Request *request, PyObject *callback)
{
    PyObject *known = list_of(request->callbacks), *kept = PyList_New(0);
    int failed = !known || !kept;

    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(known); i++) {
        int is_it = PyObject_RichCompareBool(PyList_GET_ITEM(known, i), callback, Py_EQ);
        failed = is_it < 0 || (!is_it && PyList_Append(kept, PyList_GET_ITEM(known, i)));
    }
    Py_ssize_t removed = failed ? 0 : PyList_GET_SIZE(known) - PyList_GET_SIZE(kept);
    /* Comparing runs the program's code, which may have ended the request. */
    if (!failed && removed && request->callbacks)
        Py_XSETREF(request->callbacks, Py_NewRef(kept));
    Py_XDECREF(known);
    Py_XDECREF(kept);
    return failed ? NULL : PyLong_FromSsize_t(removed);
}

static PyObject *request_cancelled(Request *request, PyObject *none)
{
    (void)request, (void)none;
    Py_RETURN_FALSE;
}

static PyObject *request_set_run(Request *request, PyObject *run)
{
    Py_ssize_t count = PySequence_Length(run);
    if (count < 0)
        return NULL;
    Py_XSETREF(request->run, count ? Py_NewRef(run) : NULL);
    Py_RETURN_NONE;
}

static PyObject *request_complete(Request *request, PyObject *raw)
{
    struct aiordma_completion c;
    if (!PyTuple_Check(raw)) {
        PyErr_SetString(PyExc_TypeError, "a completion is a tuple");
        return NULL;
    }
    if (engine_read_completion(raw, &c))
        return NULL;
    engine_complete(request, &c);
    return engine_none_unless_interrupted();
}

static PyObject *request_fail(Request *request, PyObject *error)
{
    if (request->state == IN_FLIGHT) {
        if (!PyExceptionInstance_Check(error)) {
            PyErr_SetString(PyExc_TypeError, "a request fails with an exception");
            return NULL;
        }
        engine_count(request, NULL);
        fail(request, Py_NewRef(error));
        end(request);
    }
    return engine_none_unless_interrupted();
}

static PyObject *request_keep_memory(Request *request, PyObject *none)
{
    (void)none;
    if (request->state == IN_FLIGHT)
        request->keeps = 1;
    Py_RETURN_NONE;
}

static PyObject *request_drop(Request *request, PyObject *none)
{
    (void)none;
    engine_drop(request);
    return engine_none_unless_interrupted();
}

static PyObject *request_waiters(Request *request, void *closure)
{
    (void)closure;
    return list_of(request->waiters);
}

static PyObject *request_callbacks(Request *request, void *closure)
{
    (void)closure;
    return list_of(request->callbacks);
}

static PyMethodDef methods[] = {
    {"done", (PyCFunction)request_done, METH_NOARGS,
     "done($self, /)\n--\n\n"
     "Return whether the request has ended.\n\n"
     "Raises: nothing."},
    {"result", (PyCFunction)request_result, METH_NOARGS,
     "result($self, /)\n--\n\n"
     "Return the completion of an ended request.\n\n"
     "Raises:\n"
     "    WorkCompletionError: the request failed.\n"
     "    RdmaError: the request is of a chain that was not posted.\n"
     "    RuntimeError: the request is still in flight."},
    {"exception", (PyCFunction)request_exception, METH_NOARGS,
     "exception($self, /)\n--\n\n"
     "Return the error of an ended request, None if it succeeded or is in flight. Each\n"
     "call returns an exception of its own, as each await raises one.\n\n"
     "Raises: nothing."},
    {"add_done_callback", (PyCFunction)request_add_done_callback, METH_O,
     "add_done_callback($self, callback, /)\n--\n\n"
     "Call a function with the request once it has ended: at once if it has ended, otherwise\n"
     "on the loop's thread when its completion is delivered. The function should be short.\n"
     "Its exceptions are logged.\n\n"
     "Args:\n"
     "    callback: a function of the request.\n\n"
     "Raises: nothing."},
    {"_stored_error", (PyCFunction)request_stored_error, METH_NOARGS,
     "_stored_error($self, /)\n--\n\n"
     "Return the error, or None. Unlike `exception`, it does not count as retrieved, and is no\n"
     "copy: do not raise it."},
    {"_on_done", (PyCFunction)request_on_done, METH_O,
     "_on_done($self, callback, /)\n--\n\n"
     "Add a done callback that runs no code of the program's: it may be called inside\n"
     "another request's post."},
    {"remove_done_callback", (PyCFunction)request_remove_done_callback, METH_O,
     "remove_done_callback($self, callback, /)\n--\n\n"
     "Remove a callback, and return how often it had been added. For asyncio.wait.\n\n"
     "Args:\n"
     "    callback: the function that was added.\n\n"
     "Raises: nothing."},
    {"cancelled", (PyCFunction)request_cancelled, METH_NOARGS,
     "cancelled($self, /)\n--\n\n"
     "Return False: no verb cancels a posted request. For asyncio.wait.\n\n"
     "Raises: nothing."},
    {"_set_run", (PyCFunction)request_set_run, METH_O,
     "_set_run($self, run, /)\n--\n\n"
     "Complete the unsignaled requests before this one in a run, when this one\n"
     "completes."},
    {"_complete", (PyCFunction)request_complete, METH_O,
     "_complete($self, raw, /)\n--\n\n"
     "End the request with a completion."},
    {"_fail", (PyCFunction)request_fail, METH_O,
     "_fail($self, error, /)\n--\n\n"
     "End the request without a completion: the queue pair is destroyed, or the request was\n"
     "not posted. A request that has ended does not change. The error is stored: raise only\n"
     "copies of it."},
    {"_drop", (PyCFunction)request_drop, METH_NOARGS,
     "_drop($self, /)\n--\n\n"
     "Release the memory of a request that the device did not accept, or that has kept it."},
    {"_keep_memory", (PyCFunction)request_keep_memory, METH_NOARGS,
     "_keep_memory($self, /)\n--\n\n"
     "If the request fails, keep its memory until `_drop`: the device may still access it."},
    {"_forget_waiter", (PyCFunction)request_forget_waiter, METH_O,
     "_forget_waiter($self, waiter, /)\n--\n\n"
     "Do not wake a waiter any more."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"operation", T_OBJECT, offsetof(Request, operation), READONLY, NULL},
    {"length", T_PYSSIZET, offsetof(Request, length), READONLY, NULL},
    {"remote", T_OBJECT, offsetof(Request, remote), READONLY, NULL},
    {"is_receive", T_BOOL, offsetof(Request, is_receive), READONLY, NULL},
    {"wr_id", T_ULONGLONG, offsetof(Request, wr_id), 0, NULL},
    {"_completes_as", T_UINT, offsetof(Request, completes_as), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"_waiters", (getter)request_waiters, NULL, NULL, NULL},
    {"_callbacks", (getter)request_callbacks, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyAsyncMethods awaiting = {
    .am_await = (unaryfunc)request_await,
    .am_send = (sendfunc)request_send,
};

PyTypeObject engine_request_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma.WorkRequest",
    .tp_doc =
        "WorkRequest(owner, operation, length, held, remote=None, *, is_receive=False)\n"
        "--\n\n"
        "A posted work request. Await it for its WorkCompletion; any number of tasks may,\n"
        "any number of times.\n\n"
        "`operation` is the name of the request (SEND, RECV, RDMA_READ, RDMA_WRITE, ...),\n"
        "`length` the number of its local bytes. If the program does not retrieve an error, by\n"
        "awaiting, `result` or `exception`, the error is reported (docs/guarantees.md).\n\n"
        "Raises:\n"
        "    WorkCompletionError: the awaited request failed.\n"
        "    RdmaError: the awaited request is of a chain that was not posted.\n"
        "    RuntimeError: the awaited request is of a chain that is not posted yet.\n"
        "    EventLoopError: the request was awaited outside of its event loop.\n\n"
        "Cancellation: the request stays in flight and holds its memory. Its completion is then\n"
        "discarded.",
    .tp_basicsize = sizeof(Request),
    .tp_weaklistoffset = offsetof(Request, weak),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = request_new,
    .tp_dealloc = (destructor)request_dealloc,
    .tp_finalize = (destructor)request_finalize,
    .tp_traverse = (traverseproc)request_traverse,
    .tp_clear = (inquiry)request_clear,
    .tp_str = (reprfunc)request_str,
    .tp_repr = (reprfunc)request_repr,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = properties,
    .tp_as_async = &awaiting,
    .tp_iter = request_itself,
    .tp_iternext = (iternextfunc)request_next,
};
