/*
 * Faults in the pages of memory that is to be registered, in several threads. Pinning does it, too,
 * but in the one thread of its call, which takes longest where the pages are new and have to be
 * zeroed.
 */
#include "objects.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum {
    STEP = 4
        << 20, /* bytes, between which other threads can change their mappings (mmap, malloc) */
    MOST_THREADS = 16,
    SAMPLES = 16, /* pages */
};

struct part {
    char *start;
    size_t length;
    pthread_t thread;
};

/* What the kernel refuses is not reported: the call that registers the memory meets it again. */
static void *populate(void *given)
{
    const struct part *part = given;

    for (size_t done = 0; done < part->length; done += STEP) {
        size_t step = part->length - done < STEP ? part->length - done : STEP;
        if (madvise(part->start + done, step, MADV_POPULATE_WRITE))
            break;
    }
    return NULL;
}

/* Whether some pages, evenly spread, are all there: then the others will be, too. */
static int is_resident(char *start, size_t length, size_t page)
{
    unsigned char residence = 0;

    for (size_t i = 0; i < SAMPLES; i++) {
        char *at = start + length / page * i / SAMPLES * page;
        if (mincore(at, page, &residence) || !(residence & 1))
            return 0;
    }
    return 1;
}

void aiordma_populate(void *address, size_t length, uint32_t threads)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *start = (char *)((uintptr_t)address & ~(uintptr_t)(page - 1));
    struct part parts[MOST_THREADS];
    uint32_t count = 0;
    sigset_t all, before;

    length += (size_t)((const char *)address - start);
    length = (length + page - 1) & ~(page - 1);
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (threads < 2 || is_resident(start, length, page))
        return;
    size_t share = (length / threads / STEP + 1) * STEP;
    sigfillset(&all); /* the program's threads handle its signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size_t at = share; at < length; at += share) {
        struct part *part = &parts[count];
        *part =
            (struct part){.start = start + at, .length = length - at < share ? length - at : share};
        if (pthread_create(&part->thread, NULL, populate, part))
            break;
        count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    populate(&(struct part){.start = start, .length = length < share ? length : share});
    while (count--)
        pthread_join(parts[count].thread, NULL);
}
