/*
 * The hot path as Python objects in C: the in-flight table, the request and its awaiting, slots,
 * a queue pair's port, the drain. Each class does what the one of the same name in
 * _requests/python.py or python_ports.py does, with the same interface (docs/performance.md says
 * what it gains). The caller holds the GIL, and keeps it: releasing it costs more than anything that
 * is done here.
 */
#ifndef AIORDMA_ENGINE_H
#define AIORDMA_ENGINE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "data_path.h"

/* The binding's data path; set as the package is imported, before anything can be made here. */
extern const struct aiordma_data_path *engine_path;

/* -- what Python gives once, at import ---------------------------------------------------- */

struct engine_given {
    PyObject *completion_class; /* WorkCompletion, made of engine_completion_type */
    PyObject *remote_class;     /* RemoteMemory */
    PyObject *wait_elsewhere;   /* a generator function: awaiting on loops other than asyncio */
    PyObject *log;              /* log(text, object): the exception that is set, into the log */
    PyObject *detached;         /* detached(error): a copy of a stored exception, to be raised */
    PyObject *deliver; /* deliver(handler, error): what was deferred, through the event loop */
    PyObject *address, *length, *rkey, *call_soon, *request_ended;
    PyObject *request_failed, *run_ended, *hold, *release, *complete, *waiter, *loop, *wake;
    PyObject *close, *watch_over, *drain_soon, *drain_failed, *post_refused, *doorbell_failed;
    PyObject *grant, *request_unretrieved;
    PyObject *require_own_loop, *is_closed, *send, *throw;
    PyObject *with_context, *with_none; /* tuples: ("context",) and (None,) */
};
extern struct engine_given engine_given;

/*
 * Log the exception that is set, and go on. One that is no Exception (KeyboardInterrupt, SystemExit)
 * is not for the log: it is kept until engine_interrupted, once all else is done.
 */
void engine_log(const char *text, PyObject *object);
/* Keep the exception that is set, whatever it is; the first one of several. */
void engine_keep_error(void);
/* Raise what was kept: -1 with that exception, in the place of another one. 0: nothing was. */
int engine_interrupted(void);
/* Whether the exception that is set is an interrupt; then it is kept. */
int engine_keep_interrupt(void);
enum { ENGINE_ATTEMPTS = 16 }; /* more than signals can follow one another */
/* Call a method of ours that may be called twice, again where an interrupt ended it half way. */
PyObject *engine_call_surely(PyObject *object, PyObject *name);

/* -- interrupts --------------------------------------------------------------------------- */

enum { ENGINE_DEFER_SECONDS = 1 };

int engine_prepare_interrupts(void);
PyObject *engine_uninterrupted(PyObject *module, PyObject *const *arguments, Py_ssize_t count,
                               PyObject *keywords);
extern PyTypeObject engine_steps_type;

/* -- memory ------------------------------------------------------------------------------- */

/* What a MemoryRegion is in C: what a post has to know of it. */
typedef struct {
    PyObject_HEAD PyObject *domain;
    Py_ssize_t users; /* posted requests that own a part of it */
    char retired;     /* to be closed by its last user */
    char usable;      /* open */
    char writable;    /* by the device */
} RegionBase;

/* A MemorySlice. */
typedef struct {
    PyObject_HEAD RegionBase *region;
    unsigned long long address;
    Py_ssize_t length;
    unsigned int lkey;
} Part;

extern PyTypeObject engine_region_type, engine_part_type;

/* -- completions -------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD struct aiordma_completion fields;
} Completion;

extern PyTypeObject engine_completion_type;

/* -- slots -------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD Py_ssize_t total, free, waiting;
} Slots;

extern PyTypeObject engine_slots_type;

/* -- the in-flight table ------------------------------------------------------------------ */

typedef struct {
    PyObject *entry;
    uint32_t generation;
    uint32_t next_free;
} Slot;

typedef struct {
    PyObject_HEAD Slot *slots;
    uint32_t used, capacity, first_free, live;
    uint32_t first_generation; /* of a new slot */
} Table;

extern PyTypeObject engine_table_type;

/* Returns the wr_id, 0 with an exception. */
uint64_t engine_table_add(Table *table, PyObject *entry);
/* Borrowed, and still in the table; NULL if it is not in flight. */
PyObject *engine_table_find(const Table *table, uint64_t wr_id);
/* A new reference, out of the table; NULL if it was not in flight. */
PyObject *engine_table_take(Table *table, uint64_t wr_id);

