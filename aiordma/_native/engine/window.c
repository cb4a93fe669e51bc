/*
 * Memory windows of type 2: the state of one, and the requests that bind and invalidate it. Windows
 * of type 1 take the general path, because libibverbs binds them by a call of its own.
 */
#include "window.h"

#include <structmember.h>

/* The base of BoundWindow: a memory window, and the memory that it is bound to. */
struct Window {
    PyObject_HEAD PyObject *endpoint;
    Part *memory;           /* NULL: it is not bound */
    PyObject *last;         /* the last request that bound or invalidated it, or NULL */
    struct ibv_mw *pointer; /* NULL: it is freed, or of type 1 */
    unsigned int rkey;      /* of the last bind */
    char invalidating;      /* a posted request invalidates it, and has not ended */
};

/* -- holding memory -------------------------------------------------------------------------- */

static int bind_to(Window *window, Part *memory, unsigned int rkey)
{
    if (window->memory || !memory->region) {
        PyErr_SetString(PyExc_ValueError, "a window is bound to one memory at a time");
        return -1;
    }
    window->memory = (Part *)Py_NewRef(memory);
    window->rkey = rkey;
    memory->region->users++;
    return 0;
}

/* Release the memory; no effect if the window is not bound. -1 with an exception: the region was
   retired, and closing it failed. */
static int let_go(Window *window)
{
    Part *memory = window->memory;

    if (!memory)
        return 0;
    window->memory = NULL;
    int failed = engine_release_region(memory->region);
    Py_DECREF(memory);
    return failed;
}

static void let_go_and_log(Window *window)
{
    if (let_go(window))
        engine_log("releasing the memory of %r failed", (PyObject *)window);
}

/* -- reading arguments ----------------------------------------------------------------------- */

/* Return the window, borrowed, if it belongs to the port's connection, and a request can bind or
   invalidate it. NULL: take the general path. */
static Window *read_window(const Port *port, PyObject *given)
{
    if (!port->can_bind || !PyObject_TypeCheck(given, &engine_window_type))
        return NULL;
    Window *window = (Window *)given;
    return window->endpoint == port->owner && window->pointer ? window : NULL;
}

/* Access is a subclass of int, whose numbers are read without running code. */
static int read_access(const RegionBase *region, PyObject *given, unsigned int *access)
{
    const unsigned long remote =
        IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

    if (!PyLong_Check(given) || PyBool_Check(given))
        return 0;
    unsigned long value = PyLong_AsUnsignedLong(given);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    *access = (unsigned int)value;
    return value && !(value & ~remote) && region->access & IBV_ACCESS_MW_BIND &&
           (region->writable || !(value & (remote & ~(unsigned long)IBV_ACCESS_REMOTE_READ)));
}

int engine_read_bind(const Port *port, struct engine_work *work, PyObject *const *given)
{
    Window *window = read_window(port, given[ENGINE_WINDOW]);
    PyObject *memory = given[ENGINE_LOCAL];

    if (!window || window->memory || !PyObject_TypeCheck(memory, &engine_part_type))
        return 0;
    Part *part = (Part *)memory;
    RegionBase *region = part->region;
    if (!region || !region->usable || !region->mr || region->domain != port->domain ||
        part->length <= 0 || !read_access(region, given[ENGINE_ACCESS], &work->access))
        return 0;
    engine_add_region(work, region);
    work->window = window;
    work->bound = part;
    work->length = (unsigned long long)part->length;
    work->rkey = ibv_inc_rkey(window->pointer->rkey);
    return 1;
}

int engine_read_local_invalidate(const Port *port, struct engine_work *work, PyObject *const *given)
{
    Window *window = read_window(port, given[ENGINE_WINDOW]);

    if (!window || !window->memory || window->invalidating)
        return 0;
    work->window = window;
    work->immediate = window->rkey;
    return 1;
}

