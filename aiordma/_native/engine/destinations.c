/* Destinations of datagrams, which a port remembers by peer; and their address handles. */
#include "destinations.h"

#include <structmember.h>

/*
 * An open hash table by the identity of the peer, which is immutable. So a reply to each of several
 * peers finds its address handle. A full table grows up to MOST_ROOM, and is then emptied: the next
 * datagram to each peer takes the general path, which enters it again.
 */
enum { FIRST_ROOM = 8, MOST_ROOM = 2048 };

static struct engine_destination *place_of(struct engine_destination *all, size_t room,
                                           const PyObject *peer)
{
    size_t at = ((uintptr_t)peer >> 4) * 0x9E3779B1u;
    while (all[at & (room - 1)].peer && all[at & (room - 1)].peer != peer)
        at++;
    return &all[at & (room - 1)];
}

const struct engine_destination *engine_destination(const struct engine_destinations *known,
                                                    const PyObject *peer)
{
    const struct engine_destination *found =
        known->room ? place_of(known->all, known->room, peer) : NULL;
    return found && found->peer ? found : NULL;
}

static void forget(struct engine_destination *all, size_t room)
{
    for (size_t i = 0; i < room; i++) {
        Py_XDECREF(all[i].peer);
        Py_XDECREF(all[i].handle);
    }
    PyMem_Free(all);
}

void engine_forget_destinations(struct engine_destinations *known)
{
    struct engine_destinations old = *known;

    *known = (struct engine_destinations){NULL, 0, 0};
    forget(old.all, old.room);
}

/* Make room for one more destination; -1 with an exception. Those whose handle is retired go. */
static int make_room(struct engine_destinations *known)
{
    size_t room = known->room ? 2 * known->room : FIRST_ROOM;

    if (2 * (known->count + 1) <= known->room)
        return 0;
    if (room > MOST_ROOM) {
        engine_forget_destinations(known);
        room = FIRST_ROOM;
    }
    struct engine_destinations old = *known;
    struct engine_destination *all = PyMem_Calloc(room, sizeof(*all));
    if (!all) {
        PyErr_NoMemory();
        return -1;
    }
    size_t count = 0;
    for (size_t i = 0; i < old.room; i++)
        if (old.all[i].peer && !old.all[i].handle->retired) {
            *place_of(all, room, old.all[i].peer) = old.all[i];
            old.all[i] = (struct engine_destination){.peer = NULL};
            count++;
        }
    *known = (struct engine_destinations){all, count, room};
    forget(old.all, old.room);
    return 0;
}

int engine_add_destination(struct engine_destinations *known,
                           const struct engine_destination *destination)
{
    if (make_room(known))
        return -1;
    struct engine_destination *place = place_of(known->all, known->room, destination->peer);
    struct engine_destination old = *place;
    known->count += !old.peer;
    *place = *destination;
    Py_INCREF(place->peer);
    Py_INCREF(place->handle);
    Py_XDECREF(old.peer);
    Py_XDECREF(old.handle);
    return 0;
}

int engine_traverse_destinations(const struct engine_destinations *known, visitproc visit,
                                 void *arg)
{
    for (size_t i = 0; i < known->room; i++) {
        Py_VISIT(known->all[i].peer);
        Py_VISIT(known->all[i].handle);
    }
    return 0;
}

/* -- address handles ------------------------------------------------------------------------ */

static PyMemberDef handle_members[] = {
    {"_holders", T_PYSSIZET, offsetof(Handle, holders), 0, "How many requests hold it."},
    {"_retired", T_BOOL, offsetof(Handle, retired), 0, "Whether its last holder destroys it."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject engine_handle_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiordma._native._engine.HandleBase",
    .tp_basicsize = sizeof(Handle),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = handle_members,
};
