/*
 * Preloaded before the C library (LD_PRELOAD), to count how often a process lists its machine's
 * addresses.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <ifaddrs.h>
#include <string.h>

int address_lists(void);

static volatile int lists;

int address_lists(void)
{
    return lists;
}

int getifaddrs(struct ifaddrs **addresses)
{
    static int (*next)(struct ifaddrs **);

    if (!next) {
        void *found = dlsym(RTLD_NEXT, "getifaddrs");
        memcpy(&next, &found, sizeof(found));
    }
    lists++;
    return next(addresses);
}
