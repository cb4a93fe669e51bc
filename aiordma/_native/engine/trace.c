/*
 * The trace: while it is on, each request that ends leaves a record, which Python takes from time to
 * time (_runtime/tracing.py). Recording allocates no Python object, and so runs no code of the
 * program's: it happens where requests end.
 */
#include "trace.h"

#include <time.h>

struct record {
    struct engine_record of;
    long long ended;
};

enum { FIRST_ROOM = 64 };

int engine_tracing;
static struct record *records;
static size_t count, room, limit;
static unsigned long long lost;

long long engine_trace_time(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time); /* cannot fail with this clock */
    return (long long)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int has_room(void)
{
    if (count < room)
        return 1;
    size_t more = room ? 2 * room : FIRST_ROOM;
    if (more > limit)
        more = limit;
    struct record *larger =
        more > count ? PyMem_RawRealloc(records, more * sizeof(*records)) : NULL;
    if (!larger)
        return 0;
    records = larger;
    room = more;
    return 1;
}

void engine_record(const struct engine_record *record)
{
    if (!has_room()) {
        lost++;
        return;
    }
    records[count++] = (struct record){*record, engine_trace_time()};
    Py_INCREF(record->owner);
    Py_INCREF(record->operation);
}

PyObject *engine_begin_trace(PyObject *module, PyObject *most)
{
    (void)module;
    size_t given = PyLong_AsSize_t(most);
    if (given == (size_t)-1 && PyErr_Occurred())
        return NULL;
    limit = given;
    engine_tracing = given > 0;
    Py_RETURN_NONE;
}

PyObject *engine_take_trace(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    /* Take them first: making objects can run code that ends further requests. */
    struct record *taken = records;
    size_t taken_count = count;
    unsigned long long taken_lost = lost;
    records = NULL;
    count = room = 0;
    lost = 0;
    PyObject *all = PyList_New(0);
    for (size_t i = 0; i < taken_count; i++) {
        const struct engine_record *record = &taken[i].of;
        PyObject *item =
            all ? Py_BuildValue("(OOKnlLL)", record->owner, record->operation, record->wr_id,
                                record->bytes, record->status, record->posted, taken[i].ended)
                : NULL;
        if (!item || PyList_Append(all, item))
            Py_CLEAR(all);
        Py_XDECREF(item);
        Py_DECREF(record->owner);
        Py_DECREF(record->operation);
    }
    PyMem_RawFree(taken);
    return all ? Py_BuildValue("(NK)", all, taken_lost) : NULL;
}
