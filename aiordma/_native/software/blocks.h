/* Blocks of memory that streams borrow while they have bytes to keep, and memory by the page. */
#ifndef AIORDMA_SOFTWARE_BLOCKS_H
#define AIORDMA_SOFTWARE_BLOCKS_H

#include "device.h"

struct sw_block {
    struct sw_block *next;
    uint32_t start, end; /* what waits is [start, end) */
    char bytes[];
};

/* A block has room for the longest frame, and for 4 KiB behind it. */
enum { SW_BLOCK_SIZE = 72 << 10, SW_BLOCK_ROOM = SW_BLOCK_SIZE - sizeof(struct sw_block) };

static inline const char *sw_waiting_bytes(const struct sw_block *block)
{
    return block->bytes + block->start;
}

static inline uint32_t sw_waiting_size(const struct sw_block *block)
{
    return block->end - block->start;
}

/* Borrow an empty block. NULL: no memory. */
struct sw_block *sw_take_block(void);
/* Give back a block, or a whole list of them; nothing if it is NULL. */
void sw_give_block(struct sw_block *block);
void sw_give_blocks(struct sw_block *first);

/*
 * Map zeroed memory. It costs memory by the page, once the page is used, and all of it is the
 * system's again when it is unmapped, which malloc does not promise. NULL: no memory.
 */
void *sw_map(size_t size);
void sw_unmap(void *memory, size_t size); /* nothing if it is NULL */

#endif
