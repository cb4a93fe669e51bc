/*
 * Completion channels and queues: a ring of completions, and an event for an armed queue.
 */
#include "completion.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "blocks.h"
#include "faults.h"

enum { POLLS_BEFORE_YIELD = 64 };

static struct sw_queue *queue_of(struct ibv_cq *queue)
{
    return (struct sw_queue *)queue;
}

static struct sw_channel *of_channel(struct ibv_comp_channel *channel)
{
    return (struct sw_channel *)channel;
}

static struct sw_channel *channel_of(const struct sw_queue *queue)
{
    return of_channel(queue->ibv.channel);
}

/* -- channels and their events --------------------------------------------------------------- */

static struct ibv_comp_channel *create_comp_channel(struct ibv_context *context)
{
    struct sw_channel *channel;

    if (!context) {
        errno = EINVAL;
        return NULL;
    }
    channel = calloc(1, sizeof(*channel));
    if (!channel)
        return NULL;
    channel->ibv.context = context;
    int error = sw_open_notifier(&channel->notifier);
    if (error) {
        free(channel);
        errno = error;
        return NULL;
    }
    channel->ibv.fd = channel->notifier.fd;
    sw_lock();
    sw_context_of(context)->objects++;
    sw_device.counts.channels++;
    sw_unlock();
    return &channel->ibv;
}

static int destroy_comp_channel(struct ibv_comp_channel *channel)
{
    if (!channel)
        return EINVAL;
    sw_lock();
    if (channel->refcnt) {
        sw_unlock();
        return EBUSY;
    }
    sw_context_of(channel->context)->objects--;
    sw_device.counts.channels--;
    sw_close_notifier(&of_channel(channel)->notifier);
    sw_unlock();
    free(channel);
    return 0;
}

/* Add an event. A queue that has several events is in the channel's list once. */
static void add_event(struct sw_queue *queue)
{
    struct sw_channel *channel = channel_of(queue);

    if (queue->waiting++)
        return;
    queue->next = NULL;
    if (channel->last)
        channel->last->next = queue;
    else
        channel->first = queue;
    channel->last = queue;
    sw_notify(&channel->notifier, 1);
}

static void unlist(struct sw_channel *channel, struct sw_queue *queue)
{
    struct sw_queue **link = &channel->first, *before = NULL;

    while (*link && *link != queue) {
        before = *link;
        link = &(*link)->next;
    }
    if (!*link)
        return;
    *link = queue->next;
    if (channel->last == queue)
        channel->last = before;
    queue->next = NULL;
    sw_notify(&channel->notifier, channel->first != NULL);
}

/*
 * A thread that is going to sleep for an event gets one if an armed queue has completions, as with
 * adapters whose arming names the last completion that the program has seen: perftest takes 16 for
 * an event, and relies on that for the rest. Another program polls after arming, and takes them.
 */
static int has_left_over(const struct sw_channel *channel)
{
    struct sw_queue *queue = channel->queues;

    while (queue && (queue->armed != SW_ARMED || !queue->count))
        queue = queue->sibling;
    if (!queue || sw_system->blocks(channel->notifier.fd) < 1)
        return 0;
    queue->armed = SW_UNARMED;
    add_event(queue);
    return 1;
}

static int get_cq_event(struct ibv_comp_channel *public, struct ibv_cq **queue, void **cq_context)
{
    struct sw_channel *channel = of_channel(public);
    int error = 0;

    if (!channel || !queue || !cq_context) {
        errno = EINVAL;
        return -1;
    }
    sw_lock();
    while (!error && !channel->first && !has_left_over(channel))
        error = sw_await_event(&channel->notifier);
    if (!error) {
        struct sw_queue *first = channel->first;
        first->taken++;
        if (!--first->waiting)
            unlist(channel, first);
        else
            sw_notify(&channel->notifier, 1);
        sw_progress_took_event(&channel->notifier.progress);
        *queue = ibv_cq_ex_to_cq(&first->ibv);
        *cq_context = first->ibv.cq_context;
    }
    sw_unlock();
    if (error)
        errno = error;
    return error ? -1 : 0;
}

static void ack_cq_events(struct ibv_cq *queue, unsigned int count)
{
    if (!queue || !count)
        return;
    sw_lock();
    queue->comp_events_completed += count;
    sw_changed();
    sw_unlock();
}

