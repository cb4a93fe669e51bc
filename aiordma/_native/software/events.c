/*
 * Asynchronous events, a list for each context; and the descriptors that programs wait for.
 */
#include "software.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* -- descriptors ------------------------------------------------------------------------------ */

int sw_new_signal(void)
{
    /* Blocking at first, as the kernel's are. */
    return eventfd(0, EFD_CLOEXEC);
}

void sw_signal(int fd)
{
    uint64_t one = 1;

    if (write(fd, &one, sizeof(one)) < 0) {
        /* Only a full counter fails, which is readable all the same. */
    }
}

void sw_quiet(int fd)
{
    uint64_t count;

    /* It is readable: who calls has signalled it and holds the lock. */
    if (read(fd, &count, sizeof(count)) < 0) {
        /* A program that read it itself, which leaves it as it should be. */
    }
}

int sw_await_signal(int fd)
{
    struct pollfd wanted = {.fd = fd, .events = POLLIN};
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return errno;
    if (flags & O_NONBLOCK)
        return EAGAIN;
    sw_unlock();
    int error = poll(&wanted, 1, -1) < 0 ? errno : 0;
    sw_lock();
    return error;
}

/* -- events ------------------------------------------------------------------------------------ */

static void raise_event(struct ibv_context *public, const struct ibv_async_event *what)
{
    struct sw_context *context = sw_context_of(public);
    struct sw_async_event *event = calloc(1, sizeof(*event));

    if (!event)
        return; /* there is nobody to tell, and nothing to tell it with */
    event->event = *what;
    if (context->last_event)
        context->last_event->next = event;
    else
        context->first_event = event;
    context->last_event = event;
    if (context->first_event == event)
        sw_signal(public->async_fd);
}

void sw_raise_queue_pair(struct ibv_qp *queue_pair, enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.qp = queue_pair, .event_type = type};

    raise_event(queue_pair->context, &event);
}

void sw_raise_queue(struct ibv_cq *queue, enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.cq = queue, .event_type = type};

    raise_event(queue->context, &event);
}

void sw_raise_shared_receive(struct ibv_srq *queue, enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.srq = queue, .event_type = type};

    raise_event(queue->context, &event);
}

void sw_raise_port(enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.port_num = 1, .event_type = type};

    for (struct sw_context *context = sw_device.contexts; context; context = context->next)
        raise_event(&context->verbs.context, &event);
}

/* What an event is about: the counters of taken and of acknowledged events. 0: of no object. */
static int counters_of(const struct ibv_async_event *event, uint32_t **taken,
                       uint32_t **acknowledged)
{
    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
        *taken = &((struct sw_queue *)event->element.cq)->async_taken;
        *acknowledged = &event->element.cq->async_events_completed;
        return 1;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        *taken = &((struct sw_shared_receive *)event->element.srq)->async_taken;
        *acknowledged = &event->element.srq->events_completed;
        return 1;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        *taken = &((struct sw_queue_pair *)event->element.qp)->async_taken;
        *acknowledged = &event->element.qp->events_completed;
        return 1;
    default:
        return 0;
    }
}

static void unlink_event(struct sw_context *context, struct sw_async_event **link,
                         struct sw_async_event *before)
{
    struct sw_async_event *event = *link;

    *link = event->next;
    if (context->last_event == event)
        context->last_event = before;
    if (!context->first_event)
        sw_quiet(context->verbs.context.async_fd);
    free(event);
}

static int get_async_event(struct ibv_context *public, struct ibv_async_event *event)
{
    uint32_t *taken, *acknowledged;
    int error = 0;

    if (!public || !event) {
        errno = EINVAL;
        return -1;
    }
    struct sw_context *context = sw_context_of(public);
    sw_lock();
    while (!error && !context->first_event)
        error = sw_await_signal(public->async_fd);
    if (!error) {
        *event = context->first_event->event;
        if (counters_of(event, &taken, &acknowledged))
            ++*taken;
        unlink_event(context, &context->first_event, NULL);
    }
    sw_unlock();
    if (error)
        errno = error;
    return error ? -1 : 0;
}

static void ack_async_event(struct ibv_async_event *event)
{
    uint32_t *taken, *acknowledged;

    if (!event || !counters_of(event, &taken, &acknowledged))
        return;
    sw_lock();
    ++*acknowledged;
    pthread_cond_broadcast(&sw_device.changed);
    sw_unlock();
}

void sw_forget_events(struct ibv_context *public, void *element, const uint32_t *acknowledged,
                      const uint32_t *taken)
{
    struct sw_context *context = sw_context_of(public);
    struct sw_async_event **link = &context->first_event, *before = NULL;
    uint32_t *theirs, *unused;

    while (*link) {
        struct sw_async_event *event = *link;
        if (counters_of(&event->event, &theirs, &unused) && event->event.element.qp == element) {
            unlink_event(context, link, before);
        } else {
            before = event;
            link = &event->next;
        }
    }
    while ((int32_t)(*taken - *acknowledged) > 0)
        sw_wait();
}

void sw_fill_events(struct aiordma_provider *table)
{
    table->get_async_event = get_async_event;
    table->ack_async_event = ack_async_event;
}
