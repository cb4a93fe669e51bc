/* The connection manager's messages: see cm_messages.h. */
#include "cm_messages.h"

#include <errno.h>
#include <string.h>

#include "roce.h"

/* The header of a management datagram, and the fields after it. */
enum {
    MAD_VERSION = 1,
    CM_CLASS = 7,
    CM_VERSION = 2,
    METHOD_SEND = 3,
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

/* The service IDs of both port spaces. The port is in the low 16 bits. */
#define UDP_SERVICES 0x0000000001110000u
#define TCP_SERVICES 0x0000000001060000u

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

static void put_addresses(uint8_t *data, const struct in6_addr *source, uint16_t source_port,
                          const struct in6_addr *destination)
{
    data[AT_IP_VERSION] = (is_ipv4(source) ? 4 : 6) << 4;
    put(data + AT_SOURCE_PORT, source_port, 2);
    put_address(data + AT_SOURCE, source);
    put_address(data + AT_DESTINATION, destination);
}

static int get_addresses(const uint8_t *data, struct in6_addr *source, uint16_t *source_port,
                         struct in6_addr *destination)
{
    int version = data[AT_IP_VERSION] >> 4;

    if (data[0] || (version != 4 && version != 6))
        return EBADMSG;
    *source_port = (uint16_t)get(data + AT_SOURCE_PORT, 2);
    get_address(data + AT_SOURCE, version, source);
    get_address(data + AT_DESTINATION, version, destination);
    return 0;
}

/* -- connections ------------------------------------------------------------------------------ */

/* Of all messages: the sender's number is at AT_NUMBER. */
enum {
    AT_RECEIVER = 28,
    /* REQ */
    AT_REQ_SERVICE = 32,
    AT_REQ_GUID = 40,
    AT_REQ_QPN = 56,
    AT_REQ_RESPONDER_RESOURCES = 59,
    AT_REQ_INITIATOR_DEPTH = 63,
    AT_REQ_SERVICE_TYPE = 67, /* timeout 5, type 2, flow control 1 */
    AT_REQ_PSN = 68,
    AT_REQ_RETRIES = 71, /* timeout 5, retries 3 */
    AT_REQ_PKEY = 72,
    AT_REQ_MTU = 74,        /* MTU 4, RDC 1, RNR retries 3 */
    AT_REQ_CM_RETRIES = 75, /* retries 4, SRQ 1, extended type 3 */
    AT_REQ_LIDS = 76,
    AT_REQ_SOURCE_GID = 80,
    AT_REQ_DESTINATION_GID = 96,
    AT_REQ_TRAFFIC_CLASS = 116,
    AT_REQ_HOP_LIMIT = 117,
    AT_REQ_ACK_TIMEOUT = 119, /* 5 */
    AT_REQ_DATA = 164,
    /* REP */
    AT_REP_QPN = 36,
    AT_REP_PSN = 44,
    AT_REP_RESPONDER_RESOURCES = 48,
    AT_REP_INITIATOR_DEPTH = 49,
    AT_REP_FLOW_CONTROL = 50, /* delay 5, failover 2, flow control 1 */
    AT_REP_RETRIES = 51,      /* RNR retries 3, SRQ 1 */
    AT_REP_GUID = 52,
    AT_REP_DATA = 60,
    /* MRA, REJ, DREQ */
    AT_ABOUT = 32,       /* 2 */
    AT_MRA_TIMEOUT = 33, /* 5 */
    AT_REJ_INFO = 33,    /* how long the additional information is: 7 */
    AT_REJ_REASON = 34,
    AT_REJ_GUID = 36,
    AT_REJ_DATA = 108,
    AT_DREQ_QPN = 32,
    CM_TIMEOUT = 20, /* 4.3 s, as Linux has it */
    CM_RETRIES = 15,
    UNKNOWN_LID = 0xffff,
};

static void write_request(uint8_t *mad, const struct sw_cm_message *message)
{
    uint8_t *data = mad + AT_REQ_DATA;

    put(mad + AT_REQ_SERVICE, TCP_SERVICES | message->port, 8);
    put(mad + AT_REQ_GUID, message->guid, 8);
    put(mad + AT_REQ_QPN, message->qp_num, 3);
    mad[AT_REQ_RESPONDER_RESOURCES] = message->responder_resources;
    mad[AT_REQ_INITIATOR_DEPTH] = message->initiator_depth;
    mad[AT_REQ_SERVICE_TYPE] = (uint8_t)(CM_TIMEOUT << 3 | (message->flow_control & 1));
    put(mad + AT_REQ_PSN, message->psn, 3);
    mad[AT_REQ_RETRIES] = (uint8_t)(CM_TIMEOUT << 3 | (message->retry_count & 7));
    put(mad + AT_REQ_PKEY, DEFAULT_PKEY, 2);
    mad[AT_REQ_MTU] = (uint8_t)(message->mtu << 4 | (message->rnr_retry_count & 7));
    mad[AT_REQ_CM_RETRIES] = (uint8_t)(CM_RETRIES << 4 | (message->is_shared ? 8 : 0));
    put(mad + AT_REQ_LIDS, (uint64_t)UNKNOWN_LID << 16 | UNKNOWN_LID, 4);
    memcpy(mad + AT_REQ_SOURCE_GID, &message->source, 16);
    memcpy(mad + AT_REQ_DESTINATION_GID, &message->destination, 16);
    mad[AT_REQ_TRAFFIC_CLASS] = message->traffic_class;
    mad[AT_REQ_HOP_LIMIT] = SW_HOP_LIMIT;
    mad[AT_REQ_ACK_TIMEOUT] = (uint8_t)(message->ack_timeout << 3);
    put_addresses(data, &message->source, message->source_port, &message->destination);
    memcpy(data + ADDRESSES, message->private_data, SW_CM_REQUEST_DATA);
}

static int read_request(const uint8_t *mad, struct sw_cm_message *message)
{
    const uint8_t *data = mad + AT_REQ_DATA;
    const uint64_t service = get(mad + AT_REQ_SERVICE, 8);

    message->receiver = 0;
    message->port = (uint16_t)service;
    message->guid = get(mad + AT_REQ_GUID, 8);
    message->qp_num = (uint32_t)get(mad + AT_REQ_QPN, 3);
    message->responder_resources = mad[AT_REQ_RESPONDER_RESOURCES];
    message->initiator_depth = mad[AT_REQ_INITIATOR_DEPTH];
    message->flow_control = mad[AT_REQ_SERVICE_TYPE] & 1;
    message->psn = (uint32_t)get(mad + AT_REQ_PSN, 3);
    message->retry_count = mad[AT_REQ_RETRIES] & 7;
    message->mtu = mad[AT_REQ_MTU] >> 4;
    message->rnr_retry_count = mad[AT_REQ_MTU] & 7;
    message->is_shared = mad[AT_REQ_CM_RETRIES] >> 3 & 1;
    message->traffic_class = mad[AT_REQ_TRAFFIC_CLASS];
    message->ack_timeout = mad[AT_REQ_ACK_TIMEOUT] >> 3;
    memcpy(message->private_data, data + ADDRESSES, SW_CM_REQUEST_DATA);
    /* The service type is RC, and the extended one is none. */
    if ((service & ~(uint64_t)0xffff) != TCP_SERVICES || mad[AT_REQ_SERVICE_TYPE] & 6 ||
        mad[AT_REQ_CM_RETRIES] & 7 || get(mad + AT_REQ_PKEY, 2) != DEFAULT_PKEY ||
        message->mtu < 1 || message->mtu > 5)
        return EBADMSG;
    return get_addresses(data, &message->source, &message->source_port, &message->destination);
}

static void write_reply(uint8_t *mad, const struct sw_cm_message *message)
{
    put(mad + AT_REP_QPN, message->qp_num, 3);
    put(mad + AT_REP_PSN, message->psn, 3);
    mad[AT_REP_RESPONDER_RESOURCES] = message->responder_resources;
    mad[AT_REP_INITIATOR_DEPTH] = message->initiator_depth;
    mad[AT_REP_FLOW_CONTROL] = message->flow_control & 1;
    mad[AT_REP_RETRIES] =
        (uint8_t)(message->rnr_retry_count << 5 | (message->is_shared ? 0x10 : 0));
    put(mad + AT_REP_GUID, message->guid, 8);
    memcpy(mad + AT_REP_DATA, message->private_data, SW_CM_REPLY_DATA);
}

static void read_reply(const uint8_t *mad, struct sw_cm_message *message)
{
    message->qp_num = (uint32_t)get(mad + AT_REP_QPN, 3);
    message->psn = (uint32_t)get(mad + AT_REP_PSN, 3);
    message->responder_resources = mad[AT_REP_RESPONDER_RESOURCES];
    message->initiator_depth = mad[AT_REP_INITIATOR_DEPTH];
    message->flow_control = mad[AT_REP_FLOW_CONTROL] & 1;
    message->rnr_retry_count = mad[AT_REP_RETRIES] >> 5;
    message->is_shared = mad[AT_REP_RETRIES] >> 4 & 1;
    message->guid = get(mad + AT_REP_GUID, 8);
    memcpy(message->private_data, mad + AT_REP_DATA, SW_CM_REPLY_DATA);
}

void sw_cm_write(uint8_t mad[SW_MAD], const struct sw_cm_message *message)
{
    write_header(mad, (int)message->kind, message->transaction, message->sender);
    put(mad + AT_RECEIVER, message->receiver, 4);
    switch (message->kind) {
    case SW_CM_REQ:
        write_request(mad, message);
        break;
    case SW_CM_REP:
        write_reply(mad, message);
        break;
    case SW_CM_MRA:
        mad[AT_ABOUT] = (uint8_t)(message->about << 6);
        mad[AT_MRA_TIMEOUT] = (uint8_t)(message->timeout << 3);
        break;
    case SW_CM_REJ:
        mad[AT_ABOUT] = (uint8_t)(message->about << 6);
        mad[AT_REJ_INFO] = message->guid ? sizeof(message->guid) << 1 : 0;
        put(mad + AT_REJ_REASON, message->reason, 2);
        put(mad + AT_REJ_GUID, message->guid, 8);
        memcpy(mad + AT_REJ_DATA, message->private_data, SW_CM_REJECT_DATA);
        break;
    case SW_CM_DREQ:
        put(mad + AT_DREQ_QPN, message->qp_num, 3);
        break;
    default:
        break;
    }
}

int sw_cm_read(const uint8_t *mad, size_t size, struct sw_cm_message *message)
{
    const uint64_t kind = size == SW_MAD ? get(mad + AT_ATTRIBUTE, 2) : 0;

    memset(message, 0, sizeof(*message));
    if (kind < SW_CM_REQ || kind > SW_CM_DREP || !is_ours(mad, size, kind))
        return EBADMSG;
    message->kind = (enum sw_cm_kind)kind;
    message->transaction = get(mad + AT_TRANSACTION, 8);
    message->sender = (uint32_t)get(mad + AT_NUMBER, 4);
    message->receiver = (uint32_t)get(mad + AT_RECEIVER, 4);
    switch (message->kind) {
    case SW_CM_REQ:
        return read_request(mad, message);
    case SW_CM_REP:
        read_reply(mad, message);
        break;
    case SW_CM_MRA:
        message->about = mad[AT_ABOUT] >> 6;
        message->timeout = mad[AT_MRA_TIMEOUT] >> 3;
        break;
    case SW_CM_REJ:
        message->about = mad[AT_ABOUT] >> 6;
        message->reason = (uint16_t)get(mad + AT_REJ_REASON, 2);
        memcpy(message->private_data, mad + AT_REJ_DATA, SW_CM_REJECT_DATA);
        break;
    case SW_CM_DREQ:
        message->qp_num = (uint32_t)get(mad + AT_DREQ_QPN, 3);
        break;
    default:
        break;
    }
    return 0;
}

/* -- service ID resolution -------------------------------------------------------------------- */

void sw_sidr_write_request(uint8_t mad[SW_MAD], const struct sw_sidr_request *request)
{
    uint8_t *data = mad + AT_REQUEST_DATA;

    write_header(mad, SW_SIDR_REQ, request->transaction, request->number);
    put(mad + AT_REQUEST_PKEY, DEFAULT_PKEY, 2);
    put(mad + AT_REQUEST_SERVICE, UDP_SERVICES | request->port, 8);
    put_addresses(data, &request->source, request->source_port, &request->destination);
    memcpy(data + ADDRESSES, request->private_data, SW_SIDR_REQUEST_DATA);
}

int sw_sidr_read_request(const uint8_t *mad, size_t size, struct sw_sidr_request *request)
{
    const uint8_t *data = mad + AT_REQUEST_DATA;

    if (!is_ours(mad, size, SW_SIDR_REQ) || get(mad + AT_REQUEST_PKEY, 2) != DEFAULT_PKEY)
        return EBADMSG;
    uint64_t service = get(mad + AT_REQUEST_SERVICE, 8);
    if ((service & ~(uint64_t)0xffff) != UDP_SERVICES)
        return EBADMSG;
    request->transaction = get(mad + AT_TRANSACTION, 8);
    request->number = (uint32_t)get(mad + AT_NUMBER, 4);
    request->port = (uint16_t)service;
    memcpy(request->private_data, data + ADDRESSES, SW_SIDR_REQUEST_DATA);
    return get_addresses(data, &request->source, &request->source_port, &request->destination);
}

void sw_sidr_write_reply(uint8_t mad[SW_MAD], const struct sw_sidr_reply *reply)
{
    write_header(mad, SW_SIDR_REP, reply->transaction, reply->number);
    mad[AT_REPLY_STATUS] = reply->status;
    put(mad + AT_REPLY_QPN, reply->qp_num, 3);
    put(mad + AT_REPLY_SERVICE, UDP_SERVICES | reply->port, 8);
    put(mad + AT_REPLY_QKEY, reply->qkey, 4);
    memcpy(mad + AT_REPLY_DATA, reply->private_data, SW_SIDR_REPLY_DATA);
}

int sw_sidr_read_reply(const uint8_t *mad, size_t size, struct sw_sidr_reply *reply)
{
    if (!is_ours(mad, size, SW_SIDR_REP))
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
