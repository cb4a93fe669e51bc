/*
 * Memory regions and windows, the keys by which they are reached, and the checks on every reach.
 */
#ifndef AIORDMA_SOFTWARE_MEMORY_H
#define AIORDMA_SOFTWARE_MEMORY_H

#include "context.h"
#include "mapping.h"

/*
 * What a key stands for: a region or a window. Keys are random; a region's lkey and rkey are the
 * same number, as an STag is. The upper 24 bits are found in a table, the rest must match.
 */
struct sw_key {
    uint32_t key;
    int is_window;
    struct sw_key *next; /* in the table */
};

struct sw_region {
    struct ibv_mr ibv;
    struct sw_key key;
    uint64_t base; /* the address by which it is reached: addr, an iova, or 0 (ZERO_BASED) */
    int access;
    int is_of_file;
    uint32_t windows; /* bound to it: not deregistered before them (EBUSY) */
};

struct sw_window {
    struct ibv_mw ibv;
    struct sw_key key;        /* while bound, or allocated (type 1 has one from the start) */
    struct sw_region *region; /* NULL: not bound */
    char *memory;             /* its first byte */
    uint64_t base, length;    /* as peers reach it */
    int access;
    struct ibv_qp *queue_pair;                     /* a type 2 window's: only its peer reaches it */
    struct sw_window *next_bound, *previous_bound; /* the bound windows of type 2 */
};

/* Why memory cannot be reached. */
enum sw_refusal {
    SW_REACHED,
    SW_NO_KEY, /* there is none, or it was invalidated */
    SW_BOUNDS,
    SW_ACCESS,
    SW_DOMAIN, /* of another protection domain, or another queue pair's window */
    SW_WRAP,   /* the address range wraps around */
};

/* A part of a program's own request. access: 0 to read it, IBV_ACCESS_LOCAL_WRITE to fill it. */
enum sw_refusal sw_reach_local(struct ibv_pd *domain, const struct ibv_sge *part, int access,
                               struct sw_memory *memory);
/* For a peer. access: IBV_ACCESS_REMOTE_READ, _WRITE or _ATOMIC. A length of 0 reaches nothing. */
enum sw_refusal sw_reach_remote(struct ibv_qp *queue_pair, uint32_t key, uint64_t address,
                                uint64_t length, int access, struct sw_memory *memory);
/* SEND with invalidate (is_remote) and LOCAL_INV: unbind a type 2 window of this queue pair. */
enum sw_refusal sw_invalidate(struct ibv_qp *queue_pair, uint32_t key, int is_remote);
/* BIND_MW of both types, as its turn comes in the send queue. */
int sw_bind(struct ibv_qp *queue_pair, struct ibv_mw *window, uint32_t new_key,
            const struct ibv_mw_bind_info *info);
/* A queue pair goes: its type 2 windows are unbound. */
void sw_unbind_all(struct ibv_qp *queue_pair);

void sw_memory_forked(void);

void sw_fill_memory(struct aiordma_provider *table, struct ibv_context_ops *operations);

#endif
