/* Pooled receives, and the queue of what arrives in them. */
#ifndef AIORDMA_ENGINE_ARRIVALS_H
#define AIORDMA_ENGINE_ARRIVALS_H

#include "port.h"

typedef struct PooledReceives PooledReceives;
typedef struct ArrivalQueue ArrivalQueue;

extern PyTypeObject engine_pooled_type, engine_arrivals_type;

int engine_arrival_names(void);

/* Post a block again, with the next chain. Takes the reference. */
void engine_give_back(PooledReceives *receives, Lease *lease);
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
    PyObject *waiter;   /* of the task that receives, or NULL */
    PyObject *counters; /* a dict of what counts notifications, by their number; or NULL */
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
