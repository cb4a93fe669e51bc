/*
 * The selector of a polling event loop: polls for completions if the last waits were short, then
 * arms the queues and sleeps. Tasks that a completion wakes run directly. The selector returns when
 * the loop has work (dirty), when a descriptor other than the drains' is ready, or at the timeout.
 *
 * Polling gives way to other processes. A thread that polls uses its share of a busy core, and then
 * waits while others use theirs. A thread that sleeps is woken at once. So if the core was taken
 * away during a poll, the selector does not poll for a while.
 */
#include "select.h"
#include "drain.h"

#include <errno.h>
#include <sched.h>
#include <structmember.h>
#include <sys/epoll.h>

typedef struct {
    PyObject_HEAD char dirty;
    PyObject *ready; /* borrowed during `select`: the loop's callbacks that are to run */
    int confidence;
    unsigned long long most; /* nanoseconds of spinning without a completion */
    uint64_t resumes;        /* it does not spin before this time */
} Spinner;

enum { CONFIDENT = 8, SLICE = 20000, LOOK_AT_CLOCK = 8, LET_OTHERS_RUN = 16, READY = 16 };

/*
 * The core counts as taken if the spinner looks at the clock and finds that a part of the longest
 * poll (1 / PART_TAKEN), and LEAST_TAKEN nanoseconds, have passed since it looked before. Then it
 * does not poll for PAUSE times as long as the core was taken. So the time that is lost by polling is
 * bounded, and a short disturbance ends one poll only.
 */
enum { PART_TAKEN = 3, LEAST_TAKEN = 15000, PAUSE = 32 };

/* The outcome of a poll or of a sleep. OTHERS: a descriptor other than the drains' is ready. */
enum end { FOUND, NOTHING, OTHERS, INTERRUPTED, FAILED_WITH_EXCEPTION };

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void learn(Spinner *spinner, int was_short)
{
    spinner->confidence += was_short ? 1 : -1;
    if (spinner->confidence > CONFIDENT)
        spinner->confidence = CONFIDENT;
    if (spinner->confidence < 0)
        spinner->confidence = 0;
}

static int gives_way(Spinner *spinner, uint64_t seen, uint64_t time)
{
    uint64_t taken = time - seen;
    if (taken < LEAST_TAKEN || taken < spinner->most / PART_TAKEN)
        return 0;
    spinner->resumes = time + PAUSE * taken;
    return 1;
}

static int has_work(const Spinner *spinner)
{
    return spinner->dirty || PyObject_Size(spinner->ready) > 0;
}

static int may_spin(const Spinner *spinner)
{
    return spinner->most && spinner->confidence && now() >= spinner->resumes;
}

/* Report an error to the hub, which fails the connections, and disable the drain. */
static enum end tell_of_failure(Drain *drain, int error)
{
    PyObject *number = PyLong_FromLong(error);
    PyObject *result =
        number ? PyObject_CallMethodOneArg(drain->hub, engine_python.drain_failed, number) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(result);
    drain->enabled = 0;
    return result ? FOUND : FAILED_WITH_EXCEPTION;
}

static enum end deliver(Drain *drain, int found)
{
    if (found < 0)
        return tell_of_failure(drain, -found);
    if (!found)
        return NOTHING;
    (void)engine_deliver(drain, 1);
    return engine_interrupted() ? FAILED_WITH_EXCEPTION : FOUND;
}

static int is_at_rest(const Drain *drain)
{
    return engine_takes(drain) && !drain->draining;
}

/* Poll each drain once, and deliver its completions; if `arm`, arm its queues before. */
static enum end look(PyObject *drains, int arm)
{
    enum end all = NOTHING;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(drains); i++) {
        Drain *drain = (Drain *)PyTuple_GET_ITEM(drains, i);
        if (!is_at_rest(drain))
            continue;
        int found = (int)(drain->tail - drain->head);
        if (!found) {
            found = arm ? engine_path->arm_queues(&drain->data) : 0;
            if (!found)
                found = engine_poll(drain);
        }
        enum end one = deliver(drain, found);
        if (one == FAILED_WITH_EXCEPTION)
            return one;
        if (one == FOUND)
            all = FOUND;
    }
    return all;
}

/* Take the events of the drains whose channel is ready, and deliver their completions. */
static enum end serve(PyObject *drains, const struct epoll_event *ready, int count)
{
    int ours = 0;
    enum end all = NOTHING;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(drains); i++) {
        Drain *drain = (Drain *)PyTuple_GET_ITEM(drains, i);
        int is_ready = 0;
        if (!engine_takes(drain))
            continue; /* its channel may be destroyed */
        for (int j = 0; j < count; j++)
            is_ready |= ready[j].data.fd == drain->data.channel->fd;
        if (!is_ready)
            continue;
        ours++;
        if (!is_at_rest(drain))
            continue;
        drain->wakes++;
        drain->crossings++;
        int found = (int)(drain->tail - drain->head);
        if (!found) {
            found = engine_path->take_events(&drain->data);
            if (!found)
                found = engine_poll(drain);
        }
        enum end one = deliver(drain, found);
        if (one == FAILED_WITH_EXCEPTION)
            return one;
        all = FOUND;
    }
    return ours < count ? OTHERS : all;
}

static enum end wait(PyObject *drains, int epoll, int64_t nanoseconds)
{
    struct epoll_event ready[READY];
    struct timespec time = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    int count;

