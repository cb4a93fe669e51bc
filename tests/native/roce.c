/*
 * Tests datagrams and SIDR requests as bytes. A separate program made the packets from the figures
 * of the specification, with the ICRC by zlib's crc32. That program reproduces a captured packet of
 * a network card.
 */
#include "software/roce.h"
#include "software/cm_messages.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

static int failures;

static void check(const char *what, int holds)
{
    if (holds)
        return;
    failures++;
    printf("%s\n", what);
}

static struct sw_roce_path path_of(const char *source, const char *destination)
{
    struct sw_roce_path path = {
        .source_port = 40000, .destination_port = 50001, .traffic_class = 5, .hop_limit = 63};

    check(source, inet_pton(AF_INET6, source, &path.source) == 1);
    check(destination, inet_pton(AF_INET6, destination, &path.destination) == 1);
    return path;
}

static size_t from_hex(const char *hex, uint8_t *bytes)
{
    size_t size = strlen(hex) / 2;

    for (size_t i = 0; i < size; i++) {
        unsigned int byte;
        check("hex", sscanf(hex + 2 * i, "%2x", &byte) == 1);
        bytes[i] = (uint8_t)byte;
    }
    return size;
}

/* Write a packet as expected, read it, and refuse it with any bit changed or any byte missing. */
static void packet(const char *hex, const struct sw_roce_path *path,
                   const struct sw_roce_packet *datagram)
{
    uint8_t wanted[SW_ROCE_MOST], packet[SW_ROCE_MOST];
    struct sw_roce_packet read;
    size_t size = from_hex(hex, wanted);

    memset(packet, 0xaa, sizeof(packet));
    uint32_t headers = sw_roce_headers(packet, datagram);
    memcpy(packet + headers, datagram->payload, datagram->size);
    check("its size", sw_roce_seal(packet, headers + datagram->size, path, 0) == size);
    check("its bytes", !memcmp(packet, wanted, size));
    check("read", !sw_roce_read(wanted, size, path, &read));
    check("numbers", read.destination_qpn == datagram->destination_qpn &&
                         read.source_qpn == datagram->source_qpn && read.psn == datagram->psn &&
                         read.qkey == datagram->qkey);
    check("flags", read.solicited == datagram->solicited && read.opcode == datagram->opcode &&
                       read.immediate == datagram->immediate);
    check("payload",
          read.size == datagram->size && !memcmp(read.payload, datagram->payload, datagram->size));
    for (size_t shorter = 0; shorter < size; shorter++)
        check("a part of it", sw_roce_read(wanted, shorter, path, &read));
    for (size_t bit = 0; bit < 8 * size; bit++) {
        wanted[bit / 8] ^= 1 << bit % 8;
        /* The fifth byte has the congestion bits, which routers set, so the ICRC excludes it. */
        check("a changed bit", !sw_roce_read(wanted, size, path, &read) == (bit / 8 == 4));
        wanted[bit / 8] ^= 1 << bit % 8;
    }
    struct sw_roce_path other = *path;
    other.source.s6_addr[15] ^= 1;
    check("from somebody else", sw_roce_read(wanted, size, &other, &read) == EILSEQ);
}

static void packets(void)
{
    struct sw_roce_path ipv4 = path_of("::ffff:10.1.1.1", "::ffff:10.1.1.2");
    struct sw_roce_path ipv6 = path_of("fd00::1", "fd00::2");
    struct sw_roce_packet datagram = {
        .opcode = SW_UD_SEND_ONLY_IMMEDIATE,
        .destination_qpn = 0x12c351,
        .source_qpn = 0x349c40,
        .psn = 7,
        .qkey = 0x01234567,
        .immediate = htonl(0xfeedbeef),
        .solicited = 1,
        .payload = (const uint8_t *)"hello",
        .size = 5,
    };

    packet("65b0ffff0012c351000000070123456700349c40feedbeef68656c6c6f0000006a9dc099", &ipv4,
           &datagram);
    datagram.opcode = SW_UD_SEND_ONLY;
    datagram.immediate = 0;
    datagram.solicited = 0;
    datagram.payload = (const uint8_t *)"12345678";
    datagram.size = 8;
    packet("6400ffff0012c351000000070123456700349c403132333435363738106b3480", &ipv6, &datagram);
}

