/*
 * Fuzzes the codecs, which have no state: MPA's handshake frames, the headers of frames, RoCE v2's
 * headers. Each is read from a buffer of exactly its size, so that the sanitizer finds a read of
 * one byte more. The parsed fields, written again, must give the original bytes, except reserved
 * ones.
 */
#include "world.h"

#include <stdlib.h>
#include <string.h>

#include "software/frame.h"
#include "software/mpa.h"
#include "software/roce.h"

/* A copy of the rest of the input, in an allocation of exactly its size. */
static uint8_t *rest_of(struct input *input, size_t *size)
{
    *size = input->left;
    uint8_t *copy = malloc(*size ? *size : 1);

    PROMISE(copy);
    memcpy(copy, input->at, *size);
    return copy;
}

static void handshake(struct input *input)
{
    int is_reply = take(input, 1) & 1;
    size_t available;
    uint8_t *bytes = rest_of(input, &available), again[SW_MPA_MOST];
    struct sw_mpa frame, second;

    int size = sw_mpa_size(bytes, available, is_reply);
    PROMISE(size >= -1 && size <= SW_MPA_MOST && (size <= 0 || size >= SW_MPA_HEADER));
    PROMISE(size != 0 || available < SW_MPA_HEADER);
    if (size > 0 && (size_t)size <= available) {
        uint8_t *exactly = malloc((size_t)size);
        PROMISE(exactly);
        memcpy(exactly, bytes, (size_t)size);
        if (!sw_mpa_read(exactly, (size_t)size, is_reply, &frame)) {
            PROMISE(frame.private_size <= (size_t)size - SW_MPA_HEADER);
            PROMISE(frame.private_data + frame.private_size == exactly + size);
            PROMISE(sw_mpa_write(again, &frame) == (size_t)size);
            PROMISE(!sw_mpa_read(again, (size_t)size, is_reply, &second));
            PROMISE(second.crc == frame.crc && second.markers == frame.markers);
            PROMISE(second.inbound_depth == frame.inbound_depth);
            PROMISE(second.outbound_depth == frame.outbound_depth);
            PROMISE(!frame.private_size ||
                    !memcmp(second.private_data, frame.private_data, frame.private_size));
        }
        free(exactly);
    }
    free(bytes);
}

static void frames(struct input *input)
{
    size_t available;
    uint8_t *bytes = rest_of(input, &available);
    char again[SW_UNTAGGED_HEADER];
    struct sw_frame frame;
    struct sw_reason reason;

    int known = sw_frame_read((const char *)bytes, available, &frame, &reason);
    PROMISE(known >= -1 && known <= 1);
    if (known == 1) {
        PROMISE(frame.header + frame.payload ==
                SW_LENGTH_FIELD + ((uint32_t)bytes[0] << 8 | bytes[1]));
        PROMISE(sw_frame_size(&frame) <= SW_MOST_FRAME && sw_frame_size(&frame) % 4 == 0);
        /* Bytes 2 to 7 are not compared, because they have reserved bits. */
        sw_frame_write(again, &frame);
        PROMISE(!memcmp(again, bytes, 2) && !memcmp(again + 8, bytes + 8, frame.header - 8));
    }
    if (known == -1)
        PROMISE(reason.layer <= 2 && reason.type <= 15);
    if (available >= SW_ATOMIC_REQUEST_SIZE) {
        struct sw_atomic_request request;
        char written[SW_ATOMIC_REQUEST_SIZE];
        sw_atomic_request_read((const char *)bytes, &request);
        sw_atomic_request_write(written, &request);
        PROMISE(!memcmp(written + 4, bytes + 4, sizeof(written) - 4));
    }
    if (available >= SW_READ_REQUEST_SIZE) {
        struct sw_read_request request;
        char written[SW_READ_REQUEST_SIZE];
        sw_read_request_read((const char *)bytes, &request);
        sw_read_request_write(written, &request);
        PROMISE(!memcmp(written, bytes, sizeof(written)));
    }
    sw_terminate_read((const char *)bytes, (uint32_t)available, &reason);
    /* A TERMINATE quotes the frame with the error, up to the bytes that are available. */
    char last_word[SW_MOST_TERMINATE];
    reason = (struct sw_reason){1, 2, 3};
    uint32_t size =
        sw_terminate_write(last_word, &reason, (const char *)bytes, (uint32_t)available);
    PROMISE(size >= 4 && size <= SW_MOST_TERMINATE);
    PROMISE(!sw_terminate_read(last_word, size, &reason));
    PROMISE(reason.layer == 1 && reason.type == 2 && reason.code == 3);
    free(bytes);
}

