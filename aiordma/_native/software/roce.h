/*
 * Datagrams as the payload of a UDP packet, with RoCE v2's headers (InfiniBand specification,
 * volume 1, 9.2, 9.3 and annex 17), and the first 40 bytes of a receive. Encoding and decoding have
 * no state. The bytes can come from any host.
 *
 *     BTH 12 | DETH 8 | immediate data 0 or 4 | payload | padding 0 to 3 | ICRC 4
 *
 * The ICRC covers all bytes that do not change on the way. These include the IP and UDP headers,
 * except for the fields that routers and network cards write. A program does not see its IP header.
 * Its identification (IPv4) is assumed to be 0, and "don't fragment" to be set. Linux sends such
 * headers if the socket requests it. If a packet has to be fragmented nevertheless, its ICRC is
 * that of the header that it would have had. Both sides are software devices, so they agree.
 */
#ifndef AIORDMA_SOFTWARE_ROCE_H
#define AIORDMA_SOFTWARE_ROCE_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

#include "limits.h"

enum {
    SW_ROCE_HEADERS = 24, /* at most; 20 without immediate data */
    SW_ROCE_TRAILER = 7,  /* at most: padding and ICRC */
    SW_ROCE_MOST = SW_ROCE_HEADERS + SW_DATAGRAM_MTU + SW_ROCE_TRAILER,
    SW_GRH = 40,
    SW_QPN_GROUP = 0xffffff, /* a multicast group: all attached queue pairs */
    /*
     * The UDP port of groups. RoCE's port, 4791, belongs to the kernel if it has RoCE devices.
     * Datagrams to one queue pair go to that queue pair's port.
     */
    SW_GROUP_PORT = 4795,
};

/* Source and destination of a packet. IPv4 addresses are ::ffff:a.b.c.d. */
struct sw_roce_path {
    struct in6_addr source, destination;
    uint16_t source_port, destination_port;
    uint8_t traffic_class, hop_limit; /* only for the 40 bytes of a receive */
};

/* A path, and the interface of the local address: the scope of link-local addresses and groups. */
struct sw_udp_route {
    struct sw_roce_path path;
    uint32_t interface;
};

struct sw_roce_datagram {
    uint32_t destination_qpn, source_qpn, psn, qkey;
    uint32_t immediate; /* in the order of the wire */
    int has_immediate, solicited;
    const uint8_t *payload;
    uint32_t size;
};

/*
 * Write the headers of a datagram, at most SW_ROCE_HEADERS bytes. The caller puts the payload, of
 * datagram->size bytes, after them. Returns their size.
 */
uint32_t sw_roce_headers(uint8_t *packet, const struct sw_roce_datagram *datagram);
/* Add padding and ICRC after the payload. Returns the packet's size. */
uint32_t sw_roce_seal(uint8_t *packet, const struct sw_roce_datagram *datagram,
                      const struct sw_roce_path *path);

/*
 * Read a packet: 0, EBADMSG if it is not a whole UD SEND with the default P_Key, or EILSEQ for a
 * wrong ICRC. The payload stays in the packet.
 */
int sw_roce_read(const uint8_t *packet, size_t size, const struct sw_roce_path *path,
                 struct sw_roce_datagram *datagram);

/*
 * Write the bytes before the payload of a receive. For IPv6 they are its header in the form of a
 * GRH, for IPv4 they are 20 zero bytes and the IPv4 header. size: that of the packet.
 */
void sw_roce_grh(uint8_t grh[SW_GRH], const struct sw_roce_path *path, size_t size);
/* Read these bytes: 0, or EINVAL if they are neither. */
int sw_roce_read_grh(const uint8_t grh[SW_GRH], struct sw_roce_path *path);

/* Whether an address is a multicast address. */
int sw_roce_is_group(const struct in6_addr *address);

#endif
