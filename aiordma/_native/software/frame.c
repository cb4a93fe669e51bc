/* See frame.h. */
#include "frame.h"

#include <arpa/inet.h>
#include <endian.h>
#include <string.h>

enum {
    DDP_TAGGED = 0x80,
    DDP_LAST = 0x40,
    DDP_VERSION = 1,
    DDP_VERSION_MASK = 3,
    RDMAP_VERSION = 0x40,
    RDMAP_VERSION_MASK = 0xc0,
    RDMAP_OPCODE_MASK = 0x0f,
};

static char *put16(char *to, uint16_t value)
{
    value = htons(value);
    memcpy(to, &value, sizeof(value));
    return to + sizeof(value);
}

static char *put32(char *to, uint32_t value)
{
    value = htonl(value);
    memcpy(to, &value, sizeof(value));
    return to + sizeof(value);
}

static char *put64(char *to, uint64_t value)
{
    value = htobe64(value);
    memcpy(to, &value, sizeof(value));
    return to + sizeof(value);
}

static const char *get32(const char *from, uint32_t *value)
{
    memcpy(value, from, sizeof(*value));
    *value = ntohl(*value);
    return from + sizeof(*value);
}

static const char *get64(const char *from, uint64_t *value)
{
    memcpy(value, from, sizeof(*value));
    *value = be64toh(*value);
    return from + sizeof(*value);
}

uint32_t sw_frame_write(char *to, struct sw_frame *frame)
{
    frame->header = frame->is_tagged ? SW_TAGGED_HEADER : SW_UNTAGGED_HEADER;
    to = put16(to, (uint16_t)(frame->header - SW_LENGTH_FIELD + frame->payload));
    *to++ =
        (char)((frame->is_tagged ? DDP_TAGGED : 0) | (frame->is_last ? DDP_LAST : 0) | DDP_VERSION);
    *to++ = (char)(RDMAP_VERSION | frame->operation);
    if (frame->is_tagged) {
        to = put32(to, frame->stag);
        put64(to, frame->offset);
    } else {
        to = put32(to, frame->invalidated);
        to = put32(to, frame->queue);
        to = put32(to, frame->sequence);
        put32(to, frame->message_offset);
    }
    return frame->header;
}

/* Check that an operation is tagged or untagged as it must be, and that it is in its queue. */
static int check_operation(const struct sw_frame *frame, struct sw_reason *reason)
{
    static const uint8_t queues[] = {
        [SW_READ_REQUEST] = SW_QUEUE_REQUEST,
        [SW_TERMINATE] = SW_QUEUE_TERMINATE,
        [SW_ATOMIC_REQUEST] = SW_QUEUE_REQUEST,
        [SW_ATOMIC_RESPONSE] = SW_QUEUE_ATOMIC,
    };
    int is_tagged = frame->operation == SW_WRITE || frame->operation == SW_READ_RESPONSE;

    if (frame->operation > SW_ATOMIC_RESPONSE || is_tagged != frame->is_tagged) {
        *reason = (struct sw_reason){SW_LAYER_RDMAP, 2, 6}; /* unexpected opcode */
        return -1;
    }
    if (!is_tagged && frame->queue != queues[frame->operation]) {
        *reason = (struct sw_reason){SW_LAYER_DDP, 2, 1}; /* no such queue */
        return -1;
    }
    return 1;
}

int sw_frame_read(const char *from, size_t available, struct sw_frame *frame,
                  struct sw_reason *reason)
{
    if (available < 4)
        return 0;
    uint32_t length = (uint32_t)(unsigned char)from[0] << 8 | (unsigned char)from[1];
    int ddp = (unsigned char)from[2], rdmap = (unsigned char)from[3];
    frame->is_tagged = !!(ddp & DDP_TAGGED);
    frame->is_last = !!(ddp & DDP_LAST);
    frame->operation = (enum sw_operation)(rdmap & RDMAP_OPCODE_MASK);
    frame->header = frame->is_tagged ? SW_TAGGED_HEADER : SW_UNTAGGED_HEADER;
    if ((ddp & DDP_VERSION_MASK) != DDP_VERSION) {
        *reason = frame->is_tagged ? (struct sw_reason){SW_LAYER_DDP, 1, 4}
                                   : (struct sw_reason){SW_LAYER_DDP, 2, 6};
        return -1;
    }
    if ((rdmap & RDMAP_VERSION_MASK) != RDMAP_VERSION) {
        *reason = (struct sw_reason){SW_LAYER_RDMAP, 2, 5};
        return -1;
    }
    if (length + SW_LENGTH_FIELD < frame->header) {
        *reason = (struct sw_reason){SW_LAYER_MPA, 0, 3}; /* the length does not match */
        return -1;
    }
    frame->payload = length + SW_LENGTH_FIELD - frame->header;
    if (available < frame->header)
        return 0;
    from += 4;
    if (frame->is_tagged) {
        from = get32(from, &frame->stag);
        get64(from, &frame->offset);
        frame->invalidated = frame->queue = frame->sequence = frame->message_offset = 0;
    } else {
        from = get32(from, &frame->invalidated);
        from = get32(from, &frame->queue);
        from = get32(from, &frame->sequence);
        get32(from, &frame->message_offset);
        frame->stag = 0;
        frame->offset = 0;
    }
    return check_operation(frame, reason);
}

