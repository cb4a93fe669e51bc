/*
 * RoCE v2's packets, which are the payload of UDP packets (InfiniBand specification, volume 1, 9.2,
 * 9.3 and annex 17), and the first 40 bytes of a datagram's receive. Encoding and decoding have no
 * state. The bytes can come from any host.
 *
 *     BTH 12 | headers that the opcode requires | payload | padding 0 to 3 | ICRC 4
 *
 * The ICRC covers all bytes that do not change on the way. These include the IP and UDP headers,
 * except for the fields that routers and network cards write. A program does not see its IP header.
 * It sends with the identification (IPv4) 0 and "don't fragment" set, because the socket requests
 * that. (If one call sends several packets, the kernel counts from 0.) If a packet has to be fragmented nevertheless, its ICRC is that of the header that it would
 * have had. Other devices choose an identification. So a packet to RoCE's own port is accepted if
 * there is one with which its ICRC is right, which leaves 16 bits of checking.
 */
#ifndef AIORDMA_SOFTWARE_ROCE_H
#define AIORDMA_SOFTWARE_ROCE_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

#include "limits.h"

enum {
    SW_ROCE_HEADERS = 40, /* at most: BTH and the header of an atomic */
    SW_ROCE_ICRC = 4,
    SW_ROCE_TRAILER = 7, /* at most: padding and ICRC */
    SW_ROCE_MOST = SW_ROCE_HEADERS + SW_DATAGRAM_MTU + SW_ROCE_TRAILER,
    SW_GRH = 40,
    SW_QPN_GROUP = 0xffffff, /* a multicast group: all attached queue pairs */
    SW_ROCE_PORT = 4791,     /* it belongs to the kernel if that has RoCE devices */
    SW_GROUP_PORT = 4795,    /* of the software device's groups: see datagram.h */
    SW_HOP_LIMIT = 64,       /* the system's own, for hosts */
};

/* Opcodes of BTH. Those of UC are the ones of RC and SW_UC, as far as UC has them. */
enum sw_roce_opcode {
    SW_RC_SEND_FIRST = 0x00,
    SW_RC_SEND_MIDDLE = 0x01,
    SW_RC_SEND_LAST = 0x02,
    SW_RC_SEND_LAST_IMMEDIATE = 0x03,
    SW_RC_SEND_ONLY = 0x04,
    SW_RC_SEND_ONLY_IMMEDIATE = 0x05,
    SW_RC_WRITE_FIRST = 0x06,
    SW_RC_WRITE_MIDDLE = 0x07,
    SW_RC_WRITE_LAST = 0x08,
    SW_RC_WRITE_LAST_IMMEDIATE = 0x09,
    SW_RC_WRITE_ONLY = 0x0a,
    SW_RC_WRITE_ONLY_IMMEDIATE = 0x0b,
    SW_RC_READ_REQUEST = 0x0c,
    SW_RC_READ_RESPONSE_FIRST = 0x0d,
    SW_RC_READ_RESPONSE_MIDDLE = 0x0e,
    SW_RC_READ_RESPONSE_LAST = 0x0f,
    SW_RC_READ_RESPONSE_ONLY = 0x10,
    SW_RC_ACKNOWLEDGE = 0x11,
    SW_RC_ATOMIC_ACKNOWLEDGE = 0x12,
    SW_RC_COMPARE_SWAP = 0x13,
    SW_RC_FETCH_ADD = 0x14,
    SW_RC_SEND_LAST_INVALIDATE = 0x16,
    SW_RC_SEND_ONLY_INVALIDATE = 0x17,
    SW_UC = 0x20,
    SW_UD_SEND_ONLY = 0x64,
    SW_UD_SEND_ONLY_IMMEDIATE = 0x65,
};

/* What an opcode says of its packet. */
enum {
    SW_IS_KNOWN = 1,
    SW_IS_SEND = 2,
    SW_IS_WRITE = 4,
    SW_IS_ANSWER = 8, /* READ responses and acknowledgements */
    SW_IS_FIRST = 16, /* of its message; an "only" is both */
    SW_IS_LAST = 32,
    SW_HAS_DETH = 64,
    SW_HAS_RETH = 128,
    SW_HAS_AETH = 256,
    SW_HAS_ATOMIC = 512,
    SW_HAS_ATOMIC_ANSWER = 1024,
    SW_HAS_IMMEDIATE = 2048,
    SW_HAS_INVALIDATE = 4096,
    SW_HAS_PAYLOAD = 8192, /* maybe of no bytes */
};

/* Acknowledgements (AETH's syndrome): the kind, and five bits whose meaning depends on it. */
enum {
    SW_ACKNOWLEDGED = 0x00,
    SW_NOT_READY = 0x20, /* RNR NAK: with a code of the time to wait */
    SW_REFUSED = 0x60,   /* NAK: with one of these codes */
    SW_KIND = 0x60,
    SW_OUT_OF_SEQUENCE = SW_REFUSED | 0,
    SW_INVALID_REQUEST = SW_REFUSED | 1,
    SW_ACCESS_ERROR = SW_REFUSED | 2,
    SW_OPERATION_ERROR = SW_REFUSED | 3,
    SW_NO_CREDITS = 0x1f, /* with SW_ACKNOWLEDGED: the responder does not count receives */
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

/* A packet's headers, those that its opcode has, and its payload. */
struct sw_roce_packet {
    enum sw_roce_opcode opcode;
    int solicited, acknowledge; /* the sender requests an acknowledgement */
    uint32_t destination_qpn, psn;
    uint32_t qkey, source_qpn; /* DETH */
    uint64_t address;          /* RETH, and AtomicETH */
    uint32_t rkey, length;
    uint64_t swap_add, compare; /* AtomicETH */
    uint8_t syndrome;           /* AETH */
    uint32_t messages;          /* ... the MSN */
    uint64_t original;          /* AtomicAckETH */
    uint32_t immediate;         /* in the order of the wire */
    uint32_t invalidated;       /* IETH */
    const uint8_t *payload;
    uint32_t size;
};

/* SW_IS_KNOWN and others; 0: there is no such opcode. */
unsigned int sw_roce_parts(uint8_t opcode);

/*
 * Write the headers of a packet, at most SW_ROCE_HEADERS bytes. The caller puts the payload, of
 * packet->size bytes, after them. Returns their size.
 */
uint32_t sw_roce_headers(uint8_t *bytes, const struct sw_roce_packet *packet);
/*
 * Add padding and ICRC after headers and payload, of `size` bytes. Returns the packet's size.
 * identification: that of its IPv4 header, 0 unless the kernel numbers several packets of one call.
 */
uint32_t sw_roce_seal(uint8_t *bytes, uint32_t size, const struct sw_roce_path *path,
                      uint32_t identification);

/*
 * Read a packet: 0, EBADMSG if it is not a whole packet of a known opcode with the default P_Key,
 * or EILSEQ for a wrong ICRC. The payload stays where it is.
 */
int sw_roce_read(const uint8_t *bytes, size_t size, const struct sw_roce_path *path,
                 struct sw_roce_packet *packet);

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
