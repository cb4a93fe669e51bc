/*
 * The frames of the MPA handshake: RFC 5044, 7.1, and RFC 6581, 9 (depths, peer-to-peer). Bytes
 * to a struct and back; nothing here has a state, and every byte may be a stranger's.
 */
#ifndef AIORDMA_SOFTWARE_MPA_H
#define AIORDMA_SOFTWARE_MPA_H

#include <stddef.h>
#include <stdint.h>

enum {
    SW_MPA_HEADER = 20,
    SW_MPA_MOST_PRIVATE = 512, /* on the wire, the four bytes of RFC 6581 among them */
    SW_MPA_MOST = SW_MPA_HEADER + SW_MPA_MOST_PRIVATE,
    SW_MPA_DEPTHS = 4,
    SW_MPA_MOST_DEPTH = 0x3fff, /* of 14 bits */
};

struct sw_mpa {
    int is_reply;
    unsigned int revision; /* 1 or 2 */
    int markers, crc;      /* what its sender wants to receive; wants on every frame */
    int rejects;           /* a reply's: no */
    int enhanced;          /* revision 2: all of what follows is there */
    int peer_to_peer;      /* the initiator speaks first, by a frame that says nothing: */
    int ready_by_empty_frame, ready_by_write, ready_by_read;
    uint16_t inbound_depth, outbound_depth; /* IRD, ORD of its sender; 14 bits */
    const uint8_t *private_data;            /* in the buffer that was read */
    size_t private_size;
};

/*
 * Write a frame; to has room for SW_MPA_MOST. Returns its size, 0 if the private data do not fit
 * or a number is out of range.
 */
size_t sw_mpa_write(uint8_t *to, const struct sw_mpa *frame);

/*
 * How long the frame is that begins here: 0 if more bytes are needed to tell, -1 if it is none
 * of the kind asked for.
 */
int sw_mpa_size(const uint8_t *from, size_t available, int is_reply);

/* Read a whole frame of sw_mpa_size bytes. 0, or -1: it contradicts itself. */
int sw_mpa_read(const uint8_t *from, size_t size, int is_reply, struct sw_mpa *frame);

#endif
