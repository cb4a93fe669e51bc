/* Encoding and decoding of service ID resolution: see sidr.h. */
#include "sidr.h"

#include <errno.h>
#include <string.h>

/* The header of a management datagram, and the fields after it in the two known messages. */
enum {
    MAD_VERSION = 1,
    CM_CLASS = 7,
    CM_VERSION = 2,
    METHOD_SEND = 3,
    SIDR_REQUEST = 0x17,
    SIDR_REPLY = 0x18,
    AT_TRANSACTION = 8,
    AT_ATTRIBUTE = 16,
    AT_NUMBER = 24,
    AT_REQUEST_PKEY = 28,
    AT_REQUEST_SERVICE = 32,
    AT_REQUEST_DATA = 40,
    AT_REPLY_STATUS = 28,
    AT_REPLY_QPN = 32,
    AT_REPLY_SERVICE = 36,
    AT_REPLY_QKEY = 44,
    AT_REPLY_DATA = 120,
    /* In the private data: the addresses, before the program's own data. */
    AT_IP_VERSION = 1,
    AT_SOURCE_PORT = 2,
    AT_SOURCE = 4,
    AT_DESTINATION = 20,
    ADDRESSES = 36,
    DEFAULT_PKEY = 0xffff,
};

/* The service ID of the UDP port space. The port is in the low 16 bits. */
#define UDP_SERVICES 0x0000000001110000u

static void put(uint8_t *to, uint64_t value, int size)
{
    while (size--) {
        to[size] = (uint8_t)value;
        value >>= 8;
    }
}

static uint64_t get(const uint8_t *from, int size)
{
    uint64_t value = 0;

    for (int i = 0; i < size; i++)
        value = value << 8 | from[i];
    return value;
}

static void write_header(uint8_t *mad, int attribute, uint64_t transaction, uint32_t number)
{
    memset(mad, 0, SW_MAD);
    mad[0] = MAD_VERSION;
    mad[1] = CM_CLASS;
    mad[2] = CM_VERSION;
    mad[3] = METHOD_SEND;
    put(mad + AT_TRANSACTION, transaction, 8);
    put(mad + AT_ATTRIBUTE, (uint64_t)attribute, 2);
    put(mad + AT_NUMBER, number, 4);
}

static int is_ours(const uint8_t *mad, size_t size, uint64_t attribute)
{
    return size == SW_MAD && mad[0] == MAD_VERSION && mad[1] == CM_CLASS && mad[2] == CM_VERSION &&
           mad[3] == METHOD_SEND && get(mad + AT_ATTRIBUTE, 2) == attribute;
}

static int is_ipv4(const struct in6_addr *address)
{
    return IN6_IS_ADDR_V4MAPPED(address);
}

static void put_address(uint8_t *to, const struct in6_addr *address)
{
    if (is_ipv4(address))
        memcpy(to + 12, address->s6_addr + 12, 4); /* the last four of 16 bytes */
    else
        memcpy(to, address, 16);
}

static void get_address(const uint8_t *from, int version, struct in6_addr *address)
{
    memset(address, 0, sizeof(*address));
    if (version == 6) {
        memcpy(address, from, 16);
        return;
    }
    memset(address->s6_addr + 10, 0xff, 2);
    memcpy(address->s6_addr + 12, from + 12, 4);
}

void sw_sidr_write_request(uint8_t mad[SW_MAD], const struct sw_sidr_request *request)
{
    uint8_t *data = mad + AT_REQUEST_DATA;

    write_header(mad, SIDR_REQUEST, request->transaction, request->number);
    put(mad + AT_REQUEST_PKEY, DEFAULT_PKEY, 2);
    put(mad + AT_REQUEST_SERVICE, UDP_SERVICES | request->port, 8);
    data[AT_IP_VERSION] = (is_ipv4(&request->source) ? 4 : 6) << 4;
    put(data + AT_SOURCE_PORT, request->source_port, 2);
    put_address(data + AT_SOURCE, &request->source);
    put_address(data + AT_DESTINATION, &request->destination);
    memcpy(data + ADDRESSES, request->private_data, SW_SIDR_REQUEST_DATA);
}

int sw_sidr_read_request(const uint8_t *mad, size_t size, struct sw_sidr_request *request)
{
    const uint8_t *data = mad + AT_REQUEST_DATA;

    if (!is_ours(mad, size, SIDR_REQUEST) || get(mad + AT_REQUEST_PKEY, 2) != DEFAULT_PKEY)
        return EBADMSG;
    uint64_t service = get(mad + AT_REQUEST_SERVICE, 8);
    int version = data[AT_IP_VERSION] >> 4;
    if ((service & ~(uint64_t)0xffff) != UDP_SERVICES || data[0] || (version != 4 && version != 6))
        return EBADMSG;
    request->transaction = get(mad + AT_TRANSACTION, 8);
    request->number = (uint32_t)get(mad + AT_NUMBER, 4);
    request->port = (uint16_t)service;
    request->source_port = (uint16_t)get(data + AT_SOURCE_PORT, 2);
    get_address(data + AT_SOURCE, version, &request->source);
    get_address(data + AT_DESTINATION, version, &request->destination);
    memcpy(request->private_data, data + ADDRESSES, SW_SIDR_REQUEST_DATA);
    return 0;
}

void sw_sidr_write_reply(uint8_t mad[SW_MAD], const struct sw_sidr_reply *reply)
{
    write_header(mad, SIDR_REPLY, reply->transaction, reply->number);
    mad[AT_REPLY_STATUS] = reply->status;
    put(mad + AT_REPLY_QPN, reply->qp_num, 3);
    put(mad + AT_REPLY_SERVICE, UDP_SERVICES | reply->port, 8);
    put(mad + AT_REPLY_QKEY, reply->qkey, 4);
    memcpy(mad + AT_REPLY_DATA, reply->private_data, SW_SIDR_REPLY_DATA);
}

int sw_sidr_read_reply(const uint8_t *mad, size_t size, struct sw_sidr_reply *reply)
{
    if (!is_ours(mad, size, SIDR_REPLY))
        return EBADMSG;
    uint64_t service = get(mad + AT_REPLY_SERVICE, 8);
    if ((service & ~(uint64_t)0xffff) != UDP_SERVICES)
        return EBADMSG;
    reply->transaction = get(mad + AT_TRANSACTION, 8);
    reply->number = (uint32_t)get(mad + AT_NUMBER, 4);
    reply->status = mad[AT_REPLY_STATUS];
    reply->port = (uint16_t)service;
    reply->qp_num = (uint32_t)get(mad + AT_REPLY_QPN, 3);
    reply->qkey = (uint32_t)get(mad + AT_REPLY_QKEY, 4);
    memcpy(reply->private_data, mad + AT_REPLY_DATA, SW_SIDR_REPLY_DATA);
    return 0;
}
