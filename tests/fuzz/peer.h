/*
 * The peer of a stream: composes valid and invalid frames, and reads the device's frames. It uses
 * no code of frame.c.
 */
#ifndef AIORDMA_FUZZ_PEER_H
#define AIORDMA_FUZZ_PEER_H

#include <stddef.h>
#include <stdint.h>

enum { PEER_MOST_FRAME = 2 + 65535 + 3 + 4 };

struct peer {
    int crc;
    uint32_t sequence[8]; /* by queue: the next message's number, 1 at first */
    uint32_t offset[8];   /* by queue: in the current message */
    /* of the device's last requests: a READ's sink, an atomic's number */
    uint32_t sink, sink_size, number;
    uint64_t sink_offset;
    int has_said_terminate, program_ends;
    int is_garbled;     /* the peer's bytes need not be frames any more */
    int has_said_seven; /* the peer sent a byte that may be the opcode of a TERMINATE */
    int has_heard_terminate, has_heard_end;
    int is_within_frame; /* the device has sent a part of a frame */
    uint8_t said[4][48]; /* the first bytes of the device's last frames, for a TERMINATE to quote */
    uint32_t said_count;
    size_t heard_size;
    uint8_t heard[PEER_MOST_FRAME];
};

/* A frame for peer_composes. */
struct saying {
    uint32_t operation;
    int is_last;
    uint32_t stag, sink, size;
    uint64_t offset;
    uint8_t fill;
    uint32_t wrongs, wrong; /* flags (WRONG_...), and a number that changes the wrong fields */
};

enum {
    WRONG_SUM = 1,
    WRONG_TAGGED = 2,
    WRONG_DDP = 4,
    WRONG_RDMAP = 8,
    WRONG_QUEUE = 16,
    WRONG_SEQUENCE = 32,
    WRONG_OFFSET = 64,
    WRONG_LENGTH = 128,
};

void peer_begins(struct peer *peer, int crc);
/* Write a frame, and return its size. */
size_t peer_composes(struct peer *peer, const struct saying *saying, uint8_t *frame);
/* Note bytes that the peer sends. */
void peer_says(struct peer *peer, const uint8_t *bytes, size_t size);
/* Read bytes of the device; fail if the device may not send them. */
void peer_hears(struct peer *peer, const uint8_t *bytes, size_t size);

#endif
