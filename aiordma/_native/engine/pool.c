/*
 * Leases of registered blocks. The engine leases and returns blocks without Python code, as long as
 * the current slab of the size has a free block. Slabs are made and freed by _requests/pool.py.
 */
#include "pool.h"

#include <structmember.h>

/* Block sizes are powers of two, from SMALLEST on; a size's class is its place among them. */
enum { SMALLEST = 256, SMALLEST_BITS = 8, CLASSES = 48 };

struct Slab {
    PyObject_HEAD RegionBase *region;
    Py_ssize_t size;  /* of a block, in bytes */
    Py_ssize_t count; /* of the blocks */
    Py_ssize_t free_count;
    uint32_t *free; /* the indexes of the free blocks */
};

struct Pool {
    PyObject_HEAD Slab *current[CLASSES];
    Py_ssize_t leased;
};

struct Lease {
    PyObject_HEAD Pool *pool;
    Slab *slab;
    Py_ssize_t length;
    PyObject *memory; /* a slice for Python; NULL: it was not asked for */
    uint32_t index;
    char is_leased;
};

static PyObject *next_slab, *has_room; /* the names of Python's methods */

static int class_of(Py_ssize_t length)
{
    if (length <= SMALLEST)
        return 0;
    return 64 - __builtin_clzll((unsigned long long)length - 1) - SMALLEST_BITS;
}

/* -- slabs --------------------------------------------------------------------------------- */

static PyObject *slab_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"region", "size", NULL};
    PyObject *region;
    Py_ssize_t size;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!n", names, &engine_region_type, &region,
                                     &size))
        return NULL;
    Py_ssize_t length = ((RegionBase *)region)->length;
    if (size < SMALLEST || size & (size - 1) || class_of(size) >= CLASSES ||
        length / size > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "size: a power of two from 256 on");
        return NULL;
    }
    Slab *slab = (Slab *)type->tp_alloc(type, 0);
    if (!slab)
        return NULL;
    slab->region = (RegionBase *)Py_NewRef(region);
    slab->size = size;
    slab->count = slab->free_count = length / size;
    slab->free = PyMem_Calloc((size_t)slab->count + 1, sizeof(*slab->free));
    if (!slab->free) {
        Py_DECREF(slab);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < slab->count; i++)
        slab->free[i] = (uint32_t)i;
    return (PyObject *)slab;
}

static int slab_traverse(Slab *slab, visitproc visit, void *arg)
{
    Py_VISIT(slab->region);
    return 0;
}

static void slab_dealloc(Slab *slab)
{
    PyObject_GC_UnTrack(slab);
    Py_XDECREF(slab->region);
    PyMem_Free(slab->free);
    Py_TYPE(slab)->tp_free((PyObject *)slab);
}

