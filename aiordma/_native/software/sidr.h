/*
 * Requests and replies that find the queue pair of a UDP port: InfiniBand's service ID resolution
 * (InfiniBand specification, volume 1, 12.11 and 13.4), with the IP addresses in the private data
 * as in annex 11. Encoding and decoding have no state.
 */
#ifndef AIORDMA_SOFTWARE_SIDR_H
#define AIORDMA_SOFTWARE_SIDR_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SW_MAD = 256,
    SW_SIDR_REQUEST_DATA = 180,
    SW_SIDR_REPLY_DATA = 136,
    SW_QPN_SERVICES = 1,
};
#define SW_QKEY_SERVICES 0x80010000u

enum sw_sidr_status {
    SW_SIDR_FOUND,
    SW_SIDR_NOBODY, /* no such service */
    SW_SIDR_REFUSED,
};

struct sw_sidr_request {
    uint64_t transaction;
    uint32_t number;
    struct in6_addr source, destination; /* IPv4 as ::ffff:a.b.c.d */
    uint16_t source_port, port;
    uint8_t private_data[SW_SIDR_REQUEST_DATA];
};

struct sw_sidr_reply {
    uint64_t transaction;
    uint32_t number;
    uint8_t status;
    uint16_t port;
    uint32_t qp_num, qkey;
    uint8_t private_data[SW_SIDR_REPLY_DATA];
};

void sw_sidr_write_request(uint8_t mad[SW_MAD], const struct sw_sidr_request *request);
void sw_sidr_write_reply(uint8_t mad[SW_MAD], const struct sw_sidr_reply *reply);
/* 0, or EBADMSG for any other message. */
int sw_sidr_read_request(const uint8_t *mad, size_t size, struct sw_sidr_request *request);
int sw_sidr_read_reply(const uint8_t *mad, size_t size, struct sw_sidr_reply *reply);

#endif