/* -- completions ----------------------------------------------------------------------------- */

/* The number of completions is also read without the lock, by poll_cq. */
static void set_count(struct sw_queue *queue, uint32_t count)
{
    __atomic_store_n(&queue->count, count, __ATOMIC_RELEASE);
}

static int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
    if (!context || !values)
        return EINVAL;
    values->comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
    values->raw_clock.tv_sec = 0;
    values->raw_clock.tv_nsec = (int64_t)sw_system->now();
    return 0;
}

/* What polls of this queue serve: its own sockets, or else those that its sends are answered on. */
static struct sw_progress *served_by(const struct sw_queue *queue)
{
    return queue->receives && !sw_progress_has_members(queue->progress) ? queue->receives->progress
                                                                        : queue->progress;
}

/*
 * A poll found nothing. Programs that poll in place of arming do it without pause, and where all
 * processors are busy, what they wait for needs this one: the engine, which such a program relieves,
 * or a peer's process.
 */
static void found_nothing(struct sw_queue *queue)
{
    uint32_t polls = __atomic_load_n(&queue->polls_in_vain, __ATOMIC_RELAXED) + 1;

    __atomic_store_n(&queue->polls_in_vain, polls, __ATOMIC_RELAXED);
    if (!(polls % POLLS_BEFORE_YIELD) && !sw_system->is_simulated && !sw_relieve())
        sched_yield();
}

static void begin_anew(struct sw_queue *queue)
{
    __atomic_store_n(&queue->polls_in_vain, 0, __ATOMIC_RELAXED);
}

/* Take the completion that the read functions of the extended interface describe. */
static int take_current(struct ibv_cq_ex *public)
{
    struct sw_queue *queue = (struct sw_queue *)public;
    int error = ENOENT;

    sw_lock();
    if (!queue->count)
        sw_progress_look(served_by(queue), 1);
    if (queue->count) {
        queue->current = queue->ring[queue->head];
        if (queue->times)
            queue->current_time = queue->times[queue->head];
        queue->head = (queue->head + 1) % queue->size;
        set_count(queue, queue->count - 1);
        begin_anew(queue);
        public->status = queue->current.status;
        public->wr_id = queue->current.wr_id;
        sw_progress_took_completions(served_by(queue));
        error = 0;
    }
    sw_unlock();
    return error;
}

static int start_poll(struct ibv_cq_ex *queue, struct ibv_poll_cq_attr *attr)
{
    if (!queue || !attr || attr->comp_mask)
        return EINVAL;
    int error = take_current(queue);
    if (error)
        found_nothing((struct sw_queue *)queue);
    return error;
}

static void end_poll(struct ibv_cq_ex *queue)
{
    (void)queue; /* nothing is locked between start_poll and end_poll */
}

#define READS(type, name, field)                          \
    static type read_##name(struct ibv_cq_ex *queue)      \
    {                                                     \
        return ((struct sw_queue *)queue)->current.field; \
    }
READS(enum ibv_wc_opcode, opcode, opcode)
READS(uint32_t, vendor_err, vendor_err)
READS(uint32_t, byte_len, byte_len)
READS(uint32_t, imm_data, imm_data)
READS(uint32_t, qp_num, qp_num)
READS(uint32_t, src_qp, src_qp)
READS(unsigned int, wc_flags, wc_flags)
READS(uint32_t, slid, slid)
READS(uint8_t, sl, sl)
READS(uint8_t, dlid_path_bits, dlid_path_bits)
#undef READS

static uint64_t read_completion_ts(struct ibv_cq_ex *queue)
{
    return ((struct sw_queue *)queue)->current_time;
}

static void give_readers(struct ibv_cq_ex *queue)
{
    queue->start_poll = start_poll;
    queue->next_poll = take_current;
    queue->end_poll = end_poll;
    queue->read_opcode = read_opcode;
    queue->read_vendor_err = read_vendor_err;
    queue->read_byte_len = read_byte_len;
    queue->read_imm_data = read_imm_data;
    queue->read_qp_num = read_qp_num;
    queue->read_src_qp = read_src_qp;
    queue->read_wc_flags = read_wc_flags;
    queue->read_slid = read_slid;
    queue->read_sl = read_sl;
    queue->read_dlid_path_bits = read_dlid_path_bits;
    queue->read_completion_ts = read_completion_ts;
}

