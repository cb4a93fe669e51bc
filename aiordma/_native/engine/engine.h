/*
 * The engine: the hot path as Python objects in C: the in-flight table, requests and their waiters,
 * slots, the ports of queue pairs, the drain. _engine.pyi declares what Python uses of it.
 * docs/hot-path.md has the measurements. These functions hold the GIL, because releasing it costs
 * more than their work. Only the spinner releases it, while it sleeps and now and then while it polls.
 */
#ifndef AIORDMA_ENGINE_H
#define AIORDMA_ENGINE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "data_path.h"

/* The binding's data path; set when the package is imported, before any object is made. */
extern const struct aiordma_data_path *engine_path;

/* -- objects that Python passes at import, and interned names ------------------------------- */

struct engine_given {
    PyObject *completion_class; /* WorkCompletion, a subclass of engine_completion_type */
    PyObject *remote_class;     /* RemoteMemory */
    PyObject *slice_class;      /* MemorySlice */
    PyObject *datagram_class;   /* DatagramMessage, a subclass of engine_datagram_type */
    PyObject *arrival_class;    /* DatagramArrival, the same */
    PyObject *wait_elsewhere;   /* a generator function: awaits on loops other than asyncio's */
    PyObject *log;              /* log(text, object, error) */
    PyObject *detached;         /* detached(error): a copy of a stored exception, to be raised */
    PyObject *address, *length, *rkey, *call_soon, *request_ended;
    PyObject *request_failed, *run_ended, *hold, *release, *complete, *waiter, *loop, *wake;
    PyObject *close, *destroy, *watch_over, *drain_soon, *drain_failed, *post_refused,
        *doorbell_failed;
    PyObject *grant, *request_unretrieved;
    PyObject *require_own_loop, *is_closed, *throw, *await_name;
    PyObject *with_context; /* the tuple ("context",) */
};
extern struct engine_given engine_given;

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

/* -- memory ------------------------------------------------------------------------------- */

/* The base of MemoryRegion: the fields that a post reads. */
typedef struct {
    PyObject_HEAD PyObject *domain;
    unsigned long long start;   /* the address of its first byte in this process; 0: a dma-buf */
    unsigned long long address; /* the same in work requests: `start`, or the iova */
    Py_ssize_t length;
    unsigned int lkey;
    struct ibv_mr *mr; /* for binding windows */
    unsigned int access;
    Py_ssize_t users; /* posted requests and windows that hold it */
    char retired;     /* its last user closes it */
    char usable;      /* it is registered */
    char writable;    /* the device may write to it */
} RegionBase;

/* The base of MemorySlice. */
typedef struct {
    PyObject_HEAD RegionBase *region;
    unsigned long long address;
    Py_ssize_t length;
    unsigned int lkey;
} Part;

extern PyTypeObject engine_region_type, engine_part_type;

/* Count one user less. The last one closes a retired region; -1 with an exception if that fails. */
int engine_release_region(RegionBase *region);

/* pool.c: */
typedef struct Pool Pool;
typedef struct Slab Slab;
typedef struct Lease Lease;
extern PyTypeObject engine_pool_type, engine_slab_type, engine_lease_type;

Lease *engine_lease(Pool *pool, Py_ssize_t length); /* NULL with an exception */
int engine_return_lease(Lease *lease);              /* idempotent; -1 with an exception */
void engine_return_after_error(Lease *lease);       /* an exception that is set stays set */
/* Returns the block's address in this process. */
char *engine_leased_block(const Lease *lease, struct ibv_sge *sge);
RegionBase *engine_leased_region(const Lease *lease); /* borrowed */
int engine_leased_is_usable(const Lease *lease);      /* whether its region is registered */
int engine_pool_names(void);

/* The base of PeerHandle: an address handle, and the requests that hold it. */
typedef struct {
    PyObject_HEAD Py_ssize_t holders;
    char retired; /* its last holder destroys it */
} Handle;

extern PyTypeObject engine_handle_type;

/* The base of BoundWindow: a memory window, and the memory that it is bound to. */
typedef struct {
    PyObject_HEAD PyObject *endpoint;
    Part *memory;           /* NULL: it is not bound */
    PyObject *last;         /* the last request that bound or invalidated it, or NULL */
    struct ibv_mw *pointer; /* NULL: it is freed, or of type 1 */
    unsigned int rkey;      /* of the last bind */
    char invalidating;      /* a posted request invalidates it, and has not ended */
} Window;

