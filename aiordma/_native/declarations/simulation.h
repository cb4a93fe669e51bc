/*
 * Read twice: by the C compiler (through software/device.h) and by cffi. Plain declarations only.
 *
 * A simulation: hosts, each with a software device of its own, and a network between them, in one
 * thread and on virtual time. While it runs, the software device belongs to it: no other thread may
 * use the device. Times are in nanoseconds.
 */

enum { AIORDMA_SIMULATED_TRACE = 4096 };

/* The way from one host to another. */
struct aiordma_simulated_link {
    uint64_t latency, jitter; /* jitter: at most so much more, at random */
    uint64_t bandwidth;       /* bytes per second, of all connections; 0: without a limit */
    double loss;              /* 0 to 1: packets that are lost; TCP sends them again */
    int is_cut;               /* nothing arrives */
};

enum aiordma_simulated_kind {
    AIORDMA_SIMULATED_CONNECT, /* size: the port */
    AIORDMA_SIMULATED_REFUSED, /* size: the port */
    AIORDMA_SIMULATED_DATA,    /* size: bytes */
    AIORDMA_SIMULATED_END,
    AIORDMA_SIMULATED_RESET,
    AIORDMA_SIMULATED_DATAGRAM, /* size: bytes */
    AIORDMA_SIMULATED_LOST,     /* size: bytes */
    AIORDMA_SIMULATED_CHANGED,  /* memory of a request, before its completion; size: bytes */
    AIORDMA_SIMULATED_TWICE,    /* two requests write the same memory; size: bytes of this one */
    AIORDMA_SIMULATED_ACCESSED, /* guarded memory of a request, by the program; size: bytes */
    AIORDMA_SIMULATED_DENIED,   /* an access of the peer's: the key, the range, or what for */
};

/* What arrived, or was lost. */
struct aiordma_simulated_event {
    uint64_t time;
    int sender, receiver; /* hosts; receiver -1: none has that address */
    int kind;
    uint32_t size;
    uint64_t wr_id; /* CHANGED, TWICE, ACCESSED */
    uint32_t qp_num;
};

/* What the seed decides. The choices of a kind are numbered; the default of each is 0. */
enum aiordma_simulated_choice {
    AIORDMA_SIMULATED_TURN,     /* which of the loops that have something to do is next */
    AIORDMA_SIMULATED_READY,    /* the order of descriptors that are ready */
    AIORDMA_SIMULATED_DELAY,    /* of a packet: jitter */
    AIORDMA_SIMULATED_LOSS,     /* of a packet */
    AIORDMA_SIMULATED_PLACING,  /* the order of a WRITE's bytes */
    AIORDMA_SIMULATED_LATE,     /* how late a completion is */
    AIORDMA_SIMULATED_SCENARIO, /* the scenario's own random numbers */
    AIORDMA_SIMULATED_CHOICES,
};

/* Choices that the seed makes. All others have the default. */
struct aiordma_simulated_range {
    uint64_t first, end;
    int kind;
};

/*
 * Returns 0, or EBUSY: one runs already. scrambles: a WRITE's bytes are placed in any order. posted:
 * called when a request is posted; can be NULL. kept: the choices that the seed makes, in their
 * order; they stay in memory until the end. NULL: all.
 */
int aiordma_simulation_begin(uint64_t seed, int scrambles,
                             void (*posted)(uint64_t wr_id, uint32_t qp_num),
                             const struct aiordma_simulated_range *kept, int kept_count);
/* Make a choice: 0 to count - 1. */
uint64_t aiordma_simulated_choose(int kind, uint64_t count);
/* How many choices of this kind were made. */
uint64_t aiordma_simulated_choices(int kind);
void aiordma_simulation_end(void);

/*
 * Catch the program's accesses to this memory while a request has it: shared memory that begins with
 * a page, and stays mapped until the end. accessed: called at the access, before its event is noted.
 * Returns 0 or an errno.
 */
int aiordma_simulated_guard(void *address, size_t size, void (*accessed)(void));

/* Return the number of a new host, which is up; -ENOMEM. */
int aiordma_simulated_host(void);
int aiordma_simulated_address(int host, const struct sockaddr *address);
/* The host's program runs from now on, and makes the calls; -1: no host's. */
void aiordma_simulated_enter(int host);
/* The host loses its power, or comes up again: empty, with the same addresses. */
void aiordma_simulated_crash(int host);
void aiordma_simulated_boot(int host);
/* Set the way between two hosts. to -1: between all that were not set. */
int aiordma_simulated_set_link(int from, int to, const struct aiordma_simulated_link *link);
void aiordma_simulated_get_link(int from, int to, struct aiordma_simulated_link *link);

/* One turn of the current host's engine. Returns when it is due again; UINT64_MAX: never. */
uint64_t aiordma_simulated_turn(void);
/* When the network has something to deliver; UINT64_MAX: nothing is on its way. */
uint64_t aiordma_simulated_next(void);
void aiordma_simulated_advance(uint64_t now);
/* Take up to `most` hosts for which something has become ready. Returns how many. */
int aiordma_simulated_awake(int *hosts, int most);

/* An epoll of the current host, for its event loop. Returns its descriptor, or -1. */
int aiordma_simulated_selector(void);
/* Returns 0 or an errno. events: of epoll_ctl(2); 0: watch it no more. */
int aiordma_simulated_watch(int selector, int fd, uint32_t events);
/* The host is awake (aiordma_simulated_awake) if something is ready there still. */
void aiordma_simulated_wake(int selector);
/* Returns how many are ready, up to `most`. */
int aiordma_simulated_ready(int selector, int *fds, uint32_t *events, int most);

/* Events since the beginning. The last ones are kept: read event number i of them. */
uint64_t aiordma_simulated_count(void);
void aiordma_simulated_trace(uint64_t i, struct aiordma_simulated_event *event);
