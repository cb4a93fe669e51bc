/* RoCE v2's packets: see roce.h. */
#include "roce.h"

#include <errno.h>
#include <string.h>

#include "crc32.h"

enum {
    DEFAULT_PKEY = 0xffff,
    BTH = 12,
    DETH = 8,
    RETH = 16,
    AETH = 4,
    ATOMIC = 28,
    ATOMIC_ANSWER = 8,
    IMMEDIATE = 4,
    INVALIDATE = 4,
    ICRC = SW_ROCE_ICRC,
    IPV4_HEADER = 20,
    IPV6_HEADER = 40,
    UDP_HEADER = 8,
    IP_UDP = 17,   /* the number of the protocol */
    GRH_NEXT = 27, /* InfiniBand's number, in a GRH that is not an IPv6 header */
    DONT_FRAGMENT = 0x40,
};

static void put_16(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 8);
    to[1] = (uint8_t)value;
}

static void put_24(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 16);
    put_16(to + 1, value);
}

static void put_32(uint8_t *to, uint32_t value)
{
    put_16(to, value >> 16);
    put_16(to + 2, value);
}

static void put_64(uint8_t *to, uint64_t value)
{
    put_32(to, (uint32_t)(value >> 32));
    put_32(to + 4, (uint32_t)value);
}

static uint32_t get_16(const uint8_t *from)
{
    return (uint32_t)from[0] << 8 | from[1];
}

static uint32_t get_24(const uint8_t *from)
{
    return (uint32_t)from[0] << 16 | get_16(from + 1);
}

static uint32_t get_32(const uint8_t *from)
{
    return get_16(from) << 16 | get_16(from + 2);
}

static uint64_t get_64(const uint8_t *from)
{
    return (uint64_t)get_32(from) << 32 | get_32(from + 4);
}

static int is_ipv4(const struct in6_addr *address)
{
    return IN6_IS_ADDR_V4MAPPED(address);
}

int sw_roce_is_group(const struct in6_addr *address)
{
    return address->s6_addr[0] == 0xff || (is_ipv4(address) && address->s6_addr[12] >> 4 == 0xe);
}

/* -- the IP header, as far as it is known -------------------------------------------- */

/* Write an IP header and return its size. The checksum is 0. payload: including the UDP header. */
static uint32_t ip_header(uint8_t *header, const struct sw_roce_path *path, size_t payload,
                          uint8_t traffic_class, uint8_t hop_limit)
{
    memset(header, 0, IPV6_HEADER);
    if (is_ipv4(&path->source)) {
        header[0] = 0x45;
        header[1] = traffic_class;
        put_16(header + 2, (uint32_t)(IPV4_HEADER + payload));
        header[6] = DONT_FRAGMENT;
        header[8] = hop_limit;
        header[9] = IP_UDP;
        memcpy(header + 12, path->source.s6_addr + 12, 4);
        memcpy(header + 16, path->destination.s6_addr + 12, 4);
        return IPV4_HEADER;
    }
    header[0] = (uint8_t)(0x60 | traffic_class >> 4);
    header[1] = (uint8_t)(traffic_class << 4);
    put_16(header + 4, (uint32_t)payload);
    header[6] = IP_UDP;
    header[7] = hop_limit;
    memcpy(header + 8, &path->source, 16);
    memcpy(header + 24, &path->destination, 16);
    return IPV6_HEADER;
}

/* size: that of the packet without its ICRC. */
static uint32_t icrc(const uint8_t *packet, size_t size, const struct sw_roce_path *path,
                     uint32_t identification)
{
    uint8_t before[8 + IPV6_HEADER + UDP_HEADER + BTH];
    uint8_t *at = before;
    size_t payload = UDP_HEADER + size + ICRC;

    /* InfiniBand's local header, and every field that can change on the way, count as ones. */
    memset(at, 0xff, 8);
    at += 8;
    uint32_t header = ip_header(at, path, payload, 0xff, 0xff);
    if (header == IPV4_HEADER) {
        put_16(at + 4, identification);
        memset(at + 10, 0xff, 2); /* checksum */
    } else {
        memset(at + 1, 0xff, 3); /* flow label and the rest of the traffic class */
    }
    at += header;
    put_16(at, path->source_port);
    put_16(at + 2, path->destination_port);
    put_16(at + 4, (uint32_t)payload);
    memset(at + 6, 0xff, 2); /* checksum */
    at += UDP_HEADER;
    memcpy(at, packet, BTH);
    at[4] = 0xff; /* congestion marks */
    at += BTH;
    uint32_t crc = sw_crc32(0xffffffff, before, (size_t)(at - before));
    return ~sw_crc32(crc, packet + BTH, size - BTH);
}

