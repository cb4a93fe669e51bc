/* From completion queues to the requests that they end; its reference is drain.py. */
#include "engine.h"

#include <errno.h>
#include <structmember.h>

static void look(Drain *drain);

static int drain_init(Drain *drain, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"hub", "provider", "channel", "in_flight", NULL};
    PyObject *hub, *table;
    unsigned long long provider, channel;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKKO!", names, &hub, &provider, &channel,
                                     &engine_table_type, &table))
        return -1;
    Py_XSETREF(drain->hub, Py_NewRef(hub));
    Py_XSETREF(drain->table, (Table *)Py_NewRef(table));
    drain->provider = (const struct aiordma_provider *)(uintptr_t)provider;
    drain->channel = (struct ibv_comp_channel *)(uintptr_t)channel;
    drain->look = look;
    drain->enabled = 1;
    return 0;
}

static int drain_traverse(Drain *drain, visitproc visit, void *arg)
{
    Py_VISIT(drain->hub);
    Py_VISIT(drain->table);
    Py_VISIT(drain->woken);
    return 0;
}

static int drain_clear(Drain *drain)
{
    Py_CLEAR(drain->hub);
    Py_CLEAR(drain->table);
    Py_CLEAR(drain->woken);
    return 0;
}

static void drain_dealloc(Drain *drain)
{
    PyObject_GC_UnTrack(drain);
    drain_clear(drain);
    PyMem_Free(drain->queues);
    Py_TYPE(drain)->tp_free((PyObject *)drain);
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
        unsigned long long address =
            PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(all, i));
        if (address == (unsigned long long)-1 && PyErr_Occurred()) {
            PyMem_Free(queues);
            queues = NULL;
            break;
        }
        queues[i].queue = (struct ibv_cq *)(uintptr_t)address;
        for (uint32_t j = 0; j < drain->queue_count; j++)
            if (drain->queues[j].queue == queues[i].queue)
                queues[i].armed = drain->queues[j].armed;
    }
    Py_DECREF(all);
    if (!queues)
        return NULL;
    PyMem_Free(drain->queues);
    drain->queues = queues;
    drain->queue_count = (uint32_t)count;
    Py_RETURN_NONE;
}

/* -- delivering --------------------------------------------------------------------------- */

static void complete(PyObject *entry, const struct aiordma_completion *completion)
{
    if (Py_IS_TYPE(entry, &engine_request_type)) {
        engine_complete((Request *)entry, completion);
        return;
    }
    PyObject *raw = engine_completion_tuple(completion);
    PyObject *result =
        raw ? PyObject_CallMethodOneArg(entry, engine_given.complete, raw) : NULL;
    Py_XDECREF(raw);
    Py_XDECREF(result);
    if (!result)
        engine_log("a callback of a completed work request failed", entry);
}

/* Deliver what was polled; returns how many, -1 with an exception. */
long engine_deliver(Drain *drain, int direct)
{
    PyObject *woken = NULL;
    long count = 0;

    if (direct) {
        /* Taken, so that whoever is woken and drains again has another one. */
        woken = drain->woken ? drain->woken : PyList_New(0);
        drain->woken = NULL;
        if (!woken)
            return -1;
        engine_collect_woken(woken);
    }
    drain->draining = 1;
    while (drain->head < drain->tail) {
        const struct aiordma_completion *completion = &drain->batch[drain->head++];
        PyObject *entry = engine_table_take(drain->table, completion->wr_id);
        count++;
        drain->delivered++;
        if (!entry)
            continue; /* its queue pair is gone, and the request was ended then */
        complete(entry, completion);
        Py_DECREF(entry);
    }
    drain->head = drain->tail = 0;
    drain->draining = 0;
    if (!woken)
        return count;
    int failed = engine_run_woken(woken);
    if (drain->woken)
        Py_DECREF(woken);
    else
        drain->woken = woken;
    return failed ? -1 : count;
}

/* Poll all queues into the batch, which is empty; -EIO only if nothing was found before. */
int engine_poll(Drain *drain)
{
    uint32_t count = 0;

    drain->more = 0;
    drain->polls++;
    for (uint32_t i = 0; i < drain->queue_count; i++) {
        int room = (int)(ENGINE_BATCH - count);
        int found = aiordma_poll(drain->queues[i].queue, drain->batch + count, room);
        if (found < 0) {
            if (!count)
                return -EIO;
            drain->more = 1; /* what was found is delivered first; the next call fails */
            break;
        }
        count += (uint32_t)found;
        if (found == room) {
            drain->more = 1;
            break;
        }
    }
    drain->head = 0;
    drain->tail = count;
    return (int)count;
}

int engine_arm(Drain *drain)
{
    for (uint32_t i = 0; i < drain->queue_count; i++)
        if (!drain->queues[i].armed) {
            int error = ibv_req_notify_cq(drain->queues[i].queue, 0);
            if (error)
                return -abs(error);
            drain->queues[i].armed = 1;
        }
    return 0;
}

int engine_take_events(Drain *drain)
{
    uint32_t taken = 0;
    int error = aiordma_take_events(drain->provider, drain->channel, drain->queues,
                                    drain->queue_count, &taken);
    drain->events += taken;
    return error;
}

/* Deliver what is in the batch, else what a poll finds; -errno, or -1 with an exception set. */
static long poll_and_deliver(Drain *drain, int direct)
{
    int before = drain->head < drain->tail;
    int found = before ? 1 : engine_poll(drain);
    if (found <= 0)
        return found;
    long count = engine_deliver(drain, direct);
    if (before)
        drain->more = 1; /* what came since was not looked at */
    return count;
}

