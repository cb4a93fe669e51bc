/*
 * Receives: the ring of a queue pair, and the shared receive queues.
 */
#include "shared_receive.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "faults.h"
#include "ownership.h"

/* -- rings of receives ------------------------------------------------------------------------ */

int sw_receives_make(struct sw_receives *receives, uint32_t size, uint32_t most_parts)
{
    const size_t slots = ((size_t)size + 1) * sizeof(*receives->ring);

    /* Only used slots cost memory. */
    receives->mapped = slots + (size_t)size * most_parts * sizeof(*receives->parts);
    receives->ring = sw_map(receives->mapped);
    if (!receives->ring)
        return ENOMEM;
    receives->parts = (struct ibv_sge *)(void *)((char *)receives->ring + slots);
    receives->size = size;
    receives->most_parts = most_parts;
    receives->head = receives->count = 0;
    return 0;
}

void sw_receives_free(struct sw_receives *receives)
{
    sw_unmap(receives->ring, receives->mapped);
    memset(receives, 0, sizeof(*receives));
}

/* The slot to fill. One slot more than size exists, too. */
static struct sw_receive *slot_of(struct sw_receives *receives, uint32_t slot)
{
    receives->ring[slot].parts = receives->parts + (size_t)slot * receives->most_parts;
    return &receives->ring[slot];
}

int sw_receives_add(struct sw_receives *receives, const struct ibv_recv_wr *request)
{
    if (request->num_sge < 0 || (uint32_t)request->num_sge > receives->most_parts ||
        (request->num_sge && !request->sg_list))
        return EINVAL;
    if (receives->count == receives->size)
        return ENOMEM;
    uint32_t slot = (receives->head + receives->count) % receives->size;
    struct sw_receive *receive = slot_of(receives, slot);
    receive->wr_id = request->wr_id;
    receive->part_count = request->num_sge;
    for (int i = 0; i < request->num_sge; i++)
        receive->parts[i] = request->sg_list[i];
    receives->count++;
    return 0;
}

static void copy_receive(struct sw_receive *to, const struct sw_receive *from)
{
    to->wr_id = from->wr_id;
    to->part_count = from->part_count;
    for (int i = 0; i < from->part_count; i++)
        to->parts[i] = from->parts[i];
}

int sw_receives_take(struct sw_receives *receives, struct sw_receive *to)
{
    if (!receives->count)
        return 0;
    copy_receive(to, &receives->ring[receives->head]);
    receives->head = (receives->head + 1) % receives->size;
    receives->count--;
    return 1;
}

/* Change the size. The posted receives stay, in order. */
static int resize(struct sw_receives *receives, uint32_t size)
{
    struct sw_receives other;

    if (size < receives->count)
        return EINVAL;
    int error = sw_receives_make(&other, size, receives->most_parts);
    if (error)
        return error;
    while (sw_receives_take(receives, slot_of(&other, other.count)))
        other.count++;
    sw_receives_free(receives);
    *receives = other;
    return 0;
}

/* -- shared receive queues -------------------------------------------------------------------- */

static struct sw_shared_receive *shared_of(struct ibv_srq *queue)
{
    return (struct sw_shared_receive *)queue;
}

void sw_raise_shared_receive(struct ibv_srq *queue, enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.srq = queue, .event_type = type};

    sw_raise(queue->context, &shared_of(queue)->subject, &event);
}

static int check_attributes(const struct ibv_srq_attr *attr)
{
    return attr->max_wr < 1 || attr->max_wr > SW_MOST_WORK_REQUESTS || attr->max_sge > SW_MOST_PARTS
               ? EINVAL
               : 0;
}

static struct ibv_srq *create_srq(struct ibv_pd *domain, struct ibv_srq_init_attr *init)
{
    int error = domain && init ? check_attributes(&init->attr) : EINVAL;

    if (error) {
        errno = error;
        return NULL;
    }
    struct sw_shared_receive *shared = calloc(1, sizeof(*shared));
    if (!shared)
        return NULL;
    uint32_t parts = init->attr.max_sge ? init->attr.max_sge : 1;
    if (sw_receives_make(&shared->receives, init->attr.max_wr, parts)) {
        free(shared);
        errno = ENOMEM;
        return NULL;
    }
    shared->ibv.context = domain->context;
    shared->ibv.srq_context = init->srq_context;
    shared->ibv.pd = domain;
    pthread_mutex_init(&shared->ibv.mutex, NULL);
    pthread_cond_init(&shared->ibv.cond, NULL);
    sw_lock();
    int is_room = sw_device.counts.shared_receives < SW_MOST_SHARED_RECEIVES;
    if (is_room) {
        sw_device.counts.shared_receives++;
        ((struct sw_domain *)domain)->objects++;
    }
    sw_unlock();
    if (!is_room) {
        sw_receives_free(&shared->receives);
        free(shared);
        errno = ENOMEM;
        return NULL;
    }
    init->attr.max_sge = parts;
    return &shared->ibv;
}

