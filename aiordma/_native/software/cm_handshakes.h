/*
 * Half-open handshakes: peers that have connected to a listener by TCP, and whose request has not
 * arrived. Their number is bounded, for each peer address and for all listeners together, and so is
 * their time. So silent peers cannot lock others out or use up the program's descriptors.
 */
#ifndef AIORDMA_SOFTWARE_CM_HANDSHAKES_H
#define AIORDMA_SOFTWARE_CM_HANDSHAKES_H

#include <sys/socket.h>

#include "engine.h"

struct sw_source; /* a peer address and the number of its half-open handshakes */

struct sw_handshake {
    struct sw_handshake *older, *newer;
    struct sw_source *source;                     /* NULL: not half open */
    uint32_t ticks;                               /* left until the handshake is dropped */
    void (*drop)(struct sw_handshake *handshake); /* ends the handshake, resets the connection,
                                                     frees both */
};

/*
 * Count a half-open handshake, whose drop is set. If a bound is reached, another one is dropped:
 * the oldest of the peer's address if that address is at its bound, else the oldest of the address
 * that has the most. ENOMEM: the handshake is not counted.
 */
int sw_begin_handshake(struct sw_handshake *handshake, const struct sockaddr *peer);
/*
 * End a handshake: its request has arrived, or the connection is over. Do nothing if it is not half
 * open.
 */
void sw_end_handshake(struct sw_handshake *handshake);
/* Drop the oldest handshake of the address that has the most. Returns 0 if there is none. */
int sw_evict_handshake(void);
/* The oldest handshake, or NULL. The next ones follow by newer. */
struct sw_handshake *sw_oldest_handshake(void);

/* Whether this descriptor is one of those that are reserved for the program. */
int sw_is_scarce(int fd);

/* In a fork's child: forget the parent's handshakes. */
void sw_handshakes_forked(void);
extern const struct sw_state sw_handshakes_state;

#endif
