/* Receives: the ring that a queue pair has of its own, and the queues that many share. */
#ifndef AIORDMA_SOFTWARE_SHARED_RECEIVE_H
#define AIORDMA_SOFTWARE_SHARED_RECEIVE_H

#include "context.h"

struct sw_receive {
    uint64_t wr_id;
    int part_count;
    struct ibv_sge *parts; /* room for the queue's max_sge, in the ring's one allocation */
};

/* The receives of a queue pair, or those that many share: a ring of fixed size. */
struct sw_receives {
    struct sw_receive *ring;
    struct ibv_sge *parts;
    size_t mapped; /* bytes of both */
    uint32_t size, head, count, most_parts;
};

int sw_receives_make(struct sw_receives *receives, uint32_t size, uint32_t most_parts);
void sw_receives_free(struct sw_receives *receives);
/* Copy a request in: ENOMEM when full, EINVAL for too many parts. */
int sw_receives_add(struct sw_receives *receives, const struct ibv_recv_wr *request);
/* Copy the oldest out, to has room for most_parts parts. 0: there is none. */
int sw_receives_take(struct sw_receives *receives, struct sw_receive *to);

/* Who waits for a receive of a shared queue, for a message that is held back. */
struct sw_waiter {
    void (*resume)(struct sw_waiter *waiter); /* there is one; it waits no longer */
    struct sw_waiter *next;
};

struct sw_shared_receive {
    struct ibv_srq ibv;
    struct sw_receives receives;
    uint32_t limit; /* raises SRQ_LIMIT_REACHED once when fewer are left; 0: none set */
    uint32_t users;
    struct sw_subject subject;
    struct sw_waiter *waiting; /* the longest first */
};
void sw_raise_shared_receive(struct ibv_srq *queue, enum ibv_event_type type);

/* As sw_receives_take; tells when the limit is reached. */
int sw_shared_take(struct sw_shared_receive *shared, struct sw_receive *to);
void sw_shared_await(struct sw_shared_receive *shared, struct sw_waiter *waiter);
/* It waits no longer; nothing if it does not. */
void sw_shared_leave(struct sw_shared_receive *shared, struct sw_waiter *waiter);

void sw_fill_shared_receive(struct aiordma_provider *table, struct ibv_context_ops *operations);

#endif
