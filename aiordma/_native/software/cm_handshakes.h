/*
 * Half-open handshakes: peers that have connected to a listener by TCP and whose request has not
 * arrived. They are bounded in number, for each peer address and for all listeners together, and
 * in time, so that silent peers cannot lock others out or take the program's descriptors.
 */
#ifndef AIORDMA_SOFTWARE_CM_HANDSHAKES_H
#define AIORDMA_SOFTWARE_CM_HANDSHAKES_H

#include <sys/socket.h>

#include "engine.h"

struct sw_source; /* a peer address, and how many half-open handshakes it has */

struct sw_handshake {
    struct sw_handshake *older, *newer;
    struct sw_source *source;                     /* NULL: it is not half open */
    uint32_t ticks;                               /* left */
    void (*drop)(struct sw_handshake *handshake); /* ends it, resets the connection, frees it */
};

/*
 * Count a half-open handshake, whose drop is set. Where a bound is reached, another is dropped: the
 * oldest of the peer's own address if that has as many as one address may have, else the oldest of
 * the address that has the most. ENOMEM: it is not counted.
 */
int sw_begin_handshake(struct sw_handshake *handshake, const struct sockaddr *peer);
/* The request has arrived, or the connection is over. Nothing if it is not half open. */
void sw_end_handshake(struct sw_handshake *handshake);
/* Drop the oldest of the address that has the most. Returns whether there was one. */
int sw_evict_handshake(void);
/* The oldest, or NULL; the others follow by newer. */
struct sw_handshake *sw_oldest_handshake(void);

/* Whether a new descriptor of this number leaves fewer to the program than are kept for it. */
int sw_is_scarce(int fd);

/* In a fork's child: they are the parent's. */
void sw_handshakes_forked(void);

#endif
