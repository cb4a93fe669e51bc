/* See peer.h. RFC 5044, 4; RFC 5041, 4; RFC 5040, 4; RFC 7306, 5 and 6. */
#include "peer.h"

#include <string.h>

#include "software/crc32c.h"
#include "world.h"

enum {
    WRITE = 0,
    READ_REQUEST = 1,
    READ_RESPONSE = 2,
    SEND = 3,
    SEND_INVALIDATE = 4,
    SEND_SOLICITED = 5,
    SEND_BOTH = 6,
    TERMINATE = 7,
    IMMEDIATE = 8,
    IMMEDIATE_SOLICITED = 9,
    ATOMIC_REQUEST = 10,
    ATOMIC_RESPONSE = 11,
    TAGGED_HEADER = 16,
    UNTAGGED_HEADER = 20,
};

static void put(uint8_t *to, uint64_t value, int size)
{
    for (int i = size; i--; value >>= 8)
        to[i] = (uint8_t)value;
}

static uint64_t get(const uint8_t *from, int size)
{
    uint64_t value = 0;

    for (int i = 0; i < size; i++)
        value = value << 8 | from[i];
    return value;
}

void peer_begins(struct peer *peer, int crc)
{
    peer->crc = crc;
    for (int queue = 0; queue < 8; queue++)
        peer->sequence[queue] = 1;
}

static uint32_t queue_of(uint32_t operation)
{
    switch (operation) {
    case READ_REQUEST:
    case ATOMIC_REQUEST:
        return 1;
    case TERMINATE:
        return 2;
    case ATOMIC_RESPONSE:
        return 3;
    default:
        return 0;
    }
}

/* Write the payload, which follows the header, and return its size. */
static uint32_t payload_of(const struct peer *peer, const struct saying *saying, uint8_t *to)
{
    memset(to, 0, 64);
    switch (saying->operation) {
    case READ_REQUEST:
        put(to, saying->sink, 4);
        put(to + 4, 0x4000, 8);
        put(to + 12, saying->size, 4);
        put(to + 16, saying->stag, 4);
        put(to + 20, saying->offset, 8);
        return 28;
    case ATOMIC_REQUEST:
        put(to, saying->size & 3, 4); /* fetch and add, none, compare and swap, none */
        put(to + 4, saying->sink, 4);
        put(to + 8, saying->stag, 4);
        put(to + 12, saying->size & 4 ? saying->offset : saying->offset & ~7ull, 8);
        put(to + 20, 0x0102030405060708, 8);
        put(to + 28, saying->size & 8 ? 0xff00ff00ff00ff00 : UINT64_MAX, 8);
        put(to + 36, saying->size, 8);
        put(to + 44, saying->size & 16 ? 0 : UINT64_MAX, 8);
        return 52;
    case ATOMIC_RESPONSE:
        put(to, saying->sink, 4);
        put(to + 4, 0x1122334455667788, 8);
        return 12;
    case IMMEDIATE:
    case IMMEDIATE_SOLICITED:
        put(to, 0xdeadbeef, 4);
        put(to + 4, saying->size & 3, 4);
        return 8;
    case TERMINATE:
        /* Layer, type and code; then the header of the frame with the error, if it is quoted. */
        put(to, 0x10000000u | saying->size << 16 | (saying->size & 4 ? 0xc000 : 0), 4);
        memcpy(to + 4, peer->said[saying->size & 3], 48);
        return saying->size & 4 ? 4 + 48 : 4 + (saying->size & 31);
    default: {
        uint32_t size = saying->size < 65000 ? saying->size : 65000;
        memset(to, saying->fill, size);
        return size;
    }
    }
}

