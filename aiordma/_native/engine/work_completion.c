/*
 * The base of WorkCompletion (verbs/completion.py): the fields of a completion. A field becomes a
 * Python number when it is read. The type has the interface of a named tuple.
 */
#include "work_completion.h"

enum { FIELDS = 14 };

static const char *const field_names[FIELDS] = {
    "wr_id",  "status",   "opcode",     "vendor_err", "byte_len", "immediate",      "qp_num",
    "src_qp", "wc_flags", "pkey_index", "slid",       "sl",       "dlid_path_bits", "reserved",
};

static unsigned long long value_of(const struct aiordma_completion *c, Py_ssize_t field)
{
    switch (field) {
    case 0:
        return c->wr_id;
    case 1:
        return c->status;
    case 2:
        return c->opcode;
    case 3:
        return c->vendor_err;
    case 4:
        return c->byte_len;
    case 5:
        return c->immediate;
    case 6:
        return c->qp_num;
    case 7:
        return c->src_qp;
    case 8:
        return c->wc_flags;
    case 9:
        return c->pkey_index;
    case 10:
        return c->slid;
    case 11:
        return c->sl;
    case 12:
        return c->dlid_path_bits;
    default:
        return c->reserved;
    }
}

PyObject *engine_completion_tuple(const struct aiordma_completion *completion)
{
    PyObject *tuple = PyTuple_New(FIELDS);
    for (Py_ssize_t i = 0; tuple && i < FIELDS; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(value_of(completion, i));
        if (number)
            PyTuple_SET_ITEM(tuple, i, number);
        else
            Py_CLEAR(tuple);
    }
    return tuple;
}

int engine_read_completion(PyObject *tuple, struct aiordma_completion *c)
{
    memset(c, 0, sizeof(*c));
    return PyArg_ParseTuple(tuple, "KIIIIIIIIHHbb|H", &c->wr_id, &c->status, &c->opcode,
                            &c->vendor_err, &c->byte_len, &c->immediate, &c->qp_num, &c->src_qp,
                            &c->wc_flags, &c->pkey_index, &c->slid, &c->sl, &c->dlid_path_bits,
                            &c->reserved)
               ? 0
               : -1;
}

PyObject *engine_completion(const struct aiordma_completion *completion)
{
    PyTypeObject *type = engine_python.completion_class
                             ? (PyTypeObject *)engine_python.completion_class
                             : &engine_completion_type;
    Completion *made = (Completion *)type->tp_alloc(type, 0);
    if (made)
        made->fields = *completion;
    return (PyObject *)made;
}

/* As a named tuple does, refuse a keyword that is no field, or is also given by its position. */
static int refuse_keywords(PyObject *args, PyObject *kwargs)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;

    while (PyDict_Next(kwargs, &at, &name, &value)) {
        Py_ssize_t field = 0;
        while (field < FIELDS && PyUnicode_CompareWithASCIIString(name, field_names[field]))
            field++;
        if (field == FIELDS) {
            PyErr_Format(PyExc_TypeError, "a completion has no field %R", name);
            return -1;
        }
        if (field < PyTuple_GET_SIZE(args)) {
            PyErr_Format(PyExc_TypeError, "the field %U is given twice", name);
            return -1;
        }
    }
    return 0;
}

static PyObject *completion_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *all = args;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        if (refuse_keywords(args, kwargs))
            return NULL;
        all = PyTuple_New(FIELDS);
        for (Py_ssize_t i = 0; all && i < FIELDS; i++) {
            PyObject *value = i < PyTuple_GET_SIZE(args)
                                  ? PyTuple_GET_ITEM(args, i)
                                  : PyDict_GetItemString(kwargs, field_names[i]);
            if (!value && i < FIELDS - 1) {
                PyErr_Format(PyExc_TypeError, "the field %s is missing", field_names[i]);
                Py_CLEAR(all);
            } else {
                PyTuple_SET_ITEM(all, i, value ? Py_NewRef(value) : PyLong_FromLong(0));
            }
        }
        if (!all)
            return NULL;
    } else {
        Py_INCREF(all);
    }
    struct aiordma_completion fields;
    Completion *made = NULL;
    if (!engine_read_completion(all, &fields) && (made = (Completion *)type->tp_alloc(type, 0)))
        made->fields = fields;
    Py_DECREF(all);
    return (PyObject *)made;
}

static PyObject *completion_make(PyObject *type, PyObject *iterable)
{
    PyObject *tuple = PySequence_Tuple(iterable);
    PyObject *made = tuple ? completion_new((PyTypeObject *)type, tuple, NULL) : NULL;
    Py_XDECREF(tuple);
    return made;
}

