/*
 * Memory that is mapped to a file. If the file is truncated, the mapping loses pages, and an access
 * to them raises SIGBUS. The kernel copies such memory, and returns an error instead.
 */
#ifndef AIORDMA_SOFTWARE_MAPPING_H
#define AIORDMA_SOFTWARE_MAPPING_H

#include <stddef.h>

/* Whether a part of the memory is mapped to a file. 1 also if /proc cannot be read. */
int sw_is_of_file(const void *address, size_t length);

/* Registered memory, found for one access. */
struct sw_memory {
    char *at;
    int is_of_file;
};

/* Copy. 0, or an errno: EFAULT if a part of the memory is gone. Bytes copied before that stay. */
int sw_copy_to(struct sw_memory to, const void *from, size_t size);
int sw_copy_from(void *to, struct sw_memory from, size_t size);

#endif
