/*
 * In a simulation: memory whose accesses by the program are caught while a request has it.
 *
 * It is mapped twice. The program has the first mapping, whose pages are protected (mprotect); the
 * device uses the second one. An access raises SIGSEGV: it is noted, the page is opened, and the
 * program goes on.
 */
#ifndef AIORDMA_SOFTWARE_GUARD_H
#define AIORDMA_SOFTWARE_GUARD_H

#include "device.h"

/* A posted request. queue: its queue pair, or the shared receive queue. */
struct sw_posted {
    const void *queue;
    uint64_t wr_id;
    uint32_t qp_num;
};

/* Where the device finds memory of the program: the same address, if it is not guarded. */
char *sw_device_view(void *address, size_t length);
/*
 * The request has these bytes, in the device's view, from now on. writes: the program may not read
 * them either. Only whole pages are protected. Does nothing if they are not guarded.
 */
void sw_guard(const struct sw_posted *posted, const char *at, uint32_t size, int writes);
/* The program has the request's memory again. */
void sw_unguard(const void *queue, uint64_t wr_id);
void sw_unguard_all(const void *queue);
/* The simulation is over: all guarded memory is ordinary memory again. */
void sw_guards_clear(void);

#endif
