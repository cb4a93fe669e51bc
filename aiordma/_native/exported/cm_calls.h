/* What the files of librdmacm.so.1 share. */
#ifndef AIORDMA_EXPORTED_CM_CALLS_H
#define AIORDMA_EXPORTED_CM_CALLS_H

#include "one_device.h"

/* The device's table. NULL, with errno: only before the program has an object of it. */
const struct aiordma_provider *cm_calls(void);

/* Set errno and return -1, as most calls of rdma_cma.h do. */
int cm_fail(int error);

/* Give the default protection domain to an identifier that is bound to the device. */
void cm_set_domain(struct rdma_cm_id *id);

/* Calls of cm_calls.c that others build on. */
int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event);
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address);
int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *domain, struct ibv_qp_init_attr *attr);
void rdma_destroy_srq(struct rdma_cm_id *id);

#endif
