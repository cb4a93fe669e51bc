/* What posting goes through: the state and the limits of a queue pair, or of a shared receive queue,
   and the slots of its work queues. */
#ifndef AIORDMA_ENGINE_PORT_H
#define AIORDMA_ENGINE_PORT_H

#include "destinations.h"
#include "poll.h"
#include "pool.h"

typedef struct {
    PyObject_HEAD Py_ssize_t total, free, waiting;
} Slots;

extern PyTypeObject engine_slots_type;

/* 0: no slot is free, or tasks wait for one. */
static inline int engine_take_slot(Slots *slots)
{
    if (slots->free <= 0 || slots->waiting)
        return 0;
    slots->free--;
    return 1;
}

/* Let a task that waits for a slot have the one that became free. */
void engine_grant_slot(Slots *slots);

static inline void engine_give_slot(Slots *slots)
{
    slots->free++;
    if (slots->waiting)
        engine_grant_slot(slots);
}

typedef struct OpenRequests OpenRequests;
typedef struct Senders Senders;

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
    unsigned long long max_sent; /* of a message, which the peer has to receive */
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

/*
 * The fields that a constructor sets stay as long as the object. No object is made without them
 * (except a Part, which Python subclasses), and no call sets them again. tp_clear clears only
 * fields that are set later, and every reference cycle contains such a field.
 */

/* The functions of the types of ports. */
Port *engine_new_port(PyTypeObject *type, PyObject *owner, PyObject *drain, PyObject *sends,
                      PyObject *receives, PyObject *open, PyObject *loop, PyObject *domain);
int engine_traverse_port(Port *port, visitproc visit, void *arg);
int engine_clear_port(Port *port);
void engine_free_port(Port *port);

/* Whether this is the process and the thread of the port's event loop. */
static inline int engine_is_in_thread(const Port *port)
{
    const Drain *drain = port->drain;
    return drain->process == engine_process && drain->thread == PyThread_get_thread_ident();
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

/* Whether `may` holds, the port has a queue, and its event loop runs here. */
static inline int engine_usable(const Port *port, int may)
{
    return may && (port->queue_pair || port->shared) && engine_is_here(port);
}

/* The device accepted a request, but the doorbell failed. The device may still execute it, so the
   queue pair has to end. */
void engine_doorbell_failed(Port *port, int error);

#endif