/*
 * Whether a poll finds nothing, and does not serve sockets either. A program that polls without
 * pause must not take the lock for that: the engine would sleep and wake for each of its turns.
 */
static int is_idle(const struct sw_queue *queue)
{
    return !__atomic_load_n(&queue->count, __ATOMIC_ACQUIRE) &&
           !__atomic_load_n(&queue->receives, __ATOMIC_RELAXED) &&
           (!sw_progress_has_members(queue->progress) ||
            !sw_progress_is_looker(queue->progress, queue));
}

static int poll_cq(struct ibv_cq *public, int most, struct ibv_wc *completions)
{
    struct sw_queue *queue = queue_of(public);
    uint32_t count, until_end;

    if (!queue || most < 0 || (most && !completions))
        return -EINVAL;
    if (is_idle(queue)) {
        found_nothing(queue);
        return 0;
    }
    sw_lock();
    if (!queue->count)
        sw_progress_look(served_by(queue), 1);
    count = queue->count < (uint32_t)most ? queue->count : (uint32_t)most;
    until_end = queue->size - queue->head;
    if (!count) {
        sw_unlock();
        found_nothing(queue);
        return 0;
    }
    if (count <= until_end) {
        memcpy(completions, queue->ring + queue->head, count * sizeof(*completions));
    } else {
        memcpy(completions, queue->ring + queue->head, until_end * sizeof(*completions));
        memcpy(completions + until_end, queue->ring, (count - until_end) * sizeof(*completions));
    }
    set_count(queue, queue->count - count);
    begin_anew(queue);
    /* An empty ring begins anew: a large one would else go through all of its memory. */
    queue->head = queue->count ? (queue->head + count) % queue->size : 0;
    sw_progress_took_completions(served_by(queue));
    sw_unlock();
    return (int)count;
}

static int req_notify_cq(struct ibv_cq *public, int solicited_only)
{
    struct sw_queue *queue = queue_of(public);
    struct aiordma_fault fault;

    if (!queue)
        return EINVAL;
    begin_anew(queue); /* the program is going to sleep */
    sw_lock();
    /* Arming for all completions includes arming for solicited ones. */
    if (!solicited_only)
        queue->armed = SW_ARMED;
    else if (queue->armed == SW_UNARMED)
        queue->armed = SW_ARMED_SOLICITED;
    /* At most one for each real event, or a program that arms at once would loop for ever. */
    if (queue->was_woken && public->channel && sw_fault(AIORDMA_FAULT_SPURIOUS_EVENT, &fault)) {
        queue->was_woken = 0;
        queue->armed = SW_UNARMED;
        add_event(queue);
    }
    sw_unlock();
    return 0;
}

static void tell_late(struct sw_timer *timer)
{
    add_event(SW_CONTAINER(timer, struct sw_queue, late_event));
}

static void wake(struct sw_queue *queue, int matters)
{
    struct aiordma_fault fault;

    if (queue->armed != SW_ARMED && !(queue->armed == SW_ARMED_SOLICITED && matters))
        return;
    queue->armed = SW_UNARMED;
    queue->was_woken = 1;
    if (!queue->ibv.channel)
        return;
    if (sw_fault(AIORDMA_FAULT_EVENT_DELAYED, &fault)) {
        queue->late_event.expired = tell_late;
        if (queue->late_event.deadline || !sw_call_later(&queue->late_event, fault.milliseconds))
            return;
    }
    add_event(queue);
}

void sw_raise_queue(struct ibv_cq *public, enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.cq = public, .event_type = type};

    sw_raise(public->context, &queue_of(public)->subject, &event);
}

