/*
 * One fault of each kind that a sanitizer is there to find: what does not find these finds nothing
 * elsewhere.
 */
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

int overrun(int size)
{
    char *bytes = malloc((size_t)size);
    if (!bytes)
        return -1;
    bytes[0] = 1;
    int found = ((volatile char *)bytes)[size];
    free(bytes);
    return found;
}

int use_after_free(int size)
{
    volatile char *bytes = malloc((size_t)size);
    if (!bytes)
        return -1;
    bytes[0] = 1;
    free((void *)bytes);
    return bytes[0];
}

int overflow(int number)
{
    return INT_MAX - 1 + number;
}

int misaligned(int number)
{
    static long long words[2] = {1, 2};
    char *at = (char *)words + number;
    return (int)*(volatile long long *)(void *)at;
}

static void *kept;

int leak(int size)
{
    kept = malloc((size_t)size);
    kept = 0;
    return 0;
}

static int counter;

static void *count(void *unused)
{
    for (int i = 0; i < 1000; i++)
        counter++;
    return unused;
}

int race(int unused)
{
    pthread_t first, second;
    if (pthread_create(&first, 0, count, 0))
        return -1;
    if (!pthread_create(&second, 0, count, 0))
        pthread_join(second, 0);
    pthread_join(first, 0);
    return counter + unused;
}
