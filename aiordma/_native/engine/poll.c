/* Polls completion queues, and watches over their events. */
#include "poll.h"

/* Poll all queues into the batch, which is empty. */
int engine_poll(Drain *drain)
{
    int count = engine_path->poll_queues(&drain->data);
    drain->polls++;
    if (count >= 0) {
        drain->head = 0;
        drain->tail = (uint32_t)count;
    }
    return count;
}

void engine_watch_over(Drain *drain)
{
    if (drain->watched || !drain->table->live)
        return;
    drain->watched = 1;
    PyObject *result = engine_call_method_alone(engine_python.watch_over, &drain->hub, 1);
    Py_XDECREF(result);
    if (!result)
        engine_log("starting the watchdog for lost completion events failed", drain->hub);
}

void engine_settle(Drain *drain)
{
    drain->thread = PyThread_get_thread_ident();
    Py_XSETREF(drain->running, Py_XNewRef(PyThreadState_Get()->async_gen_firstiter));
}