static void deliver(struct sw_queue *queue, const struct ibv_wc *completion, int solicited)
{
    if (queue->is_overrun)
        return;
    if (queue->count == queue->size) {
        if (!queue->ignores_overrun) {
            queue->is_overrun = 1;
            sw_raise_queue(ibv_cq_ex_to_cq(&queue->ibv), IBV_EVENT_CQ_ERR);
            wake(queue, 1); /* the program takes the completions before the lost one */
            return;
        }
        /* Write it in any case, and lose the oldest completion: see man ibv_create_cq_ex. */
        queue->head = (queue->head + 1) % queue->size;
        set_count(queue, queue->count - 1);
    }
    uint32_t place = (queue->head + queue->count) % queue->size;
    queue->ring[place] = *completion;
    if (queue->times)
        queue->times[place] = sw_system->now();
    set_count(queue, queue->count + 1);
    sw_device.completions++;
    wake(queue, solicited || completion->status != IBV_WC_SUCCESS);
}

/* -- a fault: delayed completions, in order for each queue pair ------------------------------ */

struct late_completion {
    struct late_completion *next;
    struct ibv_wc completion;
    int solicited;
};

/* The delayed completions of one queue pair. */
struct sw_late {
    struct sw_late *next;
    struct sw_queue *queue;
    struct sw_timer timer;
    struct late_completion *first, **end;
};

static void unlink_late(struct sw_late *late)
{
    struct sw_late **link = &late->queue->late;

    while (*link != late)
        link = &(*link)->next;
    *link = late->next;
}

/* Deliver the completions. Drop them if their queue pair or their queue is destroyed. */
static void end_late(struct sw_late *late, int delivers)
{
    unlink_late(late);
    sw_cancel(&late->timer);
    for (struct late_completion *one = late->first, *next; one; one = next) {
        next = one->next;
        if (delivers)
            deliver(late->queue, &one->completion, one->solicited);
        free(one);
    }
    free(late);
}

static void late_is_due(struct sw_timer *timer)
{
    end_late(SW_CONTAINER(timer, struct sw_late, timer), 1);
}

static struct sw_late *find_late(const struct sw_queue *queue, uint32_t qp_num)
{
    struct sw_late *late = queue->late;

    while (late && late->first->completion.qp_num != qp_num)
        late = late->next;
    return late;
}

/*
 * Keep a completion for later if a fault requires it. Returns 0 if the caller has to deliver it
 * now, also without memory or a timer. Earlier ones have then been delivered.
 */
static int keep(struct sw_queue *queue, const struct ibv_wc *completion, int solicited)
{
    struct sw_late *late = find_late(queue, completion->qp_num);
    struct aiordma_fault fault;

    if (!late && !sw_fault(AIORDMA_FAULT_COMPLETION_DELAYED, &fault))
        return 0;
    struct late_completion *one = malloc(sizeof(*one));
    if (!one) {
        if (late)
            end_late(late, 1);
        return 0;
    }
    *one = (struct late_completion){.completion = *completion, .solicited = solicited};
    if (late) {
        *late->end = one;
        late->end = &one->next;
        return 1;
    }
    late = calloc(1, sizeof(*late));
    if (late) {
        late->timer.expired = late_is_due;
        if (sw_call_later(&late->timer, fault.milliseconds)) {
            free(late);
            late = NULL;
        }
    }
    if (!late) {
        free(one);
        return 0;
    }
    late->queue = queue;
    late->first = one;
    late->end = &one->next;
    late->next = queue->late;
    queue->late = late;
    return 1;
}

void sw_complete(struct ibv_cq *public, const struct ibv_wc *completion, int solicited)
{
    struct sw_queue *queue = queue_of(public);

    if ((queue->late || sw_has_faults) && keep(queue, completion, solicited))
        return;
    deliver(queue, completion, solicited);
}

void sw_forget_completions(struct ibv_cq *public, uint32_t qp_num)
{
    struct sw_queue *queue = queue_of(public);
    struct sw_late *late = find_late(queue, qp_num);
    uint32_t kept = 0;

    if (late)
        end_late(late, 0);
    for (uint32_t i = 0; i < queue->count; i++) {
        uint32_t from = (queue->head + i) % queue->size, to = (queue->head + kept) % queue->size;
        if (queue->ring[from].qp_num == qp_num)
            continue;
        if (kept != i)
            queue->ring[to] = queue->ring[from];
        if (kept != i && queue->times)
            queue->times[to] = queue->times[from];
        kept++;
    }
    set_count(queue, kept);
}

struct sw_progress *sw_progress_of(const struct ibv_qp *queue_pair)
{
    const struct sw_queue *sends = queue_of(queue_pair->send_cq);
    const struct sw_queue *receives = queue_of(queue_pair->recv_cq);
    const int are_polled = !sends->ibv.channel && !receives->ibv.channel;

