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
 * Peers decide how much work there is, so the work is done in turns. A turn is bounded, and between
 * two turns the engine hands the lock over to every thread that waits for it (sw_give_way).
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
    pthread_cond_t changed; /* by every acknowledgement: see sw_wait and sw_changed */
    uint32_t generation;    /* counts forks: what has an earlier one is the parent's (fork.c) */
    struct aiordma_software_counts counts;
    struct aiordma_software_memory memory;
    uint64_t completions, reads;     /* that were ever made; of streams */
    struct sw_context *contexts;     /* all that are open */
    struct sw_context *manager;      /* the one that the connection manager opened, once it has */
    struct verbs_context operations; /* what each new context begins with (table.c) */
};
extern struct sw_device sw_device;

void sw_lock(void);
void sw_unlock(void);

/* Release the lock until something was acknowledged, or something else changed. */
void sw_wait(void);
/* Wake the threads in sw_wait. */
void sw_changed(void);

/* The same as sw_lock, for the engine's thread, which gives way to every other. */
void sw_lock_engine(void);
/* Hand the lock over to every thread that waits in sw_lock, and take it back after the last. */
void sw_give_way(void);

/*
 * Turns. A thread's begins when it takes the lock, the engine's also with each event. What serves
 * a peer counts its work, and stops between two frames once the turn is over; the engine goes on
 * with the rest in another turn. Turns are shorter while a thread waits for the lock. Work is
 * counted in bytes: those that were moved, and SW_FRAME_WORK for each frame.
 */
enum { SW_FRAME_WORK = 256 };
#ifndef SW_LONG_TURN
#define SW_LONG_TURN (2u << 20)
#define SW_SHORT_TURN (64u << 10)
#endif

void sw_begin_turn(void);
void sw_add_work(uint64_t bytes);
int sw_turn_is_over(void);

/* In a fork's child: the threads that waited for the lock are the parent's. */
void sw_lock_forked(void);

/* Random bytes from the system: keys, and numbers that nobody is to guess. */
void sw_random(void *bytes, size_t size);

#endif