extern PyTypeObject engine_window_type;

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
/* Returns a borrowed reference, and leaves the entry in the table. NULL: it is not in flight. */
PyObject *engine_table_find(const Table *table, uint64_t wr_id);
/* Removes the entry from the table, and returns a new reference. NULL: it is not in flight. */
PyObject *engine_table_take(Table *table, uint64_t wr_id);

/* -- the drain, the port, the request, the waiter ----------------------------------------- */

enum { ENGINE_BATCH = 256 };

typedef struct Drain Drain;

struct Drain {
    PyObject_HEAD void (*poll_now)(Drain *drain); /* poll for completions inside a task */
    struct aiordma_drain data;
    uint32_t head, tail; /* of the completions that are polled and not delivered yet */
    Table *table;
    PyObject *hub;
    PyObject *woken; /* a list, reused */
    char enabled, draining, watched, scheduled;
    unsigned int process; /* engine_process() of the process that made it */
    PyObject *running;    /* stands for the run of the event loop that was seen last (drain.c) */
    unsigned long thread; /* that run's */
    uint32_t fruitless,
        left_out;     /* polls of `poll_now` in a row without a completion; polls skipped */
    uint32_t at_once; /* awaits since the last pause that did not suspend */
    unsigned long long polls, crossings, delivered, wakes;
    struct aiordma_completion batch[ENGINE_BATCH];
};

typedef struct Request Request;
typedef struct PooledReceives PooledReceives;
typedef struct ArrivalQueue ArrivalQueue;
typedef struct StreamPath StreamPath;
typedef struct Senders Senders;
typedef struct DatagramReceive DatagramReceive;

/* Counters of the requests of one queue pair that have ended (open.c). */
enum { ENGINE_OPCODES = 24, ENGINE_STATUSES = 32 };
struct engine_ended {
    unsigned long long sends, receives; /* all that the device had accepted */
    unsigned long long discarded;       /* of these: without a completion */
    unsigned long long bytes_sent, bytes_received;
    unsigned long long completed[ENGINE_OPCODES]; /* without an error, by place_of(opcode) */
    unsigned long long failed[ENGINE_STATUSES];
};

/* The requests of one queue pair that have not ended, in order. */
typedef struct {
    PyObject_HEAD Request *first, *last;
    Py_ssize_t count;
    struct engine_ended ended;
} OpenRequests;

/* Where datagrams to a peer go. */
struct engine_destination {
    PyObject *peer; /* NULL: an empty place */
    Handle *handle;
    struct ibv_ah *address_handle;
    unsigned int qpn, qkey;
};

struct engine_destinations {
    struct engine_destination *all; /* a hash table of `room` places, a power of two */
    size_t count, room;
};

typedef struct {
    PyObject_HEAD PyObject *owner;
    PyObject *loop; /* asyncio's, or NULL */
    PyObject *domain;
    OpenRequests *open;
    Slots *sends, *receives;
    Drain *drain;
    Pool *pool; /* NULL: none */
    struct ibv_qp *queue_pair;
    struct ibv_srq *shared; /* instead of queue_pair, in a SharedPort */
    unsigned long long max_message;
    Py_ssize_t max_inline, max_send_sge, max_recv_sge, max_read_sge;
    PyObject *flushed; /* the error of flushed receives that no program sees; or NULL: not known */
    PyObject *remote;  /* the last RemoteMemory, which is immutable, and its fields: */
    unsigned long long remote_address, remote_length;
    unsigned int rkey;
    /* Of datagrams: */
    struct engine_destinations destinations;
    Senders *senders; /* of those that arrive, or NULL */
    unsigned long long max_datagram;
    char ready, can_send_datagrams, can_receive, can_read, can_atomics, can_immediate,
        can_invalidate, can_bind;
    char notifies_owner; /* of each completion */
    char has_pooled_receives;
} Port;

enum request_state { IN_FLIGHT, SUCCEEDED, FAILED };

