/*
 * The software device: a user-space RDMA device behind the same table as rdma-core's.
 *
 * What its rooms share. Connected queue pairs speak iWARP over TCP (MPA, DDP, RDMAP), datagrams
 * go over UDP behind RoCE v2's headers. Every object begins with the public structure of verbs.h
 * or rdma_cma.h, so that a pointer to one is a pointer to the other.
 *
 * One lock guards everything: sw_device.lock. The functions of the table and of
 * ibv_context_ops take it; a function named sw_ is called with it held unless it says otherwise.
 * One thread, the engine's, serves sockets and timers, with the lock held while it handles one,
 * so that the memory that a peer reads or writes cannot be deregistered meanwhile. Nothing that
 * holds the lock blocks: sockets are non-blocking, and a destroy that must wait for an
 * acknowledgement gives the lock up (sw_wait).
 *
 * Functions return 0 or a positive errno unless they say otherwise.
 */
#ifndef AIORDMA_SOFTWARE_H
#define AIORDMA_SOFTWARE_H

#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../provider.h"

#include "../declarations/software.h"
#include "limits.h"

#define SW_CONTAINER(pointer, type, member) \
    ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

/* -- the device (device.c) --------------------------------------------------------------- */

struct sw_device {
    struct ibv_device ibv;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* broadcast by every acknowledgement: see sw_wait */
    uint32_t generation;    /* counts forks: what has an earlier one is the parent's (fork.c) */
    struct aiordma_software_counts counts;
    struct sw_context *contexts; /* all that are open */
    struct sw_context *manager;  /* the one that the connection manager opened, once it has */
    struct sw_identifier *identifiers; /* all there are */
};
extern struct sw_device sw_device;

void sw_lock(void);
void sw_unlock(void);

/* Give the lock up until something was acknowledged, or something else changed. */
void sw_wait(void);

/* Random bytes from the system: keys, and numbers that nobody is to guess. */
void sw_random(void *bytes, size_t size);

enum { SW_EVENT_KINDS = 9 }; /* those of a port, and DEVICE_FATAL; others have fewer */

struct sw_async_event {
    struct sw_async_event *next;
    struct sw_subject *subject;
    struct ibv_async_event event;
    uint32_t times; /* raised and not taken; 0: it is in no list */
};

/* What asynchronous events are about: part of each object that has some. */
struct sw_subject {
    uint32_t taken; /* events */
    struct sw_async_event room[SW_EVENT_KINDS];
};

struct sw_context {
    struct verbs_context verbs; /* ends with the public struct ibv_context */
    struct sw_context *next;
    uint32_t generation;
    uint32_t objects; /* domains, queues and channels made from it: not closed before them */
    struct sw_async_event *first_event, *last_event; /* verbs.context.async_fd tells of them */
    struct sw_subject port;
};

static inline struct sw_context *sw_context_of(struct ibv_context *context)
{
    return SW_CONTAINER(context, struct sw_context, verbs.context);
}

/*
 * Find or make the context that identifiers are given, as librdmacm keeps one of each device for
 * the life of the process. NULL: ENOMEM, or no descriptor.
 */
struct sw_context *sw_manager_context(void);

/*
 * The GID table: an entry for each IP address of the interfaces that are up, of type
 * IBV_GID_TYPE_ROCE_V2; an address that goes leaves a hole, so that indices stay. Refreshed by
 * each call. Returns the index of an address (IPv4 as ::ffff:a.b.c.d), or -1.
 */
int sw_gid_index(const union ibv_gid *gid);
/* 0, or ENODATA where the entry is empty, EINVAL beyond the table. */
int sw_gid_entry(int index, struct ibv_gid_entry *entry);
void sw_gid_of(const struct sockaddr *address, union ibv_gid *gid);
/* The other way round; the port is 0. */
void sw_address_of(const union ibv_gid *gid, struct sockaddr_storage *address);

/* Asynchronous events (events.c). */
void sw_raise(struct ibv_context *context, struct sw_subject *subject,
              const struct ibv_async_event *event);
void sw_raise_port(enum ibv_event_type type); /* to every context */
/*
 * Before an object is freed: drop what of its events nobody has taken, and wait until all that
 * were taken are acknowledged. The lock is given up meanwhile: unhook the object first.
 */
