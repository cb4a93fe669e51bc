/* The kinds of posts, and the arguments of each. */
#ifndef AIORDMA_ENGINE_SIGNATURES_H
#define AIORDMA_ENGINE_SIGNATURES_H

#include "given.h"

/* The kinds of posts. V: the memory is a list of parts. */
enum engine_kind {
    ENGINE_SEND,
    ENGINE_SENDV,
    ENGINE_RECEIVE,
    ENGINE_RECEIVEV,
    ENGINE_WRITE,
    ENGINE_WRITEV,
    ENGINE_READ,
    ENGINE_READV,
    ENGINE_COMPARE_SWAP,
    ENGINE_FETCH_ADD,
    ENGINE_COMPARE_SWAP_VALUE, /* the result of the request is the previous value */
    ENGINE_FETCH_ADD_VALUE,
    ENGINE_BIND,
    ENGINE_LOCAL_INVALIDATE,
    ENGINE_UD_SEND,
    ENGINE_UD_SENDV,
    ENGINE_UD_RECEIVE,
    ENGINE_UD_RECEIVEV,
    ENGINE_KINDS
};

/* The arguments of a post. An argument that was not given is NULL. */
enum engine_argument {
    ENGINE_LOCAL,
    ENGINE_REMOTE,  /* memory, or the peer of a datagram */
    ENGINE_COMPARE, /* also the number that fetch_add adds */
    ENGINE_SWAP,
    ENGINE_IMMEDIATE,
    ENGINE_INVALIDATE,
    ENGINE_WINDOW,
    ENGINE_ACCESS,
    ENGINE_FENCE,
    ENGINE_SOLICITED,
    ENGINE_ARGUMENTS
};

int engine_signature_names(void);
/* The kind whose method has the name; ENGINE_KINDS: none. */
enum engine_kind engine_kind_of(const char *name);
/* Assign the arguments of a vectorcall to `given`. 0: they do not fit the kind's signature. */
int engine_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                     PyObject *keywords, PyObject **given);
/* The same for a method of a port, with a TypeError if they do not fit. */
int engine_port_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                          PyObject *keywords, PyObject **given);
/* Define a method of a port for requests of one kind. `post`: engine_post or engine_collect. */
#define ENGINE_METHOD(type, prefix, post, name, kind)                                          \
    static PyObject *prefix##_##name(type *port, PyObject *const *arguments, Py_ssize_t count, \
                                     PyObject *keywords)                                       \
    {                                                                                          \
        PyObject *given[ENGINE_ARGUMENTS];                                                     \
        return engine_port_arguments(kind, arguments, count, keywords, given)                  \
                   ? post(port, kind, given)                                                   \
                   : NULL;                                                                     \
    }
/* The methods that a chain has, too. */
#define ENGINE_COLLECTED_METHODS(type, prefix, post)                     \
    ENGINE_METHOD(type, prefix, post, send, ENGINE_SEND)                 \
    ENGINE_METHOD(type, prefix, post, sendv, ENGINE_SENDV)               \
    ENGINE_METHOD(type, prefix, post, write, ENGINE_WRITE)               \
    ENGINE_METHOD(type, prefix, post, writev, ENGINE_WRITEV)             \
    ENGINE_METHOD(type, prefix, post, read, ENGINE_READ)                 \
    ENGINE_METHOD(type, prefix, post, readv, ENGINE_READV)               \
    ENGINE_METHOD(type, prefix, post, compare_swap, ENGINE_COMPARE_SWAP) \
    ENGINE_METHOD(type, prefix, post, fetch_add, ENGINE_FETCH_ADD)       \
    ENGINE_METHOD(type, prefix, post, bind, ENGINE_BIND)                 \
    ENGINE_METHOD(type, prefix, post, local_invalidate, ENGINE_LOCAL_INVALIDATE)
/* The text signatures of the ports' methods. */
#define ENGINE_SIGNATURE_SEND \
    "send($self, data, *, immediate=None, invalidate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_SENDV \
    "sendv($self, parts, *, immediate=None, invalidate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_WRITE \
    "write($self, local, remote, *, immediate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_WRITEV \
    "writev($self, parts, remote, *, immediate=None, fence=False, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_READ "read($self, local, remote, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_READV "readv($self, parts, remote, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_COMPARE_SWAP \
    "compare_swap($self, local, remote, compare, swap, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_BIND "bind($self, window, memory, access, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_LOCAL_INVALIDATE "local_invalidate($self, window, *, fence=False)\n--\n\n"
#define ENGINE_SIGNATURE_UD_SEND \
    "ud_send($self, data, peer, *, immediate=None, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_UD_SENDV \
    "ud_sendv($self, parts, peer, *, immediate=None, solicited=False)\n--\n\n"
#define ENGINE_SIGNATURE_FETCH_ADD "fetch_add($self, local, remote, add, *, fence=False)\n--\n\n"

#endif