struct Request {
    PyObject_HEAD PyObject *owner, *operation, *held, *remote, *result, *error, *run;
    PyObject *waiters, *callbacks; /* lists, or NULL */
    PyObject *inner;               /* a callback that runs no code of the program's */
    PyObject *memory;              /* held, in addition to `held`: see request.c */
    Handle *handle;                /* held; NULL: the request is no datagram */
    Port *port;                    /* NULL: the owner gives back its slot */
    PooledReceives *pooled; /* of a receive of a pool's block, which is its memory; or NULL */
    StreamPath *stream;     /* of a stream's message, whose end it handles; or NULL */
    Py_ssize_t stream_bytes;
    /* Called once when the request ends, before its memory is released; runs no code of the
       program's. NULL: none. `subject` is the object that it is about. */
    void (*on_end)(Request *request);
    PyObject *subject;
    unsigned long long wr_id;
    Py_ssize_t length;
    long long posted; /* when, while a trace is on; else 0 */
    unsigned int completes_as;
    char is_receive, state, at_once, stream_kind;
    char retrieved; /* its error is retrieved, or another request of its run reports it */
    char finalized;
    char keeps;         /* if it fails, its memory is released by engine_drop only */
    OpenRequests *open; /* the list that contains it, or NULL */
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
    char *bytes; /* the inline data */
    size_t bytes_used, bytes_room;
    struct ibv_sge *sges; /* of the requests with several parts */
    size_t sges_used, sges_room;
    Py_ssize_t posted; /* how many requests the device accepted */
    char over;         /* the chain collects no more requests */
    char is_posted;
    char signal_last_only;
    int error; /* of a post at the end of the block */
} ChainPort;

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

typedef struct {
    PyObject_HEAD char dirty;
    int confidence;
    unsigned long long most; /* nanoseconds of spinning without a completion */
    unsigned long long found;
    uint64_t resumes; /* it does not spin before this time */
} Spinner;

extern PyTypeObject engine_drain_type, engine_port_type, engine_request_type, engine_open_type,
    engine_waiter_type, engine_spinner_type, engine_method_type, engine_chain_type,
    engine_shared_type, engine_pooled_type, engine_arrivals_type, engine_view_type,
    engine_stream_type, engine_transfer_type, engine_senders_type, engine_datagram_type,
    engine_receive_type;

/* given.c: how many forks lie between the first process and this one. */
unsigned int engine_process(void);

/* Whether the drain may take events and completions. Those of an inherited drain are the parent's. */
static inline int engine_takes(const Drain *drain)
{
    return drain->enabled && drain->process == engine_process();
}

/*
 * The fields that a constructor sets stay as long as the object. No object is made without them
 * (except a Part, which Python subclasses), and no call sets them again. tp_clear clears only
 * fields that are set later, and every reference cycle contains such a field.
 */

/* port.c: the functions of a port's type, also for shared.c. */
Port *engine_new_port(PyTypeObject *type, PyObject *owner, PyObject *drain, PyObject *sends,
                      PyObject *receives, PyObject *open, PyObject *loop, PyObject *domain);
int engine_traverse_port(Port *port, visitproc visit, void *arg);
int engine_clear_port(Port *port);
void engine_free_port(Port *port);

/* Whether this is the process and the thread of the port's event loop. */
static inline int engine_is_in_thread(const Port *port)
{
    const Drain *drain = port->drain;
    return drain->process == engine_process() && drain->thread == PyThread_get_thread_ident();
}

/*
 * Whether the port's event loop runs here: also its run. A run sets the thread's hook for
 * asynchronous generators to a bound method of its own.
 */
static inline int engine_is_here(const Port *port)
{
    return engine_is_in_thread(port) &&
           port->drain->running == PyThreadState_Get()->async_gen_firstiter;
}
/* drain.c: the event loop of the drain runs here, or stands still and this is its thread. */
void engine_settle(Drain *drain);

/* Whether `may` holds, the port has a queue, and its event loop runs here. */
static inline int engine_usable(const Port *port, int may)
{
    return may && (port->queue_pair || port->shared) && engine_is_here(port);
}

int engine_prepare(void);

/* memory.c: */
int engine_take_slot(Slots *slots); /* 0: no slot is free, or tasks wait for one */
void engine_give_slot(Slots *slots);

/* completion.c: */
PyObject *engine_completion(const struct aiordma_completion *completion);
PyObject *engine_completion_tuple(const struct aiordma_completion *completion);
int engine_read_completion(PyObject *tuple, struct aiordma_completion *completion);
int engine_completion_names(void); /* after PyType_Ready */

