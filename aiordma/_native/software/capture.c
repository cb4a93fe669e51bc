/*
 * A capture of the device's traffic: see capture.h. The format is pcapng (draft-ietf-opsawg-pcapng)
 * with raw IP packets. The device sees bytes of sockets, not packets. So the IP, TCP and UDP headers
 * are made here: the addresses and ports are the sockets', the sequence numbers count the bytes, and
 * a connection begins with a handshake that its first sender opens. TCP's checksum is 0, as in a
 * capture of a network card that computes it. There are no retransmissions, and no end of the
 * connection.
 *
 * If both ends of a connection are in this process, its bytes are sent and received here, and are
 * written once, when they are sent.
 *
 * Each packet is one writev of the bytes where they are: they can be in memory that the program has
 * unmapped, and the kernel then reports it. The file is whole after each packet.
 */
#define _GNU_SOURCE 1
#include "capture.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

enum {
    MOST_FLOWS = 1024,    /* connections; beyond, the one that was silent longest begins anew */
    MOST_SEGMENT = 32768, /* bytes of a connection in one packet */
    MOST_PARTS = 128,
    RECENT = 256,         /* datagrams that were sent, to recognize them when they are received */
    ENHANCED_PACKET = 32, /* bytes of a block before and after its packet */
    RAW_IP = 101,         /* the link type */
    TCP_HEADER = 20,
    UDP_HEADER = 8,
    MOST_HEADERS = 40 + TCP_HEADER,
    SYN = 2,
    PUSH = 8,
    ACK = 16,
};

struct end {
    struct in6_addr address; /* IPv4: ::ffff:a.b.c.d */
    uint16_t port;
};

/* A TCP connection. Direction 0 is from ends[0], which sent the first bytes. */
struct flow {
    struct end ends[2];
    uint64_t passed[2][2]; /* bytes by direction, and whether their sender or receiver is here */
    uint64_t written[2];
    uint64_t used; /* when; 0: never */
};

static struct {
    int file;
    uint64_t size, most;
    uint64_t uses;
    struct flow *flows;
    uint64_t recent[RECENT];
    unsigned int next_recent;
} capture = {.file = -1};

int sw_is_capturing;

static void stop(void)
{
    if (capture.file >= 0)
        close(capture.file);
    capture.file = -1;
    free(capture.flows);
    capture.flows = NULL;
    sw_is_capturing = 0;
}

/* Write all parts, or nothing and stop. */
static void write_all(struct iovec *parts, int count, size_t size)
{
    ssize_t written;

    if (capture.size + size > capture.most) {
        stop();
        return;
    }
    do
        written = pwritev(capture.file, parts, count, (off_t)capture.size);
    while (written < 0 && errno == EINTR);
    if (written == (ssize_t)size) {
        capture.size += size;
        return;
    }
    /* A full file system, or memory that does not exist any more. */
    if (ftruncate(capture.file, (off_t)capture.size)) {
        /* A reader then finds the last packet cut short. */
    }
    stop();
}

/* -- packets -------------------------------------------------------------------------------- */

/* Add 16-bit words to a sum for a checksum (RFC 1071). */
static uint32_t add_words(uint32_t sum, const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i + 1 < size; i += 2)
        sum += (uint32_t)bytes[i] << 8 | bytes[i + 1];
    if (size % 2)
        sum += (uint32_t)bytes[size - 1] << 8;
    return sum;
}

static uint16_t checksum(uint32_t sum)
{
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~sum;
}

static void put16(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 8);
    to[1] = (uint8_t)value;
}

static void put32(uint8_t *to, uint32_t value)
{
    put16(to, value >> 16);
    put16(to + 2, value);
}

/* Write an IP header before `size` bytes of a protocol, and return its size. */
static size_t put_ip(uint8_t *to, const struct end *from, const struct end *destination,
                     uint8_t protocol, size_t size)
{
    memset(to, 0, 40);
    if (IN6_IS_ADDR_V4MAPPED(&from->address) && IN6_IS_ADDR_V4MAPPED(&destination->address)) {
        to[0] = 0x45;
        put16(to + 2, (uint32_t)(20 + size));
        to[6] = 0x40; /* don't fragment, as the device's sockets have it */
        to[8] = 64;
        to[9] = protocol;
        memcpy(to + 12, from->address.s6_addr + 12, 4);
        memcpy(to + 16, destination->address.s6_addr + 12, 4);
        put16(to + 10, checksum(add_words(0, to, 20)));
        return 20;
    }
    to[0] = 0x60;
    put16(to + 4, (uint32_t)size);
    to[6] = protocol;
    to[7] = 64;
    memcpy(to + 8, from->address.s6_addr, 16);
    memcpy(to + 24, destination->address.s6_addr, 16);
    return 40;
}

/* Write an enhanced packet block of these headers and parts. `parts` has two places before them, and
   one after. */
