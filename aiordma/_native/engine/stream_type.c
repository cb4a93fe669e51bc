/* The type of a stream's data path, and its interface for Python. The data path is in stream_path.c. */
#include "stream_type.h"
#include "post.h"
#include "transfer.h"

#include <structmember.h>

static int is_large_enough(const StreamPath *path)
{
    Py_ssize_t ours = engine_stream_sent_words(path) + WORD_BYTES * path->depth;
    return path->lent_view.len >= path->ring_bytes + GRANT_BYTES * TABLE_ENTRIES &&
           path->lent->length == path->lent_view.len && path->ours_view.len >= ours &&
           path->ours->length == path->ours_view.len;
}

static PyObject *path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"port",       "lent",  "lent_memory", "lent_rkey", "ours",
                            "our_memory", "ring",  "receives",    "depth",     "transfer",
                            "uses_words", "grows", NULL};
    PyObject *port, *lent, *lent_memory, *ours, *our_memory;
    unsigned int lent_rkey, credits;
    Py_ssize_t ring, depth, transfer;
    int uses_words, grows = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OIO!OnInnp|p", names, &engine_port_type,
                                     &port, &engine_region_type, &lent, &lent_memory, &lent_rkey,
                                     &engine_region_type, &ours, &our_memory, &ring, &credits,
                                     &depth, &transfer, &uses_words, &grows))
        return NULL;
    if (ring < 2 || ring % 2 || ring >> 32 || !credits || credits > MOST_CREDITS ||
        depth <= CONTROL_SLOTS || transfer < 1 || transfer >> VALUE_BITS) {
        PyErr_SetString(PyExc_ValueError, "ring, credits, depth or transfer is out of range");
        return NULL;
    }
    StreamPath *path = (StreamPath *)type->tp_alloc(type, 0);
    if (!path)
        return NULL;
    path->port = (Port *)Py_NewRef(port);
    path->lent = (RegionBase *)Py_NewRef(lent);
    path->ours = (RegionBase *)Py_NewRef(ours);
    path->grows = (char)grows;
    path->ring_bytes = path->ring_free = ring;
    path->credits = credits;
    path->depth = depth;
    path->data_slots = depth - CONTROL_SLOTS;
    path->control_slots = CONTROL_SLOTS;
    path->slots_of_data = uses_words ? REQUESTS : 1;
    path->transfer = transfer;
    path->uses_words = (char)uses_words;
    path->control = NO_CONTROL;
    path->next_entry = path->next_peer_entry = 1; /* entry 0 is the Hello's buffer */
    path->granted[0] = path->free = path->next_grant = ring / 2;
    path->granted_count = 1;
    path->receive_limit = credits;
    path->next_update = credits / 2;
    path->messages = PyMem_Calloc(credits, sizeof(*path->messages));
    if (!path->messages)
        PyErr_NoMemory();
    if (!path->messages || PyObject_GetBuffer(lent_memory, &path->lent_view, PyBUF_WRITABLE) ||
        PyObject_GetBuffer(our_memory, &path->ours_view, PyBUF_WRITABLE)) {
        Py_DECREF(path);
        return NULL;
    }
    if (!is_large_enough(path)) {
        PyErr_SetString(PyExc_ValueError, "the memory does not fit the stream");
        Py_DECREF(path);
        return NULL;
    }
    path->in = path->lend =
        (struct ring){path->lent, path->lent_view.buf, path->lent->address, lent_rkey, ring};
    path->out =
        (struct ring){path->ours, path->ours_view.buf, path->ours->address, path->ours->lkey, ring};
    return (PyObject *)path;
}

static int path_traverse(StreamPath *path, visitproc visit, void *arg)
{
    Py_VISIT(path->port);
    Py_VISIT(path->lent);
    Py_VISIT(path->ours);
    Py_VISIT(path->lent_view.obj);
    Py_VISIT(path->ours_view.obj);
    for (int i = 0; i < DIRECTIONS; i++) {
        Py_VISIT(path->grown[i]);
        Py_VISIT(path->grown_views[i].obj);
    }
    Py_VISIT(path->owner);
    Py_VISIT(path->on_readable);
    Py_VISIT(path->on_writable);
    Py_VISIT(path->on_drained);
    Py_VISIT(path->is_cancelled);
    Py_VISIT(path->reader);
    return 0;
}

static int path_clear(StreamPath *path)
{
    Py_CLEAR(path->owner);
    Py_CLEAR(path->on_readable);
    Py_CLEAR(path->on_writable);
    Py_CLEAR(path->on_drained);
    Py_CLEAR(path->is_cancelled);
    Py_CLEAR(path->reader);
    return 0;
}