void sw_forget_events(struct ibv_context *context, const struct sw_subject *subject,
                      const uint32_t *acknowledged);

/*
 * The descriptors that programs wait for: eventfds, readable from sw_signal to sw_quiet. They
 * are told only of the first event and the last, and never read by anybody else.
 */
int sw_new_signal(void); /* -1 and errno */
void sw_signal(int fd);
void sw_quiet(int fd);
/*
 * Wait, the lock given up, until it is readable; whatever was seen before may have changed. EAGAIN
 * where the program made it non-blocking, EINTR after a signal handler.
 */
int sw_await_signal(int fd);

/* -- the engine (engine.c) -------------------------------------------------------------------- */

/* A descriptor that the engine's thread waits for. ready runs there, with the lock held. */
struct sw_watch {
    void (*ready)(struct sw_watch *watch, uint32_t events); /* EPOLLIN, ... */
    int fd;
    uint32_t events;
    uint32_t slot; /* the engine's; 0: not watched */
};

/* Start watching; the engine's thread is started by the first. The watch is the caller's memory. */
int sw_watch(struct sw_watch *watch, int fd, uint32_t events);
/* Change what is waited for; 0 events: nothing for now. */
void sw_rewatch(struct sw_watch *watch, uint32_t events);
/* ready is not called any more; before the descriptor is closed. Nothing if not watched. */
void sw_unwatch(struct sw_watch *watch);

struct sw_timer {
    void (*expired)(struct sw_timer *timer); /* on the engine's thread, with the lock held */
    uint64_t deadline;                       /* 0: not running */
    struct sw_timer *next;
};

/* Run once, milliseconds from now: 0 as soon as the engine can. One that runs is set anew. */
int sw_call_later(struct sw_timer *timer, uint32_t milliseconds);
void sw_cancel(struct sw_timer *timer); /* nothing if it does not run */

/*
 * In a fork's child: its thread is the parent's. Close what was watched (the sockets go on in the
 * parent, and hear nothing of it), forget all watches and timers; begin anew.
 */
void sw_engine_forked(void);

/* -- memory (memory.c) ------------------------------------------------------------------- */

struct sw_domain {
    struct ibv_pd ibv;
    uint32_t objects; /* regions, windows, queue pairs, ...: not freed before them */
};

/*
 * What a key stands for: a region or a window. Keys are random; a region's lkey and rkey are the
 * same number, as an STag is. The upper 24 bits are found in a table, the rest must match.
 */
struct sw_key {
    uint32_t key;
    int is_window;
    struct sw_key *next; /* in the table */
};

struct sw_region {
    struct ibv_mr ibv;
    struct sw_key key;
    uint64_t base; /* the address by which it is reached: addr, an iova, or 0 (ZERO_BASED) */
    int access;
    uint32_t windows; /* bound to it: not deregistered before them (EBUSY) */
};

struct sw_window {
    struct ibv_mw ibv;
    struct sw_key key; /* while bound, or allocated (type 1 has one from the start) */
    struct sw_region *region; /* NULL: not bound */
    char *memory;             /* its first byte */
    uint64_t base, length;    /* as peers reach it */
    int access;
    struct ibv_qp *queue_pair; /* a type 2 window's: only its peer reaches it */
    struct sw_window *next_bound, *previous_bound; /* the bound windows of type 2 */
};

/* Why memory cannot be reached. */
enum sw_refusal {
    SW_REACHED,
    SW_NO_KEY,  /* there is none, or it was invalidated */
    SW_BOUNDS,
    SW_ACCESS,
    SW_DOMAIN,  /* of another protection domain, or another queue pair's window */
    SW_WRAP,    /* the address range wraps around */
};

/* A part of a program's own request. access: 0 to read it, IBV_ACCESS_LOCAL_WRITE to fill it. */
enum sw_refusal sw_reach_local(struct ibv_pd *domain, const struct ibv_sge *part, int access,
                               char **memory);
/* For a peer. access: IBV_ACCESS_REMOTE_READ, _WRITE or _ATOMIC. A length of 0 reaches nothing. */
enum sw_refusal sw_reach_remote(struct ibv_qp *queue_pair, uint32_t key, uint64_t address,
                                uint64_t length, int access, char **memory);