void sw_read_request_write(char *to, const struct sw_read_request *request)
{
    to = put32(to, request->sink);
    to = put64(to, request->sink_offset);
    to = put32(to, request->size);
    to = put32(to, request->source);
    put64(to, request->source_offset);
}

void sw_read_request_read(const char *from, struct sw_read_request *request)
{
    from = get32(from, &request->sink);
    from = get64(from, &request->sink_offset);
    from = get32(from, &request->size);
    from = get32(from, &request->source);
    get64(from, &request->source_offset);
}

void sw_atomic_request_write(char *to, const struct sw_atomic_request *request)
{
    to = put32(to, request->operation);
    to = put32(to, request->number);
    to = put32(to, request->stag);
    to = put64(to, request->offset);
    to = put64(to, request->operand);
    to = put64(to, request->operand_mask);
    to = put64(to, request->compare);
    put64(to, request->compare_mask);
}

void sw_atomic_request_read(const char *from, struct sw_atomic_request *request)
{
    from = get32(from, &request->operation);
    request->operation &= 0x0f; /* the rest is reserved */
    from = get32(from, &request->number);
    from = get32(from, &request->stag);
    from = get64(from, &request->offset);
    from = get64(from, &request->operand);
    from = get64(from, &request->operand_mask);
    from = get64(from, &request->compare);
    get64(from, &request->compare_mask);
}

void sw_atomic_response_write(char *to, uint32_t number, uint64_t value)
{
    put64(put32(to, number), value);
}

void sw_atomic_response_read(const char *from, uint32_t *number, uint64_t *value)
{
    get64(get32(from, number), value);
}

void sw_immediate_write(char *to, uint32_t immediate, uint32_t belongs)
{
    put32(put32(to, immediate), belongs);
}

void sw_immediate_read(const char *from, uint32_t *immediate, uint32_t *belongs)
{
    get32(get32(from, immediate), belongs);
}

uint32_t sw_terminate_write(char *to, const struct sw_reason *reason, const char *header,
                            uint32_t size)
{
    enum { LENGTH_IS_THERE = 0x80, DDP_IS_THERE = 0x40, RDMAP_IS_THERE = 0x20 };
    char *start = to;

    /* header: MPA's length, the DDP header and, for a READ request, its RDMAP header. */
    uint32_t ddp = 0, rdmap = 0;
    if (size >= SW_TAGGED_HEADER) {
        ddp = header[2] & DDP_TAGGED ? SW_TAGGED_HEADER : SW_UNTAGGED_HEADER;
        if (size < ddp)
            ddp = 0;
        else if (size >= ddp + SW_READ_REQUEST_SIZE &&
                 (header[3] & RDMAP_OPCODE_MASK) == SW_READ_REQUEST)
            rdmap = SW_READ_REQUEST_SIZE;
    }
    *to++ = (char)(reason->layer << 4 | reason->type);
    *to++ = (char)reason->code;
    *to++ = (char)((ddp ? LENGTH_IS_THERE | DDP_IS_THERE : 0) | (rdmap ? RDMAP_IS_THERE : 0));
    *to++ = 0;
    if (ddp) {
        memcpy(to, header, ddp + rdmap); /* the length field comes first here, too */
        to += ddp + rdmap;
    }
    return (uint32_t)(to - start);
}

int sw_terminate_read(const char *from, uint32_t size, struct sw_reason *reason)
{
    if (size < 4)
        return -1;
    reason->layer = (uint8_t)((unsigned char)from[0] >> 4);
    reason->type = (uint8_t)(from[0] & 0x0f);
    reason->code = (uint8_t)from[1];
    return 0;
}
