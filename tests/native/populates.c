/*
 * Preloaded before the C library (LD_PRELOAD), to find the longest range that a process populates
 * by one madvise.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>

size_t longest_populated(void);

static volatile size_t longest;

size_t longest_populated(void)
{
    return longest;
}

int madvise(void *address, size_t length, int advice)
{
    static int (*next)(void *, size_t, int);

    if (!next) {
        void *found = dlsym(RTLD_NEXT, "madvise");
        memcpy(&next, &found, sizeof(found));
    }
    if ((advice == MADV_POPULATE_READ || advice == MADV_POPULATE_WRITE) && length > longest)
        longest = length;
    return next(address, length, advice);
}
