/* Compares Ethernet's CRC with its check value, and with tables for many sizes and places. */
#include "software/crc32.h"

#include <stdio.h>
#include <stdlib.h>

int main(void)
{
    static uint8_t bytes[5000];
    int failures = 0;

    if (~sw_crc32(UINT32_MAX, "123456789", 9) != 0xcbf43926) {
        printf("the check value is wrong\n");
        failures++;
    }
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)rand();
    for (size_t size = 0; size < sizeof(bytes) - 16; size += size < 300 ? 1 : 61) {
        const uint8_t *at = bytes + size % 16;
        uint32_t start = (uint32_t)rand();
        if (sw_crc32(start, at, size) != sw_crc32_portable(start, at, size)) {
            printf("%zu bytes differ\n", size);
            failures++;
        }
    }
    return failures != 0;
}
