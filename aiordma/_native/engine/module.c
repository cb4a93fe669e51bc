/*
 * The engine: the hot path as Python objects in C: the in-flight table, requests and their waiters,
 * slots, the ports of queue pairs, the drain. _engine.pyi declares what Python uses of it.
 * docs/hot-path.md has the measurements. These functions hold the GIL, because releasing it costs
 * more than their work. Only the spinner releases it, while it sleeps and now and then while it polls.
 *
 * This file has the module: its types, and the objects that Python passes to it at import.
 */
#include "arrivals.h"
#include "block_port.h"
#include "chain.h"
#include "datagrams.h"
#include "drain.h"
#include "method.h"
#include "open_requests.h"
#include "post.h"
#include "reading.h"
#include "request_type.h"
#include "select.h"
#include "shared.h"
#include "stream_type.h"
#include "transfer.h"
#include "trace.h"
#include "view.h"
#include "wait.h"
#include "window.h"

static int use(PyObject **place, PyObject *object)
{
    Py_XSETREF(*place, Py_NewRef(object));
    return 0;
}

static PyObject *give(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"completion", "remote",   "memory_slice", "wait_elsewhere",
                            "log",        "detached", "datagram",     NULL};
    PyObject *completion = NULL, *remote = NULL, *wait = NULL, *log = NULL, *detached = NULL;
    PyObject *slice = NULL, *datagram = NULL;

    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOOOOO", names, &completion, &remote, &slice,
                                     &wait, &log, &detached, &datagram))
        return NULL;
    if (completion && !(PyType_Check(completion) &&
                        PyType_IsSubtype((PyTypeObject *)completion, &engine_completion_type))) {
        PyErr_SetString(PyExc_TypeError, "completion: a subclass of CompletionFields");
        return NULL;
    }
    if (completion)
        use(&engine_python.completion_class, completion);
    if (datagram && !(PyType_Check(datagram) &&
                      PyType_IsSubtype((PyTypeObject *)datagram, &engine_datagram_type))) {
        PyErr_SetString(PyExc_TypeError, "datagram: a subclass of DatagramFields");
        return NULL;
    }
    if (datagram)
        use(&engine_python.datagram_class, datagram);
    if (remote)
        use(&engine_python.remote_class, remote);
    if (slice)
        use(&engine_python.slice_class, slice);
    if (wait)
        use(&engine_python.wait_elsewhere, wait);
    if (log)
        use(&engine_python.log, log);
    if (detached)
        use(&engine_python.detached, detached);
    Py_RETURN_NONE;
}

static PyObject *use_data_path(PyObject *module, PyObject *address)
{
    (void)module;
    void *path = PyLong_AsVoidPtr(address);
    if (!path && PyErr_Occurred())
        return NULL;
    engine_path = path;
    return Py_NewRef(address);
}

static PyObject *call_at_end(PyObject *module, PyObject *function)
{
    (void)module;
    int is_called = engine_call_at_end(function);
    return is_called < 0 ? NULL : PyBool_FromLong(is_called);
}

static PyObject *call_then_run(PyObject *module, PyObject *function)
{
    (void)module;
    return engine_call_then_run(function);
}

static PyObject *leak(PyObject *module, PyObject *kept)
{
    (void)module;
    Py_INCREF(kept);
    Py_RETURN_NONE;
}

static PyObject *set_engine_process(PyObject *module, PyObject *number)
{
    unsigned long before = engine_process, wanted = PyLong_AsUnsignedLong(number);

    (void)module;
    if (PyErr_Occurred())
        return NULL;
    engine_process = (unsigned int)wanted;
    return PyLong_FromUnsignedLong(before);
}