/* SEND with invalidate (is_remote) and LOCAL_INV: unbind a type 2 window of this queue pair. */
enum sw_refusal sw_invalidate(struct ibv_qp *queue_pair, uint32_t key, int is_remote);
/* BIND_MW of both types, as its turn comes in the send queue. */
int sw_bind(struct ibv_qp *queue_pair, struct ibv_mw *window, uint32_t new_key,
            const struct ibv_mw_bind_info *info);
/* A queue pair goes: its type 2 windows are unbound. */
void sw_unbind_all(struct ibv_qp *queue_pair);

/* -- completions (completion.c) ---------------------------------------------------------- */

struct sw_channel {
    struct ibv_comp_channel ibv; /* fd: an eventfd, readable while an event waits */
    struct sw_queue *first, *last; /* with events waiting */
};

struct sw_queue {
    struct ibv_cq_ex ibv; /* begins as struct ibv_cq does */
    struct ibv_wc *ring;
    uint32_t size, head, count;
    enum { SW_UNARMED, SW_ARMED_SOLICITED, SW_ARMED } armed;
    int ignores_overrun, is_overrun;
    uint32_t users;   /* queue pairs */
    uint32_t waiting; /* events on its channel that nobody has taken */
    uint32_t taken;   /* of comp_events_completed's kind */
    struct sw_subject subject;
    struct sw_queue *next;  /* on the channel */
    struct ibv_wc current;  /* that ibv_start_poll or ibv_next_poll has taken */
    /* Faults (completion.c). */
    struct sw_late *late;
    struct sw_timer late_event;
    int was_woken;
};

/*
 * Add a completion. solicited: a message that asks for it; an error always wakes. A full queue
 * loses it, and dies with IBV_EVENT_CQ_ERR.
 */
void sw_complete(struct ibv_cq *queue, const struct ibv_wc *completion, int solicited);
void sw_raise_queue(struct ibv_cq *queue, enum ibv_event_type type);
/* What a destroyed queue pair left in it is taken out, as man ibv_destroy_qp allows. */
void sw_forget_completions(struct ibv_cq *queue, uint32_t qp_num);

/* -- receives (shared_receive.c) ----------------------------------------------------------- */

struct sw_receive {
    uint64_t wr_id;
    int part_count;
    struct ibv_sge *parts; /* room for the queue's max_sge, in the ring's one allocation */
};

/* The receives of a queue pair, or those that many share: a ring of fixed size. */
struct sw_receives {
    struct sw_receive *ring;
    struct ibv_sge *parts;
    uint32_t size, head, count, most_parts;
};

int sw_receives_make(struct sw_receives *receives, uint32_t size, uint32_t most_parts);
void sw_receives_free(struct sw_receives *receives);
/* Copy a request in: ENOMEM when full, EINVAL for too many parts. */
int sw_receives_add(struct sw_receives *receives, const struct ibv_recv_wr *request);
/* Copy the oldest out, to has room for most_parts parts. 0: there is none. */
int sw_receives_take(struct sw_receives *receives, struct sw_receive *to);

struct sw_shared_receive {
    struct ibv_srq ibv;
    struct sw_receives receives;
    uint32_t limit; /* raises SRQ_LIMIT_REACHED once when fewer are left; 0: none set */
    uint32_t users;
    struct sw_subject subject;
    struct sw_queue_pair *waiting; /* those whose peers' messages are held back (next_waiting) */
};

void sw_raise_shared_receive(struct ibv_srq *queue, enum ibv_event_type type);

/* -- queue pairs (queue_pair.c, work.c) ---------------------------------------------------- */

struct sw_send {
    uint64_t wr_id;
    enum ibv_wr_opcode opcode;
    unsigned int flags; /* IBV_SEND_SIGNALED where the queue pair signals all */
    __be32 immediate;
    uint32_t invalidated; /* rkey */
    uint64_t remote_address;
    uint32_t rkey;
    uint64_t compare_add, swap;
    uint32_t length; /* of all parts, or inline */
    int part_count;
    struct ibv_sge *parts; /* room for max_send_sge */
    char *inlined;         /* room for max_inline_data; in use if flags has IBV_SEND_INLINE */
    struct ibv_ah *address_handle;
    uint32_t remote_qpn, remote_qkey;
    struct ibv_mw *window;
    uint32_t window_key;
    struct ibv_mw_bind_info bind;
    /* BEGUN: a part of it has gone. SENT: TCP has all of it, and the peer has not said so. ASKED:
     * a READ or an atomic. */
    enum { SW_POSTED, SW_BEGUN, SW_SENT, SW_ASKED, SW_DONE } stage;
    uint32_t sequence; /* its message's number on its queue of DDP's */
    enum ibv_wc_status status;
    uint32_t progress; /* of a READ: bytes arrived; the stream's own otherwise */
    uint32_t sink;     /* of a READ: the STag that its answer comes to; of an atomic: its number */
};