    return sends->progress == receives->progress || are_polled ? receives->progress : NULL;
}

void sw_serve_by_sends(const struct ibv_qp *queue_pair, int is_made)
{
    struct sw_queue *sends = queue_of(queue_pair->send_cq);
    struct sw_queue *receives = queue_of(queue_pair->recv_cq);
    struct sw_queue *served = is_made ? receives : NULL;

    if (sends == receives || sends->ibv.channel || receives->ibv.channel)
        return;
    /* The last queue pair's. It is forgotten with that, which keeps the queue of the receives. */
    if (is_made || sends->receives == receives)
        __atomic_store_n(&sends->receives, served, __ATOMIC_RELAXED);
}

/* -- queues ---------------------------------------------------------------------------------- */

/* Only used entries cost memory. Destroying the queue gives all of it back to the system. */
static struct ibv_wc *new_ring(uint32_t entries)
{
    return sw_map(entries * sizeof(struct ibv_wc));
}

static void free_ring(struct ibv_wc *ring, uint64_t *times, uint32_t entries)
{
    if (times)
        sw_unmap(times, entries * sizeof(*times));
    if (ring)
        sw_unmap(ring, entries * sizeof(*ring));
}

/* The ring and, for a queue with timestamps, their array. 0, or ENOMEM. */
static int make_ring(uint32_t entries, int has_times, struct ibv_wc **ring, uint64_t **times)
{
    *times = NULL;
    *ring = new_ring(entries);
    if (*ring && has_times)
        *times = sw_map(entries * sizeof(**times));
    if (*ring && (*times || !has_times))
        return 0;
    free_ring(*ring, NULL, entries);
    return ENOMEM;
}

static struct ibv_cq_ex *new_queue(struct ibv_context *context, uint32_t entries, void *cq_context,
                                   struct ibv_comp_channel *channel, int ignores_overrun,
                                   int has_times)
{
    struct sw_queue *queue = calloc(1, sizeof(*queue));

    if (!queue)
        return NULL;
    if (make_ring(entries, has_times, &queue->ring, &queue->times)) {
        free(queue);
        errno = ENOMEM;
        return NULL;
    }
    queue->size = entries;
    queue->ignores_overrun = ignores_overrun;
    queue->ibv.context = context;
    queue->ibv.channel = channel;
    queue->ibv.cq_context = cq_context;
    queue->ibv.cqe = (int)entries;
    sw_progress_begin(&queue->own, -1);
    queue->progress = channel ? &of_channel(channel)->notifier.progress : &queue->own;
    pthread_mutex_init(&queue->ibv.mutex, NULL);
    pthread_cond_init(&queue->ibv.cond, NULL);
    give_readers(&queue->ibv);
    sw_lock();
    int is_room = sw_device.counts.queues < SW_MOST_QUEUES;
    if (is_room) {
        sw_device.counts.queues++;
        sw_context_of(context)->objects++;
        if (channel) {
            channel->refcnt++;
            queue->sibling = of_channel(channel)->queues;
            of_channel(channel)->queues = queue;
        }
    }
    sw_unlock();
    if (!is_room) {
        free_ring(queue->ring, queue->times, entries);
        free(queue);
        errno = ENOMEM;
        return NULL;
    }
    return &queue->ibv;
}

static int check_queue(const struct ibv_context *context, int64_t entries,
                       const struct ibv_comp_channel *channel, int64_t vector)
{
    if (!context || entries < 1 || entries > SW_MOST_COMPLETIONS)
        return EINVAL;
    if (vector < 0 || vector >= SW_COMPLETION_VECTORS)
        return EINVAL;
    return channel && channel->context != context ? EINVAL : 0;
}

static struct ibv_cq *create_cq(struct ibv_context *context, int entries, void *cq_context,
                                struct ibv_comp_channel *channel, int vector)
{
    int error = check_queue(context, entries, channel, vector);

