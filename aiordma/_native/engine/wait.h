/* A task's wait on an asyncio loop. */
#ifndef AIORDMA_ENGINE_WAIT_H
#define AIORDMA_ENGINE_WAIT_H

#include "python_objects.h"

enum waiter_state { WAITING, WOKEN, CANCELLED };

/* The functions that a waiter calls on the object that it awaits. */
struct engine_awaited {
    int (*has_ended)(PyObject *awaited);
    PyObject *(*result)(PyObject *awaited);
    void (*forget)(PyObject *awaited, PyObject *waiter);
};

typedef struct {
    PyObject_HEAD PyObject *loop, *callback, *context, *message;
    PyObject *awaited; /* NULL: the waiter only waits for its wake-up */
    const struct engine_awaited *calls;
    char state, blocking;
    char pauses; /* the task suspends once, for other tasks, though the awaited object has ended */
} Waiter;

extern PyTypeObject engine_waiter_type;

Waiter *engine_waiter(PyObject *loop);
void engine_await(Waiter *waiter, PyObject *awaited, const struct engine_awaited *calls);
/* Wake a waiter of any loop: a Waiter, or an object with a method `wake`. */
int engine_wake(PyObject *object);
/* Collect the waiters that are woken from now on, until engine_run_woken runs their tasks. */
void engine_collect_woken(PyObject *list);
int engine_run_woken(PyObject *list);
/*
 * Call a function once the drain, or the function of engine_call_then_run, that runs on this thread
 * has returned, when no code of the program's is running. 1: it will be called; 0: there is none;
 * -1: an exception.
 */
int engine_call_at_end(PyObject *function);
/* Call a function while no task runs, and then run the tasks that it has woken. */
PyObject *engine_call_then_run(PyObject *function);
/*
 * `throw` and `close` of an awaitable that awaits another one, `inner`, or NULL. The caller holds a
 * reference to it.
 */
PyObject *engine_throw_into(PyObject *inner, PyObject *arguments);
PyObject *engine_close_inner(PyObject *inner);
/*
 * `send` and `__next__` of an awaitable that has am_send. From Python 3.12 on, a coroutine passes on a
 * value by these, and not by am_send.
 */
PyObject *engine_send_value(PyObject *awaitable, PyObject *value);
PyObject *engine_next(PyObject *awaitable);
int engine_runs_here(PyObject *loop); /* whether this asyncio loop is running in this thread */
int engine_wait_names(void);

#endif
