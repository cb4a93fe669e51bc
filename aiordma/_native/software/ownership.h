/*
 * In a simulation: the device owns the memory of a request until its completion. A program that
 * changes what is being sent, or reads what has not arrived, is found out.
 */
#ifndef AIORDMA_SOFTWARE_OWNERSHIP_H
#define AIORDMA_SOFTWARE_OWNERSHIP_H

#include "guard.h"
#include "memory.h"

/* Protect the memory of a request, if it is guarded. writes: the request writes it. */
void sw_guard_parts(const struct sw_posted *posted, struct ibv_pd *domain,
                    const struct ibv_sge *parts, int count, uint32_t size, int writes);
/* A checksum of the memory that a request sends. 0: it cannot be read. */
uint32_t sw_owned_sum(struct ibv_pd *domain, const struct ibv_sge *parts, int count, uint32_t size);
/* Fill the memory that a request writes with bytes that no program takes for data. */
void sw_poison(struct ibv_pd *domain, const struct ibv_sge *parts, int count, uint32_t size);
/* Whether two requests have a byte of memory in common. */
int sw_overlaps(const struct ibv_sge *one, int count, const struct ibv_sge *other, int others);
/* As sw_poison and sw_guard_parts. Returns the size. */
uint32_t sw_take_over_receive(const void *queue, uint32_t qp_num, struct ibv_pd *domain,
                              const struct ibv_recv_wr *request);

#endif
