/* Reflected CRCs of 32 bits by tables, for Ethernet's and for CRC32C. */
#include "crc_tables.h"

void sw_make_crc_tables(struct sw_crc_tables *tables, uint32_t polynomial)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
        tables->of[0][byte] = crc;
    }
    for (int n = 1; n < 8; n++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = tables->of[n - 1][byte];
            tables->of[n][byte] = tables->of[0][before & 0xff] ^ before >> 8;
        }
}

static uint32_t little_endian(const uint8_t *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

uint32_t sw_crc_by_tables(const struct sw_crc_tables *tables, uint32_t crc, const uint8_t *at,
                          size_t size)
{
    const uint32_t (*of)[256] = tables->of;

    for (; size >= 8; at += 8, size -= 8) {
        uint32_t low = crc ^ little_endian(at), high = little_endian(at + 4);
        crc = of[7][low & 0xff] ^ of[6][low >> 8 & 0xff] ^ of[5][low >> 16 & 0xff] ^
              of[4][low >> 24] ^ of[3][high & 0xff] ^ of[2][high >> 8 & 0xff] ^
              of[1][high >> 16 & 0xff] ^ of[0][high >> 24];
    }
    for (; size; at++, size--)
        crc = of[0][(crc ^ *at) & 0xff] ^ crc >> 8;
    return crc;
}
