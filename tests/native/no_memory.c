/*
 * Put before the C library (LD_PRELOAD): no memory for the connection manager's events, from
 * no_memory(1) to no_memory(0).
 */
#include <errno.h>
#include <stddef.h>

#include "software/identifier.h"

void *__libc_calloc(size_t count, size_t size); /* glibc's own */
void no_memory(int is_so);

static volatile int is_gone;

void no_memory(int is_so)
{
    is_gone = is_so;
}

void *calloc(size_t count, size_t size)
{
    if (!is_gone || count != 1 || size != sizeof(struct sw_event))
        return __libc_calloc(count, size);
    errno = ENOMEM;
    return NULL;
}
