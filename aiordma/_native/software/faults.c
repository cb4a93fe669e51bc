/* See faults.h and declarations/faults.h. */
#include "faults.h"

#include <errno.h>
#include <string.h>

enum { MOST_FAULTS = 64 };

struct rule {
    int number; /* 0: free */
    uint32_t passed;
    struct aiordma_fault fault;
};

static struct rule rules[MOST_FAULTS];
static int last_number;
static uint64_t random_state = 1;
int sw_has_faults;

/* xorshift64*: a seed has the same effect on every machine. */
static uint32_t next_random(void)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)(random_state * 2685821657736338717u >> 32);
}

static int is_over(const struct aiordma_fault *fault)
{
    return fault->times && fault->struck >= fault->times;
}

static int strikes(struct rule *rule)
{
    struct aiordma_fault *fault = &rule->fault;

    if (is_over(fault))
        return 0;
    if (rule->passed < fault->after) {
        rule->passed++;
        return 0;
    }
    if (fault->chance && next_random() % 65536 >= fault->chance)
        return 0;
    fault->struck++;
    return 1;
}

int sw_strike(enum aiordma_fault_kind kind, struct aiordma_fault *what)
{
    for (int i = 0; i < MOST_FAULTS; i++) {
        struct rule *rule = &rules[i];
        if (!rule->number || rule->fault.kind != kind || !strikes(rule))
            continue;
        *what = rule->fault;
        if (what->spread)
            what->milliseconds += next_random() % (what->spread + 1);
        return 1;
    }
    if (kind == AIORDMA_FAULT_COMPLETION_DELAYED && sw_system->is_simulated)
        return (what->milliseconds = sw_system->completion_delay()) != 0;
    return 0;
}

void sw_count_faults(void)
{
    sw_has_faults = sw_system->is_simulated;
    for (int i = 0; i < MOST_FAULTS; i++)
        sw_has_faults |= rules[i].number != 0;
}

int sw_strikes_bytes(uint64_t carried)
{
    for (int i = 0; sw_has_faults && i < MOST_FAULTS; i++) {
        struct rule *rule = &rules[i];
        if (rule->number && rule->fault.kind == AIORDMA_FAULT_DROP_AFTER_BYTES &&
            carried >= rule->fault.bytes && strikes(rule))
            return 1;
    }
    return 0;
}

int aiordma_software_add_fault(const struct aiordma_fault *fault)
{
    int number = -ENOSPC;

    if (fault->kind >= AIORDMA_FAULT_KINDS)
        return -EINVAL;
    sw_lock();
    for (int i = 0; i < MOST_FAULTS && number < 0; i++) {
        if (rules[i].number)
            continue;
        number = ++last_number;
        rules[i] = (struct rule){.number = number, .fault = *fault};
        rules[i].fault.struck = 0;
        sw_has_faults = 1;
    }
    sw_unlock();
    return number;
}

int aiordma_software_fault_struck(int number)
{
    int struck = -ENOENT;

    sw_lock();
    for (int i = 0; number && i < MOST_FAULTS; i++)
        if (rules[i].number == number)
            struck = (int)rules[i].fault.struck;
    sw_unlock();
    return struck;
}

void aiordma_software_remove_fault(int number)
{
    sw_lock();
    for (int i = 0; i < MOST_FAULTS; i++)
        if (!number || rules[i].number == number)
            rules[i].number = 0;
    sw_count_faults();
    sw_unlock();
}

void aiordma_software_seed_faults(uint64_t seed)
{
    sw_lock();
    random_state = seed * 2 + 1; /* never 0, because 0 is followed by 0 */
    sw_unlock();
}