static void path_dealloc(StreamPath *path)
{
    PyObject_GC_UnTrack(path);
    path_clear(path);
    PyBuffer_Release(&path->lent_view);
    PyBuffer_Release(&path->ours_view);
    for (int i = 0; i < DIRECTIONS; i++) {
        PyBuffer_Release(&path->grown_views[i]);
        Py_XDECREF(path->grown[i]);
    }
    PyMem_Free(path->messages);
    PyMem_Free(path->early);
    Py_XDECREF(path->port);
    Py_XDECREF(path->lent);
    Py_XDECREF(path->ours);
    Py_TYPE(path)->tp_free((PyObject *)path);
}

static PyObject *path_post_receives(StreamPath *path, PyObject *none)
{
    (void)none;
    for (uint32_t i = 0; i < path->credits && !path->failed; i++)
        engine_stream_post_receive(path, i);
    return engine_none_unless_interrupted();
}

static PyObject *path_start(StreamPath *path, PyObject *args)
{
    unsigned int credits, table_rkey, entries, rkey, length;
    unsigned long long table, address;
    int is_big_endian, uses_words;

    if (!PyArg_ParseTuple(args, "IKIIKIIpp", &credits, &table, &table_rkey, &entries, &address,
                          &rkey, &length, &is_big_endian, &uses_words))
        return NULL;
    if (path->started || entries < TABLE_ENTRIES || (uses_words && !path->uses_words)) {
        PyErr_SetString(PyExc_ValueError, "start(): once, with the numbers of a Hello");
        return NULL;
    }
    path->peer_credits = credits;
    path->send_limit = credits;
    path->peer_table = table;
    path->peer_table_rkey = table_rkey;
    path->peer_entries = entries;
    path->swaps_grants = is_big_endian != PY_BIG_ENDIAN;
    if (length)
        path->grants[path->grant_count++] = (struct grant){address, rkey, length};
    path->uses_words = (char)uses_words;
    path->slots_of_data = uses_words ? REQUESTS : 1;
    path->started = 1;
    Py_RETURN_NONE;
}

static PyObject *path_begin(StreamPath *path, PyObject *may_send)
{
    int may = PyObject_IsTrue(may_send);
    if (may < 0)
        return NULL;
    if (!path->started) {
        PyErr_SetString(PyExc_ValueError, "begin(): call start() first");
        return NULL;
    }
    path->begun = 1;
    path->may_send = (char)may;
    struct early *early = path->early;
    Py_ssize_t count = path->early_count;
    path->early = NULL;
    path->early_count = 0;
    for (Py_ssize_t i = 0; i < count && !path->failed; i++)
        engine_stream_handle(path, early[i].value, early[i].written);
    PyMem_Free(early);
    engine_stream_send_pending(path);
    return engine_none_unless_interrupted();
}

static PyObject *path_grow(StreamPath *path, PyObject *args)
{
    PyObject *region, *memory;
    unsigned int key;
    int outwards;
    Py_buffer view;

    if (!PyArg_ParseTuple(args, "pO!OI", &outwards, &engine_region_type, &region, &memory, &key))
        return NULL;
    enum direction direction = outwards ? OUTWARDS : INWARDS;
    if (PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE))
        return NULL;
    struct ring ring = {(RegionBase *)region, view.buf, ((RegionBase *)region)->address, key,
                        view.len};
    if (path->grown[direction] || ring.region->length != view.len || view.len % 2 ||
        view.len < path->ring_bytes || view.len >> 32) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "grow(): once for each direction, with a larger ring");
        return NULL;
    }
    path->grown[direction] = (RegionBase *)Py_NewRef(region);
    path->grown_views[direction] = view;
    if (outwards)
        engine_stream_send_from(path, &ring);
    else
        engine_stream_lend(path, &ring);
    return engine_none_unless_interrupted();
}

static PyObject *path_read(StreamPath *path, PyObject *limit)
{
    Py_ssize_t most = PyLong_AsSsize_t(limit);
    if (most == -1 && PyErr_Occurred())
        return NULL;
    return engine_stream_read(path, most);
}

static PyObject *path_read_into(StreamPath *path, PyObject *buffer)
{
    Py_buffer target;
    if (PyObject_GetBuffer(buffer, &target, PyBUF_WRITABLE))
        return NULL;
    Py_ssize_t length = engine_stream_read_into(path, &target);
    PyBuffer_Release(&target);
    return PyLong_FromSsize_t(length);
}

static PyObject *path_feed(StreamPath *path, PyObject *args)
{
    PyObject *receive;
    Py_ssize_t limit, length = 0;

    if (!PyArg_ParseTuple(args, "On", &receive, &limit))
        return NULL;
    if (limit > 0 && path->readable)
        length = engine_stream_feed(path, receive, limit);
    return length < 0 ? NULL : PyLong_FromSsize_t(length);
}

