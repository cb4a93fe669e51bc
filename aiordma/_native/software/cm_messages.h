/*
 * The messages of InfiniBand's connection manager (InfiniBand specification, volume 1, 12.6, 12.11
 * and 13.4), with the IP addresses in the private data as in annex 11: those that make and end a
 * connection, and those that find the queue pair of a UDP port (service ID resolution, SIDR).
 * Encoding and decoding have no state. The bytes can come from any host.
 */
#ifndef AIORDMA_SOFTWARE_CM_MESSAGES_H
#define AIORDMA_SOFTWARE_CM_MESSAGES_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SW_MAD = 256,
    SW_SIDR_REQUEST_DATA = 180,
    SW_SIDR_REPLY_DATA = 136,
    SW_CM_REQUEST_DATA = 56, /* of a program; the addresses come before it */
    SW_CM_REPLY_DATA = 196,
    SW_CM_REJECT_DATA = 148,
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

enum sw_cm_kind {
    SW_CM_REQ = 0x10, /* connect */
    SW_CM_MRA = 0x11, /* the program has the REQ, and takes its time */
    SW_CM_REJ = 0x12,
    SW_CM_REP = 0x13,  /* accept */
    SW_CM_RTU = 0x14,  /* the REP has arrived */
    SW_CM_DREQ = 0x15, /* disconnect */
    SW_CM_DREP = 0x16, /* the DREQ has arrived */
    SW_SIDR_REQ = 0x17,
    SW_SIDR_REP = 0x18,
};

/* Which message an MRA or a REJ is about. */
enum sw_cm_about { SW_CM_ABOUT_REQ, SW_CM_ABOUT_REP, SW_CM_ABOUT_OTHER };

/* Reasons of a REJ, which are the status of the program's event. */
enum sw_cm_reason {
    SW_CM_NO_RESOURCES = 3,
    SW_CM_TIMEOUT = 4,
    SW_CM_NO_SERVICE = 8,
    SW_CM_BY_PROGRAM = 28,
};

/* A message, with the fields that its kind has. */
struct sw_cm_message {
    enum sw_cm_kind kind;
    uint64_t transaction;
    uint32_t sender, receiver; /* their numbers for the connection: communication IDs */
    uint32_t qp_num;           /* REQ and REP: the sender's; DREQ: the receiver's */
    uint32_t psn;              /* REQ and REP: with which the receiver is to begin */
    uint8_t responder_resources, initiator_depth, rnr_retry_count, flow_control, is_shared;
    /* of a REQ: */
    uint8_t retry_count, ack_timeout, mtu, traffic_class;
    uint64_t guid; /* and of a REP; of a REJ that withdraws a REQ, the REQ's */
    struct in6_addr source, destination; /* IPv4 as ::ffff:a.b.c.d */
    uint16_t source_port, port;
    uint8_t about, timeout;                 /* MRA and REJ; MRA: 4.096 us * 2^timeout */
    uint16_t reason;                        /* REJ */
    uint8_t private_data[SW_CM_REPLY_DATA]; /* as many bytes as its kind has, or none */
};

void sw_cm_write(uint8_t mad[SW_MAD], const struct sw_cm_message *message);
/* 0, or EBADMSG for any other message. */
int sw_cm_read(const uint8_t *mad, size_t size, struct sw_cm_message *message);

void sw_sidr_write_request(uint8_t mad[SW_MAD], const struct sw_sidr_request *request);
void sw_sidr_write_reply(uint8_t mad[SW_MAD], const struct sw_sidr_reply *reply);
/* 0, or EBADMSG for any other message. */
int sw_sidr_read_request(const uint8_t *mad, size_t size, struct sw_sidr_request *request);
int sw_sidr_read_reply(const uint8_t *mad, size_t size, struct sw_sidr_reply *reply);

#endif
