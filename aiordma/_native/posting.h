#ifndef AIORDMA_POSTING_H
#define AIORDMA_POSTING_H

#include "provider.h"

#include "declarations/posting.h"

/*
 * Requests as the device takes them, linked, with their parts behind them; free() them. NULL:
 * *error says why. The engine, which has a chain of its own around them, is the other user.
 */
struct ibv_send_wr *aiordma_fill_sends(const struct aiordma_send_request *requests,
                                       uint32_t count, const char *sges, size_t sges_size,
                                       int *error);

#endif
