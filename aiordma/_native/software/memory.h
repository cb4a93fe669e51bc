/*
 * Memory regions and windows: their keys, and the checks of every access.
 */
#ifndef AIORDMA_SOFTWARE_MEMORY_H
#define AIORDMA_SOFTWARE_MEMORY_H

#include "context.h"
#include "mapping.h"

/*
 * A key of a region or a window. Keys are random. A region's lkey and rkey are the same number, as
 * with an STag. A table is searched for the upper 24 bits. The lower 8 bits must match, too.
 */
struct sw_key {
    uint32_t key;
    int is_window;
    struct sw_key *next; /* in the table */
};

struct sw_region {
    struct ibv_mr ibv;
    struct sw_key key;
    uint64_t base; /* the address for accesses: addr, an iova, or 0 (ZERO_BASED) */
    int access;
    int is_of_file;
    char *memory;     /* the first byte, where the device finds it (guard.h) */
    uint32_t windows; /* bound to it: they keep it from being deregistered (EBUSY) */
    void *mapping;    /* of a dma-buf, or NULL: it is unmapped when the region is deregistered */
    size_t mapping_size;
};

struct sw_window {
    struct ibv_mw ibv;
    struct sw_key key;        /* from the allocation on; a bind changes it */
    struct sw_region *region; /* NULL: not bound */
    char *memory;             /* its first byte */
    uint64_t base, length;    /* as peers address it */
    int access;
    struct ibv_qp *queue_pair;                     /* of type 2: only its peer has access */
    struct sw_window *next_bound, *previous_bound; /* the bound windows of type 2 */
};

/* The result of an access: why it is refused. */
enum sw_refusal {
    SW_REACHED,
    SW_NO_KEY, /* unknown, or invalidated */
    SW_BOUNDS,
    SW_ACCESS,
    SW_DOMAIN, /* another protection domain, or a window of another queue pair */
    SW_WRAP,   /* the address range wraps around */
};

/* Bytes of a request, in its parts from `part` on. */
struct sw_span {
    struct ibv_pd *domain;
    const struct ibv_sge *part;
    int count; /* of parts */
    uint32_t offset, size;
};

/* The bytes that are in one part. */
struct sw_piece {
    struct sw_memory memory;
    uint32_t size;
};

/* Find a part of the program's own request. access: 0 to read, IBV_ACCESS_LOCAL_WRITE to write. */
enum sw_refusal sw_reach_local(struct ibv_pd *domain, const struct ibv_sge *part, int access,
                               struct sw_memory *memory);
/* The same for a peer's request. access: IBV_ACCESS_REMOTE_READ, _WRITE or _ATOMIC. */
enum sw_refusal sw_reach_remote(struct ibv_qp *queue_pair, uint32_t key, uint64_t address,
                                uint64_t length, int access, struct sw_memory *memory);
/*
 * Take the next piece of a span that is not empty. LOC_LEN_ERR if the parts end before the span;
 * LOC_PROT_ERR if the part is not accessible. access: as for sw_reach_local.
 */
enum ibv_wc_status sw_next_piece(struct sw_span *span, int access, struct sw_piece *piece);
/* SEND with invalidate (is_remote) and LOCAL_INV: unbind a type 2 window of this queue pair. */
enum sw_refusal sw_invalidate(struct ibv_qp *queue_pair, uint32_t key, int is_remote);
/* BIND_MW of both types, when the send queue carries it out. */
int sw_bind(struct ibv_qp *queue_pair, struct ibv_mw *window, uint32_t new_key,
            const struct ibv_mw_bind_info *info);
/* Unbind the type 2 windows of a queue pair that is destroyed or reset. */
void sw_unbind_all(struct ibv_qp *queue_pair);

void sw_memory_forked(void);
extern const struct sw_state sw_memory_state;

void sw_fill_memory(struct aiordma_provider *table, struct verbs_context *operations);

#endif
