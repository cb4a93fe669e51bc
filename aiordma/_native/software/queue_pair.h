/*
 * A queue pair: its posted requests and their completions, the transport of its messages, and its
 * reports to the connection manager.
 */
#ifndef AIORDMA_SOFTWARE_QUEUE_PAIR_H
#define AIORDMA_SOFTWARE_QUEUE_PAIR_H

#include "completion.h"
#include "memory.h"
#include "roce.h"
#include "shared_receive.h"

struct sw_builder;
struct sw_identifier;
struct sw_queue_pair;

struct sw_address_handle {
    struct ibv_ah ibv;
    struct sw_udp_route route;
};

struct sw_send {
    uint64_t wr_id;
    enum ibv_wr_opcode opcode;
    unsigned int flags;   /* IBV_SEND_SIGNALED also if the queue pair signals all */
    uint32_t immediate;   /* big-endian */
    uint32_t invalidated; /* rkey */
    uint64_t remote_address;
    uint32_t rkey;
    uint64_t compare_add, swap;
    uint32_t length; /* of all parts, or of inlined */
    uint32_t sum;    /* in a simulation: of the memory, at the post */
    int part_count;
    struct ibv_sge *parts; /* max_send_sge of them */
    char *inlined;         /* max_inline_data bytes; in use if flags has IBV_SEND_INLINE */
    /* Of the address handle, which may be destroyed before this is used. */
    struct sw_udp_route route;
    uint32_t remote_qpn, remote_qkey;
    struct ibv_mw *window;
    uint32_t window_key;
    struct ibv_mw_bind_info bind;
    /* BEGUN: a part has been sent. SENT: TCP has all of it, and the peer has not confirmed it.
     * ASKED: a READ or an atomic waits for its answer. */
    enum { SW_POSTED, SW_BEGUN, SW_SENT, SW_ASKED, SW_DONE } stage;
    uint32_t sequence; /* the message's number in its DDP queue */
    enum ibv_wc_status status;
    uint32_t progress;     /* of a READ: bytes that have arrived */
    uint32_t sink;         /* of a READ: the STag for its answer; of an atomic: its number */
    uint32_t psn, packets; /* over RoCE: the first packet's number, and how many numbers it takes */
};

/*
 * The transport of a queue pair's messages: connected.c for RC over iWARP, roce_pair.c for RC and UC
 * over RoCE, datagram.c for UD.
 */
struct sw_transport {
    int (*open)(struct sw_queue_pair *pair); /* the queue pair is being created: sets ibv.qp_num */
    void (*close)(struct sw_queue_pair *pair);
    void (*transmit)(struct sw_queue_pair *pair); /* the send queue has work */
    void (*resume)(struct sw_queue_pair *pair);   /* there is a receive for the held back message */
    void (*end)(struct sw_queue_pair *pair);      /* the queue pair is in ERR or RESET */
    /* The program moves the queue pair to RTR or RTS, with these attributes. NULL: as it likes. */
    int (*enter)(struct sw_queue_pair *pair, enum ibv_qp_state to, const struct ibv_qp_attr *attr);
    /* A packet has come to RoCE's port, of `size` bytes in all. NULL: there are none. */
    void (*arrived)(struct sw_queue_pair *pair, const struct sw_udp_route *route,
                    const struct sw_roce_packet *packet, size_t size);
};

/* Reports about an identifier's queue pair to the connection manager. */
struct sw_reports {
    void (*first_frame)(struct sw_identifier *identifier); /* the peer's first frame has arrived */
    void (*ended)(struct sw_identifier *identifier); /* the connection is over, for any reason */
    void (*lost)(struct sw_identifier *identifier);  /* the queue pair is being destroyed */
};

struct sw_queue_pair {
    union {
        struct ibv_qp ibv;
        struct ibv_qp_ex extended; /* its functions are NULL without a builder */
    };
    struct sw_builder *builder; /* of extended (builder.h), or NULL */
    struct ibv_qp_cap capacity;
    int signals_all;
    struct ibv_qp_attr attributes; /* as modified, but the state is ibv.state */
    struct sw_queue_pair *next;    /* in the table of queue pairs */