/* -- the drain, the port, the request, the waiter ----------------------------------------- */

enum { ENGINE_BATCH = 256 };

typedef struct Drain Drain;

struct Drain {
    PyObject_HEAD void (*look)(Drain *drain); /* for what ended, in the middle of a task */
    struct aiordma_drain data;
    uint32_t head, tail; /* of what was polled and is not delivered */
    Table *table;
    PyObject *hub;
    PyObject *woken; /* a list, reused */
    char enabled, draining, watched, scheduled;
    uint32_t fruitless, left_out; /* looks that found nothing, in a row; those not made since */
    uint32_t at_once;             /* awaits in a row that did not suspend */
    unsigned long long polls, crossings, delivered, wakes;
    struct aiordma_completion batch[ENGINE_BATCH];
};

typedef struct Request Request;

/* Those of one queue pair that have not ended, in order. */
typedef struct {
    PyObject_HEAD Request *first, *last;
    Py_ssize_t count;
} OpenRequests;

typedef struct {
    PyObject_HEAD PyObject *owner;
    PyObject *loop; /* asyncio's, or NULL */
    PyObject *domain;
    OpenRequests *open;
    Slots *sends, *receives;
    Drain *drain;
    struct ibv_qp *queue_pair;
    struct ibv_srq *shared; /* instead of it */
    unsigned long long max_message;
    Py_ssize_t max_inline;
    PyObject *remote; /* the last one, which does not change, and what was read from it: */
    unsigned long long remote_address, remote_length;
    unsigned int rkey;
    unsigned int process;
    unsigned long thread; /* the event loop's */
    char ready, can_receive, can_read, tells, feeds;
} Port;

enum request_state { IN_FLIGHT, SUCCEEDED, FAILED };

struct Request {
    PyObject_HEAD PyObject *owner, *operation, *held, *remote, *result, *error, *run;
    PyObject *waiters, *callbacks; /* lists, or NULL */
    PyObject *inner;               /* a callback that runs nobody's code but ours */
    Part *part;                    /* held beside `held` */
    Port *port;                    /* NULL: its owner accounts for it */
    unsigned long long wr_id;
    Py_ssize_t length;
    unsigned int completes_as;
    char is_receive, state, at_once;
    char retrieved; /* its error needs no report: somebody has it, or another request tells it */
    char finalized;
    OpenRequests *open; /* in whose list it is, or NULL */
    Request *earlier, *later;
    PyObject *weak;
    struct aiordma_completion completion;
};

struct engine_collected;

/* The requests of a chain. */
typedef struct {
    PyObject_HEAD Port *port;
    struct engine_collected *collected;
    Py_ssize_t count, room;
    char *bytes; /* what goes inline */
    size_t bytes_used, bytes_room;
    Py_ssize_t posted; /* how many the device took */
    char over;         /* nothing is collected any more */
    char is_posted;
} ChainPort;

enum waiter_state { WAITING, WOKEN, CANCELLED };

/* What a waiter has to know of that whose end it awaits. */
struct engine_awaited {
    int (*has_ended)(PyObject *awaited);
    PyObject *(*result)(PyObject *awaited);
    void (*forget)(PyObject *awaited, PyObject *waiter);
};

typedef struct {
    PyObject_HEAD PyObject *loop, *callback, *context, *message;
    PyObject *awaited; /* NULL: it awaits to be woken, and no more */
    const struct engine_awaited *calls;
    char state, blocking;
    char pauses; /* its task lets others have their turn first, though nothing is waited for */
} Waiter;

typedef struct {
    PyObject_HEAD char dirty;
    int confidence;
    unsigned long long most; /* nanoseconds of spinning */
    unsigned long long found;
} Spinner;

extern PyTypeObject engine_drain_type, engine_port_type, engine_request_type, engine_open_type,
    engine_waiter_type, engine_spinner_type, engine_method_type, engine_chain_type,
    engine_shared_type;

/* given.c: how many forks lie between the first process and this one; and what needs Python. */
unsigned int engine_process(void);

