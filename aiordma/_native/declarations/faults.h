/*
 * Read twice: by the C compiler (through software/faults.h) and by cffi. Plain declarations only.
 *
 * What can be made to go wrong on the software device, for tests. A fault waits until its kind of
 * thing happens for the (after + 1)th time, strikes so often, and is over.
 */
enum aiordma_fault_kind {
    AIORDMA_FAULT_CONNECT_REFUSED,  /* rdma_connect: the peer's answer is a refusal */
    AIORDMA_FAULT_CONNECT_DELAYED,  /* ... comes milliseconds later */
    AIORDMA_FAULT_DROP_AFTER_BYTES, /* a connection breaks when it has carried so many bytes */
    AIORDMA_FAULT_DROP_AFTER_REQUESTS, /* ... at the post of the (after + 1)th request */
    AIORDMA_FAULT_DEAD_PEER, /* a connection that sends falls silent, and breaks after
                                milliseconds as TCP does without an answer */
    AIORDMA_FAULT_COMPLETION_DELAYED, /* a queue pair's completions come milliseconds later, in
                                         their order; those of others overtake them */
    AIORDMA_FAULT_SPURIOUS_EVENT, /* a completion channel has an event more than completions */
    AIORDMA_FAULT_EVENT_DELAYED,  /* a channel's event comes milliseconds later: with the events
                                     of what completes meanwhile, as one */
    AIORDMA_FAULT_POST_REFUSED,   /* post_send, post_recv, post_srq_recv: error (ENOMEM) */
    AIORDMA_FAULT_NOT_READY,      /* a message finds no receive for milliseconds */
    AIORDMA_FAULT_CRC_WANTED,     /* no fault: a handshake asks for a CRC whoever the peer is */
    AIORDMA_FAULT_CORRUPTED,      /* a frame with a CRC is broken on its way */
    AIORDMA_FAULT_KINDS,
};

struct aiordma_fault {
    uint32_t kind;
    uint32_t after; /* chances that it lets pass first */
    uint32_t times; /* how often it strikes; 0: always */
    uint32_t milliseconds;
    uint32_t error;  /* of POST_REFUSED */
    uint32_t chance; /* of 65536 that it strikes where it could; 0: always */
    uint32_t spread; /* up to so many milliseconds more, at random */
    uint32_t struck; /* out: how often it did */
    uint64_t bytes;  /* of DROP_AFTER_BYTES */
};

/* Add a fault. Returns its number, 1 or more, or -errno. */
int aiordma_software_add_fault(const struct aiordma_fault *fault);
/* How often a fault has struck; -ENOENT. */
int aiordma_software_fault_struck(int number);
/* Take one away (0: all). What it has delayed still comes. */
void aiordma_software_remove_fault(int number);
/* Where chance begins: the same seed and the same calls strike the same. */
void aiordma_software_seed_faults(uint64_t seed);

/*
 * An asynchronous event, as if the device had raised it: of a queue pair, a completion queue or a
 * shared receive queue (pointer), or of the port (NULL; to every context). DEVICE_FATAL: NULL.
 * 0 or EINVAL.
 */
int aiordma_software_raise(uint32_t event, void *pointer);
