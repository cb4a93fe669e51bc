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

struct aiordma_data_path {
    int (*take_events)(struct aiordma_drain *drain);
    int (*arm_queues)(struct aiordma_drain *drain);
    int (*poll_queues)(struct aiordma_drain *drain);
    int (*post_sends)(struct ibv_qp *queue_pair, struct ibv_send_wr *first,
                      struct ibv_send_wr **refused);
    int (*post_receives)(struct ibv_qp *queue_pair, struct ibv_srq *shared,
                         struct ibv_recv_wr *first, struct ibv_recv_wr **refused);
    struct ibv_send_wr *(*fill_sends)(const void *requests, uint32_t count, const char *sges,
                                      size_t sges_size, int *error);
};

#endif