size_t peer_composes(struct peer *peer, const struct saying *saying, uint8_t *frame)
{
    uint32_t wrongs = saying->wrongs, queue = queue_of(saying->operation);
    int is_tagged = saying->operation == WRITE || saying->operation == READ_RESPONSE;

    if (wrongs & WRONG_TAGGED)
        is_tagged = !is_tagged;
    uint32_t header = is_tagged ? TAGGED_HEADER : UNTAGGED_HEADER;
    uint32_t payload = payload_of(peer, saying, frame + header), length = header - 2 + payload;
    if (wrongs & WRONG_LENGTH) {
        length = (length + saying->wrong) & 0xffff;
        peer->is_garbled = 1;
    }
    if (wrongs & WRONG_TAGGED)
        peer->is_garbled = 1;
    put(frame, length, 2);
    frame[2] = (uint8_t)((is_tagged ? 0x80 : 0) | (saying->is_last ? 0x40 : 0) |
                         (wrongs & WRONG_DDP ? saying->wrong & 0x3f : 1));
    frame[3] = (uint8_t)((wrongs & WRONG_RDMAP ? saying->wrong & 0xf0 : 0x40) | saying->operation);
    if (is_tagged) {
        put(frame + 4, saying->stag, 4);
        put(frame + 8, saying->offset, 8);
    } else {
        if (wrongs & WRONG_QUEUE)
            queue = saying->wrong & 7;
        put(frame + 4,
            saying->operation == SEND_INVALIDATE || saying->operation == SEND_BOTH ? saying->stag
                                                                                   : 0,
            4);
        put(frame + 8, wrongs & WRONG_QUEUE ? queue | (saying->wrong & 0xff00u) << 16 : queue, 4);
        put(frame + 12, peer->sequence[queue] + (wrongs & WRONG_SEQUENCE ? saying->wrong : 0), 4);
        put(frame + 16, peer->offset[queue] + (wrongs & WRONG_OFFSET ? saying->wrong : 0), 4);
        peer->offset[queue] += payload;
        if (saying->is_last) {
            peer->sequence[queue]++;
            peer->offset[queue] = 0;
        }
    }
    if (saying->operation == TERMINATE)
        peer->has_said_terminate = 1;
    uint32_t size = header + payload;
    while (size % 4)
        frame[size++] = 0;
    uint32_t sum = peer->crc ? sw_crc32c(0, frame, size) : 0;
    if (wrongs & WRONG_SUM)
        sum ^= 1 + saying->wrong;
    for (int i = 0; i < 4; i++)
        frame[size++] = (uint8_t)(sum >> 8 * i);
    return size;
}

void peer_says(struct peer *peer, const uint8_t *bytes, size_t size)
{
    int seven = 0;

    if (!peer->is_garbled)
        return;
    for (size_t i = 0; i < size; i++)
        seven |= (bytes[i] & 0xcf) == 0x47;
    peer->has_said_seven |= seven;
}

static void hear_frame(struct peer *peer, const uint8_t *frame, size_t size)
{
    uint32_t operation = frame[3] & 15;
    int is_tagged = frame[2] >> 7;
    uint32_t sum = (uint32_t)frame[size - 4] | (uint32_t)frame[size - 3] << 8 |
                   (uint32_t)frame[size - 2] << 16 | (uint32_t)frame[size - 1] << 24;

    PROMISE(sum == (peer->crc ? sw_crc32c(0, frame, size - 4) : 0));
    PROMISE((frame[2] & 3) == 1 && frame[3] >> 6 == 1);
    PROMISE(operation <= ATOMIC_RESPONSE);
    PROMISE(is_tagged == (operation == WRITE || operation == READ_RESPONSE));
    PROMISE(!peer->has_heard_terminate);
    memcpy(peer->said[peer->said_count++ % 4], frame, size < 48 ? size : 48);
    if (is_tagged)
        return;
    PROMISE(get(frame + 8, 4) == queue_of(operation));
    const uint8_t *payload = frame + UNTAGGED_HEADER;
    if (operation == READ_REQUEST) {
        peer->sink = (uint32_t)get(payload, 4);
        peer->sink_offset = get(payload + 4, 8);
        peer->sink_size = (uint32_t)get(payload + 12, 4);
    } else if (operation == ATOMIC_REQUEST) {
        peer->number = (uint32_t)get(payload + 4, 4);
    } else if (operation == TERMINATE) {
        peer->has_heard_terminate = 1;
    }
}

void peer_hears(struct peer *peer, const uint8_t *bytes, size_t size)
{
    while (size) {
        size_t wanted = 2;
        if (peer->heard_size >= 2) {
            size_t length = 2 + get(peer->heard, 2);
            wanted = (length + 3) / 4 * 4 + 4;
            PROMISE(length >= TAGGED_HEADER);
        }
        size_t here = wanted - peer->heard_size < size ? wanted - peer->heard_size : size;
        memcpy(peer->heard + peer->heard_size, bytes, here);
        peer->heard_size += here;
        bytes += here;
        size -= here;
        if (peer->heard_size == wanted && wanted > 2) {
            hear_frame(peer, peer->heard, wanted);
            peer->heard_size = 0;
        }
    }
    peer->is_within_frame = peer->heard_size > 0;
}
