/*
 * The frames of the MPA handshake: RFC 5044, 7.1, and RFC 6581, 9 (depths, peer-to-peer), encoded
 * and decoded. Nothing here has a state. The bytes can come from any peer.
 */
#ifndef AIORDMA_SOFTWARE_MPA_H
#define AIORDMA_SOFTWARE_MPA_H

#include <stddef.h>
#include <stdint.h>

enum {
    SW_MPA_HEADER = 20,
    SW_MPA_MOST_PRIVATE = 512, /* on the wire, including the four bytes of RFC 6581 */
    SW_MPA_MOST = SW_MPA_HEADER + SW_MPA_MOST_PRIVATE,
    SW_MPA_DEPTHS = 4,
    SW_MPA_MOST_DEPTH = 0x3fff, /* of 14 bits */
};

struct sw_mpa {
    int is_reply;
    unsigned int revision; /* 1 or 2 */
    int markers, crc;      /* the sender wants to receive markers; wants a CRC on every frame */
    int rejects;           /* of a reply: rejects the request */
    int enhanced;          /* revision 2: the fields below are valid */
    int peer_to_peer;      /* the initiator sends first, a frame without a message: */
    int ready_by_empty_frame, ready_by_write, ready_by_read;
    uint16_t inbound_depth, outbound_depth; /* IRD, ORD of its sender; 14 bits */
    const uint8_t *private_data;            /* in the buffer that was read, or to write */
    size_t private_size;
};

/*
 * Write a frame of at most SW_MPA_MOST bytes. Returns its size; 0 if the private data do not fit,
 * or a number is out of range.
 */
size_t sw_mpa_write(uint8_t *to, const struct sw_mpa *frame);

/*
 * The size of the frame that begins here. 0: more bytes are needed to know it. -1: this is no such
 * frame.
 */
int sw_mpa_size(const uint8_t *from, size_t available, int is_reply);

/* Read a whole frame of sw_mpa_size bytes. 0, or -1 if it is invalid. */
int sw_mpa_read(const uint8_t *from, size_t size, int is_reply, struct sw_mpa *frame);

#endif
