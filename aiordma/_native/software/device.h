/*
 * The software device: a user-space RDMA device with the same table of calls as rdma-core.
 *
 * All modules use this one. It appears as two devices. Connected queue pairs of the first one use
 * iWARP over TCP (MPA, DDP, RDMAP), and its datagrams use UDP with the headers of RoCE v2. The second
 * one is a RoCE device. Every object begins with the public structure of verbs.h or
 * rdma_cma.h, so that a pointer to one is a pointer to the other.
 *
 * One lock, sw_device.lock, guards everything. The functions of the table and of ibv_context_ops
 * take it. A function named sw_... requires that the caller holds it, unless its comment says
 * otherwise. One thread, the engine's, serves sockets and timers, and holds the lock while it
 * serves one. So memory cannot be deregistered while a peer reads or writes it. Nothing blocks with
 * the lock held: sockets are non-blocking, and a destroying call that waits for an acknowledgement
 * releases the lock (sw_wait).
 *
 * Peers decide how much work there is, so the work is done in turns. A turn is bounded, and between
 * two turns the engine hands the lock over to every thread that waits for it (sw_give_way).
 *
 * Functions return 0 or a positive errno, unless their comment says otherwise.
 */
#ifndef AIORDMA_SOFTWARE_DEVICE_H
#define AIORDMA_SOFTWARE_DEVICE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "../provider.h"

#include "../declarations/software.h"
#include "../declarations/simulation.h"
#include "limits.h"
#include "system.h"

#define SW_CONTAINER(pointer, type, member) \
    ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

struct sw_device {
    struct ibv_device ibv;  /* iWARP, and datagrams */
    struct ibv_device roce; /* RoCE v2, on its own port */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* signaled by every acknowledgement: see sw_wait and sw_changed */
    struct aiordma_software_memory memory;
    struct verbs_context operations; /* the operations of a new context (table.c) */
    struct sw_own {
        struct sw_context *contexts; /* all open contexts */
        struct sw_context *manager;  /* the connection manager's, once it is open */
        struct sw_context *roce;     /* the same, of the RoCE device */
    } own;
    uint64_t completions, reads; /* counts: completions made, and reads of streams */
    struct aiordma_software_counts counts;
};
extern struct sw_device sw_device;

/*
 * What a simulated host has for itself: variables of the device's modules, which are exchanged when
 * another host runs (simulation.c). All of them begin as zeros.
 */
struct sw_state {
    void *at;
    size_t size;
};
extern const struct sw_state sw_device_state;

void sw_lock(void);
void sw_unlock(void);

/* Release the lock until an acknowledgement or another change, and take it again. */
void sw_wait(void);
/* Wake the threads in sw_wait. */
void sw_changed(void);

/* Take the lock in the engine's thread, which lets all other threads go first. */
void sw_lock_engine(void);
/* Hand the lock over to every thread that waits in sw_lock. Take it back after the last. */
void sw_give_way(void);

/*
 * Turns. A thread's turn begins when it takes the lock. The engine begins one with each event, too.
 * Code that serves a peer counts its work, and stops between two frames when the turn is over. The
 * engine does the rest in another turn. Turns are shorter while a thread waits for the lock. Work
 * is counted in bytes: those that were moved, and SW_FRAME_WORK for each frame.
 */
enum { SW_FRAME_WORK = 256 };
#ifndef SW_LONG_TURN
#define SW_LONG_TURN (512u << 10)
#define SW_SHORT_TURN (64u << 10)
#endif

void sw_begin_turn(void);
void sw_add_work(uint64_t bytes);
int sw_turn_is_over(void);

/* In a fork's child: forget the parent's threads that waited for the lock. */
void sw_lock_forked(void);

/* A random number of the system's, for keys and for numbers that peers must not predict. */
uint32_t sw_random(void);
void sw_forget_random(void); /* the next ones are read anew */

#endif