static PyMemberDef slab_members[] = {
    {"region", T_OBJECT_EX, offsetof(Slab, region), READONLY, "The registration."},
    {"size", T_PYSSIZET, offsetof(Slab, size), READONLY, "The size of a block in bytes."},
    {"count", T_PYSSIZET, offsetof(Slab, count), READONLY, "The number of blocks."},
    {"free", T_PYSSIZET, offsetof(Slab, free_count), READONLY, "The number of free blocks."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_slab_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Slab",
    .tp_doc = "Slab(region, size)\n--\n\nOne registration of a pool, and its free blocks.",
    .tp_basicsize = sizeof(Slab),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = slab_new,
    .tp_dealloc = (destructor)slab_dealloc,
    .tp_traverse = (traverseproc)slab_traverse,
    .tp_members = slab_members,
};

/* -- leases -------------------------------------------------------------------------------- */

static Py_ssize_t offset_of(const Lease *lease)
{
    return (Py_ssize_t)lease->index * lease->slab->size;
}

/* Returns a new reference to a slab of the class that has a free block. */
static Slab *slab_with_room(Pool *pool, int class)
{
    Slab *current = pool->current[class];

    if (current && current->free_count)
        return (Slab *)Py_NewRef(current);
    PyObject *size = PyLong_FromSsize_t((Py_ssize_t)SMALLEST << class);
    PyObject *slab = size ? PyObject_CallMethodOneArg((PyObject *)pool, next_slab, size) : NULL;
    Py_XDECREF(size);
    if (slab && !(Py_IS_TYPE(slab, &engine_slab_type) && ((Slab *)slab)->free_count &&
                  class_of(((Slab *)slab)->size) == class)) {
        PyErr_SetString(PyExc_TypeError, "_next_slab returned no slab with a free block");
        Py_CLEAR(slab);
    }
    return (Slab *)slab;
}

Lease *engine_lease(Pool *pool, Py_ssize_t length)
{
    int class = class_of(length);

    if (class >= CLASSES) {
        PyErr_SetString(PyExc_ValueError, "a block of this length is too long");
        return NULL;
    }
    /* First, because this can run the collector, and code of the program's, which leases blocks. */
    Lease *lease = (Lease *)engine_lease_type.tp_alloc(&engine_lease_type, 0);
    Slab *slab = lease ? slab_with_room(pool, class) : NULL;
    if (!slab) {
        Py_XDECREF(lease);
        return NULL;
    }
    lease->pool = (Pool *)Py_NewRef(pool);
    lease->slab = slab;
    lease->index = slab->free[--slab->free_count];
    lease->length = length;
    lease->is_leased = 1;
    pool->leased++;
    return lease;
}

int engine_return_lease(Lease *lease)
{
    if (!lease->is_leased)
        return 0;
    lease->is_leased = 0;
    Slab *slab = lease->slab;
    slab->free[slab->free_count++] = lease->index;
    lease->pool->leased--;
    if (slab == lease->pool->current[class_of(slab->size)] ||
        (slab->free_count != 1 && slab->free_count != slab->count))
        return 0;
    PyObject *arguments[] = {(PyObject *)lease->pool, (PyObject *)slab};
    PyObject *result = engine_call_method_alone(has_room, arguments, 2);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

void engine_return_after_error(Lease *lease)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    if (engine_return_lease(lease))
        engine_log("returning the block %r failed", (PyObject *)lease);
    PyErr_Restore(type, value, trace);
}

char *engine_leased_block(const Lease *lease, struct ibv_sge *sge)
{
    const RegionBase *region = lease->slab->region;

    *sge = (struct ibv_sge){region->address + (uint64_t)offset_of(lease), (uint32_t)lease->length,
                            region->lkey};
    return (char *)(uintptr_t)region->start + offset_of(lease);
}

RegionBase *engine_leased_region(const Lease *lease)
{
    return lease->slab ? lease->slab->region : NULL;
}

int engine_leased_is_usable(const Lease *lease)
{
    return lease->slab->region->usable;
}

static int lease_traverse(Lease *lease, visitproc visit, void *arg)
{
    Py_VISIT(lease->pool);
    Py_VISIT(lease->slab);
    Py_VISIT(lease->memory);
    return 0;
}

static void lease_dealloc(Lease *lease)
{
    PyObject_GC_UnTrack(lease);
    Py_XDECREF(lease->pool);
    Py_XDECREF(lease->slab);
    Py_XDECREF(lease->memory);
    Py_TYPE(lease)->tp_free((PyObject *)lease);
}

static PyObject *lease_memory(Lease *lease, void *closure)
{
    (void)closure;
    if (!lease->slab) { /* the collector can show a lease that is being made */
        PyErr_SetString(PyExc_RuntimeError, "this lease is not made yet");
        return NULL;
    }
    if (!lease->memory) {
        PyObject *memory =
            engine_python.slice_class
                ? PyObject_CallFunction(engine_python.slice_class, "Onn", lease->slab->region,
                                        offset_of(lease), lease->length)
                : PyErr_Format(PyExc_RuntimeError, "there is no class of slices");
        if (!memory)
            return NULL;
        /* The constructor can run this function again, by the collector. */
        Py_XSETREF(lease->memory, memory);
    }
    return Py_NewRef(lease->memory);
}

static PyObject *lease_release(Lease *lease, PyObject *none)
{
    (void)none;
    if (engine_return_lease(lease))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *lease_hold(Lease *lease, PyObject *none)
{
    (void)lease, (void)none;
    Py_RETURN_NONE;
}

static PyMethodDef lease_methods[] = {
    {"release", (PyCFunction)lease_release, METH_NOARGS,
     "release($self, /)\n--\n\n"
     "Return the block. Idempotent. No posted request may still use it."},
    {"_hold", (PyCFunction)lease_hold, METH_NOARGS,
     "_hold($self, /)\n--\n\n"
     "Do nothing: a lease holds its block from the start."},
    {"_release", (PyCFunction)lease_release, METH_NOARGS,
     "_release($self, /)\n--\n\n"
     "Return the block, as `release` does."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef lease_properties[] = {
    {"memory", (getter)lease_memory, NULL, "The block, as a slice of the requested length.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject engine_lease_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Lease",
    .tp_doc = "A registered block, leased until `release`. Made by `Pool.lease`.",
    .tp_basicsize = sizeof(Lease),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)lease_dealloc,
    .tp_traverse = (traverseproc)lease_traverse,
    .tp_methods = lease_methods,
    .tp_getset = lease_properties,
};

/* -- the pool ------------------------------------------------------------------------------ */

static int pool_traverse(Pool *pool, visitproc visit, void *arg)
{
    for (int i = 0; i < CLASSES; i++)
        Py_VISIT(pool->current[i]);
    return 0;
}

static int pool_clear(Pool *pool)
{
    for (int i = 0; i < CLASSES; i++)
        Py_CLEAR(pool->current[i]);
    return 0;
}

static void pool_dealloc(Pool *pool)
{
    PyObject_GC_UnTrack(pool);
    pool_clear(pool);
    Py_TYPE(pool)->tp_free((PyObject *)pool);
}

static PyObject *pool_lease(Pool *pool, PyObject *number)
{
    Py_ssize_t length = PyLong_AsSsize_t(number);
    if (length == -1 && PyErr_Occurred())
        return NULL;
    return (PyObject *)engine_lease(pool, length);
}

/* The class of a block size; -1 with an exception. */
static int read_class(PyObject *number)
{
    Py_ssize_t size = PyLong_AsSsize_t(number);
    if (size == -1 && PyErr_Occurred())
        return -1;
    int class = class_of(size);
    if (class < CLASSES)
        return class;
    PyErr_SetString(PyExc_ValueError, "blocks of this size are too long");
    return -1;
}

static PyObject *pool_get_current(Pool *pool, PyObject *size)
{
    int class = read_class(size);
    if (class < 0)
        return NULL;
    PyObject *slab = (PyObject *)pool->current[class];
    return Py_NewRef(slab ? slab : Py_None);
}

static PyObject *pool_set_current(Pool *pool, PyObject *slab)
{
    if (!Py_IS_TYPE(slab, &engine_slab_type)) {
        PyErr_SetString(PyExc_TypeError, "the current slab of a size is a Slab");
        return NULL;
    }
    Slab **place = &pool->current[class_of(((Slab *)slab)->size)];
    Py_XSETREF(*place, (Slab *)Py_NewRef(slab));
    Py_RETURN_NONE;
}

static PyObject *pool_forget_current(Pool *pool, PyObject *none)
{
    (void)none;
    pool_clear(pool);
    Py_RETURN_NONE;
}

static PyMethodDef pool_methods[] = {
    {"lease", (PyCFunction)pool_lease, METH_O,
     "lease($self, length, /)\n--\n\n"
     "Return a block of at least `length` bytes, which may have old contents.\n\n"
     "Raises:\n"
     "    VerbsCallError: a new slab could not be registered; the message names the limit."},
    {"_get_current", (PyCFunction)pool_get_current, METH_O,
     "_get_current($self, size, /)\n--\n\n"
     "Return the slab of the next lease of a size, or None."},
    {"_set_current", (PyCFunction)pool_set_current, METH_O,
     "_set_current($self, slab, /)\n--\n\n"
     "Lease the next blocks of the slab's size from this slab."},
    {"_forget_current", (PyCFunction)pool_forget_current, METH_NOARGS,
     "_forget_current($self, /)\n--\n\n"
     "Forget the current slabs of all sizes."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef pool_members[] = {
    {"leased", T_PYSSIZET, offsetof(Pool, leased), READONLY, "The number of leased blocks."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_pool_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Pool",
    .tp_doc = "The leases of a BufferPool, which makes the slabs.",
    .tp_basicsize = sizeof(Pool),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)pool_dealloc,
    .tp_traverse = (traverseproc)pool_traverse,
    .tp_clear = (inquiry)pool_clear,
    .tp_methods = pool_methods,
    .tp_members = pool_members,
};

int engine_pool_names(void)
{
    return engine_intern(&next_slab, "_next_slab") || engine_intern(&has_room, "_has_room");
}