    struct sw_send *sends;      /* a ring: [oldest, next_send) are sent, [next_send, end) wait */
    struct ibv_sge *send_parts; /* parts_each for each slot */
    uint32_t parts_each;
    char *inlined;
    size_t sends_mapped; /* bytes of all three; only used slots cost memory */
    uint32_t send_size, oldest, next_send, end; /* free-running counters: slot = counter % size. The
                                                   size is a power of two, so that this holds when
                                                   they wrap */

    struct sw_receives receives;
    struct sw_shared_receive *shared;
    struct sw_receive taken; /* that a message is arriving in */
    int has_taken;
    struct sw_waiter waiter; /* in the list of the shared receive queue */
    int is_waiting;          /* for a receive of either queue */
    struct sw_timer unready; /* a fault's (faults.h): no receive is taken before */

    struct sw_subject subject;
    const struct sw_transport *transport;
    void (*works)(void);            /* called after each post, and when bytes were sent; or NULL */
    int broken;                     /* errno: why the connection broke; 0: it was ended */
    struct sw_stream *stream;       /* of RC, once connected (stream.h) */
    struct sw_packets *packets;     /* of RC and UC over RoCE (roce_packets.h) */
    struct sw_datagrams *datagrams; /* of UD (datagram.c) */
    struct sw_identifier *identifier; /* the connection manager's, or NULL */
    const struct sw_reports *reports; /* set with identifier */
    union ibv_gid source;             /* the identifier's address, or zeros */
};

void sw_raise_queue_pair(struct ibv_qp *queue_pair, enum ibv_event_type type);
struct sw_queue_pair *sw_find_queue_pair(uint32_t qp_num);
/* Find a free number of 24 bits. */
uint32_t sw_new_queue_pair_number(void);
/* Enter a queue pair into the table for sw_find_queue_pair, or remove it. */
void sw_list_queue_pair(struct sw_queue_pair *pair);
void sw_unlist_queue_pair(struct sw_queue_pair *pair);

/* Move from INIT to RTS with the depths in attributes, which the connection manager agreed on. */
void sw_queue_pair_ready(struct sw_queue_pair *pair);
/* Move to ERR: flush all requests and end the stream. Do nothing in ERR. */
void sw_queue_pair_failed(struct sw_queue_pair *pair);
/* Stop waiting for a receive. */
void sw_stop_waiting(struct sw_queue_pair *pair);
/* In ERR: flush all requests. */
void sw_flush_sends(struct sw_queue_pair *pair);
void sw_flush_receives(struct sw_queue_pair *pair);

/*
 * Take a receive for an arriving message: 1, and pair->taken is filled. If there is none: 0, and
 * with wait the transport resumes when there is one.
 */
int sw_take_receive(struct sw_queue_pair *pair, int wait);
/* Scatter bytes into the taken receive. LOC_LEN_ERR if they do not fit; LOC_PROT_ERR. */
enum ibv_wc_status sw_fill_receive(struct sw_queue_pair *pair, uint32_t offset, const void *bytes,
                                   uint32_t size);
/* Complete the taken receive. what: the completion, without wr_id and qp_num. */
void sw_finish_receive(struct sw_queue_pair *pair, struct ibv_wc *what, int solicited);

/* Scatter into parts, or gather from them. LOC_PROT_ERR if a part is not accessible. */
enum ibv_wc_status sw_scatter(struct ibv_pd *domain, const struct ibv_sge *parts, int count,
                              uint32_t offset, const void *bytes, uint32_t size);
enum ibv_wc_status sw_gather(struct ibv_pd *domain, const struct ibv_sge *parts, int count,
                             uint32_t offset, void *bytes, uint32_t size);

/* Whether the device may access all parts of a send; access: as for sw_reach_local. */
int sw_is_reachable(const struct sw_queue_pair *pair, const struct sw_send *send, int access);
/* End a send. It completes after all earlier sends. */
void sw_end_send(struct sw_queue_pair *pair, struct sw_send *send, enum ibv_wc_status status);
/* End all SENT requests before this counter of the ring: they have arrived. */
void sw_end_sent(struct sw_queue_pair *pair, uint32_t before);
/* In SQD, raise SQ_DRAINED if the program requested it and no request is in progress. */
void sw_tell_if_drained(struct sw_queue_pair *pair);

void sw_queue_pairs_forked(void);
extern const struct sw_state sw_queue_pairs_state;

#endif
