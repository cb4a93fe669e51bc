/* See guard.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* mremap */
#endif
#include "guard.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "system.h"

struct memory {
    struct memory *next;
    char *program, *device; /* the two views */
    size_t used, mapped;    /* bytes; mapped: whole pages */
};

/* What a request has of one memory. */
struct guard {
    struct guard *next;
    struct sw_posted posted;
    const struct memory *memory;
    size_t start, end;
    int writes;
    int was_accessed; /* it protects nothing more */
};

static struct {
    struct memory *memories;
    struct guard *guards;
    void (*accessed)(void);
    struct sigaction before;
    int handles; /* SIGSEGV */
} all;

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static const struct memory *memory_at(const char *at, int is_devices)
{
    const struct memory *memory = all.memories;

    for (; memory; memory = memory->next) {
        const char *start = is_devices ? memory->device : memory->program;
        if (at >= start && at < start + memory->mapped)
            break;
    }
    return memory;
}

/* Whether the guard has the whole page. What follows the last byte of the memory is nobody's. */
static int covers(const struct guard *guard, const struct memory *memory, size_t page)
{
    return guard->memory == memory && !guard->was_accessed && guard->start <= page &&
           (guard->end >= page + page_size() || guard->end == memory->used);
}

static void protect(const struct memory *memory, size_t start, size_t end)
{
    for (size_t page = start & ~(page_size() - 1); page < end; page += page_size()) {
        int protection = PROT_READ | PROT_WRITE;
        for (const struct guard *each = all.guards; each; each = each->next)
            if (covers(each, memory, page))
                protection &= each->writes ? PROT_NONE : PROT_READ;
        mprotect(memory->program + page, page_size(), protection);
    }
}

/* Note the first access to the memory of a request. 0: no request has the page. */
static int note(const struct memory *memory, size_t page)
{
    struct guard *guard = all.guards;

    while (guard && !covers(guard, memory, page))
        guard = guard->next;
    if (!guard)
        return 0;
    guard->was_accessed = 1;
    protect(memory, guard->start, guard->end);
    all.accessed();
    sw_system->misused(AIORDMA_SIMULATED_ACCESSED, guard->posted.wr_id, guard->posted.qp_num,
                       (uint32_t)(guard->end - guard->start));
    return 1;
}

/* The fault is in the program's own code: what a function may call is not limited. */
static void handle(int number, siginfo_t *info, void *context)
{
    const char *at = info->si_addr;
    const struct memory *memory = memory_at(at, 0);

    (void)context;
    if (!memory || !note(memory, (size_t)(at - memory->program) & ~(page_size() - 1)))
        sigaction(number, &all.before, NULL); /* the access is repeated, and is that handler's */
}

int aiordma_simulated_guard(void *address, size_t size, void (*accessed)(void))
{
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    struct memory *memory = sw_system->is_simulated ? malloc(sizeof(*memory)) : NULL;

    if (!memory)
        return sw_system->is_simulated ? ENOMEM : EINVAL;
    size_t mapped = (size + page_size() - 1) & ~(page_size() - 1);
    /* A second mapping of the same pages, which are shared: see mremap(2), old_size 0. */
    char *device = mremap(address, 0, mapped, MREMAP_MAYMOVE);
    if (device == MAP_FAILED) {
        free(memory);
        return errno;
    }
    *memory = (struct memory){all.memories, address, device, size, mapped};
    all.memories = memory;
    all.accessed = accessed;
    if (!all.handles)
        all.handles = !sigaction(SIGSEGV, &action, &all.before);
    return all.handles ? 0 : errno;
}

char *sw_device_view(void *address, size_t length)
{
    const struct memory *memory = memory_at(address, 0);

    if (!memory || length > (size_t)(memory->program + memory->mapped - (char *)address))
        return address;
    return memory->device + ((char *)address - memory->program);
}

void sw_guard(const struct sw_posted *posted, const char *at, uint32_t size, int writes)
{
    const struct memory *memory = all.memories ? memory_at(at, 1) : NULL;
    struct guard *guard = memory ? malloc(sizeof(*guard)) : NULL;

    if (!guard)
        return; /* less is found out */
    const size_t start = (size_t)(at - memory->device);
    *guard = (struct guard){all.guards, *posted, memory, start, start + size, writes, 0};
    all.guards = guard;
    sw_system->posted(posted->wr_id, posted->qp_num);
    protect(memory, guard->start, guard->end);
}

static void end_guards(const void *queue, const uint64_t *wr_id)
{
    struct guard **link = &all.guards, *guard;

    while ((guard = *link)) {
        if (guard->posted.queue != queue || (wr_id && guard->posted.wr_id != *wr_id)) {
            link = &guard->next;
            continue;
        }
        *link = guard->next;
        protect(guard->memory, guard->start, guard->end);
        free(guard);
    }
}

void sw_unguard(const void *queue, uint64_t wr_id)
{
    end_guards(queue, &wr_id);
}

void sw_unguard_all(const void *queue)
{
    end_guards(queue, NULL);
}

void sw_guards_clear(void)
{
    struct memory *memory;
    struct sigaction now;

    for (struct guard *each; (each = all.guards); free(each))
        all.guards = each->next;
    while ((memory = all.memories)) {
        all.memories = memory->next;
        protect(memory, 0, memory->mapped);
        munmap(memory->device, memory->mapped);
        free(memory);
    }
    if (all.handles && !sigaction(SIGSEGV, NULL, &now) && now.sa_sigaction == handle)
        sigaction(SIGSEGV, &all.before, NULL);
    memset(&all, 0, sizeof(all));
}