/*
 * Whether an IPv4 packet's ICRC is right with another identification than 0. A CRC is linear: each
 * of the 16 bits changes it by a value that depends on the number of bytes after it only. So the
 * difference must be the sum of some of these values. `basis` are sums of them, each with a highest
 * bit that no other one has.
 */
struct identifications {
    size_t size; /* of the packets */
    uint32_t basis[16];
};

static void find_basis(struct identifications *all, size_t size)
{
    /* From the identification on: the rest of IPv4's header, UDP's, and the packet. */
    const size_t after = IPV4_HEADER - 6 + UDP_HEADER + size;
    static const uint8_t zeros[256];

    all->size = size;
    for (int bit = 0; bit < 16; bit++) {
        const uint8_t identification[2] = {(uint8_t)(1 << bit >> 8), (uint8_t)(1 << bit)};
        uint32_t change = sw_crc32(0, identification, sizeof(identification));
        for (size_t left = after; left;) {
            size_t now = left < sizeof(zeros) ? left : sizeof(zeros);
            change = sw_crc32(change, zeros, now);
            left -= now;
        }
        for (int i = 0; i < bit; i++)
            if ((change ^ all->basis[i]) < change)
                change ^= all->basis[i];
        /* Keep the highest ones first, so that one pass reduces a value. */
        int place = bit;
        for (; place && all->basis[place - 1] < change; place--)
            all->basis[place] = all->basis[place - 1];
        all->basis[place] = change;
    }
}

static int has_identification(uint32_t difference, size_t size)
{
    enum { KNOWN = 64 };
    static _Thread_local struct identifications known[KNOWN];
    struct identifications *all = &known[size / 4 % KNOWN];

    if (all->size != size)
        find_basis(all, size);
    for (int i = 0; i < 16; i++)
        if ((difference ^ all->basis[i]) < difference)
            difference ^= all->basis[i];
    return !difference;
}

/* -- packets ------------------------------------------------------------------------- */

enum {
    FIRST = SW_IS_KNOWN | SW_HAS_PAYLOAD | SW_IS_FIRST,
    MIDDLE = SW_IS_KNOWN | SW_HAS_PAYLOAD,
    LAST = SW_IS_KNOWN | SW_HAS_PAYLOAD | SW_IS_LAST,
    ONLY = FIRST | LAST,
    ANSWER = SW_IS_ANSWER | SW_HAS_AETH,
};

unsigned int sw_roce_parts(uint8_t opcode)
{
    static const uint16_t reliable[] = {
        [SW_RC_SEND_FIRST] = SW_IS_SEND | FIRST,
        [SW_RC_SEND_MIDDLE] = SW_IS_SEND | MIDDLE,
        [SW_RC_SEND_LAST] = SW_IS_SEND | LAST,
        [SW_RC_SEND_LAST_IMMEDIATE] = SW_IS_SEND | LAST | SW_HAS_IMMEDIATE,
        [SW_RC_SEND_ONLY] = SW_IS_SEND | ONLY,
        [SW_RC_SEND_ONLY_IMMEDIATE] = SW_IS_SEND | ONLY | SW_HAS_IMMEDIATE,
        [SW_RC_WRITE_FIRST] = SW_IS_WRITE | FIRST | SW_HAS_RETH,
        [SW_RC_WRITE_MIDDLE] = SW_IS_WRITE | MIDDLE,
        [SW_RC_WRITE_LAST] = SW_IS_WRITE | LAST,
        [SW_RC_WRITE_LAST_IMMEDIATE] = SW_IS_WRITE | LAST | SW_HAS_IMMEDIATE,
        [SW_RC_WRITE_ONLY] = SW_IS_WRITE | ONLY | SW_HAS_RETH,
        [SW_RC_WRITE_ONLY_IMMEDIATE] = SW_IS_WRITE | ONLY | SW_HAS_RETH | SW_HAS_IMMEDIATE,
        [SW_RC_READ_REQUEST] = SW_IS_KNOWN | SW_HAS_RETH,
        [SW_RC_READ_RESPONSE_FIRST] = ANSWER | FIRST,
        [SW_RC_READ_RESPONSE_MIDDLE] = SW_IS_ANSWER | MIDDLE,
        [SW_RC_READ_RESPONSE_LAST] = ANSWER | LAST,
        [SW_RC_READ_RESPONSE_ONLY] = ANSWER | ONLY,
        [SW_RC_ACKNOWLEDGE] = ANSWER | SW_IS_KNOWN,
        [SW_RC_ATOMIC_ACKNOWLEDGE] = ANSWER | SW_IS_KNOWN | SW_HAS_ATOMIC_ANSWER,
        [SW_RC_COMPARE_SWAP] = SW_IS_KNOWN | SW_HAS_ATOMIC,
        [SW_RC_FETCH_ADD] = SW_IS_KNOWN | SW_HAS_ATOMIC,
        [SW_RC_SEND_LAST_INVALIDATE] = SW_IS_SEND | LAST | SW_HAS_INVALIDATE,
        [SW_RC_SEND_ONLY_INVALIDATE] = SW_IS_SEND | ONLY | SW_HAS_INVALIDATE,
    };

    if (opcode == SW_UD_SEND_ONLY)
        return SW_IS_SEND | ONLY | SW_HAS_DETH;
    if (opcode == SW_UD_SEND_ONLY_IMMEDIATE)
        return SW_IS_SEND | ONLY | SW_HAS_DETH | SW_HAS_IMMEDIATE;
    if (opcode >= SW_UC && opcode <= (SW_UC | SW_RC_WRITE_ONLY_IMMEDIATE))
        return reliable[opcode - SW_UC];
    return opcode <= SW_RC_SEND_ONLY_INVALIDATE ? reliable[opcode] : 0;
}

