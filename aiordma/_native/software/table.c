/*
 * The table of the software device, filled at the first use, and functions for tests.
 */
#include <errno.h>

#include "../event_subjects.h"
#include "address.h"
#include "cm.h"
#include "cm_addresses.h"
#include "completion.h"
#include "context.h"
#include "datagram.h"
#include "faults.h"
#include "fork.h"
#include "gids.h"
#include "group.h"
#include "identifier.h"
#include "memory.h"
#include "shared_receive.h"
#include "states.h"
#include "work.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct aiordma_provider table, roce_table;
static int failure;

static void fill(void)
{
    struct verbs_context *operations = &sw_device.operations;

    sw_fill_events(&table);
    sw_fill_gids(&table);
    sw_fill_context(&table, operations);
    sw_fill_memory(&table, operations);
    sw_fill_completion(&table, operations);
    sw_fill_shared_receive(&table, &operations->context.ops);
    sw_fill_work(&operations->context.ops);
    sw_fill_datagram(&table);
    sw_fill_states(&table, operations);
    sw_fill_identifier(&table);
    sw_fill_cm_addresses(&table);
    sw_fill_group(&table);
    sw_fill_cm(&table);
    sw_fill_address(&table);
    roce_table = table;
    sw_fill_roce_cm(&roce_table);
    failure = sw_prepare_forks();
}

const struct aiordma_provider *aiordma_software(void)
{
    if (pthread_once(&once, fill) || failure)
        return NULL;
    return &table;
}

const struct aiordma_provider *aiordma_software_roce(void)
{
    return aiordma_software() ? &roce_table : NULL;
}

void aiordma_software_counts(struct aiordma_software_counts *counts)
{
    sw_lock();
    *counts = sw_device.counts;
    sw_unlock();
}

void aiordma_software_memory(struct aiordma_software_memory *memory)
{
    sw_lock();
    *memory = sw_device.memory;
    sw_unlock();
}

void aiordma_software_limit_held(uint64_t bytes)
{
    sw_lock();
    sw_device.memory.most_held = bytes;
    sw_unlock();
}

int aiordma_software_raise(uint32_t event, void *pointer)
{
    enum aiordma_subject subject = aiordma_subject_of(event);
    int is_port = subject == AIORDMA_OF_PORT || subject == AIORDMA_OF_DEVICE, error = 0;

    if (!pointer && !is_port)
        return EINVAL;
    sw_lock();
    if (is_port)
        sw_raise_port(event);
    else if (subject == AIORDMA_OF_QUEUE_PAIR)
        sw_raise_queue_pair(pointer, event);
    else if (subject == AIORDMA_OF_COMPLETION_QUEUE)
        sw_raise_queue(pointer, event);
    else if (subject == AIORDMA_OF_SHARED_RECEIVE)
        sw_raise_shared_receive(pointer, event);
    else
        error = EINVAL;
    sw_unlock();
    return error;
}
