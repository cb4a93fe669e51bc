/*
 * Blocks of memory that streams borrow while they have bytes to keep. An idle connection has none.
 * A few returned blocks stay spare, so that a packet needs no system call for its block. All others
 * are unmapped at once.
 */
#include "blocks.h"

#include <stdlib.h>
#include <sys/mman.h>

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#ifdef __SANITIZE_ADDRESS__

/* One allocation per block: the sanitizer detects accesses beyond it or after its return. */
enum { MOST_SPARE = 0 };

void *sw_map(size_t size)
{
    return calloc(1, size);
}

void sw_unmap(void *memory, size_t size)
{
    (void)size;
    free(memory);
}

#else

enum { MOST_SPARE = 8 };

void *sw_map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

void sw_unmap(void *memory, size_t size)
{
    if (memory && munmap(memory, size)) {
        /* munmap fails only at the limit of mappings: the memory stays mapped, and unused. */
    }
}

#endif

static struct sw_block *spare;
static int spare_count;

struct sw_block *sw_take_block(void)
{
    struct sw_block *block = spare;

    if (block) {
        spare = block->next;
        spare_count--;
    } else {
        block = sw_map(SW_BLOCK_SIZE);
        if (!block)
            return NULL;
    }
    block->next = NULL;
    block->start = block->end = 0;
    sw_device.memory.blocks++;
    return block;
}

void sw_give_block(struct sw_block *block)
{
    if (!block)
        return;
    sw_device.memory.blocks--;
    if (spare_count == MOST_SPARE) {
        sw_unmap(block, SW_BLOCK_SIZE);
        return;
    }
    block->next = spare;
    spare = block;
    spare_count++;
}

void sw_give_blocks(struct sw_block *first)
{
    while (first) {
        struct sw_block *next = first->next;
        sw_give_block(first);
        first = next;
    }
}
