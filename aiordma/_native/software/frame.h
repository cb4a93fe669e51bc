/*
 * Frames: an MPA FPDU (RFC 5044, 4) with its DDP and RDMAP headers (RFC 5041, 4; RFC 5040, 4; RFC
 * 7306), encoded to bytes, and decoded from bytes that a peer sent. Nothing here has a state.
 */
#ifndef AIORDMA_SOFTWARE_FRAME_H
#define AIORDMA_SOFTWARE_FRAME_H

#include <stddef.h>
#include <stdint.h>

/* RDMAP's opcodes. */
enum sw_operation {
    SW_WRITE = 0,
    SW_READ_REQUEST = 1,
    SW_READ_RESPONSE = 2,
    SW_SEND = 3,
    SW_SEND_INVALIDATE = 4,
    SW_SEND_SOLICITED = 5,
    SW_SEND_SOLICITED_INVALIDATE = 6,
    SW_TERMINATE = 7,
    SW_IMMEDIATE = 8,
    SW_IMMEDIATE_SOLICITED = 9,
    SW_ATOMIC_REQUEST = 10,
    SW_ATOMIC_RESPONSE = 11,
};

/* DDP's queues of untagged messages. */
enum { SW_QUEUE_SEND, SW_QUEUE_REQUEST, SW_QUEUE_TERMINATE, SW_QUEUE_ATOMIC, SW_QUEUES };

enum {
    SW_LENGTH_FIELD = 2,
    SW_TAGGED_HEADER = 16,   /* with MPA's length field */
    SW_UNTAGGED_HEADER = 20, /* the same */
    SW_READ_REQUEST_SIZE = 28,
    SW_ATOMIC_REQUEST_SIZE = 52,
    SW_ATOMIC_RESPONSE_SIZE = 12,
    SW_IMMEDIATE_SIZE = 8,
    SW_MOST_TERMINATE = 4 + 2 + 18 + 28,
    SW_MOST_ULPDU = 65535,
    SW_MOST_PAYLOAD = 65024, /* of a sent frame: a multiple of a cache line */
    SW_MOST_FRAME = SW_LENGTH_FIELD + SW_MOST_ULPDU + 3 + 4,
};

struct sw_frame {
    enum sw_operation operation;
    int is_tagged, is_last;
    uint32_t stag; /* tagged: the buffer, and the offset in it */
    uint64_t offset;
    uint32_t invalidated; /* untagged: the STag of a SEND with invalidate */
    uint32_t queue, sequence, message_offset;
    uint32_t header; /* bytes before the payload */
    uint32_t payload;
};

/* RDMAP's, DDP's or MPA's reason for a TERMINATE (RFC 5040, 4.8). */
struct sw_reason {
    uint8_t layer, type, code;
};

enum { SW_LAYER_RDMAP, SW_LAYER_DDP, SW_LAYER_MPA };

/* The size of a frame with its padding to four bytes and MPA's CRC field, which is always there. */
static inline uint32_t sw_padding(uint32_t header, uint32_t payload)
{
    return (0u - (header + payload)) & 3;
}

static inline uint32_t sw_frame_size(const struct sw_frame *frame)
{
    return frame->header + frame->payload + sw_padding(frame->header, frame->payload) + 4;
}

/* Write the header, at most SW_UNTAGGED_HEADER bytes. Sets and returns frame->header. */
uint32_t sw_frame_write(char *to, struct sw_frame *frame);

/*
 * Read a header from the bytes that have arrived. 1: frame is filled. 0: more bytes are needed. -1:
 * the header is invalid, for the reason in reason.
 */
int sw_frame_read(const char *from, size_t available, struct sw_frame *frame,
                  struct sw_reason *reason);

struct sw_read_request {
    uint32_t sink, size, source;
    uint64_t sink_offset, source_offset;
};

struct sw_atomic_request {
    uint32_t operation; /* SW_FETCH_ADD or SW_COMPARE_SWAP */
    uint32_t number, stag;
    uint64_t offset, operand, operand_mask, compare, compare_mask;
};

enum { SW_FETCH_ADD = 0, SW_COMPARE_SWAP = 2 };

void sw_read_request_write(char *to, const struct sw_read_request *request);
void sw_read_request_read(const char *from, struct sw_read_request *request);
void sw_atomic_request_write(char *to, const struct sw_atomic_request *request);
void sw_atomic_request_read(const char *from, struct sw_atomic_request *request);
void sw_atomic_response_write(char *to, uint32_t number, uint64_t value);
void sw_atomic_response_read(const char *from, uint32_t *number, uint64_t *value);

/*
 * The 64 bits of immediate data: the program's 32, and the message that they belong to. RFC 7306
 * leaves their meaning open. The immediate data of a SEND are a message of their own before it.
 */
enum { SW_OF_WRITE = 0, SW_OF_SEND = 1 };
void sw_immediate_write(char *to, uint32_t immediate, uint32_t belongs);
void sw_immediate_read(const char *from, uint32_t *immediate, uint32_t *belongs);

/*
 * Write the payload of a TERMINATE: the reason, and the header of the frame that caused it (size 0:
 * none), at most SW_MOST_TERMINATE bytes. Returns the size.
 */
uint32_t sw_terminate_write(char *to, const struct sw_reason *reason, const char *header,
                            uint32_t size);
int sw_terminate_read(const char *from, uint32_t size, struct sw_reason *reason);

#endif
