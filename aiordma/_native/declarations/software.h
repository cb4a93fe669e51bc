/*
 * Read twice: by the C compiler (through software/device.h) and by cffi. Plain declarations only.
 */

/* The numbers of existing objects. Sockets are the device's open sockets to peers. */
struct aiordma_software_counts {
    uint32_t contexts, domains, regions, windows, channels, queues, queue_pairs, shared_receives;
    uint32_t address_handles, event_channels, identifiers, sockets;
};

/*
 * The software device's table, filled at the first call. NULL: out of memory.
 *
 * A forked child must not use the objects of its parent: no call checks that. Objects that the
 * child creates itself work.
 */
const struct aiordma_provider *aiordma_software(void);
/* The same calls, but rdma_create_id makes identifiers of the RoCE device. */
const struct aiordma_provider *aiordma_software_roce(void);

/* For the libraries of exported/: the place of an identifier where they keep what is theirs. */
void **aiordma_software_slot(struct rdma_cm_id *id);

/* For tests: count the objects that exist. */
void aiordma_software_counts(struct aiordma_software_counts *counts);

struct aiordma_software_memory {
    uint64_t held;      /* bytes kept for messages without a receive, of all connections */
    uint64_t most_held; /* their limit */
    uint64_t blocks;    /* blocks borrowed by connections, including those for held */
    uint64_t moved;     /* bytes ever moved within a buffer to make space */
};

/* For tests: the memory that connections use. */
void aiordma_software_memory(struct aiordma_software_memory *memory);

/*
 * Limit the bytes kept for messages without a receive, of all connections together. Connections
 * that wait for an answer of their peer may use all of it, other connections half.
 */
void aiordma_software_limit_held(uint64_t bytes);

/*
 * Write all traffic from now on to a pcapng file, until it has `most` bytes; NULL: end the capture.
 * A forked child writes none. Returns 0 or an errno.
 */
int aiordma_software_capture(const char *path, uint64_t most);