/*
 * What a constructor sets is there for as long as the object: no object is made without it (but for
 * a Part, which Python subclasses), none is set anew, and the collector clears only what is set
 * later, which every cycle has to have.
 */

/* Whether it is this process's and thread's, has its queue, and may do that. */
static inline int engine_usable(const Port *port, int may)
{
    return may && (port->queue_pair || port->shared) && port->process == engine_process() &&
           port->thread == PyThread_get_thread_ident();
}

int engine_prepare(void);

/* memory.c: */
int engine_take_slot(Slots *slots); /* 0: none is free, or others wait for one */
void engine_give_slot(Slots *slots);

/* completion.c: */
PyObject *engine_completion(const struct aiordma_completion *completion);
PyObject *engine_completion_tuple(const struct aiordma_completion *completion);
int engine_read_completion(PyObject *tuple, struct aiordma_completion *completion);
int engine_completion_names(void); /* once the type is ready */

/* wait.c: */
Waiter *engine_waiter(PyObject *loop);
void engine_await(Waiter *waiter, PyObject *awaited, const struct engine_awaited *calls);
int engine_wake(Waiter *waiter);
/* From here to engine_run_woken those who are woken are put on the list, to be run at once. */
void engine_collect_woken(PyObject *list);
int engine_run_woken(PyObject *list);

/* request.c: */
Request *engine_request(Port *port, PyObject *operation, Py_ssize_t length, Part *part,
                        PyObject *remote, int is_receive);
void engine_complete(Request *request, const struct aiordma_completion *completion);
void engine_drop(Request *request); /* the device did not take it */
/* Whether those before it in its run end with it without running anybody's code. */
int engine_run_is_quiet(const Request *last);
void engine_enter(OpenRequests *open, Request *request);
void engine_leave(OpenRequests *open, Request *request); /* nothing, if it is not there */

/* What is to be posted, of a plain request. */
struct engine_plain {
    PyObject *operation; /* its name */
    enum ibv_wr_opcode opcode;
    unsigned int flags;
    Part *part;       /* NULL: the view's bytes go inline */
    Py_buffer view;   /* its obj is NULL unless it is to be given back */
    PyObject *remote; /* RemoteMemory, or NULL */
    struct ibv_sge sge;
    unsigned long long remote_address;
    unsigned int rkey;
};

enum engine_kind { ENGINE_SEND, ENGINE_RECEIVE, ENGINE_WRITE, ENGINE_READ };

/* plain.c: */
int engine_plain_names(void);
/* Read what a post was given. 1: it is plain; 0: it is not; -1: an exception. */
int engine_read(Port *port, enum engine_kind kind, PyObject *const *arguments,
                struct engine_plain *plain);
/* Give back what was read; returns the request, or NULL where an interrupt was kept meanwhile. */
PyObject *engine_end_reading(struct engine_plain *plain, PyObject *request);
/* Whether there are two arguments; else with an exception. */
int engine_has_two_sides(Py_ssize_t count);
/* A request that holds its memory. Its slot is taken; it is given back with NULL, an exception. */
Request *engine_plain_request(Port *port, const struct engine_plain *plain, int is_receive);
/*
 * Asked again where no more of the program's code can run before the device has the request. What
 * was given runs such code as it is read (__index__, buffers), and so does the garbage collector,
 * as the request is made; it may close the queue pair, or the region that was not held yet.
 */
int engine_is_still_usable(const Port *port, const Part *part, int is_receive);
/* Nothing of it is posted: it leaves the tables, and gives back its memory and its slot. */
void engine_take_back(Port *port, Request *request);
/* The same, and free it. Returns NULL where an exception is set, else None. */
PyObject *engine_withdraw(Port *port, Request *request, int has_failed);

/* Post or collect; a new request, None if it is not plain, NULL with an exception. port.c: */
PyObject *engine_post(Port *port, enum engine_kind kind, PyObject *const *arguments);
/* chain.c: */
PyObject *engine_collect(ChainPort *chain, enum engine_kind kind, PyObject *const *arguments);

/* method.c: */
PyObject *engine_method(PyObject *module, PyObject *args);

/* drain.c; what returns an int: 0 or more, or -errno: */
int engine_poll(Drain *drain);                 /* into the batch, which is empty */
long engine_deliver(Drain *drain, int direct); /* the batch; how many */
void engine_watch_over(Drain *drain);

#endif
