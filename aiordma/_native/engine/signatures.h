/* The kinds of posts, and the arguments of each. */
#ifndef AIORDMA_ENGINE_SIGNATURES_H
#define AIORDMA_ENGINE_SIGNATURES_H

#include "python_objects.h"

/*
 * The kinds of posts: KIND(constant, name, opcode, parameters). A port has a method of each name with
 * these parameters; those with a default are keywords. reading.c reads the arguments. V: the memory
 * is a list of parts. VALUE: the result of the request is the previous value. The receives are last,
 * and have no opcode.
 */
#define ENGINE_FLAGS "fence=False, solicited=False"
#define ENGINE_EACH_KIND(KIND)                                                                    \
    KIND(SEND, send, IBV_WR_SEND, "data, *, immediate=None, invalidate=None, " ENGINE_FLAGS)      \
    KIND(SENDV, sendv, IBV_WR_SEND, "parts, *, immediate=None, invalidate=None, " ENGINE_FLAGS)   \
    KIND(WRITE, write, IBV_WR_RDMA_WRITE, "local, remote, *, immediate=None, " ENGINE_FLAGS)      \
    KIND(WRITEV, writev, IBV_WR_RDMA_WRITE, "parts, remote, *, immediate=None, " ENGINE_FLAGS)    \
    KIND(READ, read, IBV_WR_RDMA_READ, "local, remote, *, fence=False")                           \
    KIND(READV, readv, IBV_WR_RDMA_READ, "parts, remote, *, fence=False")                         \
    KIND(COMPARE_SWAP, compare_swap, IBV_WR_ATOMIC_CMP_AND_SWP,                                   \
         "local, remote, compare, swap, *, fence=False")                                          \
    KIND(FETCH_ADD, fetch_add, IBV_WR_ATOMIC_FETCH_AND_ADD, "local, remote, add, *, fence=False") \
    KIND(COMPARE_SWAP_VALUE, compare_swap_value, IBV_WR_ATOMIC_CMP_AND_SWP,                       \
         "remote, compare, swap")                                                                 \
    KIND(FETCH_ADD_VALUE, fetch_add_value, IBV_WR_ATOMIC_FETCH_AND_ADD, "remote, add")            \
    KIND(BIND, bind, IBV_WR_BIND_MW, "window, memory, access, *, fence=False")                    \
    KIND(LOCAL_INVALIDATE, local_invalidate, IBV_WR_LOCAL_INV, "window, *, fence=False")          \
    KIND(UD_SEND, ud_send, IBV_WR_SEND, "data, peer, *, immediate=None, solicited=False")         \
    KIND(UD_SENDV, ud_sendv, IBV_WR_SEND, "parts, peer, *, immediate=None, solicited=False")      \
    KIND(RECEIVE, receive, 0, "buffer")                                                           \
    KIND(RECEIVEV, receivev, 0, "parts")                                                          \
    KIND(UD_RECEIVE, ud_receive, 0, "buffer")                                                     \
    KIND(UD_RECEIVEV, ud_receivev, 0, "parts")

#define KIND(constant, name, opcode, parameters) ENGINE_##constant,
enum engine_kind { ENGINE_EACH_KIND(KIND) ENGINE_KINDS };
#undef KIND

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

/* Read the parameters of all kinds. Returns -1 with an exception. */
int engine_read_signatures(void);
/* The kind of the name; ENGINE_KINDS: none. */
enum engine_kind engine_kind_of(const char *name);
/* Assign the arguments of a vectorcall to `given`. 0: they do not fit the kind's signature. */
int engine_arguments(enum engine_kind kind, PyObject *const *arguments, Py_ssize_t count,
                     PyObject *keywords, PyObject **given);

#endif