/* wait.c: */
Waiter *engine_waiter(PyObject *loop);
void engine_await(Waiter *waiter, PyObject *awaited, const struct engine_awaited *calls);
int engine_wake(Waiter *waiter);
/* Collect the waiters that are woken from now on, until engine_run_woken runs their tasks. */
void engine_collect_woken(PyObject *list);
int engine_run_woken(PyObject *list);
/* Call a function while no task runs, and then run the tasks that it has woken. */
PyObject *engine_call_then_run(PyObject *function);
/*
 * `throw` and `close` of an awaitable that awaits another one, `inner`, or NULL. The caller holds a
 * reference to it.
 */
PyObject *engine_throw_into(PyObject *inner, PyObject *arguments);
PyObject *engine_close_inner(PyObject *inner);
/* What `send` and `__next__` return after a step: its result, or NULL with an exception. */
PyObject *engine_after_step(PySendResult step, PyObject *result);

/* request.c: */
Request *engine_request(Port *port, PyObject *operation, Py_ssize_t length, PyObject *memory,
                        PyObject *remote, int is_receive);
void engine_complete(Request *request, const struct aiordma_completion *completion);
int engine_holds_usable(const Request *request); /* whether its regions are still registered */
/* Release the memory of a request that was not posted, or that has kept it. */
void engine_drop(Request *request);
/* Whether the request has failed, and the device may still use its memory. */
int engine_keeps(const Request *request);
/* The `on_end` of an atomic whose result is the previous value, which is in its leased block. */
void engine_read_value(Request *request);
/* Whether the requests before it in its run can complete without running the program's code. */
int engine_run_is_quiet(const Request *last);
/* A completion, or an exception if the request failed or has not ended. */
PyObject *engine_result(Request *request);

/* open.c: */
void engine_enter(OpenRequests *open, Request *request);
void engine_leave(OpenRequests *open, Request *request); /* no effect if it is not in the list */
/* Count a request that ends. NULL: it ends without a completion. */
void engine_count(const Request *request, const struct aiordma_completion *completion);

/* trace.c: whether a trace is on. A request is then noted when it is posted, and when it ends. */
extern int engine_tracing;
void engine_note_post(Request *request);
void engine_record(const Request *request, const struct aiordma_completion *completion);
PyObject *engine_begin_trace(PyObject *module, PyObject *most);
PyObject *engine_take_trace(PyObject *module, PyObject *none);

/* request_await.c: */
void engine_forget_waiter(Request *request, PyObject *waiter);
/* Await a request on behalf of `awaited`, which is its own awaitable once the request has ended. */
PyObject *engine_await_request(Request *request, PyObject *awaited,
                               const struct engine_awaited *calls);
/* Take the reference of a result, and raise StopIteration with it. Returns NULL. */
PyObject *engine_stop_iteration(PyObject *result);

/* datagrams.c: */
int engine_datagram_names(void);
PyObject *engine_grh_ends(PyObject *module, PyObject *grh);
/* Returns the destination of a peer, which is valid until the next is added. NULL: not known. */
const struct engine_destination *engine_destination(const Port *port, const PyObject *peer);
int engine_add_destination(Port *port, const struct engine_destination *destination); /* -1: exc. */
void engine_forget_destinations(Port *port);
int engine_traverse_destinations(const Port *port, visitproc visit, void *arg);
/* Make a DatagramMessage of the first bytes of a block; NULL with an exception. */
PyObject *engine_datagram(PyObject *senders, const char *block, Py_ssize_t size,
                          const struct aiordma_completion *completion);
/* Make a receive, with a block for the header; NULL with an exception. */
DatagramReceive *engine_datagram_receive(Port *port, struct ibv_sge *header);
void engine_set_receive(Request *request, DatagramReceive *receive);

/* pooled.c, arrivals.c, view.c: */
int engine_pooled_names(void);
int engine_arrival_names(void);
int engine_view_names(void);
/* A request of pooled receives has ended: move its block on. */
void engine_arrived(Request *request);
/* Whether the request, if it succeeds, has a queue for its block, and no block is posted for it (or
   it is of no pooled receives). */
int engine_arrival_is_quiet(const Request *request, uint32_t qp_num);
PyObject *engine_view(ArrivalQueue *queue);
int engine_runs_here(PyObject *loop); /* whether this asyncio loop is running in this thread */

