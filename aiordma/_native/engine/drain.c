/* The drain: delivers completions that were polled. */
#include "drain.h"
#include "request.h"
#include "wait.h"

#include <errno.h>
#include <structmember.h>

static void poll_now(Drain *drain);

static PyObject *drain_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"hub", "provider", "channel", "in_flight", NULL};
    PyObject *hub, *table;
    unsigned long long provider, channel;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKKO!", names, &hub, &provider, &channel,
                                     &engine_table_type, &table))
        return NULL;
    Drain *drain = (Drain *)type->tp_alloc(type, 0);
    if (!drain)
        return NULL;
    drain->hub = Py_NewRef(hub);
    drain->table = (Table *)Py_NewRef(table);
    drain->data.provider = (const struct aiordma_provider *)(uintptr_t)provider;
    drain->data.channel = (struct ibv_comp_channel *)(uintptr_t)channel;
    drain->data.batch = drain->batch;
    drain->data.capacity = ENGINE_BATCH;
    drain->poll_now = poll_now;
    drain->enabled = 1;
    drain->process = engine_process;
    return (PyObject *)drain;
}

static int drain_traverse(Drain *drain, visitproc visit, void *arg)
{
    Py_VISIT(drain->hub);
    Py_VISIT(drain->table);
    Py_VISIT(drain->woken);
    Py_VISIT(drain->running);
    return 0;
}

static int drain_clear(Drain *drain)
{
    Py_CLEAR(drain->woken);
    Py_CLEAR(drain->running);
    return 0;
}

static void drain_dealloc(Drain *drain)
{
    PyObject_GC_UnTrack(drain);
    drain_clear(drain);
    Py_XDECREF(drain->hub);
    Py_XDECREF(drain->table);
    PyMem_Free(drain->data.queues);
    Py_TYPE(drain)->tp_free((PyObject *)drain);
}

static PyObject *drain_settle(Drain *drain, PyObject *none)
{
    (void)none;
    engine_settle(drain);
    Py_RETURN_NONE;
}

static PyObject *drain_set_queues(Drain *drain, PyObject *list)
{
    PyObject *all = PySequence_Fast(list, "queues are a sequence of addresses");
    if (!all)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(all);
    struct aiordma_drained_queue *queues =
        PyMem_Calloc((size_t)(count ? count : 1), sizeof(*queues));
    if (!queues)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; queues && i < count; i++) {
        unsigned long long address = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(all, i));
        if (address == (unsigned long long)-1 && PyErr_Occurred()) {
            PyMem_Free(queues);
            queues = NULL;
            break;
        }
        queues[i].queue = (struct ibv_cq *)(uintptr_t)address;
        for (uint32_t j = 0; j < drain->data.queue_count; j++)
            if (drain->data.queues[j].queue == queues[i].queue)
                queues[i].armed = drain->data.queues[j].armed;
    }
    Py_DECREF(all);
    if (!queues)
        return NULL;
    PyMem_Free(drain->data.queues);
    drain->data.queues = queues;
    drain->data.queue_count = (uint32_t)count;
    Py_RETURN_NONE;
}

/* -- delivering --------------------------------------------------------------------------- */

/* Deliver the batch, and return the number. Exceptions are kept for engine_interrupted. */
long engine_deliver(Drain *drain, int direct)
{
    PyObject *woken = NULL;
    long count = 0;

    if (direct) {
        /* Take the list, so that a woken task that drains again uses another one. */
        woken = drain->woken ? drain->woken : PyList_New(0);
        drain->woken = NULL;
        if (!woken)
            PyErr_Clear(); /* the woken tasks are then scheduled on the loop */
        else
            engine_collect_woken(woken);
    }
    drain->draining = 1;
    while (drain->head < drain->tail) {
        const struct aiordma_completion *completion = &drain->batch[drain->head++];
        Request *request = engine_table_take(drain->table, completion->wr_id);
        count++;
        drain->delivered++;
        if (!request)
            continue; /* its queue pair was destroyed, which ended the request */
        engine_complete(request, completion);
        Py_DECREF(request);
    }
    drain->head = drain->tail = 0;
    drain->draining = 0;
    if (!woken)
        return count;
    if (engine_run_woken(woken))
        engine_keep_error(); /* an interrupted task's, which is raised after the rest of the work */
    if (drain->woken)
        Py_DECREF(woken);
    else
        drain->woken = woken;
    return count;
}

/* Deliver the batch; if it is empty, poll first. Returns the number of completions, or -errno. */
static long poll_and_deliver(Drain *drain, int direct)
{
    int before = drain->head < drain->tail;
    int found = before ? 1 : engine_poll(drain);
    if (found <= 0)
        return found;
    long count = engine_deliver(drain, direct);
    if (before)
        drain->data.more = 1; /* the queues were not polled */
    return count;
}

static PyObject *drain_step(Drain *drain, PyObject *args)
{
    int arm, direct;

    if (!PyArg_ParseTuple(args, "pp", &arm, &direct))
        return NULL;
    if (drain->draining || !engine_takes(drain))
        return PyLong_FromLong(0);
    drain->thread = PyThread_get_thread_ident(); /* a loop can continue in another thread */
    drain->crossings++;
    long error = engine_path->take_events(&drain->data), count = 0;
    if (!error)
        error = count = poll_and_deliver(drain, direct);
    /*
     * Arm as late as possible: requests that the woken tasks posted, and that completed at once,
     * need no event. Then poll once more, because a completion before the arming makes no event.
     */
    if (error >= 0 && arm && engine_takes(drain) && !drain->draining && !drain->data.more) {
        error = engine_path->arm_queues(&drain->data);
        if (!error) {
            error = poll_and_deliver(drain, direct);
            count += error > 0 ? error : 0;
        }
    }
    if (engine_interrupted())
        return NULL;
    return PyLong_FromLong(error < 0 && !count ? error : count);
}

