/* UDP sockets that say which address a packet came to, and are told which it is to leave from. */
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
    SW_UDP_SHARED = 2, /* with others of the same mind */
    SW_UDP_ERRORS = 4, /* ICMP's refusals are told: sw_udp_refusal */
};

/* Bound to an address; its port may be 0, which takes a free one. */
int sw_udp_open(struct sw_udp *udp, const struct sockaddr *address, int flags);
/* At a free port of all addresses, of IPv6 as well if the host has it. */
int sw_udp_open_anywhere(struct sw_udp *udp);
/*
 * It only keeps the host in a group, unless send_only. ENETUNREACH where the interface leads to
 * no groups, as the loopback's does not for IPv6.
 */
int sw_udp_open_member(struct sw_udp *udp, const struct in6_addr *group, uint32_t interface,
                       int send_only);
void sw_udp_close(struct sw_udp *udp);

/* To path.destination:destination_port from path.source, whatever the socket is bound to. */
int sw_udp_send(const struct sw_udp *udp, const struct sw_udp_way *way, const void *packet,
                size_t size);
/*
 * The size of what came, which may be more than there was room for, or -1 and errno. The way is
 * the sender's: from it to us; the interface is that which it came in by.
 */
ssize_t sw_udp_receive(const struct sw_udp *udp, void *packet, size_t room, struct sw_udp_way *way);
/*
 * Take the oldest of the errors that ICMP told of, with whom it was sent to: a positive errno, or
 * 0 when there is none.
 */
int sw_udp_refusal(const struct sw_udp *udp, struct in6_addr *destination, uint16_t *port);

/*
 * Join a group on an interface; 0: on all that have an address of the group's version of IP. The
 * socket gets the groups that it has joined, and no others.
 */
int sw_udp_join(const struct sw_udp *udp, const struct in6_addr *group, uint32_t interface);

#endif
