/* See ownership.h. */
#include "ownership.h"

#include <stdlib.h>
#include <string.h>

#include "crc32c.h"

enum { POISON = 0xdb, BLOCK = 4096 };

void sw_guard_parts(const struct sw_posted *posted, struct ibv_pd *domain,
                    const struct ibv_sge *parts, int count, uint32_t size, int writes)
{
    struct sw_span span = {domain, parts, count, 0, size};
    struct sw_piece piece;

    while (span.size && !sw_next_piece(&span, writes ? IBV_ACCESS_LOCAL_WRITE : 0, &piece))
        sw_guard(posted, piece.memory.at, piece.size, writes);
}

uint32_t sw_owned_sum(struct ibv_pd *domain, const struct ibv_sge *parts, int count, uint32_t size)
{
    struct sw_span span = {domain, parts, count, 0, size};
    struct sw_piece piece;
    char block[BLOCK];
    uint32_t sum = 0;

    while (span.size) {
        if (sw_next_piece(&span, 0, &piece))
            return 0;
        for (uint32_t done = 0, part; done < piece.size; done += part) {
            part = piece.size - done < BLOCK ? piece.size - done : BLOCK;
            struct sw_memory from = {piece.memory.at + done, piece.memory.is_of_file};
            if (sw_copy_from(block, from, part))
                return 0;
            sum = sw_crc32c(sum, block, part);
        }
    }
    return sum;
}

void sw_poison(struct ibv_pd *domain, const struct ibv_sge *parts, int count, uint32_t size)
{
    struct sw_span span = {domain, parts, count, 0, size};
    struct sw_piece piece;
    char block[BLOCK];

    memset(block, POISON, sizeof(block));
    while (span.size) {
        if (sw_next_piece(&span, IBV_ACCESS_LOCAL_WRITE, &piece))
            return;
        for (uint32_t done = 0, part; done < piece.size; done += part) {
            part = piece.size - done < BLOCK ? piece.size - done : BLOCK;
            struct sw_memory to = {piece.memory.at + done, piece.memory.is_of_file};
            if (sw_copy_to(to, block, part))
                return;
        }
    }
}

uint32_t sw_take_over_receive(const void *queue, uint32_t qp_num, struct ibv_pd *domain,
                              const struct ibv_recv_wr *request)
{
    const struct sw_posted posted = {queue, request->wr_id, qp_num};
    uint64_t size = 0;

    for (int i = 0; i < request->num_sge; i++)
        size += request->sg_list[i].length;
    if (size > UINT32_MAX)
        return 0;
    sw_poison(domain, request->sg_list, request->num_sge, (uint32_t)size);
    sw_guard_parts(&posted, domain, request->sg_list, request->num_sge, (uint32_t)size, 1);
    return (uint32_t)size;
}

int sw_overlaps(const struct ibv_sge *one, int count, const struct ibv_sge *other, int others)
{
    for (int i = 0; i < count; i++)
        for (int j = 0; j < others; j++)
            if (one[i].length && other[j].length && one[i].lkey == other[j].lkey &&
                one[i].addr < other[j].addr + other[j].length &&
                other[j].addr < one[i].addr + one[i].length)
                return 1;
    return 0;
}
