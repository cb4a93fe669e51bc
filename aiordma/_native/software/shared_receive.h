/* Receives: the ring of a queue pair, and the queues that many queue pairs share. */
#ifndef AIORDMA_SOFTWARE_SHARED_RECEIVE_H
#define AIORDMA_SOFTWARE_SHARED_RECEIVE_H

#include "context.h"

struct sw_receive {
    uint64_t wr_id;
    int part_count;
    struct ibv_sge *parts; /* max_sge of the queue, part of the ring's allocation */
};

/* A ring of fixed size: the receives of a queue pair, or of a shared receive queue. */
struct sw_receives {
    struct sw_receive *ring;
    struct ibv_sge *parts;
    size_t mapped; /* bytes of both */
    uint32_t size, head, count, most_parts;
};

int sw_receives_make(struct sw_receives *receives, uint32_t size, uint32_t most_parts);
void sw_receives_free(struct sw_receives *receives);
/* Copy a request into the ring. ENOMEM if it is full, EINVAL for too many parts. */
int sw_receives_add(struct sw_receives *receives, const struct ibv_recv_wr *request);
/* Copy the oldest receive to a place for most_parts parts, and remove it. 0: there is none. */
int sw_receives_take(struct sw_receives *receives, struct sw_receive *to);

/* A message that is held back, and waits for a receive of a shared queue. */
struct sw_waiter {
    void (*resume)(struct sw_waiter *waiter); /* there is a receive; the waiter has left the list */
    struct sw_waiter *next;
};

struct sw_shared_receive {
    struct ibv_srq ibv;
    struct sw_receives receives;
    uint32_t limit; /* raises SRQ_LIMIT_REACHED once if fewer are left; 0: not set */
    uint32_t users;
    struct sw_subject subject;
    struct sw_waiter *waiting; /* the longest-waiting first */
};
void sw_raise_shared_receive(struct ibv_srq *queue, enum ibv_event_type type);

/* As sw_receives_take. Raises SRQ_LIMIT_REACHED. */
int sw_shared_take(struct sw_shared_receive *shared, struct sw_receive *to);
void sw_shared_await(struct sw_shared_receive *shared, struct sw_waiter *waiter);
/* Stop waiting. Do nothing if it does not wait. */
void sw_shared_leave(struct sw_shared_receive *shared, struct sw_waiter *waiter);

void sw_fill_shared_receive(struct aiordma_provider *table, struct ibv_context_ops *operations);

#endif
