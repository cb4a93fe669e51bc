/* A posted work request: its memory, its completion and its result. How it is awaited is in
   request_await.c, its type in request_type.c. */
#include "request.h"
#include "trace.h"
#include "wait.h"

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

void engine_hold_memory(const Request *request)
{
    PyObject *memory = request->memory;
    for (Py_ssize_t i = 0; memory && i < count_of(memory); i++)
        hold(object_at(memory, i));
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
        int failed;
        if (PyObject_TypeCheck(memory, &engine_part_type)) {
            failed = engine_release_region(((Part *)memory)->region);
        } else {
            PyObject *result = engine_call_method_alone(engine_python.release, &memory, 1);
            failed = !result;
            Py_XDECREF(result);
        }
        if (failed)
            engine_log("releasing the memory of %r failed", memory);
    }
}

int engine_hold_all(PyObject *held)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(held); i++) {
        PyObject *result = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(held, i), engine_python.hold);
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

/* -- the requests of a queue pair that have not ended ---------------------------------------- */

/* A linked list through the requests. A set would be slower: its hashing took a quarter of the time
   of a request. */
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

/* Send opcodes begin at 0, those of receives at IBV_WC_RECV. */
enum { OF_RECEIVES = 16 };

static unsigned int place_of(unsigned int opcode)
{
    return opcode & IBV_WC_RECV ? OF_RECEIVES + opcode % (ENGINE_OPCODES - OF_RECEIVES)
                                : opcode % OF_RECEIVES;
}

unsigned int engine_opcode_at(unsigned int place)
{
    return place < OF_RECEIVES ? place : IBV_WC_RECV + place - OF_RECEIVES;
}

static void record(const Request *request, const struct aiordma_completion *completion)
{
    if (!request->posted)
        return; /* it was posted before the trace began */
    Py_ssize_t bytes = request->length;
    if (request->is_receive && completion && !completion->status)
        bytes = (Py_ssize_t)completion->byte_len;
    engine_record(&(struct engine_record){
        .owner = request->owner,
        .operation = request->operation,
        .posted = request->posted,
        .wr_id = request->wr_id,
        .bytes = bytes,
        .status = completion ? (long)completion->status : -1,
    });
}

/* Count a request that ends. NULL: it ends without a completion. */
static void count_end(const Request *request, const struct aiordma_completion *completion)
{
    if (!request->open || !request->wr_id)
        return; /* it was not posted */
    /* A receive of our own that the end of its queue flushes is neither traced nor a failure. */
    int is_unused = request->is_receive && request->poster &&
                    (!completion || completion->status == IBV_WC_WR_FLUSH_ERR);
    if (engine_tracing && !is_unused)
        record(request, completion);
    struct engine_ended *ended = &request->open->ended;
    if (request->is_receive)
        ended->receives++;
    else
        ended->sends++;
    if (!completion || is_unused) {
        ended->discarded++;
        return;
    }
    if (completion->status) {
        uint32_t status = completion->status;
        ended->failed[status < ENGINE_STATUSES ? status : IBV_WC_GENERAL_ERR]++;
        return;
    }
    ended->completed[place_of(completion->opcode)]++;
    if (request->is_receive)
        ended->bytes_received += completion->byte_len;
    else if (completion->opcode == IBV_WC_RDMA_READ)
        ended->bytes_received += (unsigned long long)request->length;
    else if (completion->opcode == IBV_WC_SEND || completion->opcode == IBV_WC_RDMA_WRITE)
        ended->bytes_sent += (unsigned long long)request->length;
}

uint64_t engine_put_in_flight(Port *port, Request *request)
{
    request->wr_id = engine_table_add(port->drain->table, request);
    if (!request->wr_id)
        return 0;
    if (engine_tracing)
        request->posted = engine_trace_time();
    engine_enter(port->open, request);
    return request->wr_id;
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
        PyObject *destroyed = (PyObject *)handle;
        PyObject *result = engine_call_method_alone(engine_python.destroy, &destroyed, 1);
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
    if (!request->poster || !request->calls->takes_memory)
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
    PyObject *arguments[] = {request->owner, (PyObject *)request};
    PyObject *result = engine_call_method_alone(engine_python.request_ended, arguments, 2);
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
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(waiters); i++)
        if (engine_wake(PyList_GET_ITEM(waiters, i)))
            engine_log("waking the tasks that await %r failed", (PyObject *)request);
    Py_DECREF(waiters);
}

static void call_inner(Request *request)
{
    PyObject *inner = request->inner;
    if (!inner)
        return;
    request->inner = NULL;
    PyObject *result = engine_call_alone(inner, (PyObject **)&request, 1);
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

void engine_forget_subject(Request *request)
{
    request->on_end = NULL;
    Py_CLEAR(request->subject);
}

static void end(Request *request)
{
    Py_INCREF(request);
    if (!engine_keeps(request)) {
        if (request->on_end)
            request->on_end(request);
        engine_forget_subject(request);
        release(request);
    }
    account(request);
    wake_all(request);
    call_inner(request);
    if (request->poster)
        request->calls->ended(request);
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
           !request->port->shared && request->poster;
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
        error = engine_call_method_alone(engine_python.request_failed, arguments, 3);
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
    return earlier != (const PyObject *)last && Py_IS_TYPE(earlier, Py_TYPE(last))
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
        .opcode = aiordma_completes_as(earlier->opcode),
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
            PyObject *result = engine_call_method_alone(engine_python.run_ended, arguments, 3);
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
    count_end(request, completion);
    if (completion->status) {
        explain(request, completion);
    } else {
        request->completion = *completion;
        request->state = SUCCEEDED;
    }
    end_run(request);
    end(request);
}

void engine_fail(Request *request, PyObject *error)
{
    count_end(request, NULL);
    fail(request, Py_NewRef(error));
    end(request);
}

void engine_drop(Request *request)
{
    Py_INCREF(request); /* its subject may have the last reference */
    Py_CLEAR(request->poster);
    if (engine_keeps(request) && request->on_end)
        request->on_end(request);
    engine_forget_subject(request);
    release(request);
    Py_DECREF(request);
}

void engine_take_back(Request *request)
{
    Port *port = request->port;

    if (request->wr_id)
        Py_XDECREF(engine_table_take(port->drain->table, request->wr_id));
    engine_leave(port->open, request);
    engine_drop(request);
    engine_give_slot(request->is_receive ? port->receives : port->sends);
}

PyObject *engine_withdraw(Request *request, int has_failed)
{
    engine_take_back(request);
    Py_DECREF(request);
    return has_failed ? NULL : Py_NewRef(Py_None); /* the general path raises the error */
}

PyObject *engine_own_error(Request *request)
{
    request->retrieved = 1;
    return engine_python.detached ? PyObject_CallOneArg(engine_python.detached, request->error)
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
        error = engine_own_error(request);
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
