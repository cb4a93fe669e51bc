/*
 * What memory is mapped to. A mapping of a file can lose its pages at any time: whoever truncates
 * the file takes them away, and a process that touches them gets a SIGBUS. Such memory is copied by
 * the kernel, which returns an error instead.
 */
#ifndef AIORDMA_SOFTWARE_MAPPING_H
#define AIORDMA_SOFTWARE_MAPPING_H

#include <stddef.h>

/* Whether any of it is mapped to a file; also where /proc does not tell. */
int sw_is_of_file(const void *address, size_t length);

/* Registered memory, as it was found for one access. */
struct sw_memory {
    char *at;
    int is_of_file;
};

/* 0, or an errno: EFAULT where some of the memory is gone. What was copied until then stays. */
int sw_copy_to(struct sw_memory to, const void *from, size_t size);
int sw_copy_from(void *to, struct sw_memory from, size_t size);

#endif
