/* What the programs share that give the software device frames of a peer. */
#ifndef AIORDMA_TESTS_QUEUE_PAIR_H
#define AIORDMA_TESTS_QUEUE_PAIR_H

#include <stdio.h>
#include <stdlib.h>

#include "software/engine.h"

/* Print what is wrong and end the program, unless all is well. */
static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    printf("%s\n", what);
    exit(1);
}

/* Make a queue pair with a completion queue of its own, in the state INIT. */
static struct ibv_qp *make_queue_pair(const struct aiordma_provider *table, struct ibv_pd *domain,
                                      uint32_t max_send_wr)
{
    struct ibv_cq *queue = table->create_cq(domain->context, 64, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {
        .send_cq = queue,
        .recv_cq = queue,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = max_send_wr, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
    };
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};

    check(queue != NULL, "create_cq failed");
    struct ibv_qp *queue_pair = table->create_qp(domain, &init);
    check(queue_pair != NULL, "create_qp failed");
    check(!table->modify_qp(queue_pair, &attr,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
          "modify_qp failed");
    return queue_pair;
}

#endif
