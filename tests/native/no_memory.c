/*
 * Preloaded before the C library (LD_PRELOAD). After no_memory(kind), allocations of one kind fail,
 * until no_memory(NOTHING).
 */
#include <errno.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "software/identifier.h"
#include "software/stream.h"

/*
 * EVENTS: the connection manager's events. BLOCKS: blocks that keep bytes of streams. QUESTIONS:
 * the requests of peers (struct sw_answer). WATCHES: descriptors in an epoll.
 */
enum { NOTHING, EVENTS, BLOCKS, QUESTIONS, WATCHES };

void *__libc_calloc(size_t count, size_t size); /* glibc's own */
void no_memory(int kind);

static volatile int missing;

void no_memory(int kind)
{
    missing = kind;
}

void *calloc(size_t count, size_t size)
{
    int is_event = count == 1 && size == sizeof(struct sw_event);

    if ((missing == EVENTS && is_event) ||
        (missing == QUESTIONS && size == sizeof(struct sw_answer))) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_calloc(count, size);
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    if (missing == BLOCKS && size == SW_BLOCK_SIZE) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    if (missing == WATCHES && operation == EPOLL_CTL_ADD) {
        errno = ENOMEM;
        return -1;
    }
    return (int)syscall(SYS_epoll_ctl, epoll, operation, fd, event);
}
