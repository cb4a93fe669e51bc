/* The signatures of the kinds of posts: the arguments of a call, by parameter. */
#include "signatures.h"

enum { MOST_ARGUMENTS = 6 };

struct parameter {
    const char *name;
    enum engine_argument argument;
};

/* The first `positional` parameters are required. The others are keywords. */
static const struct {
    const char *name;
    Py_ssize_t positional;
    struct parameter parameters[MOST_ARGUMENTS];
} kinds[ENGINE_KINDS] = {
    [ENGINE_SEND] = {"send",
                     1,
                     {{"data", ENGINE_LOCAL},
                      {"immediate", ENGINE_IMMEDIATE},
                      {"invalidate", ENGINE_INVALIDATE},
                      {"fence", ENGINE_FENCE},
                      {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_SENDV] = {"sendv",
                      1,
                      {{"parts", ENGINE_LOCAL},
                       {"immediate", ENGINE_IMMEDIATE},
                       {"invalidate", ENGINE_INVALIDATE},
                       {"fence", ENGINE_FENCE},
                       {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_RECEIVE] = {"receive", 1, {{"buffer", ENGINE_LOCAL}}},
    [ENGINE_RECEIVEV] = {"receivev", 1, {{"parts", ENGINE_LOCAL}}},
    [ENGINE_WRITE] = {"write",
                      2,
                      {{"local", ENGINE_LOCAL},
                       {"remote", ENGINE_REMOTE},
                       {"immediate", ENGINE_IMMEDIATE},
                       {"fence", ENGINE_FENCE},
                       {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_WRITEV] = {"writev",
                       2,
                       {{"parts", ENGINE_LOCAL},
                        {"remote", ENGINE_REMOTE},
                        {"immediate", ENGINE_IMMEDIATE},
                        {"fence", ENGINE_FENCE},
                        {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_READ] = {"read",
                     2,
                     {{"local", ENGINE_LOCAL}, {"remote", ENGINE_REMOTE}, {"fence", ENGINE_FENCE}}},
    [ENGINE_READV] =
        {"readv", 2, {{"parts", ENGINE_LOCAL}, {"remote", ENGINE_REMOTE}, {"fence", ENGINE_FENCE}}},
    [ENGINE_COMPARE_SWAP] = {"compare_swap",
                             4,
                             {{"local", ENGINE_LOCAL},
                              {"remote", ENGINE_REMOTE},
                              {"compare", ENGINE_COMPARE},
                              {"swap", ENGINE_SWAP},
                              {"fence", ENGINE_FENCE}}},
    [ENGINE_FETCH_ADD] = {"fetch_add",
                          3,
                          {{"local", ENGINE_LOCAL},
                           {"remote", ENGINE_REMOTE},
                           {"add", ENGINE_COMPARE},
                           {"fence", ENGINE_FENCE}}},
    [ENGINE_COMPARE_SWAP_VALUE] = {"compare_swap_value",
                                   3,
                                   {{"remote", ENGINE_REMOTE},
                                    {"compare", ENGINE_COMPARE},
                                    {"swap", ENGINE_SWAP}}},
    [ENGINE_FETCH_ADD_VALUE] = {"fetch_add_value",
                                2,
                                {{"remote", ENGINE_REMOTE}, {"add", ENGINE_COMPARE}}},
    [ENGINE_BIND] = {"bind",
                     3,
                     {{"window", ENGINE_WINDOW},
                      {"memory", ENGINE_LOCAL},
                      {"access", ENGINE_ACCESS},
                      {"fence", ENGINE_FENCE}}},
    [ENGINE_LOCAL_INVALIDATE] = {"local_invalidate",
                                 1,
                                 {{"window", ENGINE_WINDOW}, {"fence", ENGINE_FENCE}}},
    [ENGINE_UD_SEND] = {"ud_send",
                        2,
                        {{"data", ENGINE_LOCAL},
                         {"peer", ENGINE_REMOTE},
                         {"immediate", ENGINE_IMMEDIATE},
                         {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_UD_SENDV] = {"ud_sendv",
                         2,
                         {{"parts", ENGINE_LOCAL},
                          {"peer", ENGINE_REMOTE},
                          {"immediate", ENGINE_IMMEDIATE},
                          {"solicited", ENGINE_SOLICITED}}},
    [ENGINE_UD_RECEIVE] = {"ud_receive", 1, {{"buffer", ENGINE_LOCAL}}},
    [ENGINE_UD_RECEIVEV] = {"ud_receivev", 1, {{"parts", ENGINE_LOCAL}}},
};

static PyObject *parameter_names[ENGINE_KINDS][MOST_ARGUMENTS]; /* interned */

int engine_signature_names(void)
{
    for (int i = 0; i < ENGINE_KINDS; i++)
        for (int j = 0; j < MOST_ARGUMENTS && kinds[i].parameters[j].name; j++)
            if (engine_intern(&parameter_names[i][j], kinds[i].parameters[j].name))
                return -1;
    return 0;
}

/* The names in a program's calls are interned; only those of `**keywords` may not be. -1: unknown. */
static int find_parameter(enum engine_kind kind, PyObject *name)
{
    PyObject *const *names = parameter_names[kind];

    for (int i = 0; i < MOST_ARGUMENTS && names[i]; i++)
        if (names[i] == name)
            return i;
    for (int i = 0; i < MOST_ARGUMENTS && names[i]; i++)
        if (PyUnicode_Compare(names[i], name) == 0)
            return i;
    return -1;
}

static int read_keyword(enum engine_kind kind, PyObject *name, PyObject *value, PyObject **given)
{
    int found = find_parameter(kind, name);
    if (found < 0)
        return 0;
    enum engine_argument argument = kinds[kind].parameters[found].argument;
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
        if (!read_keyword(kind, PyTuple_GET_ITEM(keywords, i), arguments[count + i], given))
            return 0;
    for (Py_ssize_t i = count; i < positional; i++)
        if (!given[kinds[kind].parameters[i].argument])
            return 0;
    return 1;
}

int engine_port_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                          PyObject *keywords, PyObject **given)
{
    if (engine_arguments(kind, arguments, count, keywords, given))
        return 1;
    PyErr_Format(PyExc_TypeError, "%s(): the arguments do not fit the signature", kinds[kind].name);
    return 0;
}

enum engine_kind engine_kind_of(const char *name)
{
    int kind = 0;
    while (kind < ENGINE_KINDS && strcmp(name, kinds[kind].name))
        kind++;
    return kind;
}