static uint32_t size_of_headers(unsigned int parts)
{
    return (uint32_t)(BTH + (parts & SW_HAS_DETH ? DETH : 0) + (parts & SW_HAS_RETH ? RETH : 0) +
                      (parts & SW_HAS_AETH ? AETH : 0) + (parts & SW_HAS_ATOMIC ? ATOMIC : 0) +
                      (parts & SW_HAS_ATOMIC_ANSWER ? ATOMIC_ANSWER : 0) +
                      (parts & SW_HAS_IMMEDIATE ? IMMEDIATE : 0) +
                      (parts & SW_HAS_INVALIDATE ? INVALIDATE : 0));
}

static uint32_t padding(uint32_t size)
{
    return -size & 3;
}

uint32_t sw_roce_headers(uint8_t *bytes, const struct sw_roce_packet *packet)
{
    unsigned int parts = sw_roce_parts((uint8_t)packet->opcode);
    uint8_t *at = bytes + BTH;

    memset(bytes, 0, SW_ROCE_HEADERS);
    bytes[0] = (uint8_t)packet->opcode;
    bytes[1] = (uint8_t)((packet->solicited ? 0x80 : 0) | padding(packet->size) << 4);
    put_16(bytes + 2, DEFAULT_PKEY);
    put_24(bytes + 5, packet->destination_qpn);
    bytes[8] = packet->acknowledge ? 0x80 : 0;
    put_24(bytes + 9, packet->psn);
    if (parts & SW_HAS_DETH) {
        put_32(at, packet->qkey);
        put_24(at + 5, packet->source_qpn);
        at += DETH;
    }
    if (parts & SW_HAS_RETH) {
        put_64(at, packet->address);
        put_32(at + 8, packet->rkey);
        put_32(at + 12, packet->length);
        at += RETH;
    }
    if (parts & SW_HAS_ATOMIC) {
        put_64(at, packet->address);
        put_32(at + 8, packet->rkey);
        put_64(at + 12, packet->swap_add);
        put_64(at + 20, packet->compare);
        at += ATOMIC;
    }
    if (parts & SW_HAS_AETH) {
        at[0] = packet->syndrome;
        put_24(at + 1, packet->messages);
        at += AETH;
    }
    if (parts & SW_HAS_ATOMIC_ANSWER) {
        put_64(at, packet->original);
        at += ATOMIC_ANSWER;
    }
    if (parts & SW_HAS_IMMEDIATE) {
        memcpy(at, &packet->immediate, IMMEDIATE);
        at += IMMEDIATE;
    }
    if (parts & SW_HAS_INVALIDATE) {
        put_32(at, packet->invalidated);
        at += INVALIDATE;
    }
    return (uint32_t)(at - bytes);
}

uint32_t sw_roce_seal(uint8_t *bytes, uint32_t size, const struct sw_roce_path *path,
                      uint32_t identification)
{
    uint32_t pad = padding(size); /* headers are a multiple of four */

    memset(bytes + size, 0, pad);
    size += pad;
    uint32_t crc = icrc(bytes, size, path, identification);
    for (int i = 0; i < ICRC; i++)
        bytes[size + i] = (uint8_t)(crc >> 8 * i);
    return size + ICRC;
}

static void read_headers(const uint8_t *at, unsigned int parts, struct sw_roce_packet *packet)
{
    if (parts & SW_HAS_DETH) {
        packet->qkey = get_32(at);
        packet->source_qpn = get_24(at + 5);
        at += DETH;
    }
    if (parts & SW_HAS_RETH) {
        packet->address = get_64(at);
        packet->rkey = get_32(at + 8);
        packet->length = get_32(at + 12);
        at += RETH;
    }
    if (parts & SW_HAS_ATOMIC) {
        packet->address = get_64(at);
        packet->rkey = get_32(at + 8);
        packet->swap_add = get_64(at + 12);
        packet->compare = get_64(at + 20);
        at += ATOMIC;
    }
    if (parts & SW_HAS_AETH) {
        packet->syndrome = at[0];
        packet->messages = get_24(at + 1);
        at += AETH;
    }
    if (parts & SW_HAS_ATOMIC_ANSWER) {
        packet->original = get_64(at);
        at += ATOMIC_ANSWER;
    }
    if (parts & SW_HAS_IMMEDIATE)
        memcpy(&packet->immediate, at, IMMEDIATE);
    if (parts & SW_HAS_INVALIDATE)
        packet->invalidated = get_32(at);
}

