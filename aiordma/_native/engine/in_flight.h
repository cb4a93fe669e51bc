/* The in-flight table: the requests in flight, by slot and generation. */
#ifndef AIORDMA_ENGINE_IN_FLIGHT_H
#define AIORDMA_ENGINE_IN_FLIGHT_H

#include "python_objects.h"

typedef struct Request Request;

typedef struct {
    Request *request; /* NULL: the slot is free */
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
uint64_t engine_table_add(Table *table, Request *request);
/* Returns a borrowed reference, and leaves the request in the table. NULL: it is not in flight. */
Request *engine_table_find(const Table *table, uint64_t wr_id);
/* Removes the request from the table, and returns a new reference. NULL: it is not in flight. */
Request *engine_table_take(Table *table, uint64_t wr_id);

#endif
