/* The in-flight table: the requests in flight, by slot and generation. */
#include "in_flight.h"

enum { NONE = UINT32_MAX, LEAST = 64 };
/* shrink() keeps a slot with a higher generation, because new slots would otherwise begin with a
   generation that soon wraps around. */
#define MOST_GENERATIONS_DROPPED (1u << 31)

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    Table *table = (Table *)type->tp_alloc(type, 0);
    if (!table)
        return NULL;
    table->first_free = NONE;
    table->first_generation = 1;
    return (PyObject *)table;
}

static int table_traverse(Table *table, visitproc visit, void *arg)
{
    for (uint32_t i = 0; i < table->used; i++)
        Py_VISIT(table->slots[i].request);
    return 0;
}

static int table_clear(Table *table)
{
    for (uint32_t i = 0; i < table->used; i++)
        Py_CLEAR(table->slots[i].request);
    return 0;
}

static void table_dealloc(Table *table)
{
    PyObject_GC_UnTrack(table);
    table_clear(table);
    PyMem_Free(table->slots);
    Py_TYPE(table)->tp_free((PyObject *)table);
}

static int grow(Table *table)
{
    uint32_t capacity = table->capacity ? 2 * table->capacity : LEAST;
    Slot *slots = PyMem_Realloc(table->slots, capacity * sizeof(*slots));
    if (!slots) {
        PyErr_NoMemory();
        return -1;
    }
    table->slots = slots;
    table->capacity = capacity;
    return 0;
}

uint64_t engine_table_add(Table *table, Request *request)
{
    uint32_t at = table->first_free;

    if (at != NONE) {
        table->first_free = table->slots[at].next_free;
    } else {
        if (table->used == table->capacity && grow(table))
            return 0;
        at = table->used++;
        table->slots[at].generation = table->first_generation;
    }
    table->slots[at].request = (Request *)Py_NewRef(request);
    table->live++;
    return (uint64_t)table->slots[at].generation << 32 | at;
}

Request *engine_table_find(const Table *table, uint64_t wr_id)
{
    uint32_t at = (uint32_t)wr_id;

    if (at >= table->used || table->slots[at].generation != wr_id >> 32)
        return NULL;
    return table->slots[at].request;
}

Request *engine_table_take(Table *table, uint64_t wr_id)
{
    Request *request = engine_table_find(table, wr_id);
    uint32_t at = (uint32_t)wr_id;

    if (!request)
        return NULL;
    table->slots[at].request = NULL;
    /* Generation 0 is never used, so that a zeroed wr_id finds no request. */
    if (++table->slots[at].generation == 0)
        table->slots[at].generation = 1;
    table->slots[at].next_free = table->first_free;
    table->first_free = at;
    table->live--;
    return request;
}

/*
 * Remove the free slots after the last live one. New slots begin with a generation that the removed
 * slots have not used, so that a late completion finds no request.
 */
static void shrink(Table *table)
{
    uint32_t capacity = table->capacity;

    while (table->used) {
        const Slot *last = &table->slots[table->used - 1];
        if (last->request || last->generation > MOST_GENERATIONS_DROPPED)
            break;
        if (table->first_generation < last->generation)
            table->first_generation = last->generation;
        table->used--;
    }
    /* Low slots are used first, so that those at the end become free. */
    table->first_free = NONE;
    for (uint32_t at = table->used; at--;)
        if (!table->slots[at].request) {
            table->slots[at].next_free = table->first_free;
            table->first_free = at;
        }
    while (capacity > LEAST && table->used <= capacity / 2)
        capacity /= 2;
    if (capacity == table->capacity)
        return;
    Slot *slots = PyMem_Realloc(table->slots, capacity * sizeof(*slots));
    if (!slots)
        return; /* keep the larger array */
    table->slots = slots;
    table->capacity = capacity;
}

static PyObject *table_shrink(Table *table, PyObject *none)
{
    (void)none;
    shrink(table);
    Py_RETURN_NONE;
}

static PyObject *table_add(Table *table, Request *request)
{
    uint64_t wr_id = engine_table_add(table, request);
    PyObject *number = wr_id ? PyLong_FromUnsignedLongLong(wr_id) : NULL;
    if (wr_id && !number)
        Py_DECREF(engine_table_take(table, wr_id)); /* the caller still has it */
    return number;
}

static PyObject *table_take(Table *table, PyObject *number)
{
    unsigned long long wr_id = PyLong_AsUnsignedLongLong(number);
    if (wr_id == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    Request *request = engine_table_take(table, wr_id);
    return request ? (PyObject *)request : Py_NewRef(Py_None);
}

static Py_ssize_t table_length(Table *table)
{
    return table->live;
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)table_add, METH_O,
     "add($self, request, /)\n--\n\n"
     "Keep the work request, and return the wr_id that finds it."},
    {"take", (PyCFunction)table_take, METH_O,
     "take($self, wr_id, /)\n--\n\n"
     "Remove and return the request of a wr_id; None if it is not, or no longer, in flight."},
    {"shrink", (PyCFunction)table_shrink, METH_NOARGS,
     "shrink($self, /)\n--\n\n"
     "Free the slots behind the last live one."},
    {NULL, NULL, 0, NULL},
};

static PyObject *table_slots(Table *table, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLong(table->used);
}

static PyGetSetDef properties[] = {
    {"slots", (getter)table_slots, NULL,
     "The number of slots: at least as many as were in use at once since the last shrink.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods sequence = {.sq_length = (lenfunc)table_length};

PyTypeObject engine_table_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma.InFlightTable",
    .tp_doc = "Requests in flight, by slot. `add` and `take` take constant time; it grows by need.",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = table_new,
    .tp_dealloc = (destructor)table_dealloc,
    .tp_traverse = (traverseproc)table_traverse,
    .tp_clear = (inquiry)table_clear,
    .tp_methods = methods,
    .tp_getset = properties,
    .tp_as_sequence = &sequence,
};