int engine_window_is_still_usable(const struct engine_work *work)
{
    const Window *window = work->window;
    if (!window->pointer)
        return 0;
    if (work->bound)
        return !window->memory;
    return window->memory && window->rkey == work->immediate && !window->invalidating;
}

void engine_fill_bind(const struct engine_work *work, struct ibv_send_wr *send)
{
    send->bind_mw.mw = work->window->pointer;
    send->bind_mw.rkey = work->rkey;
    send->bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = work->bound->region->mr,
        .addr = work->bound->address,
        .length = work->length,
        .mw_access_flags = work->access,
    };
}

/* -- requests -------------------------------------------------------------------------------- */

static void bind_ended(Request *request)
{
    Window *window = (Window *)request->subject;

    if (request->state == FAILED)
        let_go_and_log(window);
    else if (window->pointer)
        window->pointer->rkey = window->rkey;
}

static void invalidate_ended(Request *request)
{
    Window *window = (Window *)request->subject;

    window->invalidating = 0;
    if (request->state != FAILED)
        let_go_and_log(window);
}

void engine_note_window(const struct engine_work *work, Request *request)
{
    Window *window = work->window;

    request->subject = Py_NewRef(window);
    request->on_end = work->bound ? bind_ended : invalidate_ended;
    window->invalidating = !work->bound;
    if (work->bound && bind_to(window, work->bound, work->rkey))
        engine_log("%r was bound twice", (PyObject *)window); /* it was checked before the post */
    Py_XSETREF(window->last, Py_NewRef(request));
}

/* -- the interface for Python ----------------------------------------------------------------- */

static int window_traverse(Window *window, visitproc visit, void *arg)
{
    Py_VISIT(window->endpoint);
    Py_VISIT(window->memory);
    Py_VISIT(window->last);
    return 0;
}

static int window_clear(Window *window)
{
    Py_CLEAR(window->endpoint);
    Py_CLEAR(window->last);
    return 0;
}

static void window_dealloc(Window *window)
{
    PyObject_GC_UnTrack(window);
    window_clear(window);
    Py_XDECREF(window->memory);
    Py_TYPE(window)->tp_free((PyObject *)window);
}

static PyObject *window_bind_to(Window *window, PyObject *args)
{
    PyObject *memory;
    unsigned int rkey;

    if (!PyArg_ParseTuple(args, "O!I", &engine_part_type, &memory, &rkey) ||
        bind_to(window, (Part *)memory, rkey))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *window_let_go(Window *window, PyObject *none)
{
    (void)none;
    if (let_go(window))
        return NULL;
    return engine_none_unless_interrupted();
}

static PyMethodDef methods[] = {
    {"_bind_to", (PyCFunction)window_bind_to, METH_VARARGS,
     "_bind_to($self, memory, rkey, /)\n--\n\n"
     "Hold the memory that a posted bind gives access to, until `_let_go`."},
    {"_let_go", (PyCFunction)window_let_go, METH_NOARGS,
     "_let_go($self, /)\n--\n\n"
     "Release the memory. Idempotent."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_endpoint", T_OBJECT, offsetof(Window, endpoint), 0, "The endpoint that it belongs to."},
    {"_memory", T_OBJECT, offsetof(Window, memory), READONLY, "The memory that it is bound to."},
    {"_last", T_OBJECT, offsetof(Window, last), 0,
     "The last request that bound or invalidated it."},
    {"_invalidating", T_BOOL, offsetof(Window, invalidating), 0,
     "Whether a posted request invalidates it, and has not ended."},
    {"_pointer", T_ULONGLONG, offsetof(Window, pointer), 0,
     "The address of its struct ibv_mw; 0: the port cannot bind it."},
    {"rkey", T_UINT, offsetof(Window, rkey), READONLY,
     "The key of the last bind, for the peer; 0 before."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_window_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.WindowBase",
    .tp_basicsize = sizeof(Window),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)window_dealloc,
    .tp_traverse = (traverseproc)window_traverse,
    .tp_clear = (inquiry)window_clear,
    .tp_methods = methods,
    .tp_members = members,
};