/* stream.c (what its other files know is in stream.h): */
int engine_stream_names(void);
/* A request of a stream has ended. */
void engine_stream_ended(Request *request);
/* Whether a request that succeeds does not end its stream (or is of no stream). */
int engine_stream_is_quiet(const Request *request, const struct aiordma_completion *completion);

/* The kinds of posts. V: the memory is a list of parts. */
enum engine_kind {
    ENGINE_SEND,
    ENGINE_SENDV,
    ENGINE_RECEIVE,
    ENGINE_RECEIVEV,
    ENGINE_WRITE,
    ENGINE_WRITEV,
    ENGINE_READ,
    ENGINE_READV,
    ENGINE_COMPARE_SWAP,
    ENGINE_FETCH_ADD,
    ENGINE_COMPARE_SWAP_VALUE, /* the result of the request is the previous value */
    ENGINE_FETCH_ADD_VALUE,
    ENGINE_BIND,
    ENGINE_LOCAL_INVALIDATE,
    ENGINE_UD_SEND,
    ENGINE_UD_SENDV,
    ENGINE_UD_RECEIVE,
    ENGINE_UD_RECEIVEV,
    ENGINE_KINDS
};

/* The arguments of a post. An argument that was not given is NULL. */
enum engine_argument {
    ENGINE_LOCAL,
    ENGINE_REMOTE,  /* memory, or the peer of a datagram */
    ENGINE_COMPARE, /* also the number that fetch_add adds */
    ENGINE_SWAP,
    ENGINE_IMMEDIATE,
    ENGINE_INVALIDATE,
    ENGINE_WINDOW,
    ENGINE_ACCESS,
    ENGINE_FENCE,
    ENGINE_SOLICITED,
    ENGINE_ARGUMENTS
};

/* How the device gets the bytes: from registered memory, or copied, inline or to a pool block. */
/* ENGINE_VALUE: no bytes are given; a pool block receives the value of an atomic. */
enum engine_copying { ENGINE_NOTHING, ENGINE_INLINE, ENGINE_BLOCK, ENGINE_VALUE };

enum { ENGINE_PARTS = 32 }; /* of one request; one with more parts takes the general path */

/* What a request is to do, as it was read from the arguments of a post. */
struct engine_work {
    PyObject *operation; /* its name; borrowed */
    PyObject *remote;    /* RemoteMemory, or NULL; borrowed */
    enum ibv_wr_opcode opcode;
    enum engine_copying copying;
    unsigned int flags;
    uint32_t immediate; /* or the rkey to invalidate */
    unsigned int rkey;  /* of the remote memory, or that a window gets */
    Window *window;     /* to bind or to invalidate, else NULL; borrowed */
    Part *bound;        /* the memory to bind it to, else NULL; borrowed */
    unsigned int access;
    unsigned long long remote_address, compare_add, swap;
    unsigned long long length;
    Handle *handle; /* of a datagram, else NULL; a reference */
    struct ibv_ah *address_handle;
    unsigned int remote_qpn, remote_qkey;
    int is_receive;
    int has_header;   /* of a datagram that is received: the first sge is the header's */
    int count;        /* of the sges */
    int region_count; /* of the regions that the parts belong to; references */
    int view_count;   /* of the exported buffers */
    struct ibv_sge sges[ENGINE_PARTS];
    RegionBase *owners[ENGINE_PARTS]; /* of each sge: its region; NULL: a buffer */
    RegionBase *regions[ENGINE_PARTS];
    Py_buffer views[ENGINE_PARTS];
};

/* work.c: */
int engine_work_names(void);
/*
 * Read the arguments of a post. 1: they were read; 0: the port cannot handle them, and the general
 * path has to; -1: an exception. Call engine_release_work in every case.
 */
int engine_read(Port *port, enum engine_kind kind, PyObject *const *given,
                struct engine_work *work);
void engine_release_work(struct engine_work *work); /* its buffers and regions */
/* Release the work, and return the request. If an interrupt is kept, raise it, and return NULL. */
PyObject *engine_end_reading(struct engine_work *work, PyObject *request);
/* Copy the bytes of all sges, which are in this process's memory. */
void engine_gather(const struct engine_work *work, char *to);
/* PyObject_GetBuffer, with a TypeError for a buffer of Python objects, whose bytes are addresses, and
   the exporter's error for a buffer that does not say what its elements are (numpy's dates). */
