/*
 * Forks. A child has copies of the parent's objects, none of its threads, and shares its sockets
 * and eventfds: using them would affect the parent's connections. The callers check that no object
 * is used in a child of the process that created it (verbs.Resource, and the engine's drains); this
 * device does not. The child closes its copies of the sockets. TCP tells the peer nothing, because
 * the parent still has the socket. The memory stays as it is until the child ends. Objects that the
 * child creates itself work.
 */
#include "fork.h"

#include <string.h>

#include "capture.h"
#include "cm_handshakes.h"
#include "cm_silence.h"
#include "gids.h"
#include "identifier.h"
#include "roce_port.h"
#include "stream.h"

static void in_child(void)
{
    sw_lock_forked();
    memset(&sw_device.own, 0, sizeof(sw_device.own));
    memset(&sw_device.counts, 0, sizeof(sw_device.counts));
    sw_engine_forked();
    sw_progress_forked();
    sw_streams_forked();
    sw_capture_forked();
    sw_gids_forked();
    sw_identifiers_forked();
    sw_silence_forked();
    sw_handshakes_forked();
    sw_memory_forked();
    sw_queue_pairs_forked();
    sw_roce_port_forked();
}

int sw_prepare_forks(void)
{
    /* Fork with the lock held, so that the child's copy of the state is consistent. */
    return pthread_atfork(sw_lock, sw_unlock, in_child);
}
