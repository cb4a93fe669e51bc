/*
 * The TCP port space: what both sides have in common, and the side that connects; for cm_listen.c,
 * the side that listens and accepts.
 */
#ifndef AIORDMA_SOFTWARE_CM_STREAM_H
#define AIORDMA_SOFTWARE_CM_STREAM_H

#include "cm_handshakes.h"
#include "cm_silence.h"
#include "connected.h"
#include "identifier.h"
#include "mpa.h"

/* Of an identifier, or, until its request has arrived, of a peer of a listener. */
struct sw_connection {
    struct sw_watch watch;
    struct sw_identifier *identifier;
    struct sw_queue_pair *pair; /* while it is to be connected, or is */
    int fd;                     /* -1: none, or the stream's */
    uint8_t frame[SW_MPA_MOST];
    size_t arrived;
    struct sw_mpa peer;        /* what it said, in frame */
    struct sw_silence silence; /* while it is connected */

    /* a listener's */
    uint32_t waiting; /* requests that the program has not taken */
    uint32_t backlog;
    int spare;            /* a descriptor to be closed where there is no other; -1: none */
    uint32_t retries;     /* to accept, since the last success */
    int is_short;         /* of descriptors or memory, lately, and the program knows */
    struct sw_timer calm; /* runs until it has not been short for a while */

    /* a peer's whose request has not arrived */
    struct sw_handshake handshake;
    struct sw_connection *listener;
};

struct sw_connection *sw_new_connection(struct sw_identifier *identifier);
void sw_close_connection(struct sw_connection *connection); /* only its socket, if it has one */
/* So that the peer is told by a reset, not by an end that it may take for an answer. */
void sw_reset_connection(struct sw_connection *connection);
void sw_set_type_of_service(const struct sw_identifier *identifier, int fd);
/* get is getsockname or getpeername. */
int sw_get_socket_address(int fd, int (*get)(int, struct sockaddr *, socklen_t *),
                          struct sockaddr_storage *address);

/*
 * Read as far as the frame goes, and no further: what is behind it is the stream's. 0: it is
 * whole, EAGAIN: it is not, else what is wrong.
 */
int sw_read_handshake(struct sw_connection *connection, int is_reply);
int sw_write_handshake(struct sw_connection *connection, const struct sw_mpa *frame);
int sw_wants_crc(const struct sw_identifier *identifier);

/* The queue pair that is to be connected: ours, or the one of the program's that it names. */
int sw_attach_pair(struct sw_identifier *identifier);
void sw_detach_pair(struct sw_identifier *identifier);
/* Hand the socket over to the stream, in any case. */
int sw_begin_stream(struct sw_connection *connection, const struct sw_terms *terms);
void sw_report_established(struct sw_identifier *identifier, const struct sw_terms *terms,
                           int has_data);
void sw_took_too_long(struct sw_timer *timer); /* an identifier's */
/* Its part of the port space; cm_listen.c has the rest. */
int sw_stream_bind(struct sw_identifier *identifier);
int sw_stream_connect(struct sw_identifier *identifier);
int sw_stream_disconnect(struct sw_identifier *identifier);
void sw_stream_heard(struct sw_identifier *identifier);
void sw_stream_ended(struct sw_identifier *identifier);
void sw_stream_lost_queue_pair(struct sw_identifier *identifier);

static inline uint16_t sw_depth_of(uint8_t asked)
{
    return asked == RDMA_MAX_RESP_RES ? SW_MOST_DEPTH : asked;
}

static inline uint16_t sw_least(uint16_t one, uint16_t other)
{
    return one < other ? one : other;
}

#endif
