/*
 * CRC32C by the processor's instruction if it has one, and otherwise by tables.
 *
 * The instruction processes 8 bytes per cycle, but its result comes two cycles later. So the
 * checksums of three neighbouring blocks are computed in turn, and then combined by multiplication:
 * the checksum of data with n bytes of zeros behind it is the checksum of the data times x^8n,
 * modulo the polynomial.
 */
#include "crc32c.h"

#include <string.h>

#include "crc_tables.h"

enum { REVERSED_POLYNOMIAL = 0x82f63b78u }; /* in C23 its values are unsigned */

static struct sw_crc_tables tables;

#ifdef __x86_64__

#include <immintrin.h>

enum { LONG_BLOCK = 1024, SHORT_BLOCK = 128 };

/*
 * x^(8n - 33) modulo the polynomial, with its bits reversed as the instruction requires. The
 * carry-less multiplication shifts by one, and the instruction that reduces the product shifts by
 * 32.
 */
enum {
    SHORT_ONCE = 0x0d3b6092u,  /* n = 128 */
    SHORT_TWICE = 0xb9e02b86u, /* n = 256 */
    LONG_ONCE = 0x170076fau,   /* n = 1024 */
    LONG_TWICE = 0xa51b6135u,  /* n = 2048 */
};

static int has_instructions;

__attribute__((target("sse4.2"))) static uint64_t eight(uint64_t crc, const unsigned char *at)
{
    uint64_t word;

    memcpy(&word, at, sizeof(word));
    return _mm_crc32_u64(crc, word);
}

__attribute__((target("sse4.2,pclmul"))) static __m128i times(uint64_t crc, uint32_t factor)
{
    return _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc), _mm_cvtsi64_si128(factor), 0);
}

/* Process three blocks. Inlined, so that the sizes and factors are constants. */
__attribute__((target("sse4.2,pclmul"), always_inline)) static inline uint64_t
three_blocks(uint64_t crc, const unsigned char *at, size_t block, uint32_t once, uint32_t twice)
{
    uint64_t second = 0, third = 0;

    for (size_t i = 0; i < block; i += 8) {
        crc = eight(crc, at + i);
        second = eight(second, at + block + i);
        third = eight(third, at + 2 * block + i);
    }
    __m128i moved = _mm_xor_si128(times(crc, twice), times(second, once));
    return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(moved)) ^ third;
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t
by_instruction(uint32_t start, const unsigned char *at, size_t size)
{
    uint64_t crc = start;

    for (; size >= 3 * LONG_BLOCK; at += 3 * LONG_BLOCK, size -= 3 * LONG_BLOCK)
        crc = three_blocks(crc, at, LONG_BLOCK, LONG_ONCE, LONG_TWICE);
    for (; size >= 3 * SHORT_BLOCK; at += 3 * SHORT_BLOCK, size -= 3 * SHORT_BLOCK)
        crc = three_blocks(crc, at, SHORT_BLOCK, SHORT_ONCE, SHORT_TWICE);
    for (; size >= 8; at += 8, size -= 8)
        crc = eight(crc, at);
    for (; size; at++, size--)
        crc = _mm_crc32_u8((uint32_t)crc, *at);
    return (uint32_t)crc;
}

#endif

/* Runs when the extension is loaded, before any checksum. */
__attribute__((constructor)) static void prepare(void)
{
    sw_make_crc_tables(&tables, REVERSED_POLYNOMIAL);
#ifdef __x86_64__
    __builtin_cpu_init();
    has_instructions = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#endif
}

uint32_t sw_crc32c_portable(uint32_t crc, const void *bytes, size_t size)
{
    return ~sw_crc_by_tables(&tables, ~crc, bytes, size);
}

uint32_t sw_crc32c(uint32_t crc, const void *bytes, size_t size)
{
#ifdef __x86_64__
    if (has_instructions)
        return ~by_instruction(~crc, bytes, size);
#endif
    return ~sw_crc_by_tables(&tables, ~crc, bytes, size);
}
