/*
 * UDP sockets that report a packet's destination address, and send from any local address.
 */
#ifndef AIORDMA_SOFTWARE_UDP_H
#define AIORDMA_SOFTWARE_UDP_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "roce.h"

struct sw_udp {
    int fd; /* non-blocking */
    sa_family_t family;
    uint16_t port;
};

enum {
    SW_UDP_IPV6_ONLY = 1,
    SW_UDP_SHARED = 2,      /* the port, with sockets that have this flag, too: groups */
    SW_UDP_PORT_SHARED = 8, /* the same, and each packet goes to one of them */
    SW_UDP_SEVERAL = 16,    /* receive several packets at a time, if the kernel can */
    SW_UDP_ERRORS = 4,      /* sw_udp_refusal returns the errors that ICMP reported */
};

/* Open a socket that is bound to an address. If its port is 0, a free one is taken. */
int sw_udp_open(struct sw_udp *udp, const struct sockaddr *address, int flags);
/* Open a socket at a free port of all addresses, including IPv6 if the host has it. */
int sw_udp_open_anywhere(struct sw_udp *udp);
/*
 * Open a socket that only makes the host a member of a group; not even that, if send_only is set.
 * ENETUNREACH if the interface supports no groups, as with the loopback interface and IPv6.
 */
int sw_udp_open_member(struct sw_udp *udp, const struct in6_addr *group, uint32_t interface,
                       int send_only);
void sw_udp_close(struct sw_udp *udp);

/* Send from path.source, also if the socket is bound to another address. */
int sw_udp_send(const struct sw_udp *udp, const struct sw_udp_route *route, const void *packet,
                size_t size);
/*
 * Send packets of `each` bytes, of which the last can be shorter, in one call. Fails if the
 * kernel or the network's MTU does not allow that, and nothing is sent.
 */
int sw_udp_send_several(const struct sw_udp *udp, const struct sw_udp_route *route,
                        const void *packets, size_t size, uint16_t each);
/*
 * Receive a packet. Returns its size, which can be larger than room, or -1 and errno. route: from
 * the sender to this host, with the interface that the packet arrived on. each: of a socket with
 * SW_UDP_SEVERAL, the size of the packets that arrived together, of which the last can be shorter.
 */
ssize_t sw_udp_receive(const struct sw_udp *udp, void *packet, size_t room,
                       struct sw_udp_route *route, size_t *each);
/*
 * Take the oldest error that ICMP reported, and the destination of its packet. Returns a positive
 * errno, or 0 if there is none.
 */
int sw_udp_refusal(const struct sw_udp *udp, struct in6_addr *destination, uint16_t *port);

/*
 * Join a group on an interface; 0: on all interfaces with an address of the group's IP version. The
 * socket receives only from groups that it has joined.
 */
int sw_udp_join(const struct sw_udp *udp, const struct in6_addr *group, uint32_t interface);

#endif
