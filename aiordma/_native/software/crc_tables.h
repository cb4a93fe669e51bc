/* Reflected CRCs of 32 bits by tables: eight bytes a step. */
#ifndef AIORDMA_SOFTWARE_CRC_TABLES_H
#define AIORDMA_SOFTWARE_CRC_TABLES_H

#include <stddef.h>
#include <stdint.h>

/* of[n][byte]: the CRC of that byte with n bytes of zeros behind it. */
struct sw_crc_tables {
    uint32_t of[8][256];
};

/* Fill the tables. The polynomial is written with its lowest power first. */
void sw_make_crc_tables(struct sw_crc_tables *tables, uint32_t polynomial);

/* The CRC of bytes behind those of crc, without an inversion before or after. */
uint32_t sw_crc_by_tables(const struct sw_crc_tables *tables, uint32_t crc, const uint8_t *at,
                          size_t size);

#endif
