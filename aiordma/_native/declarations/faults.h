/*
 * Read twice: by the C compiler (through software/faults.h) and by cffi. Plain declarations only.
 *
 * Faults of the software device, for tests. A fault strikes from the (after + 1)th occasion of its
 * kind on, until it has struck `times` times.
 */
enum aiordma_fault_kind {
    AIORDMA_FAULT_CONNECT_REFUSED,     /* rdma_connect: the peer's reply is a rejection */
    AIORDMA_FAULT_CONNECT_DELAYED,     /* rdma_connect: the reply comes milliseconds later */
    AIORDMA_FAULT_DROP_AFTER_BYTES,    /* a connection breaks when it has carried this many bytes */
    AIORDMA_FAULT_DROP_AFTER_REQUESTS, /* a connection breaks at the post of a request */
    AIORDMA_FAULT_DEAD_PEER, /* a connection that sends falls silent, and breaks after milliseconds,
                                as TCP does without an answer */
    AIORDMA_FAULT_COMPLETION_DELAYED, /* a queue pair's completions come milliseconds later, in
                                         order; other queue pairs' completions do not */
    AIORDMA_FAULT_SPURIOUS_EVENT,     /* a completion channel has one event too many */
    AIORDMA_FAULT_EVENT_DELAYED,      /* a channel's event comes milliseconds later, as one with the
                                     events of later completions */
    AIORDMA_FAULT_POST_REFUSED,       /* post_send, post_recv, post_srq_recv: error (ENOMEM) */
    AIORDMA_FAULT_NOT_READY,          /* messages find no receive for milliseconds */
    AIORDMA_FAULT_CRC_WANTED,         /* not a fault: a handshake requests a CRC for every peer */
    AIORDMA_FAULT_CORRUPTED,          /* a frame with a CRC is corrupted on its way */
    AIORDMA_FAULT_KINDS,
};

struct aiordma_fault {
    uint32_t kind;
    uint32_t after; /* occasions without an effect before the first */
    uint32_t times; /* times that it strikes; 0: always */
    uint32_t milliseconds;
    uint32_t error;  /* of POST_REFUSED */
    uint32_t chance; /* of 65536: the probability that it strikes; 0: always */
    uint32_t spread; /* a random number of milliseconds to add, at most */
    uint32_t struck; /* out: times that it has struck */
    uint64_t bytes;  /* of DROP_AFTER_BYTES */
};

/* Add a fault. Returns its number, 1 or more, or -errno. */
int aiordma_software_add_fault(const struct aiordma_fault *fault);
/* How many times a fault has struck, or -ENOENT. */
int aiordma_software_fault_struck(int number);
/* Remove a fault; 0: all. Anything that it has delayed still happens. */
void aiordma_software_remove_fault(int number);
/* Seed the random numbers. The same seed and the same calls have the same effect. */
void aiordma_software_seed_faults(uint64_t seed);

/*
 * Raise an asynchronous event of a queue pair, a completion queue or a shared receive queue
 * (pointer), or of the port, in every context (NULL). DEVICE_FATAL: NULL. 0 or EINVAL.
 */
int aiordma_software_raise(uint32_t event, void *pointer);
