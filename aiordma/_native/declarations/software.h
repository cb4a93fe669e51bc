/*
 * Read twice: by the C compiler (through software/device.h) and by cffi. Plain declarations
 * only.
 */

/* How many of each there are. Sockets are those that the device has open to peers. */
struct aiordma_software_counts {
    uint32_t contexts, domains, regions, windows, channels, queues, queue_pairs, shared_receives;
    uint32_t address_handles, event_channels, identifiers, sockets;
};

/*
 * The software device's table (once; nothing happens before). NULL: out of memory.
 *
 * In a process that was forked off, every call on what the parent had made fails with EPERM and
 * does nothing; what the process makes itself works.
 */
const struct aiordma_provider *aiordma_software(void);

/* For tests: what is left. */
void aiordma_software_counts(struct aiordma_software_counts *counts);

struct aiordma_software_memory {
    uint64_t held;      /* bytes that hold back what peers sent, of all connections */
    uint64_t most_held; /* their limit */
    uint64_t blocks;    /* that connections have borrowed, these among them */
    uint64_t moved;     /* bytes that were ever moved to make room in a buffer */
};

/* For tests: what connections keep in memory. */
void aiordma_software_memory(struct aiordma_software_memory *memory);

/*
 * Limit the bytes that hold back what peers sent, of all connections together. A connection that
 * waits for an answer of its peer may use all of it, the others half.
 */
void aiordma_software_limit_held(uint64_t bytes);