static PyObject *completion_get(Completion *completion, void *field)
{
    return PyLong_FromUnsignedLongLong(value_of(&completion->fields, (Py_ssize_t)field));
}

static Py_ssize_t completion_length(Completion *completion)
{
    (void)completion;
    return FIELDS;
}

static PyObject *completion_item(Completion *completion, Py_ssize_t at)
{
    if (at < 0 || at >= FIELDS) {
        PyErr_SetString(PyExc_IndexError, "a completion has 14 fields");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(value_of(&completion->fields, at));
}

static PyObject *completion_compare(PyObject *one, PyObject *other, int operation)
{
    if (!PyObject_TypeCheck(other, &engine_completion_type) && !PyTuple_Check(other))
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *a = PySequence_Tuple(one), *b = PySequence_Tuple(other);
    PyObject *result = a && b ? PyObject_RichCompare(a, b, operation) : NULL;
    Py_XDECREF(a);
    Py_XDECREF(b);
    return result;
}

static Py_hash_t completion_hash(Completion *completion)
{
    PyObject *tuple = engine_completion_tuple(&completion->fields);
    Py_hash_t hash = tuple ? PyObject_Hash(tuple) : -1;
    Py_XDECREF(tuple);
    return hash;
}

static PyObject *completion_repr(Completion *completion)
{
    PyObject *text = PyUnicode_FromFormat("%s(", "WorkCompletion");
    for (Py_ssize_t i = 0; text && i < FIELDS; i++) {
        PyObject *more = PyUnicode_FromFormat("%U%s%s=%llu", text, i ? ", " : "", field_names[i],
                                              value_of(&completion->fields, i));
        Py_SETREF(text, more);
    }
    if (text) {
        PyObject *whole = PyUnicode_FromFormat("%U)", text);
        Py_SETREF(text, whole);
    }
    return text;
}

static PyObject *completion_reduce(PyObject *completion, PyObject *none)
{
    (void)none;
    PyObject *tuple = engine_completion_tuple(&((Completion *)completion)->fields);
    return tuple ? Py_BuildValue("(ON)", Py_TYPE(completion), tuple) : NULL;
}

static PyMethodDef methods[] = {
    {"_make", completion_make, METH_O | METH_CLASS,
     "_make($type, numbers, /)\n--\n\n"
     "Make one of 13 or 14 numbers."},
    {"__reduce__", completion_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define FIELD(at, name, doc) {name, (getter)completion_get, NULL, doc, (void *)(at)}
static PyGetSetDef properties[] = {
    FIELD(0, "wr_id", "The number that the request was posted with."),
    FIELD(1, "status", "WorkCompletionStatus as a number; 0 is success."),
    FIELD(2, "opcode", "WorkCompletionOpcode as a number: what completed."),
    FIELD(3, "vendor_err", "The device's own number for an error."),
    FIELD(4, "byte_len", "Bytes received, or moved by a READ or atomic."),
    FIELD(5, "immediate", "32 bits that came beside the data, or the rkey that was invalidated."),
    FIELD(6, "qp_num", "The number of the queue pair here."),
    FIELD(7, "src_qp", "The number of the queue pair that sent a datagram."),
    FIELD(8, "wc_flags", "WorkCompletionFlag as a number: which optional fields are valid."),
    FIELD(9, "pkey_index", "The index of the P_Key that a datagram carried."),
    FIELD(10, "slid", "The sender's LID, of a datagram on InfiniBand."),
    FIELD(11, "sl", "The service level of a datagram."),
    FIELD(12, "dlid_path_bits", "The path bits of the LID that a datagram was sent to."),
    FIELD(13, "reserved", "Always 0."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods sequence = {
    .sq_length = (lenfunc)completion_length,
    .sq_item = (ssizeargfunc)completion_item,
};

PyTypeObject engine_completion_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.CompletionFields",
    .tp_basicsize = sizeof(Completion),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = completion_new,
    .tp_methods = methods,
    .tp_getset = properties,
    .tp_as_sequence = &sequence,
    .tp_iter = PySeqIter_New,
    .tp_richcompare = completion_compare,
    .tp_hash = (hashfunc)completion_hash,
    .tp_repr = (reprfunc)completion_repr,
};

int engine_completion_names(void)
{
    PyObject *names = PyTuple_New(FIELDS);
    for (Py_ssize_t i = 0; names && i < FIELDS; i++) {
        PyObject *name = PyUnicode_InternFromString(field_names[i]);
        if (name)
            PyTuple_SET_ITEM(names, i, name);
        else
            Py_CLEAR(names);
    }
    int failed = !names || PyDict_SetItemString(engine_completion_type.tp_dict, "_fields", names);
    Py_XDECREF(names);
    return failed ? -1 : 0;
}
