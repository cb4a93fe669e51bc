/* A work description: the local memory that it names, and what it holds. */
#include "description.h"

static void add_piece(struct engine_work *work, RegionBase *region, uint64_t address,
                      Py_ssize_t length, uint32_t lkey)
{
    work->length += (uint64_t)length;
    if (!length)
        return;
    work->sges[work->count] = (struct ibv_sge){address, (uint32_t)length, lkey};
    work->owners[work->count++] = region;
}

void engine_add_region(struct engine_work *work, RegionBase *region)
{
    for (int i = 0; i < work->region_count; i++)
        if (work->regions[i] == region)
            return;
    work->regions[work->region_count++] = (RegionBase *)Py_NewRef(region);
}

static int read_registered(const Port *port, struct engine_work *work, RegionBase *region,
                           uint64_t address, Py_ssize_t length, uint32_t lkey, int is_target)
{
    if (!region->usable || region->domain != port->domain || (uint64_t)length >> 32 ||
        (is_target && !region->writable))
        return 0;
    engine_add_region(work, region);
    add_piece(work, region, address, length, lkey);
    return 1;
}

/* Whether the elements of a format (PEP 3118) are Python objects. Names are between colons. */
static int has_objects(const char *format)
{
    for (int is_name = 0; *format; format++) {
        if (*format == ':')
            is_name = !is_name;
        else if (*format == 'O' && !is_name)
            return 1;
    }
    return 0;
}

int engine_get_buffer(PyObject *given, Py_buffer *view, int flags)
{
    if (PyBytes_CheckExact(given) || PyByteArray_CheckExact(given))
        return PyObject_GetBuffer(given, view, flags);
    /* A memoryview gives its format only together with its dimensions. */
    if (PyObject_GetBuffer(given, view, flags | PyBUF_ND | PyBUF_FORMAT))
        return -1; /* without a format, the general path finds out what the elements are */
    if (!view->format || !has_objects(view->format))
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "the elements of the buffer are Python objects");
    return -1;
}

static int read_buffer(struct engine_work *work, PyObject *given)
{
    Py_buffer *view = &work->views[work->view_count];

    if (!PyObject_CheckBuffer(given))
        return 0;
    if (engine_get_buffer(given, view, PyBUF_SIMPLE)) {
        PyErr_Clear(); /* the general path raises the error */
        return 0;
    }
    work->view_count++;
    if ((uint64_t)view->len > ENGINE_COPY_LIMIT)
        return 0;
    add_piece(work, NULL, (uintptr_t)view->buf, view->len, 0);
    return 1;
}

/* Read a slice, a region, or another buffer. 1: it was read; 0: take the general path. */
static int read_part(const Port *port, struct engine_work *work, PyObject *given, int is_target)
{
    if (PyObject_TypeCheck(given, &engine_part_type)) {
        const Part *part = (const Part *)given;
        /* The region is NULL if its constructor did not run. */
        return part->region && read_registered(port, work, part->region, part->address,
                                               part->length, part->lkey, is_target);
    }
    if (PyObject_TypeCheck(given, &engine_region_type)) {
        RegionBase *region = (RegionBase *)given;
        return read_registered(port, work, region, region->address, region->length, region->lkey,
                               is_target);
    }
    return !is_target && read_buffer(work, given);
}

/* The list, if it is one, may change while it is read, because buffers can run Python code. */
static int read_parts(const Port *port, struct engine_work *work, PyObject *given, Py_ssize_t most,
                      int is_target)
{
    if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given))
        return 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
        if (i == most || i == ENGINE_PARTS)
            return 0;
        PyObject *part = Py_NewRef(PySequence_Fast_GET_ITEM(given, i));
        int is_read = read_part(port, work, part, is_target);
        Py_DECREF(part);
        if (!is_read)
            return 0;
    }
    return 1;
}

/* If a part is not registered, all bytes are copied. The sges then have the addresses in this
   process's memory, which differ from a region's addresses if it has an iova. A dma-buf has none,
   and the general path registers the other parts. */
static int choose_copying(const Port *port, struct engine_work *work)
{
    if (work->length > port->max_message)
        return 0;
    if (!work->view_count)
        return 1;
    for (int i = 0; i < work->count; i++) {
        if (!work->owners[i])
            continue;
        if (!work->owners[i]->start)
            return 0;
        work->sges[i].addr += work->owners[i]->start - work->owners[i]->address;
    }
    if (work->length <= (uint64_t)port->max_inline) {
        work->copying = ENGINE_INLINE;
        work->flags |= work->length ? IBV_SEND_INLINE : 0;
        return 1;
    }
    work->copying = ENGINE_BLOCK;
    return work->length <= ENGINE_COPY_LIMIT && port->pool;
}

int engine_read_source(const Port *port, struct engine_work *work, PyObject *given)
{
    return read_part(port, work, given, 0) && choose_copying(port, work);
}

int engine_read_sources(const Port *port, struct engine_work *work, PyObject *given)
{
    return read_parts(port, work, given, port->max_send_sge, 0) && choose_copying(port, work);
}

int engine_read_target(const Port *port, struct engine_work *work, PyObject *given)
{
    return read_part(port, work, given, 1) && work->length <= port->max_message;
}

int engine_read_targets(const Port *port, struct engine_work *work, PyObject *given,
                        Py_ssize_t most)
{
    return read_parts(port, work, given, most, 1) && work->length <= port->max_message;
}

void engine_gather(const struct engine_work *work, char *to)
{
    for (int i = 0; i < work->count; i++) {
        memcpy(to, (const void *)(uintptr_t)work->sges[i].addr, work->sges[i].length);
        to += work->sges[i].length;
    }
}

int engine_regions_are_usable(const struct engine_work *work)
{
    for (int i = 0; i < work->region_count; i++)
        if (!work->regions[i]->usable)
            return 0;
    return 1;
}

void engine_release_work(struct engine_work *work)
{
    for (int i = 0; i < work->view_count; i++)
        PyBuffer_Release(&work->views[i]);
    for (int i = 0; i < work->region_count; i++)
        Py_DECREF(work->regions[i]);
    Py_XDECREF(work->handle);
}

PyObject *engine_end_reading(struct engine_work *work, PyObject *request)
{
    engine_release_work(work);
    if (engine_interrupted())
        Py_CLEAR(request);
    return request;
}
