/*
 * The data path: each verbs call of a post (but ibv_bind_mw, in posting.c), of a drain and of a CM
 * event is made here, and nowhere else. It is compiled into the binding. The engine calls it through the table below.
 */
#ifndef AIORDMA_DATA_PATH_H
#define AIORDMA_DATA_PATH_H

#include "provider.h"

#include "declarations/data_path.h"
#include "declarations/posting.h"

/*
 * Post linked work requests to a send queue. Returns 0: the device accepted all; a positive errno:
 * it refused *refused and all requests after it; a negative errno: it accepted all, but the
 * doorbell failed, and it may still execute them. *refused is NULL unless the errno is positive.
 */
int aiordma_post_sends(struct ibv_qp *queue_pair, struct ibv_send_wr *first,
                       struct ibv_send_wr **refused);
/* The same for a receive queue, or for a shared one if queue_pair is NULL. */
int aiordma_post_receives(struct ibv_qp *queue_pair, struct ibv_srq *shared,
                          struct ibv_recv_wr *first, struct ibv_recv_wr **refused);
/*
 * Make linked work requests and their sges in one allocation, which the caller frees with free().
 * NULL: *error is the errno.
 */
struct ibv_send_wr *aiordma_fill_sends(const void *requests, uint32_t count, const char *sges,
                                       size_t sges_size, int *error);

/* Copy the valid members of a completion. */
void aiordma_pack_completion(struct aiordma_completion *out, const struct ibv_wc *wc);

/* One completion queue on a drained channel. */
struct aiordma_drained_queue {
    struct ibv_cq *queue;
    uint32_t events; /* taken from the channel and not acknowledged yet */
    uint32_t armed;
};

/* A completion channel, its queues, and the completions that were polled from them. */
struct aiordma_drain {
    const struct aiordma_provider *provider;
    struct ibv_comp_channel *channel; /* non-blocking */
    struct aiordma_drained_queue *queues;
    struct aiordma_completion *batch;
    uint32_t queue_count;
    uint32_t capacity; /* of batch */
    uint32_t more;     /* out: the last poll filled the batch; poll again */
    uint32_t next;     /* the queue that is polled first, behind the one that filled a batch */
    uint64_t events;   /* out: taken from the channel in total */
};

/* The functions that the engine calls. */
struct aiordma_data_path {
    /*
     * The three steps of a drain. ibv_req_notify_cq is one-shot: poll after arming, or a completion
     * between the last poll and the arming is never reported.
     *
     * Take the events of the channel's armed queues, and acknowledge them. 0 or -errno.
     */
    int (*take_events)(struct aiordma_drain *drain);
    /* Request a notification from each queue that is not armed. 0 or -errno. */
    int (*arm_queues)(struct aiordma_drain *drain);
    /*
     * Poll the queues until they are empty or the batch is full. The number of completions, or -EIO.
     * A queue that fills every batch does not keep the others from being polled.
     */
    int (*poll_queues)(struct aiordma_drain *drain);
    int (*post_sends)(struct ibv_qp *queue_pair, struct ibv_send_wr *first,
                      struct ibv_send_wr **refused);
    int (*post_receives)(struct ibv_qp *queue_pair, struct ibv_srq *shared,
                         struct ibv_recv_wr *first, struct ibv_recv_wr **refused);
    struct ibv_send_wr *(*fill_sends)(const void *requests, uint32_t count, const char *sges,
                                      size_t sges_size, int *error);
};

#endif