static void put_block(const uint8_t *headers, size_t headers_size, struct iovec *parts, int count,
                      size_t size)
{
    static const uint8_t zeros[4];
    uint32_t length = (uint32_t)(headers_size + size), padding = -length & 3;
    uint32_t total = ENHANCED_PACKET + length + padding, block[7];
    uint8_t end[8];
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t time = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    block[0] = 6;
    block[1] = total;
    block[2] = 0; /* the interface */
    block[3] = (uint32_t)(time >> 32);
    block[4] = (uint32_t)time;
    block[5] = block[6] = length;
    memcpy(end, zeros, sizeof(zeros));
    memcpy(end + padding, &total, sizeof(total));
    parts[0] = (struct iovec){.iov_base = block, .iov_len = sizeof(block)};
    parts[1] = (struct iovec){.iov_base = (void *)(uintptr_t)headers, .iov_len = headers_size};
    parts[2 + count] = (struct iovec){.iov_base = end, .iov_len = padding + sizeof(total)};
    write_all(parts, count + 3, total);
}

/* -- connections ---------------------------------------------------------------------------- */

/* Write a segment of a connection. `parts` as of put_block. */
static void put_segment(const struct flow *flow, int direction, unsigned int flags,
                        uint32_t sequence, uint32_t acknowledged, struct iovec *parts, int count,
                        size_t size)
{
    const struct end *from = &flow->ends[direction], *to = &flow->ends[!direction];
    uint8_t headers[MOST_HEADERS];
    size_t ip = put_ip(headers, from, to, IPPROTO_TCP, TCP_HEADER + size);
    uint8_t *tcp = headers + ip;

    memset(tcp, 0, TCP_HEADER);
    put16(tcp, from->port);
    put16(tcp + 2, to->port);
    put32(tcp + 4, sequence);
    put32(tcp + 8, acknowledged);
    tcp[12] = TCP_HEADER / 4 << 4;
    tcp[13] = (uint8_t)flags;
    put16(tcp + 14, 65535);
    put_block(headers, ip + TCP_HEADER, parts, count, size);
}

/* Write the bytes from `skipped` on. */
static void put_bytes(struct flow *flow, int direction, const struct iovec *from, int count,
                      size_t skipped, size_t size)
{
    struct iovec parts[MOST_PARTS + 3];

    for (int at = 0; at < count && size;) {
        int used = 0;
        size_t taken = 0;
        while (at < count && used < MOST_PARTS && taken < size && taken < MOST_SEGMENT) {
            size_t left = from[at].iov_len - skipped;
            if (from[at].iov_len <= skipped) {
                skipped -= from[at++].iov_len;
                continue;
            }
            size_t most = size - taken < MOST_SEGMENT - taken ? size - taken : MOST_SEGMENT - taken;
            size_t part = left < most ? left : most;
            parts[2 + used++] = (struct iovec){(char *)from[at].iov_base + skipped, part};
            taken += part;
            skipped += part;
        }
        if (!taken)
            return;
        put_segment(flow, direction, PUSH | ACK, (uint32_t)(1 + flow->written[direction]),
                    (uint32_t)(1 + flow->written[!direction]), parts, used, taken);
        if (!sw_is_capturing)
            return; /* it has stopped, and the flows are freed */
        flow->written[direction] += taken;
        size -= taken;
    }
}

static void put_handshake(const struct flow *flow)
{
    struct iovec parts[3];

    put_segment(flow, 0, SYN, 0, 0, parts, 0, 0);
    if (sw_is_capturing)
        put_segment(flow, 1, SYN | ACK, 0, 1, parts, 0, 0);
    if (sw_is_capturing)
        put_segment(flow, 0, ACK, 1, 1, parts, 0, 0);
}

static int read_end(const struct sockaddr_storage *name, struct end *end)
{
    const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)name;
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)(const void *)name;

    memset(end, 0, sizeof(*end));
    if (name->ss_family == AF_INET6) {
        end->address = six->sin6_addr;
        end->port = ntohs(six->sin6_port);
        return 0;
    }
    if (name->ss_family != AF_INET)
        return -1;
    memset(end->address.s6_addr + 10, 0xff, 2);
    memcpy(end->address.s6_addr + 12, &four->sin_addr, 4);
    end->port = ntohs(four->sin_port);
    return 0;
}

static int is_same(const struct end *one, const struct end *other)
{
    return one->port == other->port && IN6_ARE_ADDR_EQUAL(&one->address, &other->address);
}

/* Find the connection, or begin one. */
static struct flow *find_flow(const struct end *from, const struct end *to, int *direction)
{
    struct flow *oldest = &capture.flows[0];

    for (int i = 0; i < MOST_FLOWS; i++) {
        struct flow *flow = &capture.flows[i];
        for (*direction = 0; flow->used && *direction < 2; ++*direction)
            if (is_same(from, &flow->ends[*direction]) && is_same(to, &flow->ends[!*direction]))
                return flow;
        if (flow->used < oldest->used)
            oldest = flow;
        if (!flow->used)
            break; /* the rest is free, too */
    }
    *oldest = (struct flow){.ends = {*from, *to}};
    *direction = 0;
    put_handshake(oldest);
    return oldest;
}

