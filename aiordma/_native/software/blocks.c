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

/*
 * Small mappings that are spare: unmapping interrupts all processors that the program runs on. Each
 * place is read and written atomically, because no lock is held.
 */
enum { MOST_SPARE_MAPPINGS = 8, MOST_SPARE_SIZE = 64 << 10 };

struct mapping {
    size_t size;
};
static struct mapping *spare_mappings[MOST_SPARE_MAPPINGS];

static size_t whole_pages(size_t size)
{
    const size_t page = 4096; /* with larger pages, more sizes differ than necessary */

    return (size + page - 1) & ~(page - 1);
}

static void unmap(void *memory, size_t size)
{
    if (munmap(memory, size)) {
        /* munmap fails only at the limit of mappings: the memory stays mapped, and unused. */
    }
}

static void keep_or_unmap(struct mapping *mapping)
{
    for (int i = 0; i < MOST_SPARE_MAPPINGS; i++) {
        struct mapping *none = NULL;
        if (__atomic_compare_exchange_n(&spare_mappings[i], &none, mapping, 0, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED))
            return;
    }
    unmap(mapping, mapping->size);
}

static void *find_mapping(size_t size)
{
    struct mapping *other = NULL;

    for (int i = 0; i < MOST_SPARE_MAPPINGS; i++) {
        struct mapping *mapping = __atomic_exchange_n(&spare_mappings[i], NULL, __ATOMIC_ACQ_REL);
        if (other)
            keep_or_unmap(other);
        if (mapping && mapping->size == size)
            return mapping;
        other = mapping;
    }
    if (other) /* the program needs other sizes now */
        unmap(other, other->size);
    return NULL;
}

void *sw_map(size_t size)
{
    size = whole_pages(size);
    void *memory = size <= MOST_SPARE_SIZE ? find_mapping(size) : NULL;

    if (!memory)
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void sw_unmap(void *memory, size_t size)
{
    struct mapping *mapping = memory;

    if (!memory)
        return;
    size = whole_pages(size);
    if (size > MOST_SPARE_SIZE) {
        unmap(memory, size);
        return;
    }
    mapping->size = size;
    keep_or_unmap(mapping);
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