static PyObject *path_write(StreamPath *path, PyObject *data)
{
    Py_buffer source;
    Py_ssize_t done = 0, length = 1;

    if (PyObject_GetBuffer(data, &source, PyBUF_SIMPLE))
        return NULL;
    while (done < source.len && length > 0) {
        length = engine_stream_write(path, (const char *)source.buf + done, NULL,
                                     (struct ibv_sge){0}, source.len - done, 1);
        done += length > 0 ? length : 0;
    }
    PyBuffer_Release(&source);
    if (engine_interrupted())
        return NULL;
    return PyLong_FromSsize_t(length < 0 ? -1 : done);
}

static PyObject *path_write_registered(StreamPath *path, PyObject *memory)
{
    Py_ssize_t done = 0, length = 1;

    if (!PyObject_TypeCheck(memory, &engine_part_type) || !((Part *)memory)->region) {
        PyErr_SetString(PyExc_TypeError, "write_registered() takes a MemorySlice");
        return NULL;
    }
    const Part *part = (const Part *)memory;
    if (!part->region->usable || part->region->domain != path->port->domain)
        Py_RETURN_NONE;
    while (done < part->length && length > 0) {
        struct ibv_sge source = {part->address + (uint64_t)done, 0, part->lkey};
        length = engine_stream_write(path, NULL, part->region, source, part->length - done, 1);
        done += length > 0 ? length : 0;
    }
    if (engine_interrupted())
        return NULL;
    return PyLong_FromSsize_t(length < 0 ? -1 : done);
}

static PyObject *path_close_write(StreamPath *path, PyObject *both)
{
    int closes_both = PyObject_IsTrue(both);
    if (closes_both < 0)
        return NULL;
    if (path->write_closed && !closes_both)
        Py_RETURN_NONE;
    path->write_closed = 1;
    if (!path->peer_disconnected && !engine_stream_is_over(path) && path->started) {
        path->control = closes_both || path->at_eof ? DISCONNECT : SHUTDOWN;
        engine_stream_send_pending(path);
    }
    return engine_none_unless_interrupted();
}

static PyObject *path_end(StreamPath *path, PyObject *none)
{
    (void)none;
    engine_stream_end(path);
    return engine_none_unless_interrupted();
}

static PyObject *path_wake(StreamPath *path, PyObject *none)
{
    (void)none;
    engine_stream_wake(path);
    return engine_none_unless_interrupted();
}

static PyObject *path_writable(StreamPath *path, void *closure)
{
    (void)closure;
    return PyLong_FromSsize_t(engine_stream_writable(path));
}

static PyObject *path_can_write(StreamPath *path, void *closure)
{
    (void)closure;
    return PyBool_FromLong(engine_stream_writable(path) && engine_stream_ring_room(path));
}

static PyObject *path_is_drained(StreamPath *path, void *closure)
{
    (void)closure;
    return PyBool_FromLong(engine_stream_is_drained(path));
}

static PyObject *path_receive(StreamPath *path, PyObject *const *arguments, Py_ssize_t count)
{
    return engine_stream_call(path, arguments, count, RECEIVE);
}

static PyObject *path_receive_into(StreamPath *path, PyObject *const *arguments, Py_ssize_t count)
{
    return engine_stream_call(path, arguments, count, RECEIVE_INTO);
}

static PyObject *path_send(StreamPath *path, PyObject *const *arguments, Py_ssize_t count)
{
    return engine_stream_call(path, arguments, count, SEND);
}

