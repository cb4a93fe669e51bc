/* CRC32C (Castagnoli's polynomial), the checksum at the end of an MPA frame. */
#ifndef AIORDMA_SOFTWARE_CRC32C_H
#define AIORDMA_SOFTWARE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/*
 * Extend the checksum crc of earlier bytes (0: there are none) by these bytes. On the wire, the
 * lowest byte of a checksum comes first (RFC 3720, B.4). Takes no lock.
 */
uint32_t sw_crc32c(uint32_t crc, const void *bytes, size_t size);

/* The same without the processor's instruction, for comparison. */
uint32_t sw_crc32c_portable(uint32_t crc, const void *bytes, size_t size);

#endif
