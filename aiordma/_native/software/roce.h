/*
 * Datagrams as they stand in a UDP payload: RoCE v2's headers (InfiniBand specification, volume
 * 1, 9.2, 9.3 and annex 17), and what a receive has in its first 40 bytes. A codec without any
 * state: what it reads may come from anyone.
 *
 *     BTH 12 | DETH 8 | immediate 4, if there is one | payload | 0 to 3 bytes of padding | ICRC 4
 *
 * The ICRC covers what does not change on the way, and that is the IP and UDP headers too, but
 * for the fields that routers and network cards write. A program does not see its IP header: the
 * identification of IPv4 is taken to be 0 and "don't fragment" to be set, which is what Linux
 * sends from a socket that asks for it. Where a packet has to be fragmented all the same, its
 * ICRC is that of the header it would have had; both ends being of this kind, they agree.
 */
#ifndef AIORDMA_SOFTWARE_ROCE_H
#define AIORDMA_SOFTWARE_ROCE_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

#include "limits.h"

enum {
    SW_ROCE_HEADERS = 24, /* the most; 20 without an immediate */
    SW_ROCE_TRAILER = 7,  /* the most: padding and ICRC */
    SW_ROCE_MOST = SW_ROCE_HEADERS + SW_DATAGRAM_MTU + SW_ROCE_TRAILER,
    SW_GRH = 40,
    SW_QPN_GROUP = 0xffffff, /* a multicast group's: all queue pairs that are attached */
    /*
     * The UDP port of groups. Not RoCE's 4791, which a kernel that has RoCE devices takes for
     * itself; a queue pair's own datagrams go to a port of its own.
     */
    SW_GROUP_PORT = 4795,
};

/* Where a packet comes from and goes to; IPv4 addresses as ::ffff:a.b.c.d. */
struct sw_roce_path {
    struct in6_addr source, destination;
    uint16_t source_port, destination_port;
    uint8_t traffic_class, hop_limit; /* only for the 40 bytes of a receive */
};

/* A path, and the interface of its own end: the scope of link-local addresses and of groups. */
struct sw_udp_way {
    struct sw_roce_path path;
    uint32_t interface;
};

struct sw_roce_datagram {
    uint32_t destination_qpn, source_qpn, psn, qkey;
    uint32_t immediate; /* as it goes over the wire */
    int has_immediate, solicited;
    const uint8_t *payload;
    uint32_t size;
};

/*
 * Write the headers of a datagram (SW_ROCE_HEADERS are enough room), whose payload, of
 * datagram->size bytes, the caller puts behind them. Returns their size.
 */
uint32_t sw_roce_headers(uint8_t *packet, const struct sw_roce_datagram *datagram);
/* With the payload there: add padding and ICRC. Returns the packet's size. */
uint32_t sw_roce_seal(uint8_t *packet, const struct sw_roce_datagram *datagram,
                      const struct sw_roce_path *path);

/*
 * Read a packet: 0, or EBADMSG for what is no whole UD SEND with the default P_Key, EILSEQ for a
 * wrong ICRC. The payload is that in the packet.
 */
int sw_roce_read(const uint8_t *packet, size_t size, const struct sw_roce_path *path,
                 struct sw_roce_datagram *datagram);

/*
 * What a receive has before the payload: for IPv6 its header in the form of a GRH, for IPv4 20
 * bytes of nothing and the IPv4 header. size: of the packet.
 */
void sw_roce_grh(uint8_t grh[SW_GRH], const struct sw_roce_path *path, size_t size);
/* The other way round: 0, or EINVAL where it is neither. */
int sw_roce_read_grh(const uint8_t grh[SW_GRH], struct sw_roce_path *path);

/* Whether an address is a multicast group's. */
int sw_roce_is_group(const struct in6_addr *address);

#endif
