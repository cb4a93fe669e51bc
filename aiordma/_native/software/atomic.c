/* Atomics of peers: see atomic.h. */
#include "atomic.h"

/* Add fields as in RFC 7306: no carry passes a bit that is set in the mask. */
static uint64_t masked_sum(uint64_t one, uint64_t other, uint64_t mask)
{
    uint64_t sum = 0, carry = 0;

    if (!mask)
        return one + other;
    for (int bit = 0; bit < 64; bit++) {
        uint64_t total = (one >> bit & 1) + (other >> bit & 1) + carry;
        sum |= (total & 1) << bit;
        carry = mask >> bit & 1 ? 0 : total >> 1;
    }
    return sum;
}

static uint64_t result_of(const struct sw_atomic_request *request, uint64_t before)
{
    if (request->operation == SW_FETCH_ADD)
        return masked_sum(before, request->operand, request->operand_mask);
    if ((before ^ request->compare) & request->compare_mask)
        return before;
    return (before & ~request->operand_mask) | (request->operand & request->operand_mask);
}

int sw_carry_out_atomic(const struct sw_atomic_request *request, struct sw_memory memory,
                        uint64_t *before)
{
    uint64_t *value = (uint64_t *)(void *)memory.at, after;

    if (memory.is_of_file) {
        /* Atomic only among the device's requests, because these hold the lock. */
        int error = sw_copy_from(before, memory, sizeof(*before));
        after = error ? 0 : result_of(request, *before);
        return error || after == *before ? error : sw_copy_to(memory, &after, sizeof(after));
    }
    *before = __atomic_load_n(value, __ATOMIC_SEQ_CST);
    /* The program's threads can change the value in between. */
    do
        after = result_of(request, *before);
    while (
        !__atomic_compare_exchange_n(value, before, after, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return 0;
}