struct sw_queue_pair {
    struct ibv_qp ibv;
    struct ibv_qp_cap capacity;
    int signals_all;
    struct ibv_qp_attr attributes; /* as modified; state is ibv.state */
    struct sw_queue_pair *next;    /* in the table of queue pairs */

    struct sw_send *sends; /* a ring: done .. [oldest, next) sent, [next, end) waiting */
    struct ibv_sge *send_parts;
    char *inlined;
    uint32_t send_size, oldest, next_send, end; /* free-running counters; slot = counter % size,
        and size a power of two, so that it stays so where they wrap */

    struct sw_receives receives;
    struct sw_shared_receive *shared;
    struct sw_receive taken; /* the receive that a message is arriving in */
    int has_taken;
    struct sw_queue_pair *next_waiting; /* for a receive of the shared queue */
    int is_waiting;
    struct sw_timer unready; /* a fault's (faults.h): no receive is seen before */

    struct sw_subject subject;
    struct sw_stream *stream;         /* RC, once connected (stream.h) */
    struct sw_datagrams *datagrams;   /* UD (datagram.c) */
    struct sw_identifier *identifier; /* the connection's, if the connection manager has one */
};

void sw_raise_queue_pair(struct ibv_qp *queue_pair, enum ibv_event_type type);
struct sw_queue_pair *sw_find_queue_pair(uint32_t qp_num);
/* A free number of 24 bits. */
uint32_t sw_new_queue_pair_number(void);

/* From INIT by way of RTR, with what the connection manager agreed: attributes' depths. */
void sw_queue_pair_ready(struct sw_queue_pair *pair);
/* To ERR: what is posted is flushed, the stream ends. Nothing if it is there. */
void sw_queue_pair_failed(struct sw_queue_pair *pair);
/* In ERR: what is posted there ends as flushed. */
void sw_flush_sends(struct sw_queue_pair *pair);
void sw_flush_receives(struct sw_queue_pair *pair);

/*
 * Receives, for messages that arrive. take: 1 and pair->taken is filled, or 0, and for a stream
 * (wait != 0) sw_stream_resume is called when there is one.
 */
int sw_take_receive(struct sw_queue_pair *pair, int wait);
/* Scatter bytes into the taken receive; LOC_LEN_ERR where they do not fit, LOC_PROT_ERR. */
enum ibv_wc_status sw_fill_receive(struct sw_queue_pair *pair, uint32_t offset,
                                   const void *bytes, uint32_t size);
/*
 * Complete the taken receive. what has opcode, byte_len, wc_flags, imm_data, src_qp, status...;
 * wr_id and qp_num are set here.
 */
void sw_finish_receive(struct sw_queue_pair *pair, struct ibv_wc *what, int solicited);

/* Scatter into, or gather from, parts: LOC_PROT_ERR where one cannot be reached. */
enum ibv_wc_status sw_scatter(struct ibv_pd *domain, const struct ibv_sge *parts, int count,
                              uint32_t offset, const void *bytes, uint32_t size);
enum ibv_wc_status sw_gather(struct ibv_pd *domain, const struct ibv_sge *parts, int count,
                             uint32_t offset, void *bytes, uint32_t size);

/* A send's end: its completion is told when all before it have ended. */
void sw_end_send(struct sw_queue_pair *pair, struct sw_send *send, enum ibv_wc_status status);
/* All that are SENT, and were posted before this one of the ring's counters, have arrived. */
void sw_end_sent(struct sw_queue_pair *pair, uint32_t before);

/* -- streams: iWARP over TCP (stream.h) ---------------------------------------------------- */