static int is_intact(const uint8_t *bytes, size_t size, const struct sw_roce_path *path)
{
    const uint8_t *end = bytes + size - ICRC;
    uint32_t crc = (uint32_t)end[3] << 24 | (uint32_t)end[2] << 16 | (uint32_t)end[1] << 8 | end[0];
    uint32_t difference = crc ^ icrc(bytes, size - ICRC, path, 0);

    if (!difference)
        return 1;
    return path->destination_port == SW_ROCE_PORT && is_ipv4(&path->source) &&
           has_identification(difference, size - ICRC);
}

int sw_roce_read(const uint8_t *bytes, size_t size, const struct sw_roce_path *path,
                 struct sw_roce_packet *packet)
{
    memset(packet, 0, sizeof(*packet));
    if (size < BTH + ICRC || size > SW_ROCE_MOST || size % 4)
        return EBADMSG;
    unsigned int parts = sw_roce_parts(bytes[0]);
    size_t headers = size_of_headers(parts), pad = bytes[1] >> 4 & 3;
    /* The low four bits are the headers' version, 0. */
    if (!parts || bytes[1] & 0xf || get_16(bytes + 2) != DEFAULT_PKEY ||
        size < headers + pad + ICRC)
        return EBADMSG;
    if (is_ipv4(&path->source) != is_ipv4(&path->destination))
        return EBADMSG;
    size_t length = size - headers - pad - ICRC;
    /* A request that carries bytes which it should not have is the responder's to refuse. */
    if (length > SW_DATAGRAM_MTU || (length && (parts & SW_IS_ANSWER) && !(parts & SW_HAS_PAYLOAD)))
        return EBADMSG;
    if (!is_intact(bytes, size, path))
        return EILSEQ;
    packet->opcode = bytes[0];
    packet->solicited = bytes[1] >> 7;
    packet->acknowledge = bytes[8] >> 7;
    packet->destination_qpn = get_24(bytes + 5);
    packet->psn = get_24(bytes + 9);
    read_headers(bytes + BTH, parts, packet);
    packet->payload = bytes + headers;
    packet->size = (uint32_t)length;
    return 0;
}

/* -- the bytes before the payload of a receive --------------------------------------- */

static uint32_t ipv4_sum(const uint8_t *header)
{
    uint32_t sum = 0;

    for (int i = 0; i < IPV4_HEADER; i += 2)
        sum += get_16(header + i);
    sum = (sum & 0xffff) + (sum >> 16);
    return (sum & 0xffff) + (sum >> 16);
}

void sw_roce_grh(uint8_t grh[SW_GRH], const struct sw_roce_path *path, size_t size)
{
    uint8_t header[IPV6_HEADER];
    uint32_t length =
        ip_header(header, path, UDP_HEADER + size, path->traffic_class, path->hop_limit);

    if (length == IPV4_HEADER)
        put_16(header + 10, ~ipv4_sum(header));
    memset(grh, 0, SW_GRH);
    memcpy(grh + SW_GRH - length, header, length);
}

static void map_ipv4(struct in6_addr *to, const uint8_t *address)
{
    memset(to, 0, sizeof(*to));
    memset(to->s6_addr + 10, 0xff, 2);
    memcpy(to->s6_addr + 12, address, 4);
}

int sw_roce_read_grh(const uint8_t grh[SW_GRH], struct sw_roce_path *path)
{
    const uint8_t *ipv4 = grh + SW_GRH - IPV4_HEADER;

    memset(path, 0, sizeof(*path));
    /* An IPv6 address can look like an IPv4 header, but it hardly has a valid checksum. The bytes
     * before an IPv4 header can have any value. */
    if (ipv4[0] == 0x45 && ipv4_sum(ipv4) == 0xffff) {
        map_ipv4(&path->source, ipv4 + 12);
        map_ipv4(&path->destination, ipv4 + 16);
        path->traffic_class = ipv4[1];
        path->hop_limit = ipv4[8];
        return 0;
    }
    if (grh[0] >> 4 != 6 || (grh[6] != IP_UDP && grh[6] != GRH_NEXT))
        return EINVAL;
    memcpy(&path->source, grh + 8, 16);
    memcpy(&path->destination, grh + 24, 16);
    path->traffic_class = (uint8_t)(grh[0] << 4 | grh[1] >> 4);
    path->hop_limit = grh[7];
    return 0;
}
