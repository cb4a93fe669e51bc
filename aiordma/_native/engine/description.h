/* A work description: what a request is to do, and the local memory that it names. */
#ifndef AIORDMA_ENGINE_DESCRIPTION_H
#define AIORDMA_ENGINE_DESCRIPTION_H

#include "port.h"
#include "signatures.h"

/* The base of BoundWindow, in window.c. */
typedef struct Window Window;

/* How the device gets the bytes: from registered memory, or copied, inline or to a pool block. */
/* ENGINE_VALUE: no bytes are given; a pool block receives the value of an atomic. */
enum engine_copying { ENGINE_NOTHING, ENGINE_INLINE, ENGINE_BLOCK, ENGINE_VALUE };

enum { ENGINE_PARTS = 32 }; /* of one request; one with more parts takes the general path */
/* Bytes up to which buffers are copied to a pool block; registering longer ones is cheaper. */
enum { ENGINE_COPY_LIMIT = 1 << 16 };

/* What a request is to do, as it was read from the arguments of a post. */
struct engine_work {
    PyObject *remote; /* RemoteMemory, or NULL; borrowed */
    enum ibv_wr_opcode opcode;
    enum engine_copying copying;
    unsigned int flags;
    uint32_t immediate; /* or the rkey to invalidate */
    unsigned int rkey;  /* of the remote memory, or that a window gets */
    Window *window;     /* to bind or to invalidate, else NULL; borrowed */
    Part *bound;        /* the memory to bind it to, else NULL; borrowed */
    unsigned int access;
    unsigned long long remote_address, compare_add, swap;
    unsigned long long length;
    Handle *handle; /* of a datagram, else NULL; a reference */
    struct ibv_ah *address_handle;
    unsigned int remote_qpn, remote_qkey;
    int is_receive;
    int has_header;   /* of a datagram that is received: the first sge is the header's */
    int count;        /* of the sges */
    int region_count; /* of the regions that the parts belong to; references */
    int view_count;   /* of the exported buffers */
    struct ibv_sge sges[ENGINE_PARTS];
    RegionBase *owners[ENGINE_PARTS]; /* of each sge: its region; NULL: a buffer */
    RegionBase *regions[ENGINE_PARTS];
    Py_buffer views[ENGINE_PARTS];
};

/* PyObject_GetBuffer, with a TypeError for a buffer of Python objects, whose bytes are addresses, and
   the exporter's error for a buffer that does not say what its elements are (numpy's dates). */
int engine_get_buffer(PyObject *given, Py_buffer *view, int flags);
/* Add a region that the request holds. */
void engine_add_region(struct engine_work *work, RegionBase *region);
/* Read the memory that the device reads (a source) or writes to (a target); several parts: a list or
   a tuple. 1: it was read; 0: take the general path. */
int engine_read_source(const Port *port, struct engine_work *work, PyObject *given);
int engine_read_sources(const Port *port, struct engine_work *work, PyObject *given);
int engine_read_target(const Port *port, struct engine_work *work, PyObject *given);
int engine_read_targets(const Port *port, struct engine_work *work, PyObject *given,
                        Py_ssize_t most);
/* Whether its regions are registered. */
int engine_regions_are_usable(const struct engine_work *work);
/* Copy the bytes of all sges, which are in this process's memory. */
void engine_gather(const struct engine_work *work, char *to);
void engine_release_work(struct engine_work *work); /* its buffers and regions */
/* Release the work, and return the request. If an interrupt is kept, raise it, and return NULL. */
PyObject *engine_end_reading(struct engine_work *work, PyObject *request);

#endif
