/* Ethernet's CRC, for RoCE's packets. */
#ifndef AIORDMA_SOFTWARE_CRC32_H
#define AIORDMA_SOFTWARE_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* Go on with a checksum, which begins and ends inverted: ~sw_crc32(~0, bytes, size). */
uint32_t sw_crc32(uint32_t crc, const void *bytes, size_t size);
uint32_t sw_crc32_portable(uint32_t crc, const void *bytes, size_t size);

#endif
