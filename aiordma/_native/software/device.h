/*
 * The software device: a user-space RDMA device behind the same table as rdma-core's.
 *
 * This is the ground that its rooms stand on. Connected queue pairs speak iWARP over TCP (MPA,
 * DDP, RDMAP), datagrams go over UDP behind RoCE v2's headers. Every object begins with the public
 * structure of verbs.h or rdma_cma.h, so that a pointer to one is a pointer to the other.
 *
 * One lock guards everything: sw_device.lock. The functions of the table and of
 * ibv_context_ops take it; a function named sw_ is called with it held unless it says otherwise.
 * One thread, the engine's, serves sockets and timers, with the lock held while it handles one,
 * so that the memory that a peer reads or writes cannot be deregistered meanwhile. Nothing that
 * holds the lock blocks: sockets are non-blocking, and a destroy that must wait for an
 * acknowledgement gives the lock up (sw_wait).
 *
 * Functions return 0 or a positive errno unless they say otherwise.
 */
#ifndef AIORDMA_SOFTWARE_DEVICE_H
#define AIORDMA_SOFTWARE_DEVICE_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "../provider.h"

#include "../declarations/software.h"
#include "limits.h"

#define SW_CONTAINER(pointer, type, member) \
    ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

struct sw_device {
    struct ibv_device ibv;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* broadcast by every acknowledgement: see sw_wait */
    uint32_t generation;    /* counts forks: what has an earlier one is the parent's (fork.c) */
    struct aiordma_software_counts counts;
    uint64_t completions, reads; /* that were ever made; of streams */
    struct sw_context *contexts; /* all that are open */
    struct sw_context *manager;  /* the one that the connection manager opened, once it has */
    struct verbs_context operations; /* what each new context begins with (table.c) */
};
extern struct sw_device sw_device;

void sw_lock(void);
void sw_unlock(void);

/* Give the lock up until something was acknowledged, or something else changed. */
void sw_wait(void);

/* Random bytes from the system: keys, and numbers that nobody is to guess. */
void sw_random(void *bytes, size_t size);

#endif
