/*
 * Ethernet's CRC, by carry-less multiplication if the processor has it, and otherwise by tables.
 *
 * A checksum is a remainder of polynomials. So 16 bytes can be replaced by their product with
 * x^n modulo the polynomial, added n bits later: four such blocks are folded into the four behind
 * them, until four are left, then one. The last step reduces 128 bits to 32.
 */
#include "crc32.h"

#include <string.h>

#include "crc_tables.h"

enum { POLYNOMIAL = 0xedb88320u };

static struct sw_crc_tables tables;

#ifdef __x86_64__

#include <immintrin.h>

static int has_instructions;

/* Two powers of x modulo the polynomial, for the two halves of a block. */
struct factors {
    long long low, high;
};
static const struct factors BY_FOUR = {0x154442bd4, 0x1c6e41596}; /* 512 bits */
static const struct factors BY_ONE = {0x1751997d0, 0x0ccaa009e};  /* 128 bits */
static const struct factors TO_64 = {0x163cd6124, 0};
static const struct factors REDUCTION = {0x1db710641,
                                         0x1f7011641}; /* the polynomial; its inverse */

__attribute__((target("sse4.1,pclmul"))) static inline __m128i load(const uint8_t *at)
{
    return _mm_loadu_si128((const __m128i *)(const void *)at);
}

__attribute__((target("sse4.1,pclmul"))) static inline __m128i pair_of(struct factors factors)
{
    return _mm_set_epi64x(factors.high, factors.low);
}

/* Move a block by the factors' bits, and add it to what is there. */
__attribute__((target("sse4.1,pclmul"), always_inline)) static inline __m128i
fold(__m128i block, __m128i factors, __m128i to)
{
    __m128i low = _mm_clmulepi64_si128(block, factors, 0x00);
    __m128i high = _mm_clmulepi64_si128(block, factors, 0x11);

    return _mm_xor_si128(_mm_xor_si128(low, high), to);
}

/* size: a multiple of 16, and 64 at least. */
__attribute__((target("sse4.1,pclmul"))) static uint32_t
by_multiplication(uint32_t crc, const uint8_t *at, size_t size)
{
    const __m128i by_four = pair_of(BY_FOUR), by_one = pair_of(BY_ONE), to_64 = pair_of(TO_64);
    const __m128i reduction = pair_of(REDUCTION), low_32 = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i blocks[4];

    for (int i = 0; i < 4; i++)
        blocks[i] = load(at + 16 * i);
    blocks[0] = _mm_xor_si128(blocks[0], _mm_cvtsi32_si128((int)crc));
    for (at += 64, size -= 64; size >= 64; at += 64, size -= 64)
#pragma GCC unroll 4 /* so that the blocks are in registers */
        for (int i = 0; i < 4; i++)
            blocks[i] = fold(blocks[i], by_four, load(at + 16 * i));
    __m128i one = blocks[0];
    for (int i = 1; i < 4; i++)
        one = fold(one, by_one, blocks[i]);
    for (; size; at += 16, size -= 16)
        one = fold(one, by_one, load(at));

    one = _mm_xor_si128(_mm_srli_si128(one, 8), _mm_clmulepi64_si128(one, by_one, 0x10));
    one = _mm_xor_si128(_mm_srli_si128(one, 4),
                        _mm_clmulepi64_si128(_mm_and_si128(one, low_32), to_64, 0x00));
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(one, low_32), reduction, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_32), reduction, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(one, quotient), 1);
}

#endif

/* Runs when the extension is loaded, before any checksum. */
__attribute__((constructor)) static void prepare(void)
{
    sw_make_crc_tables(&tables, POLYNOMIAL);
#ifdef __x86_64__
    __builtin_cpu_init();
    has_instructions = __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("pclmul");
#endif
}

uint32_t sw_crc32_portable(uint32_t crc, const void *bytes, size_t size)
{
    return sw_crc_by_tables(&tables, crc, bytes, size);
}

uint32_t sw_crc32(uint32_t crc, const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
#ifdef __x86_64__
    if (has_instructions && size >= 64) {
        crc = by_multiplication(crc, at, size & ~(size_t)15);
        at += size & ~(size_t)15;
        size &= 15;
    }
#endif
    return sw_crc_by_tables(&tables, crc, at, size);
}