    Py_BEGIN_ALLOW_THREADS
        /* epoll_pwait2 takes nanoseconds. On an older kernel, they are rounded up. */
        count = epoll_pwait2(epoll, ready, READY, nanoseconds < 0 ? NULL : &time, NULL);
    if (count < 0 && errno == ENOSYS) {
        int64_t milliseconds = nanoseconds < 0 ? -1 : (nanoseconds + 999999) / 1000000;
        count = epoll_wait(epoll, ready, READY,
                           milliseconds > INT32_MAX ? INT32_MAX : (int)milliseconds);
    }
    Py_END_ALLOW_THREADS if (count < 0)
    {
        if (errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            return FAILED_WITH_EXCEPTION;
        }
        return PyErr_CheckSignals() ? FAILED_WITH_EXCEPTION : INTERRUPTED;
    }
    return count ? serve(drains, ready, count) : NOTHING;
}

/* Poll until no completion was found for `most` nanoseconds or the core was taken (NOTHING), or the
   loop has work (FOUND). */
static enum end spin(Spinner *spinner, PyObject *drains, int epoll, uint64_t until)
{
    uint64_t last = now(), slice = last, seen = last;

    for (unsigned int polls = 1;; polls++) {
        enum end end = look(drains, 0);
        if (end == FAILED_WITH_EXCEPTION)
            return end;
        uint64_t time;
        if (end == FOUND) {
            learn(spinner, 1);
            if (has_work(spinner))
                return FOUND;
            time = last = now();
        } else if (polls % LOOK_AT_CLOCK) {
            relax();
            continue;
        } else {
            if (polls % LET_OTHERS_RUN == 0)
                sched_yield(); /* with few cores, the peer's process may need this one */
            time = now();
            if (gives_way(spinner, seen, time))
                return NOTHING;
        }
        seen = time;
        if (time - slice >= SLICE) {
            /* Serve other descriptors, and let threads run that wait for the GIL. */
            end = wait(drains, epoll, 0);
            if (end >= OTHERS || (end == FOUND && has_work(spinner)))
                return end;
            seen = slice = now(); /* this thread may have waited for the GIL */
        }
        if (time >= until)
            return INTERRUPTED;
        if (time - last >= spinner->most) {
            learn(spinner, 0);
            return NOTHING;
        }
    }
}

static enum end run(Spinner *spinner, PyObject *drains, int epoll, uint64_t until)
{
    for (;;) {
        enum end end;
        if (may_spin(spinner)) {
            end = spin(spinner, drains, epoll, until);
            if (end != NOTHING)
                return end;
        }
        end = look(drains, 1);
        if (end == FOUND && !has_work(spinner))
            continue;
        if (end != NOTHING)
            return end;
        uint64_t asleep = now();
        if (asleep >= until)
            return INTERRUPTED;
        end = wait(drains, epoll, until == UINT64_MAX ? -1 : (int64_t)(until - asleep));
        if (end == FOUND && spinner->most)
            learn(spinner, now() - asleep < spinner->most);
        if (end != FOUND || has_work(spinner))
            return end;
    }
}

static PyObject *spinner_select(Spinner *spinner, PyObject *args)
{
    PyObject *drains, *timeout;
    int epoll;

    if (!PyArg_ParseTuple(args, "iO!OO", &epoll, &PyTuple_Type, &drains, &timeout, &spinner->ready))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(drains); i++)
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(drains, i), &engine_drain_type)) {
            PyErr_SetString(PyExc_TypeError, "drains are polled, and nothing else");
            return NULL;
        }
    uint64_t until = UINT64_MAX;
    if (timeout != Py_None) {
        double seconds = PyFloat_AsDouble(timeout);
        if (seconds == -1.0 && PyErr_Occurred())
            return NULL;
        if (seconds < 1e9)
            until = now() + (uint64_t)(seconds > 0 ? seconds * 1e9 : 0);
    }
    spinner->dirty = 0;
    Py_INCREF(drains); /* a task that runs here may close one of them */
    enum end end = until <= now() ? look(drains, 0) : run(spinner, drains, epoll, until);
    Py_DECREF(drains);
    if (end == FAILED_WITH_EXCEPTION)
        return NULL;
    return PyBool_FromLong(end == OTHERS);
}

static PyObject *spinner_takes(Spinner *spinner, PyObject *drain)
{
    (void)spinner;
    return PyBool_FromLong(PyObject_TypeCheck(drain, &engine_drain_type));
}

static PyMethodDef methods[] = {
    {"takes", (PyCFunction)spinner_takes, METH_O,
     "takes($self, drain, /)\n--\n\nReturn whether it can poll this drain."},
    {"select", (PyCFunction)spinner_select, METH_VARARGS,
     "select($self, epoll, drains, timeout, ready, /)\n--\n\n"
     "Poll for completions and deliver them, then sleep in epoll, until the loop has\n"
     "something to do, another descriptor is ready, or the timeout has passed. Return whether\n"
     "another descriptor is ready."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"dirty", T_BOOL, offsetof(Spinner, dirty), 0, "the loop has something to do"},
    {"confidence", T_INT, offsetof(Spinner, confidence), 0, "0: spinning does not pay"},
    {"most", T_ULONGLONG, offsetof(Spinner, most), 0, "nanoseconds of spinning"},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_spinner_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Spinner",
    .tp_basicsize = sizeof(Spinner),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_methods = methods,
    .tp_members = members,
};
