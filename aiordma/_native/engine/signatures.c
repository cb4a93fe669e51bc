/* Reads the arguments of a post by the parameters of its kind. */
#include "signatures.h"

/* What each parameter is. */
static const struct {
    const char *name;
    enum engine_argument argument;
} known[] = {
    {"data", ENGINE_LOCAL},          {"parts", ENGINE_LOCAL},
    {"buffer", ENGINE_LOCAL},        {"local", ENGINE_LOCAL},
    {"memory", ENGINE_LOCAL},        {"remote", ENGINE_REMOTE},
    {"peer", ENGINE_REMOTE},         {"compare", ENGINE_COMPARE},
    {"add", ENGINE_COMPARE},         {"swap", ENGINE_SWAP},
    {"immediate", ENGINE_IMMEDIATE}, {"invalidate", ENGINE_INVALIDATE},
    {"window", ENGINE_WINDOW},       {"access", ENGINE_ACCESS},
    {"fence", ENGINE_FENCE},         {"solicited", ENGINE_SOLICITED},
};

static struct kind {
    const char *name, *text;
    Py_ssize_t positional; /* the first parameters are required, the others are keywords */
    int count;
    struct {
        PyObject *name; /* interned */
        enum engine_argument argument;
    } parameters[ENGINE_ARGUMENTS];
} kinds[] = {
#define KIND(constant, name, opcode, parameters) {#name, parameters},
    ENGINE_EACH_KIND(KIND)
#undef KIND
};

static int read_parameter(struct kind *kind, const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        if (strlen(known[i].name) != length || memcmp(known[i].name, name, length))
            continue;
        kind->parameters[kind->count].argument = known[i].argument;
        return engine_intern(&kind->parameters[kind->count++].name, known[i].name);
    }
    PyErr_Format(PyExc_SystemError, "%s(%s): unknown parameter", kind->name, kind->text);
    return -1;
}

int engine_read_signatures(void)
{
    for (struct kind *kind = kinds; kind < kinds + ENGINE_KINDS; kind++) {
        kind->positional = kind->count = 0; /* a failed import may be repeated */
        for (const char *at = kind->text; *at; at += strspn(at, ",* ")) {
            size_t length = strcspn(at, ",=");
            kind->positional += at[length] != '=';
            if (read_parameter(kind, at, length))
                return -1;
            at += strcspn(at, ",");
        }
    }
    return 0;
}

/* The names in a program's calls are interned; only those of `**keywords` may not be. -1: unknown. */
static int find_parameter(const struct kind *kind, PyObject *name)
{
    for (int i = 0; i < kind->count; i++)
        if (kind->parameters[i].name == name)
            return i;
    for (int i = 0; i < kind->count; i++)
        if (PyUnicode_Compare(kind->parameters[i].name, name) == 0)
            return i;
    return -1;
}

static int read_keyword(const struct kind *kind, PyObject *name, PyObject *value, PyObject **given)
{
    int found = find_parameter(kind, name);
    if (found < 0)
        return 0;
    enum engine_argument argument = kind->parameters[found].argument;
    int is_new = !given[argument];
    given[argument] = value;
    return is_new;
}

int engine_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                     PyObject *keywords, PyObject **given)
{
    Py_ssize_t positional = kinds[kind].positional;
    Py_ssize_t keyword_count = keywords ? PyTuple_GET_SIZE(keywords) : 0;

    if (count > positional)
        return 0;
    for (int i = 0; i < ENGINE_ARGUMENTS; i++)
        given[i] = NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        given[kinds[kind].parameters[i].argument] = arguments[i];
    for (Py_ssize_t i = 0; i < keyword_count; i++)
        if (!read_keyword(&kinds[kind], PyTuple_GET_ITEM(keywords, i), arguments[count + i], given))
            return 0;
    for (Py_ssize_t i = count; i < positional; i++)
        if (!given[kinds[kind].parameters[i].argument])
            return 0;
    return 1;
}

enum engine_kind engine_kind_of(const char *name)
{
    int kind = 0;
    while (kind < ENGINE_KINDS && strcmp(name, kinds[kind].name))
        kind++;
    return kind;
}
