/* A posted work request: its memory, its completion and its result; and the requests of one queue
   pair that have not ended. */
#ifndef AIORDMA_ENGINE_REQUEST_H
#define AIORDMA_ENGINE_REQUEST_H

#include "port.h"
#include "work_completion.h"
#include "completion_opcodes.h"

typedef struct Request Request;

enum request_state { IN_FLIGHT, SUCCEEDED, FAILED };

/* What the poster of a request does with it. */
struct engine_poster {
    /* The request has ended. Takes the reference `poster`. */
    void (*ended)(Request *request);
    /* Whether `ended` will run none of the program's code, if the request succeeds. */
    int (*is_quiet)(const Request *request, const struct aiordma_completion *completion);
    int takes_memory; /* `ended` takes the request's memory, too */
};

struct Request {
    PyObject_HEAD PyObject *owner, *operation, *held, *remote, *result, *error, *run;
    PyObject *waiters, *callbacks; /* lists, or NULL */
    PyObject *inner;               /* a callback that runs no code of the program's */
    PyObject *memory;              /* held, in addition to `held`: see request.c */
    Handle *handle;                /* held; NULL: the request is no datagram */
    Port *port;                    /* NULL: the owner gives back its slot */
    PyObject *poster; /* which posted it for itself: pooled receives or a stream; or NULL */
    const struct engine_poster *calls; /* of `poster` */
    Py_ssize_t stream_bytes;
    /* Called once when the request ends, before its memory is released; runs no code of the
       program's. NULL: none. `subject` is the object that it is about. */
    void (*on_end)(Request *request);
    PyObject *subject;
    unsigned long long wr_id;
    Py_ssize_t length;
    long long posted;    /* when, while a trace is on; else 0 */
    unsigned int opcode; /* an enum ibv_wr_opcode; 0 for a receive */
    char is_receive, state, at_once, stream_kind;
    char retrieved; /* its error is retrieved, or another request of its run reports it */
    char finalized;
    char keeps;         /* if it fails, its memory is released by engine_drop only */
    OpenRequests *open; /* the list that contains it, or NULL */
    Request *earlier, *later;
    PyObject *weak;
    struct aiordma_completion completion;
};

/* Counters of the requests of one queue pair that have ended. */
enum { ENGINE_OPCODES = 24, ENGINE_STATUSES = 32 };
struct engine_ended {
    unsigned long long sends, receives; /* all that the device had accepted */
    unsigned long long discarded;       /* of these: without a completion */
    unsigned long long bytes_sent, bytes_received;
    unsigned long long
        completed[ENGINE_OPCODES]; /* without an error, by opcode: see engine_opcode_at */
    unsigned long long failed[ENGINE_STATUSES];
};

/* The requests of one queue pair that have not ended, in order. */
struct OpenRequests {
    PyObject_HEAD Request *first, *last;
    Py_ssize_t count;
    struct engine_ended ended;
};

void engine_enter(OpenRequests *open, Request *request);
void engine_leave(OpenRequests *open, Request *request); /* no effect if it is not in the list */
/* The opcode that a place of `completed` counts. */
unsigned int engine_opcode_at(unsigned int place);

/* Hold all items of a tuple of memory; with an exception, none of them. */
int engine_hold_all(PyObject *held);
/* Hold the memory of a new request. */
void engine_hold_memory(const Request *request);
int engine_holds_usable(const Request *request); /* whether its regions are still registered */

/* Enter a request into the in-flight table and the list of open requests, before the device gets it.
   Returns the wr_id, which it sets; 0: an exception. */
uint64_t engine_put_in_flight(Port *port, Request *request);
/* Undo a request that was not posted: remove it from the tables, release its memory and slot. */
void engine_take_back(Request *request);
/* The same, and drop the reference. Returns NULL if has_failed (an exception is set), else None. */
PyObject *engine_withdraw(Request *request, int has_failed);

void engine_complete(Request *request, const struct aiordma_completion *completion);
/* End a request, which is in flight, without a completion. */
void engine_fail(Request *request, PyObject *error);
/* Release the memory of a request that was not posted, or that has kept it. */
void engine_drop(Request *request);
/* Whether the request has failed, and the device may still use its memory. */
int engine_keeps(const Request *request);
/* Forget what the request calls when it ends. */
void engine_forget_subject(Request *request);
/* The `on_end` of an atomic whose result is the previous value, which is in its leased block. */
void engine_read_value(Request *request);
/* Whether the requests before it in its run can complete without running the program's code. */
int engine_run_is_quiet(const Request *last);
/* A completion, or an exception if the request failed or has not ended. */
PyObject *engine_result(Request *request);
/* Return a copy of the error for each caller: a raise adds the caller's frames to an exception. */
PyObject *engine_own_error(Request *request);

#endif
