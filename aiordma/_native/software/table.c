/*
 * The table of the software device: made once, at the first use.
 */
#include "software.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct aiordma_provider table;
static struct verbs_context operations;
static int failure;

void sw_give_operations(struct verbs_context *to)
{
    *to = operations;
}

static void fill(void)
{
    sw_fill_device(&table, &operations);
    sw_fill_events(&table);
    sw_fill_memory(&table, &operations.context.ops);
    sw_fill_completion(&table, &operations);
    sw_fill_shared_receive(&table, &operations.context.ops);
    sw_fill_queue_pair(&table);
    sw_fill_work(&operations.context.ops);
    sw_fill_datagram(&table);
    sw_fill_cm(&table);
    sw_fill_address(&table);
    sw_fill_group(&table);
    failure = sw_guard(&table);
}

const struct aiordma_provider *aiordma_software(void)
{
    if (pthread_once(&once, fill) || failure)
        return NULL;
    return &table;
}

void aiordma_software_counts(struct aiordma_software_counts *counts)
{
    sw_lock();
    *counts = sw_device.counts;
    sw_unlock();
}
