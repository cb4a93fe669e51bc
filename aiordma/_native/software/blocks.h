/* Blocks of memory that streams borrow while they have bytes to keep, and memory by the page. */
#ifndef AIORDMA_SOFTWARE_BLOCKS_H
#define AIORDMA_SOFTWARE_BLOCKS_H

#include "device.h"

struct sw_block {
    struct sw_block *next;
    uint32_t start, end; /* the kept bytes are [start, end) */
    uint32_t is_excess;  /* of a stream's kept blocks (stream.h) */
    char bytes[];
};

/* A block has space for the longest frame and 4 KiB more. */
enum { SW_BLOCK_SIZE = 72 << 10, SW_BLOCK_ROOM = SW_BLOCK_SIZE - sizeof(struct sw_block) };

static inline const char *sw_waiting_bytes(const struct sw_block *block)
{
    return block->bytes + block->start;
}

static inline uint32_t sw_waiting_size(const struct sw_block *block)
{
    return block->end - block->start;
}

/* Borrow an empty block. NULL: out of memory. */
struct sw_block *sw_take_block(void);
/* Return a block, or a list of blocks. Do nothing if it is NULL. */
void sw_give_block(struct sw_block *block);
void sw_give_blocks(struct sw_block *first);

/*
 * Map memory. A page costs memory only once it is used, and unmapping returns all of it to the
 * system, which free() does not guarantee. A few small mappings stay for the next call, as they are.
 * Needs no lock. NULL: out of memory.
 */
void *sw_map(size_t size);
void sw_unmap(void *memory, size_t size); /* does nothing if memory is NULL */

#endif
