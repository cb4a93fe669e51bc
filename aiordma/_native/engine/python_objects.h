/* Python's objects that the engine uses, kept exceptions, the log, and the count of forks. */
#ifndef AIORDMA_ENGINE_PYTHON_OBJECTS_H
#define AIORDMA_ENGINE_PYTHON_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "data_path.h"

/* The binding's data path; set when the package is imported, before any object is made. */
extern const struct aiordma_data_path *engine_path;

/* Objects that Python passes at import, and interned names. */
struct engine_python {
    PyObject *completion_class; /* WorkCompletion, a subclass of CompletionFields */
    PyObject *remote_class;     /* RemoteMemory */
    PyObject *slice_class;      /* MemorySlice */
    PyObject *datagram_class;   /* DatagramMessage, a subclass of DatagramFields */
    PyObject *wait_elsewhere;   /* a generator function: awaits on loops other than asyncio's */
    PyObject *log;              /* log(text, object, error) */
    PyObject *detached;         /* detached(error): a copy of a stored exception, to be raised */
    PyObject *address, *length, *rkey, *call_soon, *request_ended;
    PyObject *request_failed, *run_ended, *hold, *release, *waiter, *loop, *wake;
    PyObject *close, *destroy, *watch_over, *drain_soon, *drain_failed, *post_refused,
        *doorbell_failed;
    PyObject *grant, *request_unretrieved;
    PyObject *require_own_loop, *is_closed, *throw, *await_name;
    PyObject *with_context; /* the tuple ("context",) */
};
extern struct engine_python engine_python;

/*
 * Log the exception that is set, and clear it. An interrupt, which is an exception that is no
 * Exception (KeyboardInterrupt, SystemExit), is not logged. It is kept for engine_interrupted.
 */
void engine_log(const char *text, PyObject *object);
/* Keep the exception that is set, of any class, and clear it. Of several, the first is kept. */
void engine_keep_error(void);
/* Set the kept exception, in place of one that is set, and return -1. 0: none is kept. */
int engine_interrupted(void);
/* Return None; NULL if an exception was kept, which is then set. */
PyObject *engine_none_unless_interrupted(void);
/* Return whether the exception that is set is an interrupt. If it is, it is kept, and cleared. */
int engine_keep_interrupt(void);
/*
 * Return the kept exception, and forget it until it is put back: before calls of Python code, in
 * which the next function of the engine would set it. NULL: none is kept.
 */
PyObject *engine_put_aside(void);
void engine_put_back(PyObject *aside);
/*
 * Call a function, or the method `name` of the first argument, with the kept exception put aside.
 * For all Python code that runs behind a completion: the first call of the engine in it would raise
 * what another callback raised, and end it half way.
 */
PyObject *engine_call_alone(PyObject *function, PyObject *const *arguments, size_t count);
PyObject *engine_call_method_alone(PyObject *name, PyObject *const *arguments, size_t count);

/* Intern a text, unless that is done. Returns -1 with an exception. */
int engine_intern(PyObject **place, const char *text);
/* Intern the names, and count the forks. */
int engine_prepare(void);
/* How many forks lie between the first process and this one. */
extern unsigned int engine_process;

#endif
