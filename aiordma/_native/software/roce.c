/* RoCE v2's headers of datagrams: see roce.h. */
#include "roce.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

enum {
    UD_SEND_ONLY = 0x64,
    UD_SEND_ONLY_WITH_IMMEDIATE = 0x65,
    DEFAULT_PKEY = 0xffff,
    BTH = 12,
    DETH = 8,
    IMMEDIATE = 4,
    ICRC = 4,
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

static int is_ipv4(const struct in6_addr *address)
{
    return IN6_IS_ADDR_V4MAPPED(address);
}

int sw_roce_is_group(const struct in6_addr *address)
{
    return address->s6_addr[0] == 0xff || (is_ipv4(address) && address->s6_addr[12] >> 4 == 0xe);
}

/* -- Ethernet's CRC, eight bytes at a time ------------------------------------------- */

static uint32_t crc_of[8][256]; /* [n][byte]: the CRC of a byte and n zero bytes after it */
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;

static void fill_crc(void)
{
    const uint32_t polynomial = 0xedb88320;

    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
        crc_of[0][byte] = crc;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = crc_of[zeros - 1][byte];
            crc_of[zeros][byte] = crc >> 8 ^ crc_of[0][crc & 0xff];
        }
}

static uint32_t add_crc(uint32_t crc, const uint8_t *bytes, size_t size)
{
    for (; size >= 8; bytes += 8, size -= 8) {
        uint32_t low = crc ^ ((uint32_t)bytes[3] << 24 | (uint32_t)bytes[2] << 16 |
                              (uint32_t)bytes[1] << 8 | bytes[0]);
        crc = crc_of[7][low & 0xff] ^ crc_of[6][low >> 8 & 0xff] ^ crc_of[5][low >> 16 & 0xff] ^
              crc_of[4][low >> 24] ^ crc_of[3][bytes[4]] ^ crc_of[2][bytes[5]] ^
              crc_of[1][bytes[6]] ^ crc_of[0][bytes[7]];
    }
    for (; size; bytes++, size--)
        crc = crc >> 8 ^ crc_of[0][(crc ^ *bytes) & 0xff];
    return crc;
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
static uint32_t icrc(const uint8_t *packet, size_t size, const struct sw_roce_path *path)
{
    uint8_t before[8 + IPV6_HEADER + UDP_HEADER + BTH];
    uint8_t *at = before;
    size_t payload = UDP_HEADER + size + ICRC;

    /* InfiniBand's local header, and every field that can change on the way, count as ones. */
    memset(at, 0xff, 8);
    at += 8;
    uint32_t header = ip_header(at, path, payload, 0xff, 0xff);
    if (header == IPV4_HEADER)
        memset(at + 10, 0xff, 2); /* checksum */
    else
        memset(at + 1, 0xff, 3); /* flow label and the rest of the traffic class */
    at += header;
    put_16(at, path->source_port);
    put_16(at + 2, path->destination_port);
    put_16(at + 4, (uint32_t)payload);
    memset(at + 6, 0xff, 2); /* checksum */
    at += UDP_HEADER;
    memcpy(at, packet, BTH);
    at[4] = 0xff; /* congestion marks */
    at += BTH;
    pthread_once(&crc_once, fill_crc);
    uint32_t crc = add_crc(0xffffffff, before, (size_t)(at - before));
    return ~add_crc(crc, packet + BTH, size - BTH);
}

/* -- packets ------------------------------------------------------------------------- */

static uint32_t padding(uint32_t size)
{
    return -size & 3;
}

uint32_t sw_roce_headers(uint8_t *packet, const struct sw_roce_datagram *datagram)
{
    memset(packet, 0, SW_ROCE_HEADERS);
    packet[0] = datagram->has_immediate ? UD_SEND_ONLY_WITH_IMMEDIATE : UD_SEND_ONLY;
    packet[1] = (uint8_t)((datagram->solicited ? 0x80 : 0) | padding(datagram->size) << 4);
    put_16(packet + 2, DEFAULT_PKEY);
    put_24(packet + 5, datagram->destination_qpn);
    put_24(packet + 9, datagram->psn);
    put_32(packet + BTH, datagram->qkey);
    put_24(packet + BTH + 5, datagram->source_qpn);
    if (!datagram->has_immediate)
        return BTH + DETH;
    memcpy(packet + BTH + DETH, &datagram->immediate, IMMEDIATE);
    return BTH + DETH + IMMEDIATE;
}

uint32_t sw_roce_seal(uint8_t *packet, const struct sw_roce_datagram *datagram,
                      const struct sw_roce_path *path)
{
    uint32_t size = BTH + DETH + (datagram->has_immediate ? IMMEDIATE : 0) + datagram->size;
    uint32_t pad = padding(datagram->size);

    memset(packet + size, 0, pad);
    size += pad;
    uint32_t crc = icrc(packet, size, path);
    for (int i = 0; i < ICRC; i++)
        packet[size + i] = (uint8_t)(crc >> 8 * i);
    return size + ICRC;
}

int sw_roce_read(const uint8_t *packet, size_t size, const struct sw_roce_path *path,
                 struct sw_roce_datagram *datagram)
{
    size_t headers = BTH + DETH;

    memset(datagram, 0, sizeof(*datagram));
    if (size < headers + ICRC || size > SW_ROCE_MOST || size % 4)
        return EBADMSG;
    if (packet[0] == UD_SEND_ONLY_WITH_IMMEDIATE)
        headers += IMMEDIATE;
    else if (packet[0] != UD_SEND_ONLY)
        return EBADMSG;
    size_t pad = packet[1] >> 4 & 3;
    /* The low four bits are the headers' version, 0. */
    if (packet[1] & 0xf || get_16(packet + 2) != DEFAULT_PKEY || size < headers + pad + ICRC)
        return EBADMSG;
    if (is_ipv4(&path->source) != is_ipv4(&path->destination))
        return EBADMSG;
    size_t length = size - headers - pad - ICRC;
    if (length > SW_DATAGRAM_MTU)
        return EBADMSG;
    const uint8_t *end = packet + size - ICRC;
    uint32_t crc = (uint32_t)end[3] << 24 | (uint32_t)end[2] << 16 | (uint32_t)end[1] << 8 | end[0];
    if (crc != icrc(packet, size - ICRC, path))
        return EILSEQ;
    datagram->solicited = packet[1] >> 7;
    datagram->destination_qpn = get_24(packet + 5);
    datagram->psn = get_24(packet + 9);
    datagram->qkey = get_32(packet + BTH);
    datagram->source_qpn = get_24(packet + BTH + 5);
    datagram->has_immediate = headers > BTH + DETH;
    if (datagram->has_immediate)
        memcpy(&datagram->immediate, packet + BTH + DETH, IMMEDIATE);
    datagram->payload = packet + headers;
    datagram->size = (uint32_t)length;
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