static void packets(struct input *input)
{
    uint32_t how = take(input, 1);
    struct sw_roce_path path = {.source_port = (uint16_t)take(input, 2), .destination_port = 4791};
    struct sw_roce_packet packet, second;
    uint8_t again[SW_ROCE_MOST], grh[SW_GRH];

    memset(&path.source, how & 1 ? 0x11 : 0, sizeof(path.source));
    memset(&path.destination, how & 2 ? 0x22 : 0, sizeof(path.destination));
    for (int i = 10; i < 12 && !(how & 1); i++)
        path.source.s6_addr[i] = path.destination.s6_addr[i] = 0xff;
    path.traffic_class = (uint8_t)how;
    path.hop_limit = (uint8_t)how;
    if (how & 4) {
        size_t available;
        uint8_t *bytes = rest_of(input, &available);
        sw_roce_read(bytes, available, &path, &packet);
        if (available >= SW_GRH)
            sw_roce_read_grh(bytes, &path);
        free(bytes);
        return;
    }
    uint8_t opcode = (uint8_t)take(input, 1);
    unsigned int parts = sw_roce_parts(opcode);
    if (!parts)
        return;
    /* A packet with the right ICRC, so that more than the ICRC's check is tested. */
    size_t size = input->left < SW_DATAGRAM_MTU ? input->left : SW_DATAGRAM_MTU;
    const uint8_t *payload = take_bytes(input, &size);
    packet = (struct sw_roce_packet){
        .opcode = opcode,
        .destination_qpn = how * 0x10101 & 0xffffff,
        .source_qpn = 0x123456,
        .qkey = how * 0x01010101u,
        .immediate = how,
        .solicited = how >> 4 & 1,
        .address = how * 0x0101010101010101u,
        .rkey = how,
        .length = ~how,
        .swap_add = how,
        .compare = how + 1,
        .syndrome = (uint8_t)how,
        .messages = how,
        .original = how,
        .invalidated = how,
        .payload = payload,
        .size = parts & SW_HAS_PAYLOAD ? (uint32_t)size : 0,
    };
    uint32_t headers = sw_roce_headers(again, &packet);
    PROMISE(headers <= SW_ROCE_HEADERS);
    memcpy(again + headers, payload, size);
    uint32_t whole = sw_roce_seal(again, headers + packet.size, &path, 0);
    PROMISE(whole <= SW_ROCE_MOST);
    uint8_t *exactly = malloc(whole);
    PROMISE(exactly);
    memcpy(exactly, again, whole);
    int error = sw_roce_read(exactly, whole, &path, &second);
    if ((how & 3) == 0 || (how & 3) == 3) {
        PROMISE(!error && second.opcode == packet.opcode && second.size == packet.size);
        PROMISE(second.destination_qpn == packet.destination_qpn);
        PROMISE(second.solicited == packet.solicited);
        PROMISE(second.address == (parts & (SW_HAS_RETH | SW_HAS_ATOMIC) ? packet.address : 0));
        PROMISE(second.syndrome == (parts & SW_HAS_AETH ? packet.syndrome : 0));
        PROMISE(second.immediate == (parts & SW_HAS_IMMEDIATE ? how : 0));
        PROMISE(!memcmp(second.payload, payload, packet.size));
    }
    if (!error && packet.size) {
        /* With one bit changed, the packet is refused. */
        size_t at = headers + how % packet.size;
        exactly[at] ^= (uint8_t)(1 << (how & 7));
        PROMISE(sw_roce_read(exactly, whole, &path, &second));
    }
    sw_roce_grh(grh, &path, whole);
    struct sw_roce_path back;
    if (!error)
        PROMISE(!sw_roce_read_grh(grh, &back) &&
                !memcmp(&back.source, &path.source, sizeof(back.source)));
    free(exactly);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct input input = {bytes, size};

    switch (take(&input, 1) % 3) {
    case 0:
        handshake(&input);
        break;
    case 1:
        frames(&input);
        break;
    default:
        packets(&input);
    }
    return 0;
}
