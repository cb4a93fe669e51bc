/* Where datagrams go: address handles, and the table of them by peer. */
#ifndef AIORDMA_ENGINE_DESTINATIONS_H
#define AIORDMA_ENGINE_DESTINATIONS_H

#include "python_objects.h"

/* The base of PeerHandle: an address handle, and the requests that hold it. */
typedef struct {
    PyObject_HEAD Py_ssize_t holders;
    char retired; /* its last holder destroys it */
} Handle;

extern PyTypeObject engine_handle_type;

/* Where datagrams to a peer go. */
struct engine_destination {
    PyObject *peer; /* NULL: an empty place */
    Handle *handle;
    struct ibv_ah *address_handle;
    unsigned int qpn, qkey;
};

struct engine_destinations {
    struct engine_destination *all; /* a hash table of `room` places, a power of two */
    size_t count, room;
};

/* Returns the destination of a peer, which is valid until the next is added. NULL: not known. */
const struct engine_destination *engine_destination(const struct engine_destinations *known,
                                                    const PyObject *peer);
/* -1: an exception. */
int engine_add_destination(struct engine_destinations *known,
                           const struct engine_destination *destination);
void engine_forget_destinations(struct engine_destinations *known);
int engine_traverse_destinations(const struct engine_destinations *known, visitproc visit,
                                 void *arg);

#endif