static PyMethodDef functions[] = {
    {"use_data_path", use_data_path, METH_O,
     "use_data_path($module, address, /)\n--\n\n"
     "Use this table of functions to post and to drain. Return its address."},
    {"method", engine_method, METH_VARARGS,
     "method($module, name, function, /)\n--\n\n"
     "Make a method whose calls go to the port's method of that name. The function is\n"
     "called only if that returns None."},
    {"end_chain", (PyCFunction)(void (*)(void))engine_end_chain, METH_FASTCALL,
     "end_chain($module, chain, kind, error, trace, /)\n--\n\n"
     "Post a chain at the end of its block, and return True. False: Python has to end it, or\n"
     "to raise the error of its port."},
    {"give", (PyCFunction)(void (*)(void))give, METH_VARARGS | METH_KEYWORDS,
     "give(completion=, remote=, memory_slice=, wait_elsewhere=, log=, detached=, datagram=):"
     " set objects of Python's that the engine uses."},
    {"grh_ends", engine_grh_ends, METH_O,
     "grh_ends($module, grh, /)\n--\n\n"
     "Return the GIDs of the sender and of the destination of a received datagram."},
    {"call_at_end", call_at_end, METH_O,
     "call_at_end($module, function, /)\n--\n\n"
     "Call a function once the drain, or the function of `call_then_run`, that runs here has returned,\n"
     "between the tasks that it has woken, and not in the middle of any of the program's code.\n"
     "Return False, and do nothing, if none runs here."},
    {"call_then_run", call_then_run, METH_O,
     "call_then_run($module, function, /)\n--\n\n"
     "Call a function from the event loop, while no task runs, and then run the tasks that it has "
     "woken: they need not wait for the loop's next turn. Return its result."},
    {"leak", leak, METH_O,
     "leak($module, kept, /)\n--\n\n"
     "Keep an object, and all that it refers to, for the life of the process. Cannot fail."},
    {"begin_trace", engine_begin_trace, METH_O,
     "begin_trace($module, limit, /)\n--\n\n"
     "Record the requests that are posted from now on, when they end. At most `limit` records\n"
     "wait for take_trace. 0: record no more."},
    {"set_engine_process", set_engine_process, METH_O,
     "Be another process from now on, as after a fork; returns the number of the one before."},
    {"take_trace", engine_take_trace, METH_NOARGS,
     "take_trace($module, /)\n--\n\n"
     "Return the records since the last call, and how many were lost because there was no room.\n"
     "A record is (owner, operation, wr_id, bytes, status or -1, posted, ended), the times in\n"
     "nanoseconds of time.monotonic_ns()."},
    {NULL, NULL, 0, NULL},
};

/* The types and the objects in engine_python exist once per process. A second interpreter would use
   the objects of the first one, and replace them by its own. */
static int refuse_subinterpreter(void)
{
    if (PyInterpreterState_Get() == PyInterpreterState_Main())
        return 0;
    PyErr_SetString(PyExc_ImportError,
                    "aiordma works in the main interpreter only: import it there, and not in a "
                    "subinterpreter");
    return -1;
}

static int execute(PyObject *module)
{
    const struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {
        {"InFlightTable", &engine_table_type},
        {"RegionBase", &engine_region_type},
        {"Part", &engine_part_type},
        {"Slots", &engine_slots_type},
        {"Drain", &engine_drain_type},
        {"Port", &engine_port_type},
        {"WorkRequest", &engine_request_type},
        {"Waiter", &engine_waiter_type},
        {"Spinner", &engine_spinner_type},
        {"OpenRequests", &engine_open_requests_type},
        {"Method", &engine_method_type},
        {"ChainPort", &engine_chain_type},
        {"BlockPort", &engine_block_port_type},
        {"SharedPort", &engine_shared_type},
        {"CompletionFields", &engine_completion_type},
        {"Pool", &engine_pool_type},
        {"HandleBase", &engine_handle_type},
        {"WindowBase", &engine_window_type},
        {"Slab", &engine_slab_type},
        {"Lease", &engine_lease_type},
        {"PooledReceives", &engine_pooled_type},
        {"ArrivalQueue", &engine_arrivals_type},
        {"ArrivalView", &engine_view_type},
        {"StreamPath", &engine_stream_type},
        {"StreamTransfer", &engine_transfer_type},
        {"SendersBase", &engine_senders_type},
        {"DatagramFields", &engine_datagram_type},
        {"DatagramReceive", &engine_receive_type},
    };
    if (refuse_subinterpreter() || engine_prepare() || engine_work_names() ||
        engine_read_signatures() || engine_pool_names() || engine_arrival_names() ||
        engine_wait_names() || engine_view_names() || engine_stream_names() ||
        engine_datagram_names())
        return -1;
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (PyType_Ready(types[i].type) ||
            PyModule_AddObjectRef(module, types[i].name, (PyObject *)types[i].type))
            return -1;
    if (PyModule_AddIntConstant(module, "BATCH", ENGINE_BATCH) ||
        PyModule_AddIntConstant(module, "COPY_LIMIT", ENGINE_COPY_LIMIT))
        return -1;
    return engine_completion_names();
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED}, /* a free-threaded build turns the GIL on */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aiordma._native._engine",
    .m_doc = "The hot path in C.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__engine(void)
{
    return PyModuleDef_Init(&definition);
}