static int modify_srq(struct ibv_srq *queue, struct ibv_srq_attr *attr, int mask)
{
    struct sw_shared_receive *shared = shared_of(queue);
    int error = 0;

    if (!queue || !attr || mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
        return EINVAL;
    sw_lock();
    uint32_t size = mask & IBV_SRQ_MAX_WR ? attr->max_wr : shared->receives.size;
    uint32_t limit = mask & IBV_SRQ_LIMIT ? attr->srq_limit : shared->limit;
    if (size < 1 || size > SW_MOST_WORK_REQUESTS || limit > size)
        error = EINVAL;
    if (!error && size != shared->receives.size)
        error = resize(&shared->receives, size);
    if (!error)
        shared->limit = limit;
    sw_unlock();
    return error;
}

static int query_srq(struct ibv_srq *queue, struct ibv_srq_attr *attr)
{
    struct sw_shared_receive *shared = shared_of(queue);

    if (!queue || !attr)
        return EINVAL;
    sw_lock();
    attr->max_wr = shared->receives.size;
    attr->max_sge = shared->receives.most_parts;
    attr->srq_limit = shared->limit;
    sw_unlock();
    return 0;
}

static int destroy_srq(struct ibv_srq *queue)
{
    struct sw_shared_receive *shared = shared_of(queue);

    if (!queue)
        return EINVAL;
    sw_lock();
    if (shared->users) {
        sw_unlock();
        return EBUSY;
    }
    shared->limit = 0;
    sw_forget_events(queue->context, &shared->subject, &queue->events_completed);
    ((struct sw_domain *)queue->pd)->objects--;
    sw_device.counts.shared_receives--;
    sw_unlock();
    pthread_cond_destroy(&queue->cond);
    pthread_mutex_destroy(&queue->mutex);
    sw_receives_free(&shared->receives);
    sw_unguard_all(shared);
    free(shared);
    return 0;
}

int sw_shared_take(struct sw_shared_receive *shared, struct sw_receive *to)
{
    if (!sw_receives_take(&shared->receives, to))
        return 0;
    if (shared->limit && shared->receives.count < shared->limit) {
        shared->limit = 0;
        sw_raise_shared_receive(&shared->ibv, IBV_EVENT_SRQ_LIMIT_REACHED);
    }
    return 1;
}

void sw_shared_await(struct sw_shared_receive *shared, struct sw_waiter *waiter)
{
    struct sw_waiter **link = &shared->waiting;

    while (*link)
        link = &(*link)->next;
    waiter->next = NULL;
    *link = waiter;
}

void sw_shared_leave(struct sw_shared_receive *shared, struct sw_waiter *waiter)
{
    struct sw_waiter **link = &shared->waiting;

    while (*link && *link != waiter)
        link = &(*link)->next;
    if (*link)
        *link = waiter->next;
}

/*
 * Resume messages that were held back for lack of a receive. A resumed waiter takes a receive,
 * leaves the list, or returns to it because no receive is left. So the loop ends.
 */
static void resume(struct sw_shared_receive *shared)
{
    struct sw_waiter *waiter;

    while (shared->receives.count && (waiter = shared->waiting)) {
        shared->waiting = waiter->next;
        waiter->resume(waiter);
    }
}

static int post_srq_recv(struct ibv_srq *queue, struct ibv_recv_wr *request,
                         struct ibv_recv_wr **refused)
{
    struct sw_shared_receive *shared = shared_of(queue);
    struct aiordma_fault fault;
    int error = queue ? 0 : EINVAL;

    if (!error) {
        sw_lock();
        for (; request; request = request->next) {
            if (sw_fault(AIORDMA_FAULT_POST_REFUSED, &fault))
                error = (int)fault.error;
            else
                error = sw_receives_add(&shared->receives, request);
            if (error)
                break;
            if (sw_system->is_simulated)
                sw_take_over_receive(shared, 0, queue->pd, request);
        }
        resume(shared);
        sw_unlock();
    }
    if (error && refused)
        *refused = request;
    return error;
}

void sw_fill_shared_receive(struct aiordma_provider *table, struct ibv_context_ops *operations)
{
    table->create_srq = create_srq;
    table->modify_srq = modify_srq;
    table->query_srq = query_srq;
    table->destroy_srq = destroy_srq;
    operations->post_srq_recv = post_srq_recv;
}
