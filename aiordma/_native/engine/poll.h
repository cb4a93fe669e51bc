/* The completion queues of one channel, polled in batches. drain.c delivers what is found. */
#ifndef AIORDMA_ENGINE_POLL_H
#define AIORDMA_ENGINE_POLL_H

#include "in_flight.h"

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
    unsigned int process; /* engine_process of the process that made it */
    PyObject *running;    /* stands for the run of the event loop that was seen last */
    unsigned long thread; /* that run's */
    uint32_t fruitless,
        left_out;     /* polls of `poll_now` in a row without a completion; polls skipped */
    uint32_t at_once; /* awaits since the last pause that did not suspend */
    unsigned long long polls, crossings, delivered, wakes;
    struct aiordma_completion batch[ENGINE_BATCH];
};

/* Whether the drain may take events and completions. Those of an inherited drain are the parent's. */
static inline int engine_takes(const Drain *drain)
{
    return drain->enabled && drain->process == engine_process;
}

int engine_poll(Drain *drain); /* poll into the empty batch; returns the number, or -errno */
/* The event loop of the drain runs here, or stands still and this is its thread. */
void engine_settle(Drain *drain);
/* Start the watchdog for lost completion events, if requests are in flight. */
void engine_watch_over(Drain *drain);

#endif
