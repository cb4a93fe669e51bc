/*
 * The TCP port space: the parts for both sides, and the side that connects. cm_listen.c is the side
 * that listens and accepts.
 */
#ifndef AIORDMA_SOFTWARE_CM_STREAM_H
#define AIORDMA_SOFTWARE_CM_STREAM_H

#include "cm_silence.h"
#include "connected.h"
#include "identifier.h"
#include "mpa.h"

/* The connection of an identifier, or of a peer whose request has not arrived. */
struct sw_connection {
    struct sw_watch watch;
    struct sw_member member;          /* lets the program's thread serve the socket */
    struct sw_identifier *identifier; /* NULL: its request has not arrived */
    struct sw_half_open *half_open;   /* ... and is awaited (cm_listen.c) */
    struct sw_queue_pair *pair;       /* while connecting or connected */
    int fd;                           /* -1: none, or the stream has it */
    uint8_t frame[SW_MPA_MOST];       /* the peer's handshake, and maybe bytes after it */
    size_t arrived, size;      /* bytes in it, of the handshake; size is set when it is complete */
    struct sw_mpa peer;        /* the handshake, read */
    struct sw_silence silence; /* while connected */
};

struct sw_connection *sw_new_connection(struct sw_identifier *identifier);
void sw_close_connection(struct sw_connection *connection); /* only its socket, if it has one */
/* Close with a reset: the peer could take a plain end for an answer. */
void sw_reset_connection(struct sw_connection *connection);
void sw_set_type_of_service(const struct sw_identifier *identifier, int fd);
/* get: getsockname or getpeername. */
int sw_get_socket_address(int fd, int (*get)(int, struct sockaddr *, socklen_t *),
                          struct sockaddr_storage *address);

/* Read the peer's frame of the handshake. 0: it is complete, EAGAIN: it is not, else an error. */
int sw_read_handshake(struct sw_connection *connection, int is_reply);
int sw_write_handshake(struct sw_connection *connection, const struct sw_mpa *frame);
int sw_wants_crc(const struct sw_identifier *identifier);

/* Attach the queue pair to connect: the identifier's, or the program's that its parameters name. */
int sw_attach_pair(struct sw_identifier *identifier);
void sw_detach_pair(struct sw_identifier *identifier);
/* Start watching the connection's socket, which the program's thread can serve. */
int sw_watch_connection(struct sw_connection *connection, const struct sw_identifier *identifier,
                        uint32_t events);
/* Give the socket to the stream, also after a failure. */
int sw_begin_stream(struct sw_connection *connection, const struct sw_terms *terms);
void sw_report_established(struct sw_identifier *identifier, const struct sw_terms *terms,
                           int has_data);
void sw_took_too_long(struct sw_timer *timer); /* of an identifier */
/* Its operations of the port space. cm_listen.c has the others. */
int sw_stream_bind(struct sw_identifier *identifier);
int sw_stream_connect(struct sw_identifier *identifier);
int sw_stream_disconnect(struct sw_identifier *identifier);
void sw_stream_first_frame(struct sw_identifier *identifier);
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
