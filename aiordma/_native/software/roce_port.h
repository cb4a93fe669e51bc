/*
 * RoCE's UDP port, 4791, which all processes of a user share, and the queue pairs behind it.
 *
 * The upper 8 bits of a queue pair's number are the slot of its process. The kernel gives a packet to
 * the process that it belongs to, as long as it numbers the processes as their slots. If another
 * process gets it, that one passes it on.
 */
#ifndef AIORDMA_SOFTWARE_ROCE_PORT_H
#define AIORDMA_SOFTWARE_ROCE_PORT_H

#include "progress.h"
#include "queue_pair.h"
#include "udp.h"

/* Something to do once for all packets of a burst. */
struct sw_due {
    void (*run)(struct sw_due *due);
    struct sw_due *next, **link; /* link NULL: it is not due */
};

/*
 * Open the port for one more user. EADDRINUSE: the kernel's RoCE devices have the port, or another
 * user's processes.
 */
int sw_roce_port_enter(void);
/* The same for a queue pair, and find a number for it. */
int sw_roce_port_join(uint32_t *number);
/* A user no longer needs it. */
void sw_roce_port_leave(void);

/* -- queue pair 1: what is for no queue pair of the program's --------------------------------- */

/*
 * Who gets the packets to queue pair 1, each with the bytes that it was read from. is_passed: by
 * another process, so it is not passed on again.
 */
struct sw_services {
    void (*arrived)(const struct sw_udp_route *route, const struct sw_roce_packet *packet,
                    const uint8_t *bytes, size_t size, int is_passed);
};
void sw_roce_port_serve(const struct sw_services *services);
/* A random number whose upper 8 bits are the slot of this process, and the slot of such a number. */
uint32_t sw_roce_port_number(void);
int sw_roce_port_is_ours(uint32_t number);
/* Pass a packet on to the process that such a number is of. */
void sw_roce_port_pass(uint32_t number, const struct sw_udp_route *route, const uint8_t *bytes,
                       size_t size);
/* Send a packet to queue pair 1 of the peer, from queue pair 1. It can be lost. */
void sw_roce_port_tell(const struct sw_udp_route *route, const uint8_t *payload, uint32_t size);
/* The same to the sender of a packet that came by this route. */
void sw_roce_port_answer(const struct sw_udp_route *from, const uint8_t *payload, uint32_t size);

/*
 * A port of the connection manager, at one address of the host or at all, which one process has. The
 * others pass requests for it on through the claim.
 */
struct sw_claim {
    struct sw_watch watch;
    struct sw_udp udp;
    int is_open;
};

/*
 * Claim a port in a space, 0 to 255. address: unspecified, for all addresses, or of IPv4 only. Port 0
 * takes one that is free. may_share: with claims that may, too. EADDRINUSE: another process has it.
 * That a port of all addresses is taken at one of them is not seen: requests to that address go there.
 */
int sw_roce_port_claim(struct sw_claim *claim, uint8_t space, const struct in6_addr *address,
                       int may_share, uint16_t *port);
void sw_roce_port_unclaim(struct sw_claim *claim); /* does nothing if it is not open */
/* Pass a packet on to the process that has the port at its destination. Returns 0: there is none. */
int sw_roce_port_pass_to_claim(uint8_t space, uint16_t port, const struct sw_udp_route *route,
                               const uint8_t *bytes, size_t size);

/* -- sending ---------------------------------------------------------------------------------- */

/*
 * Packets to the same port of another host are composed in one place, for one call of the kernel:
 * write one to sw_roce_port_room(), of SW_ROCE_MOST bytes, then add it. sw_roce_port_flush sends
 * what was added. Without it, nothing is sent. A packet that cannot be sent is lost, as any can be.
 */
uint8_t *sw_roce_port_room(void);
void sw_roce_port_add(struct sw_udp_route *route, uint32_t size); /* headers and payload */
void sw_roce_port_flush(void);
/* The same at the next poll of a program that polls often, and 2 ms later at the latest. */
void sw_roce_port_flush_soon(void);

/* Run it at the end of this burst, or do nothing if it is due already. Never forget a freed one. */
void sw_roce_port_after(struct sw_due *due);
void sw_roce_port_forget(struct sw_due *due); /* does nothing if it is not due */

void sw_roce_port_forked(void);
extern const struct sw_state sw_roce_port_state;

#endif