static PyMethodDef path_methods[] = {
    {"post_receives", (PyCFunction)path_post_receives, METH_NOARGS,
     "post_receives($self, /)\n--\n\n"
     "Post all receives."},
    {"start", (PyCFunction)path_start, METH_VARARGS,
     "start($self, permitted, table_address, table_rkey, table_entries, buffer_address, buffer_rkey,\n"
     "      buffer_length, is_big_endian, uses_words, /)\n--\n\n"
     "Set what the peer's Hello says, and whether messages carry words."},
    {"begin", (PyCFunction)path_begin, METH_O,
     "begin($self, may_send, /)\n--\n\n"
     "Begin, after `start`: handle what has arrived, and send if this side may."},
    {"grow", (PyCFunction)path_grow, METH_VARARGS,
     "grow($self, outwards, region, memory, key, /)\n--\n\n"
     "Use a larger ring from now on: that for sending, with its lkey, or that which the peer writes\n"
     "to, with its rkey. Once for each."},
    {"read", (PyCFunction)path_read, METH_O,
     "read($self, limit, /)\n--\n\n"
     "Return bytes that have arrived, at most `limit`; b\"\" if there are none."},
    {"read_into", (PyCFunction)path_read_into, METH_O,
     "read_into($self, buffer, /)\n--\n\n"
     "Copy bytes that have arrived into the buffer; returns their number."},
    {"feed", (PyCFunction)path_feed, METH_VARARGS,
     "feed($self, receive, limit, /)\n--\n\n"
     "Call a function with a view of bytes that have arrived, at most `limit`, which it must not\n"
     "keep; returns their number. It is not called if there are none."},
    {"write", (PyCFunction)path_write, METH_O,
     "write($self, data, /)\n--\n\n"
     "Copy and post as much as there is room for; returns the number of bytes. -1: a request could\n"
     "not be posted, and the stream has ended."},
    {"write_registered", (PyCFunction)path_write_registered, METH_O,
     "write_registered($self, memory, /)\n--\n\n"
     "Post as much of registered memory as there is room for, as `write` does. None: the memory\n"
     "cannot be used."},
    {"close_write", (PyCFunction)path_close_write, METH_O,
     "close_write($self, both, /)\n--\n\n"
     "Send the end of the data, or, with `both`, of both directions."},
    {"receive", (PyCFunction)(void (*)(void))path_receive, METH_FASTCALL,
     "receive($self, general, arguments, keywords, /)\n--\n\n"
     "Return an awaitable that does the work of `general(*arguments, **keywords)`, and calls it\n"
     "for all but the usual case."},
    {"receive_into", (PyCFunction)(void (*)(void))path_receive_into, METH_FASTCALL,
     "receive_into($self, general, arguments, keywords, /)\n--\n\n"
     "The same for receive_into."},
    {"send", (PyCFunction)(void (*)(void))path_send, METH_FASTCALL,
     "send($self, general, arguments, keywords, /)\n--\n\n"
     "The same for send."},
    {"wake", (PyCFunction)path_wake, METH_NOARGS,
     "wake($self, /)\n--\n\n"
     "Wake the tasks that wait."},
    {"end", (PyCFunction)path_end, METH_NOARGS,
     "end($self, /)\n--\n\n"
     "Call all callbacks: the stream has ended."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef path_members[] = {
    {"owner", T_OBJECT, offsetof(StreamPath, owner), 0, NULL},
    {"on_readable", T_OBJECT, offsetof(StreamPath, on_readable), 0, NULL},
    {"on_writable", T_OBJECT, offsetof(StreamPath, on_writable), 0, NULL},
    {"on_drained", T_OBJECT, offsetof(StreamPath, on_drained), 0, NULL},
    {"is_cancelled", T_OBJECT, offsetof(StreamPath, is_cancelled), 0, NULL},
    {"at_once", T_UINT, offsetof(StreamPath, at_once), 0, NULL},
    {"receiving", T_BOOL, offsetof(StreamPath, receiving), 0, NULL},
    {"sending", T_BOOL, offsetof(StreamPath, sending), 0, NULL},
    {"closed", T_BOOL, offsetof(StreamPath, closed), 0, NULL},
    {"lacks_send", T_BOOL, offsetof(StreamPath, lacks_send), 0, NULL},
    {"failed", T_BOOL, offsetof(StreamPath, failed), 0, NULL},
    {"lost_data", T_BOOL, offsetof(StreamPath, lost_data), READONLY, NULL},
    {"at_eof", T_BOOL, offsetof(StreamPath, at_eof), READONLY, NULL},
    {"peer_disconnected", T_BOOL, offsetof(StreamPath, peer_disconnected), READONLY, NULL},
    {"uses_words", T_BOOL, offsetof(StreamPath, uses_words), READONLY, NULL},
    {"readable", T_PYSSIZET, offsetof(StreamPath, readable), READONLY, NULL},
    {"in_flight", T_PYSSIZET, offsetof(StreamPath, in_flight), READONLY, NULL},
    {"free_bytes", T_PYSSIZET, offsetof(StreamPath, ring_free), READONLY, NULL},
    {"data_slots", T_PYSSIZET, offsetof(StreamPath, data_slots), READONLY, NULL},
    {"control_slots", T_PYSSIZET, offsetof(StreamPath, control_slots), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef path_properties[] = {
    {"writable", (getter)path_writable, NULL, NULL, NULL},
    {"can_write", (getter)path_can_write, NULL, NULL, NULL},
    {"is_drained", (getter)path_is_drained, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject engine_stream_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.StreamPath",
    .tp_basicsize = sizeof(StreamPath),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = path_new,
    .tp_dealloc = (destructor)path_dealloc,
    .tp_traverse = (traverseproc)path_traverse,
    .tp_clear = (inquiry)path_clear,
    .tp_methods = path_methods,
    .tp_members = path_members,
    .tp_getset = path_properties,
};
