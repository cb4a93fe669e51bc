/*
 * A queue pair: what is posted to it, and how that ends; what carries its messages, and who is
 * told of that.
 */
#ifndef AIORDMA_SOFTWARE_QUEUE_PAIR_H
#define AIORDMA_SOFTWARE_QUEUE_PAIR_H

#include "completion.h"
#include "memory.h"
#include "roce.h"
#include "shared_receive.h"

struct sw_identifier;
struct sw_queue_pair;

struct sw_address_handle {
    struct ibv_ah ibv;
    struct sw_udp_way way;
};

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
    struct sw_udp_way way; /* the address handle's, which may be gone before it is used */
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

/* What carries a queue pair's messages: connected.c for RC, datagram.c for UD. */
struct sw_transport {
    int (*open)(struct sw_queue_pair *pair); /* it is being made: sets ibv.qp_num */
    void (*close)(struct sw_queue_pair *pair);
    void (*transmit)(struct sw_queue_pair *pair); /* there is work in the send queue */
    void (*resume)(struct sw_queue_pair *pair);   /* a receive, for the message that is held back */
    void (*end)(struct sw_queue_pair *pair);      /* it is in ERR, or RESET */
};

/* What the connection manager is told of an identifier's queue pair. */
struct sw_told {
    void (*heard)(struct sw_identifier *identifier); /* the peer's first frame */
    void (*ended)(struct sw_identifier *identifier); /* the connection is over, by whomever */
    void (*lost)(struct sw_identifier *identifier);  /* the queue pair is being destroyed */
};

struct sw_queue_pair {
    struct ibv_qp ibv;
    struct ibv_qp_cap capacity;
    int signals_all;
    struct ibv_qp_attr attributes; /* as modified; state is ibv.state */
    struct sw_queue_pair *next;    /* in the table of queue pairs */

    struct sw_send *sends;      /* a ring: done .. [oldest, next) sent, [next, end) waiting */
    struct ibv_sge *send_parts; /* parts_each for a slot */
    uint32_t parts_each;
    char *inlined;
    size_t sends_mapped; /* bytes of all three: only what has been posted costs memory */
    uint32_t send_size, oldest, next_send, end; /* free-running counters; slot = counter % size,
        and size a power of two, so that it stays so where they wrap */

    struct sw_receives receives;
    struct sw_shared_receive *shared;
    struct sw_receive taken; /* the receive that a message is arriving in */
    int has_taken;
    struct sw_waiter waiter; /* for a receive of the shared queue */
    int is_waiting;          /* for one at all */
    struct sw_timer unready; /* a fault's (faults.h): no receive is seen before */

    struct sw_subject subject;
    const struct sw_transport *transport;
    void (*posted)(void);             /* tell who looks while there is work; or NULL */
    struct sw_stream *stream;         /* RC's, once connected (stream.h) */
    struct sw_datagrams *datagrams;   /* UD's (datagram.c) */
    struct sw_identifier *identifier; /* the connection manager's, if it has one for it */
    const struct sw_told *told;       /* who answers for that; with it, or not at all */
    union ibv_gid source;             /* its address; zeros without one */
};

void sw_raise_queue_pair(struct ibv_qp *queue_pair, enum ibv_event_type type);
struct sw_queue_pair *sw_find_queue_pair(uint32_t qp_num);
/* A free number of 24 bits. */
uint32_t sw_new_queue_pair_number(void);
/* By its number it is found, or no longer. */
void sw_list_queue_pair(struct sw_queue_pair *pair);
void sw_unlist_queue_pair(struct sw_queue_pair *pair);

/* From INIT by way of RTR, with what the connection manager agreed: attributes' depths. */
void sw_queue_pair_ready(struct sw_queue_pair *pair);
/* To ERR: what is posted is flushed, the stream ends. Nothing if it is there. */
void sw_queue_pair_failed(struct sw_queue_pair *pair);
/* For a receive, in this state or for good. */
void sw_stop_waiting(struct sw_queue_pair *pair);
/* In ERR: what is posted there ends as flushed. */
void sw_flush_sends(struct sw_queue_pair *pair);
void sw_flush_receives(struct sw_queue_pair *pair);

/*
 * Receives, for messages that arrive. take: 1 and pair->taken is filled, or 0, and for a stream
 * (wait != 0) the transport resumes when there is one.
 */
int sw_take_receive(struct sw_queue_pair *pair, int wait);
/* Scatter bytes into the taken receive; LOC_LEN_ERR where they do not fit, LOC_PROT_ERR. */
enum ibv_wc_status sw_fill_receive(struct sw_queue_pair *pair, uint32_t offset, const void *bytes,
                                   uint32_t size);
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
/* SQ_DRAINED, in SQD, if the program asked for it and all that had begun has ended. */
void sw_tell_if_drained(struct sw_queue_pair *pair);

void sw_queue_pairs_forked(void);

#endif
