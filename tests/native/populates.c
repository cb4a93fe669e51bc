/*
 * Preloaded before the C library (LD_PRELOAD), to find the longest range that a process populates
 * by one madvise, and the bytes that other threads than the first one populate.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

size_t longest_populated(void);
size_t populated_beside(void);

static volatile size_t longest, beside;

size_t longest_populated(void)
{
    return longest;
}

size_t populated_beside(void)
{
    return beside;
}

int madvise(void *address, size_t length, int advice)
{
    static int (*next)(void *, size_t, int);

    if (!next) {
        void *found = dlsym(RTLD_NEXT, "madvise");
        memcpy(&next, &found, sizeof(found));
    }
    if (advice == MADV_POPULATE_READ || advice == MADV_POPULATE_WRITE) {
        if (length > longest)
            longest = length;
        if (gettid() != getpid())
            __atomic_fetch_add(&beside, length, __ATOMIC_RELAXED);
    }
    return next(address, length, advice);
}
