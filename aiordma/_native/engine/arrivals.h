/* What pooled receives, the queue of what arrives in them, and its views know of each other. */
#ifndef AIORDMA_ENGINE_ARRIVALS_H
#define AIORDMA_ENGINE_ARRIVALS_H

#include "engine.h"

/* Posts the blocks of a pool (pooled.c). */
struct PooledReceives {
    PyObject_HEAD Port *port;
    Pool *pool;
    PyObject *refused; /* called with the errno of a failed post; 0: the port was not usable */
    PyObject
        *members; /* a dict: the queues by queue pair number; NULL: all arrivals are `queue`'s */
    ArrivalQueue *queue; /* or NULL */
    Lease **unposted;    /* blocks for the next chain; references */
    Py_ssize_t count, room;
    Py_ssize_t posted, chain;
};

/* Post a block again, with the next chain. Takes the reference. */
void engine_give_back(PooledReceives *receives, Lease *lease);
/* Post the chain of blocks that were given back. */
void engine_post_unposted(PooledReceives *receives);
/* Handle the errno of a failed post; 0: the port was not usable. */
void engine_notify_refused(PooledReceives *receives, int error);
/* Return the block to the pool, and drop the reference. */
void engine_return_block(Lease *lease);

struct engine_arrival {
    Lease *lease; /* a reference */
    struct aiordma_completion completion;
};

struct ArrivalQueue {
    PyObject_HEAD PyObject *owner; /* Arrivals: it waits, and raises the errors */
    PooledReceives *receives;
    Port *port;                     /* of the endpoint */
    struct engine_arrival *arrived; /* a ring of `room` entries, a power of two */
    Py_ssize_t first, count, room;
    PyObject *waiter; /* of the task that receives, or NULL */
    Py_ssize_t pause, at_once;
    Py_ssize_t views, most_views;
    char busy, fed;
};

static inline struct engine_arrival *engine_arrival_at(const ArrivalQueue *queue, Py_ssize_t at)
{
    return &queue->arrived[(queue->first + at) & (queue->room - 1)];
}

/* Whether an arrival is there, and may be handed out without a pause. */
int engine_may_take(const ArrivalQueue *queue);
/*
 * Post the chain, poll, and return a waiter for the next arrival: a reference. Then call
 * engine_end_wait. NULL: an exception is set; or, without one, an arrival is there, or Python has to
 * check whether the task may wait.
 */
PyObject *engine_begin_wait(ArrivalQueue *queue);
void engine_end_wait(ArrivalQueue *queue);
/* The number of bytes of the first arrival in its block. */
Py_ssize_t engine_contents_length(const ArrivalQueue *queue);
/* Remove the first arrival, and return its block: a reference. */
Lease *engine_pop_arrival(ArrivalQueue *queue);

#endif