void sw_capture_parts(int fd, int is_sent, const struct iovec *parts, int count, size_t size)
{
    struct sockaddr_storage local, remote;
    socklen_t local_size = sizeof(local), remote_size = sizeof(remote);
    struct end here, there;
    int direction;

    if (sw_system->getsockname(fd, (struct sockaddr *)&local, &local_size) ||
        sw_system->getpeername(fd, (struct sockaddr *)&remote, &remote_size) ||
        read_end(&local, &here) || read_end(&remote, &there))
        return; /* the connection was reset at this moment */
    struct flow *flow = find_flow(is_sent ? &here : &there, is_sent ? &there : &here, &direction);
    if (!sw_is_capturing)
        return;
    flow->used = ++capture.uses;
    uint64_t *passed = &flow->passed[direction][is_sent];
    *passed += size;
    if (*passed <= flow->written[direction])
        return; /* the other end is here, too */
    size_t fresh = (size_t)(*passed - flow->written[direction]);
    if (fresh > size)
        fresh = size;
    put_bytes(flow, direction, parts, count, size - fresh, fresh);
}

/* -- datagrams ------------------------------------------------------------------------------ */

static uint64_t digest_of(const struct end *from, const struct end *to, const uint8_t *packet,
                          size_t size)
{
    uint64_t digest = 14695981039346656037u ^ ((uint64_t)from->port << 16 | to->port);

    for (size_t i = 0; i < size; i++)
        digest = (digest ^ packet[i]) * 1099511628211u;
    return digest;
}

/* Whether this process has sent the packet that it receives. */
static int was_sent_here(uint64_t digest)
{
    for (int i = 0; i < RECENT; i++)
        if (capture.recent[i] == digest)
            return 1;
    return 0;
}

void sw_capture_packet(const struct sw_udp_route *route, uint16_t port, int is_sent,
                       const void *packet, size_t size)
{
    const struct sw_roce_path *path = &route->path;
    struct end from = {path->source, is_sent ? port : path->source_port};
    struct end to = {path->destination, is_sent ? path->destination_port : port};
    struct iovec parts[4];
    uint8_t headers[MOST_HEADERS];
    uint64_t digest = digest_of(&from, &to, packet, size);

    if (!is_sent && was_sent_here(digest))
        return;
    if (is_sent)
        capture.recent[capture.next_recent++ % RECENT] = digest;
    size_t ip = put_ip(headers, &from, &to, IPPROTO_UDP, UDP_HEADER + size);
    uint8_t *udp = headers + ip;
    put16(udp, from.port);
    put16(udp + 2, to.port);
    put16(udp + 4, (uint32_t)(UDP_HEADER + size));
    put16(udp + 6, 0);
    /* The addresses are at the end of either IP header; UDP writes a sum of 0 as 0xffff. */
    size_t addresses = ip == 20 ? 8 : 32;
    uint32_t sum = add_words((uint32_t)(IPPROTO_UDP + UDP_HEADER + size), headers + ip - addresses,
                             addresses + UDP_HEADER);
    uint16_t check = checksum(add_words(sum, packet, size));
    put16(udp + 6, check ? check : 0xffff);
    parts[2] = (struct iovec){.iov_base = (void *)(uintptr_t)packet, .iov_len = size};
    put_block(headers, ip + UDP_HEADER, parts, 1, size);
}

/* -- the file ------------------------------------------------------------------------------- */

/* The section header, and the only interface: its name, and nanoseconds as the unit of time. */
static void put_head(void)
{
    static const uint32_t section[] = {0x0a0d0d0a, 28, 0x1a2b3c4d, 1, 0xffffffff, 0xffffffff, 28};
    struct {
        uint32_t type, size;
        uint16_t link, reserved;
        uint32_t longest;
        uint16_t name_code, name_size;
        char name[8];
        uint16_t unit_code, unit_size;
        uint8_t unit[4];
        uint32_t end, again;
    } interface = {
        .type = 1,
        .size = sizeof(interface),
        .link = RAW_IP,
        .name_code = 2,
        .name_size = sizeof(interface.name),
        .name = {'s', 'o', 'f', 't', 'w', 'a', 'r', 'e'},
        .unit_code = 9,
        .unit_size = 1,
        .unit = {9},
        .again = sizeof(interface),
    };
    struct iovec parts[] = {{(void *)(uintptr_t)section, sizeof(section)},
                            {&interface, sizeof(interface)}};
    write_all(parts, 2, sizeof(section) + sizeof(interface));
}

int aiordma_software_capture(const char *path, uint64_t most)
{
    int error = 0;

    sw_lock();
    stop();
    if (path) {
        capture.file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (capture.file < 0)
            error = errno;
        else if (!(capture.flows = calloc(MOST_FLOWS, sizeof(*capture.flows))))
            error = ENOMEM;
        capture.size = capture.uses = 0;
        capture.most = most;
        sw_is_capturing = 1;
        if (!error)
            put_head();
        if (!error && !sw_is_capturing)
            error = ENOSPC;
        if (error)
            stop();
    }
    sw_unlock();
    return error;
}

void sw_capture_forked(void)
{
    stop();
}