static PyObject *drain_forget_arming(Drain *drain, PyObject *none)
{
    (void)none;
    for (uint32_t i = 0; i < drain->data.queue_count; i++)
        drain->data.queues[i].armed = 0;
    Py_RETURN_NONE;
}

/* -- polling in the middle of a task ------------------------------------------------------- */

/* After FRUITLESS polls in a row without a completion, only one call in SELDOM polls. */
enum { FRUITLESS = 32, SELDOM = 16 };

/* Whether the request can complete while another one is awaited: no code of the program's runs. */
static int is_quiet(Drain *drain, const struct aiordma_completion *completion)
{
    const Request *request = engine_table_find(drain->table, completion->wr_id);
    if (!request)
        return 1;
    return !completion->status && request->port && !request->port->notifies_owner &&
           !request->callbacks && !request->held &&
           (!request->poster || request->calls->is_quiet(request, completion)) &&
           (!request->run || engine_run_is_quiet(request));
}

static void drain_soon(Drain *drain)
{
    if (drain->scheduled)
        return;
    drain->scheduled = 1;
    PyObject *result = engine_call_method_alone(engine_python.drain_soon, &drain->hub, 1);
    Py_XDECREF(result);
    if (!result)
        engine_log("scheduling a drain failed, and completions will be delivered late", drain->hub);
}

/*
 * Deliver completions without a wake-up, in the middle of a task. A device can complete a request
 * during its post, or soon after. The first await of a window of requests then finds all of their
 * completions. They are delivered in order, up to the first one that would run the program's code.
 * The rest waits for the loop.
 */
static void poll_now(Drain *drain)
{
    if (!engine_takes(drain) || drain->draining || drain->head < drain->tail)
        return;
    if (drain->fruitless >= FRUITLESS && ++drain->left_out % SELDOM)
        return;
    int found = engine_poll(drain);
    if (found <= 0) {
        drain->fruitless++; /* the next drain finds an error again, and reports it */
        return;
    }
    drain->fruitless = 0;
    while (drain->head < drain->tail && is_quiet(drain, &drain->batch[drain->head])) {
        const struct aiordma_completion *completion = &drain->batch[drain->head++];
        Request *request = engine_table_take(drain->table, completion->wr_id);
        drain->delivered++;
        if (!request)
            continue;
        request->at_once = 1;
        engine_complete(request, completion);
        Py_DECREF(request);
    }
    if (drain->head < drain->tail)
        drain_soon(drain);
}

/* -- the interface for Python --------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"set_queues", (PyCFunction)drain_set_queues, METH_O,
     "set_queues($self, addresses, /)\n--\n\n"
     "Set the completion queues, by their addresses. Queues that it has stay armed."},
    {"settle", (PyCFunction)drain_settle, METH_NOARGS,
     "settle($self, /)\n--\n\n"
     "Let the ports post: their event loop runs here, or stands still and this is its thread."},
    {"step", (PyCFunction)drain_step, METH_VARARGS,
     "step($self, arm, direct, /)\n--\n\n"
     "Take the channel's events, poll a batch and deliver it; then arm the queues that are not\n"
     "armed, if asked, and poll and deliver once more. With `direct`, run the woken tasks at once. Return the number of completions,\n"
     "or -errno."},
    {"forget_arming", (PyCFunction)drain_forget_arming, METH_NOARGS,
     "forget_arming($self, /)\n--\n\n"
     "Regard no queue as armed: an event may have been lost."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"enabled", T_BOOL, offsetof(Drain, enabled), 0, "Whether it polls."},
    {"draining", T_BOOL, offsetof(Drain, draining), READONLY,
     "Whether completions are being delivered."},
    {"more", T_UINT, offsetof(Drain, data.more), READONLY,
     "Whether the batch was full: call `step` again."},
    {"watched", T_BOOL, offsetof(Drain, watched), 0, "Whether the watchdog runs."},
    {"scheduled", T_BOOL, offsetof(Drain, scheduled), 0, "Whether a drain is scheduled."},
    {"events", T_ULONGLONG, offsetof(Drain, data.events), READONLY,
     "The number of events taken from the channel."},
    {"polls", T_ULONGLONG, offsetof(Drain, polls), READONLY, "The number of polls of all queues."},
    {"delivered", T_ULONGLONG, offsetof(Drain, delivered), READONLY,
     "The number of delivered completions."},
    {"wakes", T_ULONGLONG, offsetof(Drain, wakes), 0, "How often the channel was readable."},
    {"crossings", T_ULONGLONG, offsetof(Drain, crossings), READONLY,
     "The number of calls into the driver."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_drain_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Drain",
    .tp_basicsize = sizeof(Drain),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = drain_new,
    .tp_dealloc = (destructor)drain_dealloc,
    .tp_traverse = (traverseproc)drain_traverse,
    .tp_clear = (inquiry)drain_clear,
    .tp_methods = methods,
    .tp_members = members,
};
