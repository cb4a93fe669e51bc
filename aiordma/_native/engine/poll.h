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
    uint32_t fruitless,
        left_out;     /* polls of `poll_now` in a row without a completion; polls skipped */
    uint32_t at_once; /* awaits since the last pause that did not suspend */
    unsigned long long polls, crossings, delivered, wakes;
    struct aiordma_completion batch[ENGINE_BATCH];
};

int engine_poll(Drain *drain); /* poll into the empty batch; returns the number, or -errno */
/* Start the watchdog for lost completion events, if requests are in flight. */
void engine_watch_over(Drain *drain);

#endif
