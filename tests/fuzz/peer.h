/*
 * The peer of a stream: composes frames, right ones and wrong ones, and reads those of the device
 * with code of its own (nothing here comes from frame.c).
 */
#ifndef AIORDMA_FUZZ_PEER_H
#define AIORDMA_FUZZ_PEER_H

#include <stddef.h>
#include <stdint.h>

enum { PEER_MOST_FRAME = 2 + 65535 + 3 + 4 };

struct peer {
    int crc;
    uint32_t sequence[8]; /* by queue: the next message's number, 1 at first */
    uint32_t offset[8];   /* of the message that is under way */
    /* what the device asked for last: a READ's sink, an atomic's number */
    uint32_t sink, sink_size, number;
    uint64_t sink_offset;
    int has_said_terminate, program_ends;
    int is_garbled;     /* where its frames begin is not known any more */
    int has_said_seven; /* a byte that might be the head of a TERMINATE */
    int has_heard_terminate, has_heard_end;
    int is_within_frame; /* the device has begun one and not ended it */
    uint8_t said[4][48]; /* how the device's last frames begin, for a TERMINATE to quote */
    uint32_t said_count;
    size_t heard_size;
    uint8_t heard[PEER_MOST_FRAME];
};

/* What a peer says. */
struct saying {
    uint32_t operation;
    int is_last;
    uint32_t stag, sink, size;
    uint64_t offset;
    uint8_t fill;
    uint32_t wrongs, wrong; /* a set of WRONG_, and by how much */
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
/* Returns the frame's size. */
size_t peer_composes(struct peer *peer, const struct saying *saying, uint8_t *frame);
/* It is sent. */
void peer_says(struct peer *peer, const uint8_t *bytes, size_t size);
/* Bytes of the device: fails where they are not what a device may say. */
void peer_hears(struct peer *peer, const uint8_t *bytes, size_t size);

#endif