/* Another device's packet: of RC, with an identification in its IPv4 header. */
static void identifications(void)
{
    struct sw_roce_path path = path_of("::ffff:10.1.1.1", "::ffff:10.1.1.2");
    struct sw_roce_packet packet = {.opcode = SW_RC_WRITE_ONLY_IMMEDIATE,
                                    .destination_qpn = 17,
                                    .psn = 0xfffffe,
                                    .acknowledge = 1,
                                    .address = 0x123456789abcdef0,
                                    .rkey = 0xfedcba98,
                                    .length = 4,
                                    .immediate = htonl(7),
                                    .payload = (const uint8_t *)"data",
                                    .size = 4},
                          read;
    uint8_t bytes[SW_ROCE_MOST];

    path.destination_port = SW_ROCE_PORT;
    for (uint32_t identification = 0; identification < 0x10000; identification += 257) {
        uint32_t size = sw_roce_headers(bytes, &packet);
        memcpy(bytes + size, packet.payload, 4);
        size = sw_roce_seal(bytes, size + 4, &path, identification);
        check("any identification", !sw_roce_read(bytes, size, &path, &read));
        check("its numbers", read.psn == packet.psn && read.address == packet.address &&
                                 read.rkey == packet.rkey && read.length == 4 &&
                                 read.immediate == packet.immediate && read.acknowledge);
    }
    /* Of the changed packets, about one in 65,536 passes. */
    int passed = 0;
    uint32_t size = sw_roce_headers(bytes, &packet);
    memcpy(bytes + size, packet.payload, 4);
    size = sw_roce_seal(bytes, size + 4, &path, 99);
    for (uint32_t bit = 8 * 5; bit < 8 * size; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        passed += !sw_roce_read(bytes, size, &path, &read);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    check("few changed packets pass", passed <= 1);
}

static void headers_of_receives(void)
{
    struct sw_roce_path ipv4 = path_of("::ffff:10.1.1.1", "::ffff:239.1.2.3");
    struct sw_roce_path ipv6 = path_of("fd00::1", "ff0e::1234"), read;
    uint8_t grh[SW_GRH], wanted[SW_GRH];

    sw_roce_grh(grh, &ipv4, 36);
    from_hex("0000000000000000000000000000000000000000"
             "45050040000040003f113fa20a010101ef010203",
             wanted);
    check("IPv4 header", !memcmp(grh, wanted, SW_GRH));
    memset(grh, 0x60, 20); /* undefined bytes, which may look like an IPv6 header */
    check("IPv4 header read", !sw_roce_read_grh(grh, &read) &&
                                  !memcmp(&read.source, &ipv4.source, 16) &&
                                  !memcmp(&read.destination, &ipv4.destination, 16) &&
                                  read.traffic_class == 5 && read.hop_limit == 63);
    sw_roce_grh(grh, &ipv6, 36);
    from_hex("60500000002c113ffd000000000000000000000000000001"
             "ff0e0000000000000000000000001234",
             wanted);
    check("IPv6 header", !memcmp(grh, wanted, SW_GRH));
    check("IPv6 header read", !sw_roce_read_grh(grh, &read) &&
                                  !memcmp(&read.source, &ipv6.source, 16) &&
                                  !memcmp(&read.destination, &ipv6.destination, 16) &&
                                  read.traffic_class == 5 && read.hop_limit == 63);
    memset(grh, 0, sizeof(grh));
    check("no header", sw_roce_read_grh(grh, &read) == EINVAL);
    check("groups", sw_roce_is_group(&ipv4.destination) && sw_roce_is_group(&ipv6.destination) &&
                        !sw_roce_is_group(&ipv4.source) && !sw_roce_is_group(&ipv6.source));
}

static void questions(void)
{
    struct sw_roce_path ipv4 = path_of("::ffff:10.1.1.1", "::ffff:10.1.1.2");
    struct sw_sidr_request request = {.transaction = 0x1122334455667788,
                                      .number = 0x99aabbcc,
                                      .source = ipv4.source,
                                      .destination = ipv4.destination,
                                      .source_port = 40000,
                                      .port = 7174},
                           asked;
    struct sw_sidr_reply reply = {.transaction = 5,
                                  .number = 6,
                                  .status = SW_SIDR_REFUSED,
                                  .port = 7174,
                                  .qp_num = 0x123456,
                                  .qkey = 0x01234567},
                         told;
    uint8_t mad[SW_MAD], wanted[SW_MAD] = {0};

    memset(&asked, 0, sizeof(asked));
    memset(request.private_data, 0xd1, sizeof(request.private_data));
    memset(reply.private_data, 0xd2, sizeof(reply.private_data));
    sw_sidr_write_request(mad, &request);
    from_hex("01070203000000001122334455667788001700000000000099aabbccffff0000"
             "0000000001111c06"
             "00409c40"
             "0000000000000000000000000a010101"
             "0000000000000000000000000a010102",
             wanted);
    memset(wanted + 76, 0xd1, 180);
    check("a question", !memcmp(mad, wanted, SW_MAD));
    check("a question read",
          !sw_sidr_read_request(mad, SW_MAD, &asked) && !memcmp(&asked, &request, sizeof(asked)));
    check("a question is no answer", sw_sidr_read_reply(mad, SW_MAD, &told));
    check("a part of a question", sw_sidr_read_request(mad, SW_MAD - 1, &asked));

    memset(wanted, 0, sizeof(wanted));
    sw_sidr_write_reply(mad, &reply);
    from_hex("01070203000000000000000000000005001800000000000000000006"
             "02000000123456000000000001111c0601234567",
             wanted);
    memset(wanted + 120, 0xd2, 136);
    check("an answer", !memcmp(mad, wanted, SW_MAD));
    memset(&told, 0, sizeof(told));
    check("an answer read",
          !sw_sidr_read_reply(mad, SW_MAD, &told) && told.transaction == 5 && told.number == 6 &&
              told.status == SW_SIDR_REFUSED && told.port == 7174 && told.qp_num == 0x123456 &&
              told.qkey == 0x01234567 && !memcmp(told.private_data, reply.private_data, 136));
    check("an answer is no question", sw_sidr_read_request(mad, SW_MAD, &asked));
}

int main(void)
{
    packets();
    identifications();
    headers_of_receives();
    questions();
    return failures ? 1 : 0;
}