/* What the two sides agreed on in the MPA handshake. */
struct sw_terms {
    int crc;               /* CRC32C on every frame, both ways */
    int is_initiator;
    int must_hear_first;   /* the accepting side sends nothing before a frame has come */
    int must_hear_soon;    /* ... or some time has passed: the peer announces nothing */
    int sends_ready;       /* the initiator sends a WRITE of no bytes first (RFC 6581 RTR) */
    int gives_word;        /* the peer answers READs of no bytes: it is one of our own kind */
    uint16_t inbound_depth, outbound_depth; /* READs and atomics outstanding: IRD, ORD */
    const void *already;   /* bytes behind the handshake that have been read */
    size_t already_size;
};

/*
 * Give a connected, non-blocking TCP socket to a queue pair, which goes to RTS. The stream owns
 * the socket from here, also on failure. If the pair has failed or will, the peer is told by the
 * end of the stream.
 */
int sw_stream_begin(struct sw_queue_pair *pair, int fd, const struct sw_terms *terms);
/* There is work in the send queue. */
void sw_stream_transmit(struct sw_queue_pair *pair);
/* There is a receive for the message that is held back. */
void sw_stream_resume(struct sw_queue_pair *pair);
/* The end: what TCP has taken is still delivered. The queue pair is in ERR, or goes away. */
void sw_stream_end(struct sw_queue_pair *pair);

/* -- the connection manager, as streams see it (cm.c) --------------------------------------- */

/* The first frame of the peer has come: the accepting side is ESTABLISHED. */
void sw_identifier_heard(struct sw_identifier *identifier);
/* The stream is over, whoever ended it: DISCONNECTED. */
void sw_identifier_ended(struct sw_identifier *identifier);
/* The queue pair is being destroyed; the identifier forgets it. */
void sw_identifier_lost_queue_pair(struct sw_identifier *identifier);

/* -- datagrams (datagram.c) ------------------------------------------------------------------ */

/*
 * A UD queue pair's socket. Its number has the UDP port in its low 16 bits, so that (address,
 * number) is enough to reach it. Sets ibv.qp_num.
 */
int sw_datagrams_open(struct sw_queue_pair *pair);
void sw_datagrams_close(struct sw_queue_pair *pair);
/* Send what the send queue has; each ends at once. */
void sw_datagrams_transmit(struct sw_queue_pair *pair);
/* It gets a multicast group's datagrams, on the interface of its identifier if it has one. */
int sw_datagrams_attach(struct sw_queue_pair *pair, const union ibv_gid *group);
int sw_datagrams_detach(struct sw_queue_pair *pair, const union ibv_gid *group);
/* By the program itself, with ibv_attach_mcast: it is not destroyed before it is detached. */
int sw_datagrams_are_attached(const struct sw_queue_pair *pair);

/* -- fork (fork.c) -------------------------------------------------------------------------- */

/* Have every call refuse what a parent made, and register for forks. 0 or an errno. */
int sw_guard(struct aiordma_provider *table);
/* In the child, beside sw_engine_forked: forget what is the parent's, telling nobody. */
void sw_device_forked(void);
void sw_queue_pairs_forked(void);
void sw_identifiers_forked(void); /* closes those that the engine did not watch */
void sw_memory_forked(void);

/* -- the table: each room fills in its own functions ----------------------------------------- */

/* What each new context begins with. */
void sw_give_operations(struct verbs_context *operations);

void sw_fill_device(struct aiordma_provider *table, struct verbs_context *operations);
void sw_fill_events(struct aiordma_provider *table);
void sw_fill_memory(struct aiordma_provider *table, struct ibv_context_ops *operations);
void sw_fill_completion(struct aiordma_provider *table, struct verbs_context *operations);
void sw_fill_shared_receive(struct aiordma_provider *table, struct ibv_context_ops *operations);
void sw_fill_queue_pair(struct aiordma_provider *table);
void sw_fill_work(struct ibv_context_ops *operations);
void sw_fill_datagram(struct aiordma_provider *table); /* address handles, multicast */
void sw_fill_cm(struct aiordma_provider *table);       /* channels, identifiers, connections */
void sw_fill_address(struct aiordma_provider *table);  /* rdma_getaddrinfo */
void sw_fill_group(struct aiordma_provider *table);    /* multicast of the connection manager */

#endif
