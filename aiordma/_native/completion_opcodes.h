/* The opcode of the completion of a send request. */
#ifndef AIORDMA_COMPLETION_OPCODES_H
#define AIORDMA_COMPLETION_OPCODES_H

#include "rdma_core.h"

static inline enum ibv_wc_opcode aiordma_completes_as(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD;
    case IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV;
    case IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW;
    default:
        return IBV_WC_SEND;
    }
}

#endif
