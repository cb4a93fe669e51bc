/* Compares CRC32C with the vectors of RFC 3720 (B.4), and with a bitwise sum of many sizes. */
#include "software/crc32c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint32_t (*checksum)(uint32_t crc, const void *bytes, size_t size);

static int failures;

static void check(const char *what, size_t size, uint32_t found, uint32_t wanted)
{
    if (found == wanted)
        return;
    failures++;
    printf("%s of %zu bytes: %08x is not %08x\n", what, size, found, wanted);
}

static void vectors(const char *what, checksum sum)
{
    static const unsigned char read_command[48] = {
        0x01, 0xc0, [16] = 0x14, [22] = 0x04, [27] = 0x14, [31] = 0x18, 0x28, [40] = 0x02,
    };
    unsigned char bytes[32];

    memset(bytes, 0, sizeof(bytes));
    check(what, 32, sum(0, bytes, 32), 0x8a9136aa);
    memset(bytes, 0xff, sizeof(bytes));
    check(what, 32, sum(0, bytes, 32), 0x62a8ab43);
    for (int i = 0; i < 32; i++)
        bytes[i] = (unsigned char)i;
    check(what, 32, sum(0, bytes, 32), 0x46dd794e);
    for (int i = 0; i < 32; i++)
        bytes[i] = (unsigned char)(31 - i);
    check(what, 32, sum(0, bytes, 32), 0x113fdb5c);
    check(what, 48, sum(0, read_command, 48), 0xd9963a56);
    check(what, 9, sum(0, "123456789", 9), 0xe3069283);
    check(what, 0, sum(0, bytes, 0), 0);
}

static uint32_t bit_by_bit(uint32_t crc, const unsigned char *at, size_t size)
{
    crc = ~crc;
    while (size--) {
        crc ^= *at++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

/* Sizes that reach every branch of the block code, at every alignment, in one piece and in two. */
static void sizes(const char *what, checksum sum)
{
    enum { MOST = 8000 };
    static unsigned char bytes[MOST + 8];

    srandom(1);
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (unsigned char)random();
    for (size_t size = 0; size <= MOST; size += size < 1300 ? 1 : 61) {
        const unsigned char *at = bytes + size % 8;
        uint32_t wanted = bit_by_bit(0, at, size);
        size_t first = size ? (size_t)random() % size : 0;
        check(what, size, sum(0, at, size), wanted);
        check(what, size, sum(sum(0, at, first), at + first, size - first), wanted);
    }
}

static void speed(const char *what, checksum sum, size_t size)
{
    unsigned char *bytes = calloc(1, size);
    size_t rounds = 400000000 / size;
    struct timespec begin, end;
    uint32_t crc = 0;

    if (!bytes)
        exit(2);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (size_t i = 0; i < rounds; i++)
        crc = sum(crc, bytes, size);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds =
        (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    printf("%-8s %6zu bytes: %6.2f GB/s (%08x)\n", what, size,
           1e-9 * (double)(rounds * size) / seconds, crc);
    free(bytes);
}

int main(int count, char **words)
{
    vectors("chosen", sw_crc32c);
    vectors("portable", sw_crc32c_portable);
    sizes("chosen", sw_crc32c);
    sizes("portable", sw_crc32c_portable);
    if (count == 2 && !strcmp(words[1], "speed"))
        for (size_t size = 64; size <= 65536; size *= 4) {
            speed("chosen", sw_crc32c, size);
            speed("portable", sw_crc32c_portable, size);
        }
    return failures != 0;
}
