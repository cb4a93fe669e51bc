/* CRC32C (Castagnoli's polynomial), which closes every frame of MPA. */
#ifndef AIORDMA_SOFTWARE_CRC32C_H
#define AIORDMA_SOFTWARE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/*
 * The checksum of what had the checksum crc (0: of nothing) with these bytes behind it. On the
 * wire its lowest byte comes first (RFC 3720, B.4). Takes no lock.
 */
uint32_t sw_crc32c(uint32_t crc, const void *bytes, size_t size);

/* The same without the processor's instructions, for comparison. */
uint32_t sw_crc32c_portable(uint32_t crc, const void *bytes, size_t size);

#endif