    if (error) {
        errno = error;
        return NULL;
    }
    return (struct ibv_cq *)new_queue(context, (uint32_t)entries, cq_context, channel, 0, 0);
}

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    int error = EINVAL;
    uint32_t flags = 0;

    if (attr)
        error = check_queue(context, attr->cqe, attr->channel, attr->comp_vector);
    if (!error) {
        if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS)
            flags = attr->flags;
        /* SINGLE_THREADED has no effect: the engine adds completions, which takes the lock. */
        if (flags & ~(uint32_t)(IBV_CREATE_CQ_ATTR_SINGLE_THREADED |
                                IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) ||
            attr->comp_mask & ~(uint32_t)IBV_CQ_INIT_ATTR_MASK_FLAGS ||
            attr->wc_flags &
                ~(uint64_t)(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP))
            error = EOPNOTSUPP;
    }
    if (error) {
        errno = error;
        return NULL;
    }
    return new_queue(context, attr->cqe, attr->cq_context, attr->channel,
                     (flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN) != 0,
                     (attr->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) != 0);
}

static int resize_cq(struct ibv_cq *public, int entries)
{
    struct sw_queue *queue = queue_of(public);

    if (!queue || entries < 1 || entries > SW_MOST_COMPLETIONS)
        return EINVAL;
    struct ibv_wc *ring, *old;
    uint64_t *times, *old_times;
    if (make_ring((uint32_t)entries, queue->times != NULL, &ring, &times))
        return ENOMEM;
    old = ring;
    old_times = times;
    int error = 0;
    uint32_t old_size = (uint32_t)entries;
    sw_lock();
    if ((uint32_t)entries < queue->count) {
        error = EINVAL;
    } else {
        for (uint32_t i = 0; i < queue->count; i++) {
            ring[i] = queue->ring[(queue->head + i) % queue->size];
            if (times)
                times[i] = queue->times[(queue->head + i) % queue->size];
        }
        old = queue->ring;
        old_times = queue->times;
        old_size = queue->size;
        queue->ring = ring;
        queue->times = times;
        queue->head = 0;
        queue->size = (uint32_t)entries;
        queue->ibv.cqe = entries;
    }
    sw_unlock();
    free_ring(old, old_times, old_size);
    return error;
}

/* No effect: each event is raised at once, which any moderation permits. */
static int modify_cq(struct ibv_cq *queue, struct ibv_modify_cq_attr *attr)
{
    if (!queue || !attr || attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE)
        return EINVAL;
    return 0;
}

static int destroy_cq(struct ibv_cq *public)
{
    struct sw_queue *queue = queue_of(public);

    if (!queue)
        return EINVAL;
    sw_lock();
    if (queue->users) {
        sw_unlock();
        return EBUSY;
    }
    if (queue->waiting)
        unlist(channel_of(queue), queue);
    queue->waiting = 0;
    queue->armed = SW_UNARMED;
    sw_cancel(&queue->late_event);
    while (queue->late)
        end_late(queue->late, 0);
    /* Do not wait if the program acknowledged more events than it took. */
    while ((int32_t)(queue->taken - public->comp_events_completed) > 0)
        sw_wait();
    sw_forget_events(public->context, &queue->subject, &public->async_events_completed);
    sw_progress_end(&queue->own);
    if (public->channel) {
        public->channel->refcnt--;
        struct sw_queue **link = &channel_of(queue)->queues;
        while (*link != queue)
            link = &(*link)->sibling;
        *link = queue->sibling;
    }
    sw_context_of(public->context)->objects--;
    sw_device.counts.queues--;
    sw_unlock();
    pthread_cond_destroy(&public->cond);
    pthread_mutex_destroy(&public->mutex);
    free_ring(queue->ring, queue->times, queue->size);
    free(queue);
    return 0;
}

void sw_fill_completion(struct aiordma_provider *table, struct verbs_context *operations)
{
    table->create_comp_channel = create_comp_channel;
    table->destroy_comp_channel = destroy_comp_channel;
    table->create_cq = create_cq;
    table->resize_cq = resize_cq;
    table->destroy_cq = destroy_cq;
    table->get_cq_event = get_cq_event;
    table->ack_cq_events = ack_cq_events;
    operations->create_cq_ex = create_cq_ex;
    operations->modify_cq = modify_cq;
    operations->query_rt_values = query_rt_values;
    operations->context.ops.poll_cq = poll_cq;
    operations->context.ops.req_notify_cq = req_notify_cq;
}
