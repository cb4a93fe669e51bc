/* The fields of registered memory that posts read. */
#include "regions.h"

#include <structmember.h>

/* -- regions ------------------------------------------------------------------------------ */

static int region_traverse(RegionBase *region, visitproc visit, void *arg)
{
    Py_VISIT(region->domain);
    return 0;
}

static int region_clear(RegionBase *region)
{
    Py_CLEAR(region->domain);
    return 0;
}

static void region_dealloc(RegionBase *region)
{
    PyObject_GC_UnTrack(region);
    region_clear(region);
    Py_TYPE(region)->tp_free((PyObject *)region);
}

int engine_close_region(RegionBase *region)
{
    /* Nothing else closes a retired region before its domain. */
    PyObject *result = engine_call_method_alone(engine_python.close, (PyObject **)&region, 1);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static PyMemberDef region_members[] = {
    {"domain", T_OBJECT_EX, offsetof(RegionBase, domain), 0, "The protection domain."},
    {"address", T_ULONGLONG, offsetof(RegionBase, address), 0,
     "The address of the first byte, in work requests and for peers."},
    {"length", T_PYSSIZET, offsetof(RegionBase, length), 0, "The length in bytes."},
    {"lkey", T_UINT, offsetof(RegionBase, lkey), 0, "The key for local work requests."},
    {"_start", T_ULONGLONG, offsetof(RegionBase, start), 0,
     "The address of the first byte in this process; 0: a dma-buf, which it does not access."},
    {"_mr", T_ULONGLONG, offsetof(RegionBase, mr), 0, "The address of its struct ibv_mr."},
    {"_access", T_UINT, offsetof(RegionBase, access), 0, "The permitted access, as a number."},
    {"_users", T_PYSSIZET, offsetof(RegionBase, users), 0,
     "How many posted requests and windows hold it."},
    {"_retired", T_BOOL, offsetof(RegionBase, retired), 0, "Whether its last user closes it."},
    {"_usable", T_BOOL, offsetof(RegionBase, usable), 0, "Whether it is registered."},
    {"_writable", T_BOOL, offsetof(RegionBase, writable), 0, "Whether the device may write to it."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_region_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.RegionBase",
    .tp_basicsize = sizeof(RegionBase),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)region_dealloc,
    .tp_traverse = (traverseproc)region_traverse,
    .tp_clear = (inquiry)region_clear,
    .tp_members = region_members,
};

/* -- slices ------------------------------------------------------------------------------- */

static int part_init(Part *part, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"region", "address", "length", "lkey", NULL};
    PyObject *region;
    unsigned long long address;
    Py_ssize_t length;
    unsigned int lkey;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!KnI", names, &engine_region_type, &region,
                                     &address, &length, &lkey))
        return -1;
    if (part->region) {
        PyErr_SetString(PyExc_TypeError, "a slice is constructed once: create another one");
        return -1;
    }
    part->region = (RegionBase *)Py_NewRef(region);
    part->address = address;
    part->length = length;
    part->lkey = lkey;
    return 0;
}

static int part_traverse(Part *part, visitproc visit, void *arg)
{
    Py_VISIT(part->region);
    return 0;
}

static void part_dealloc(Part *part)
{
    PyObject_GC_UnTrack(part);
    Py_XDECREF(part->region);
    Py_TYPE(part)->tp_free((PyObject *)part);
}

static PyObject *part_sge(Part *part, void *closure)
{
    (void)closure;
    struct ibv_sge sge = {part->address, (uint32_t)part->length, part->lkey};
    /* The length field of a work request has 32 bits. */
    Py_ssize_t size = (uint64_t)part->length >> 32 ? 0 : (Py_ssize_t)sizeof(sge);
    return PyBytes_FromStringAndSize((const char *)&sge, size);
}

static PyMemberDef part_members[] = {
    {"region", T_OBJECT_EX, offsetof(Part, region), READONLY, "The region."},
    {"address", T_ULONGLONG, offsetof(Part, address), READONLY, "The address of its first byte."},
    {"length", T_PYSSIZET, offsetof(Part, length), READONLY, "The length in bytes."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef part_properties[] = {
    {"_sge", (getter)part_sge, NULL, "Its struct ibv_sge; empty if it is too long for one.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject engine_part_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.Part",
    .tp_basicsize = sizeof(Part),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)part_init,
    .tp_dealloc = (destructor)part_dealloc,
    .tp_traverse = (traverseproc)part_traverse,
    .tp_members = part_members,
    .tp_getset = part_properties,
};