static PyObject *drain_step(Drain *drain, PyObject *args)
{
    int arm, direct;

    if (!PyArg_ParseTuple(args, "pp", &arm, &direct))
        return NULL;
    if (drain->draining)
        return PyLong_FromLong(0);
    drain->crossings++;
    long error = engine_take_events(drain), count = 0;
    if (!error)
        error = count = poll_and_deliver(drain, direct);
    /*
     * Armed as late as may be: what those who were woken have posted, and what ended in it, needs
     * no event. And polled once more, or what came before the arming would be told of by nobody.
     */
    if (error >= 0 && arm && drain->enabled && !drain->draining && !drain->more) {
        error = engine_arm(drain);
        if (!error) {
            error = poll_and_deliver(drain, direct);
            count += error > 0 ? error : 0;
        }
    }
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(error < 0 && !count ? error : count);
}

static PyObject *drain_forget_arming(Drain *drain, PyObject *none)
{
    (void)none;
    for (uint32_t i = 0; i < drain->queue_count; i++)
        drain->queues[i].armed = 0;
    Py_RETURN_NONE;
}

/* -- looking, in the middle of a task ------------------------------------------------------ */

enum { FRUITLESS = 32, SELDOM = 16 };

/* Whether it can end inside another one's await: nobody's code runs by it. */
static int is_quiet(Drain *drain, const struct aiordma_completion *completion)
{
    PyObject *entry = engine_table_find(drain->table, completion->wr_id);
    if (!entry)
        return 1;
    if (completion->status || !Py_IS_TYPE(entry, &engine_request_type))
        return 0;
    const Request *request = (const Request *)entry;
    return request->port && !request->port->tells && !request->callbacks && !request->held &&
           (!request->run || engine_run_is_quiet(request));
}

static void drain_soon(Drain *drain)
{
    if (drain->scheduled)
        return;
    drain->scheduled = 1;
    PyObject *result = PyObject_CallMethodNoArgs(drain->hub, engine_given.drain_soon);
    Py_XDECREF(result);
    if (!result)
        engine_log("what completed will be delivered late", drain->hub);
}

/*
 * What a device completes inside the post, or soon after, is found here without a wake-up, all of
 * it by the first await of a window. Only ends that run nobody's code are taken, in order; the
 * others, and all behind them, wait for the loop.
 */
static void look(Drain *drain)
{
    if (!drain->enabled || drain->draining || drain->head < drain->tail)
        return;
    if (drain->fruitless >= FRUITLESS && ++drain->left_out % SELDOM)
        return;
    int found = engine_poll(drain);
    if (found <= 0) {
        drain->fruitless++; /* an error is found again, by a drain that tells of it */
        return;
    }
    drain->fruitless = 0;
    while (drain->head < drain->tail && is_quiet(drain, &drain->batch[drain->head])) {
        const struct aiordma_completion *completion = &drain->batch[drain->head++];
        Request *request = (Request *)engine_table_take(drain->table, completion->wr_id);
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

void engine_watch_over(Drain *drain)
{
    if (drain->watched || !drain->table->live)
        return;
    drain->watched = 1;
    PyObject *result = PyObject_CallMethodNoArgs(drain->hub, engine_given.watch_over);
    Py_XDECREF(result);
    if (!result)
        engine_log("nothing looks for a lost completion event", drain->hub);
}

/* -- what Python sees --------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"set_queues", (PyCFunction)drain_set_queues, METH_O,
     "set_queues(addresses): drain these; those known stay armed."},
    {"step", (PyCFunction)drain_step, METH_VARARGS,
     "step(arm, direct): take the channel's events, arm what is not armed, poll a batch,\n"
     "deliver it; direct: run at once whom it wakes. Return how many, or -errno."},
    {"forget_arming", (PyCFunction)drain_forget_arming, METH_NOARGS,
     "Take no queue to be armed: its event may have been lost."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"enabled", T_BOOL, offsetof(Drain, enabled), 0, "polls find anything"},
    {"draining", T_BOOL, offsetof(Drain, draining), READONLY, "completions are being delivered"},
    {"more", T_BOOL, offsetof(Drain, more), READONLY, "the batch was full: step again"},
    {"watched", T_BOOL, offsetof(Drain, watched), 0, "the watchdog runs"},
    {"scheduled", T_BOOL, offsetof(Drain, scheduled), 0, "drain_soon was called"},
    {"events", T_ULONGLONG, offsetof(Drain, events), READONLY, "taken from the channel"},
    {"polls", T_ULONGLONG, offsetof(Drain, polls), READONLY, "rounds over all queues"},
    {"delivered", T_ULONGLONG, offsetof(Drain, delivered), READONLY, "completions, in all"},
    {"wakes", T_ULONGLONG, offsetof(Drain, wakes), 0, "times that the channel was readable"},
    {"crossings", T_ULONGLONG, offsetof(Drain, crossings), READONLY, "calls into the driver"},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_drain_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "aiordma._native._engine.Drain",
    .tp_basicsize = sizeof(Drain),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)drain_init,
    .tp_dealloc = (destructor)drain_dealloc,
    .tp_traverse = (traverseproc)drain_traverse,
    .tp_clear = (inquiry)drain_clear,
    .tp_methods = methods,
    .tp_members = members,
};
