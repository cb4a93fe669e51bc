#include "mpa.h"

#include <string.h>

enum { KEY = 16, FLAGS = 16, REVISION = 17, PRIVATE_LENGTH = 18 };

/* Flags of the header. */
enum { MARKERS = 0x80, CRC = 0x40, REJECTS = 0x20, ENHANCED = 0x10 };

/* The two bits above each depth. */
enum { UPPER = 0x8000, LOWER = 0x4000 };

static const uint8_t *key_of(int is_reply)
{
    return (const uint8_t *)(is_reply ? "MPA ID Rep Frame" : "MPA ID Req Frame");
}

static void put_16(uint8_t *to, unsigned int value)
{
    to[0] = (uint8_t)(value >> 8);
    to[1] = (uint8_t)value;
}

static unsigned int get_16(const uint8_t *from)
{
    return (unsigned int)from[0] << 8 | from[1];
}

static unsigned int with_bits(unsigned int depth, int upper, int lower)
{
    return depth | (upper ? UPPER : 0u) | (lower ? LOWER : 0u);
}

size_t sw_mpa_write(uint8_t *to, const struct sw_mpa *frame)
{
    size_t size = frame->private_size + (frame->enhanced ? SW_MPA_DEPTHS : 0);
    unsigned int flags = 0;

    if (frame->private_size > SW_MPA_MOST_PRIVATE || size > SW_MPA_MOST_PRIVATE ||
        frame->inbound_depth > SW_MPA_MOST_DEPTH || frame->outbound_depth > SW_MPA_MOST_DEPTH)
        return 0;
    memcpy(to, key_of(frame->is_reply), KEY);
    if (frame->markers)
        flags |= MARKERS;
    if (frame->crc)
        flags |= CRC;
    if (frame->rejects)
        flags |= REJECTS;
    if (frame->enhanced)
        flags |= ENHANCED;
    to[FLAGS] = (uint8_t)flags;
    to[REVISION] = (uint8_t)frame->revision;
    put_16(to + PRIVATE_LENGTH, (unsigned int)size);
    uint8_t *at = to + SW_MPA_HEADER;
    if (frame->enhanced) {
        put_16(at,
               with_bits(frame->inbound_depth, frame->peer_to_peer, frame->ready_by_empty_frame));
        put_16(at + 2,
               with_bits(frame->outbound_depth, frame->ready_by_write, frame->ready_by_read));
        at += SW_MPA_DEPTHS;
    }
    if (frame->private_size)
        memcpy(at, frame->private_data, frame->private_size);
    return SW_MPA_HEADER + size;
}

int sw_mpa_size(const uint8_t *from, size_t available, int is_reply)
{
    /* Reject another protocol by its first bytes, without waiting for a whole header. */
    if (memcmp(from, key_of(is_reply), available < KEY ? available : KEY))
        return -1;
    if (available < SW_MPA_HEADER)
        return 0;
    unsigned int length = get_16(from + PRIVATE_LENGTH);
    return length > SW_MPA_MOST_PRIVATE ? -1 : (int)(SW_MPA_HEADER + length);
}

int sw_mpa_read(const uint8_t *from, size_t size, int is_reply, struct sw_mpa *frame)
{
    if (sw_mpa_size(from, size, is_reply) != (int)size || size < SW_MPA_HEADER)
        return -1;
    memset(frame, 0, sizeof(*frame));
    frame->is_reply = is_reply;
    frame->revision = from[REVISION];
    frame->markers = !!(from[FLAGS] & MARKERS);
    frame->crc = !!(from[FLAGS] & CRC);
    frame->rejects = is_reply && from[FLAGS] & REJECTS;
    frame->enhanced = frame->revision >= 2 && from[FLAGS] & ENHANCED;
    if (frame->revision < 1 || frame->revision > 2)
        return -1;
    const uint8_t *at = from + SW_MPA_HEADER;
    frame->private_size = size - SW_MPA_HEADER;
    if (frame->enhanced) {
        if (frame->private_size < SW_MPA_DEPTHS)
            return -1;
        unsigned int inbound = get_16(at), outbound = get_16(at + 2);
        frame->inbound_depth = inbound & SW_MPA_MOST_DEPTH;
        frame->peer_to_peer = !!(inbound & UPPER);
        frame->ready_by_empty_frame = !!(inbound & LOWER);
        frame->outbound_depth = outbound & SW_MPA_MOST_DEPTH;
        frame->ready_by_write = !!(outbound & UPPER);
        frame->ready_by_read = !!(outbound & LOWER);
        at += SW_MPA_DEPTHS;
        frame->private_size -= SW_MPA_DEPTHS;
    }
    frame->private_data = at;
    return 0;
}