int engine_get_buffer(PyObject *given, Py_buffer *view, int flags);
/* Add a region that the request holds. */
void engine_add_region(struct engine_work *work, RegionBase *region);
/* Make a request that holds its memory. Its slot is taken already. After an exception (NULL), the
   slot is given back. */
Request *engine_work_request(Port *port, struct engine_work *work);
/*
 * Whether the port and the regions are still usable. Called at a point after which no code of the
 * program's runs before the device has the request. Such code runs while the arguments are read
 * (__index__, buffers), and while the request is made (the garbage collector). It can close the
 * queue pair, or a region, which is not held yet.
 */
int engine_is_still_usable(const Port *port, const struct engine_work *work);
/* The request for the device, without its wr_id and its sges. */
struct ibv_send_wr engine_send_wr(const struct engine_work *work);
/* Undo a request that was not posted: remove it from the tables, release its memory and slot. */
void engine_take_back(Port *port, Request *request);
/* The same, and drop the reference. Returns NULL if has_failed (an exception is set), else None. */
PyObject *engine_withdraw(Port *port, Request *request, int has_failed);

/* window.c: read the arguments of a bind or a local invalidate. 0: take the general path. */
int engine_read_bind(const Port *port, struct engine_work *work, PyObject *const *given);
int engine_read_local_invalidate(const Port *port, struct engine_work *work,
                                 PyObject *const *given);
int engine_window_is_still_usable(const struct engine_work *work); /* of a work with a window */
void engine_fill_bind(const struct engine_work *work, struct ibv_send_wr *send);
/* The request of a work with a window is posted or collected: set the window's state. */
void engine_note_window(const struct engine_work *work, Request *request);

/* Post (port.c) or collect (chain.c) a request. Returns the new request, None if the general path
   has to post it, or NULL with an exception. */
PyObject *engine_post(Port *port, enum engine_kind kind, PyObject *const *given);
PyObject *engine_collect(ChainPort *chain, enum engine_kind kind, PyObject *const *given);
PyObject *engine_end_chain(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

/* port.c: the device accepted a request, but the doorbell failed. The device may still execute it,
   so the queue pair has to end. */
void engine_doorbell_failed(Port *port, int error);

/* shared.c: a method of both types of ports. */
PyObject *engine_receive_all(Port *port, PyObject *given);
#define ENGINE_RECEIVE_ALL                                                                     \
    {"receive_all", (PyCFunction)engine_receive_all, METH_O,                                   \
     "receive_all($self, parts, /)\n--\n\n"                                                    \
     "Post a receive for each item of the list, as one chain. An item is registered memory,\n" \
     "or a list of it. Return the requests; or the errno, and the posted requests; or None:\n" \
     "the general path has to post them."}

/* method.c: */
PyObject *engine_method(PyObject *module, PyObject *args);
int engine_method_names(void);
/* Assign the arguments of a vectorcall to `given`. 0: they do not fit the kind's signature. */
int engine_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                     PyObject *keywords, PyObject **given);
/* The same for a method of a port, with a TypeError if they do not fit. */
int engine_port_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                          PyObject *keywords, PyObject **given);
/* The text signatures of the ports' methods. */
#define ENGINE_SIGNATURE_SEND \
    "send($self, data, *, immediate=None, invalidate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_SENDV \
    "sendv($self, parts, *, immediate=None, invalidate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_WRITE \
    "write($self, local, remote, *, immediate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_WRITEV \
    "writev($self, parts, remote, *, immediate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_READ "read($self, remote, local, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_READV "readv($self, remote, parts, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_COMPARE_SWAP \
    "compare_swap($self, local, remote, compare, swap, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_BIND "bind($self, window, memory, access, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_LOCAL_INVALIDATE "local_invalidate($self, window, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_UD_SEND \
    "ud_send($self, data, peer, *, immediate=None, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_UD_SENDV \
    "ud_sendv($self, parts, peer, *, immediate=None, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_FETCH_ADD "fetch_add($self, local, remote, add, *, fence=False)\n--\n\n"

/* drain.c: */
int engine_poll(Drain *drain); /* poll into the empty batch; returns the number, or -errno */
long engine_deliver(Drain *drain, int direct); /* deliver the batch; returns the number */
void engine_watch_over(Drain *drain);

#endif
