/*
 * Asynchronous events, in a list for each context, and the descriptors that programs wait for.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* preadv2 */
#endif
#include "events.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../event_subjects.h"

/* -- descriptors ------------------------------------------------------------------------------- */

int sw_new_signal(void)
{
    /* Blocking at first, as the kernel's descriptors are. */
    return sw_system->eventfd(0, EFD_CLOEXEC);
}

void sw_signal(int fd)
{
    sw_system->ring(fd);
}

void sw_quiet(int fd)
{
    sw_system->quiet(fd);
}

/* 0 if the descriptor blocks, EAGAIN if it does not. */
static int check_blocking(int fd)
{
    int blocks = sw_system->blocks(fd);

    if (blocks < 0)
        return errno;
    return blocks ? 0 : EAGAIN;
}

int sw_await_signal(int fd)
{
    struct pollfd wanted = {.fd = fd, .events = POLLIN};
    int error = check_blocking(fd);

    if (error)
        return error;
    sw_unlock();
    error = sw_system->poll(&wanted, 1, -1) < 0 ? errno : 0;
    sw_lock();
    return error;
}

/* -- descriptors of channels ------------------------------------------------------------------- */

int sw_open_notifier(struct sw_notifier *notifier)
{
    struct epoll_event event = {.events = EPOLLIN};
    int error = 0;

    notifier->signal = sw_new_signal();
    if (notifier->signal < 0)
        return errno;
    notifier->fd = sw_system->epoll_create1(EPOLL_CLOEXEC);
    if (notifier->fd < 0)
        error = errno;
    else if (sw_system->epoll_ctl(notifier->fd, EPOLL_CTL_ADD, notifier->signal, &event))
        error = errno;
    if (error) {
        if (notifier->fd >= 0)
            sw_system->close(notifier->fd);
        sw_system->close(notifier->signal);
        return error;
    }
    sw_progress_begin(&notifier->progress, notifier->fd);
    return 0;
}

void sw_close_notifier(struct sw_notifier *notifier)
{
    sw_progress_end(&notifier->progress);
    sw_system->close(notifier->fd);
    sw_system->close(notifier->signal);
}

void sw_notify(struct sw_notifier *notifier, int has_events)
{
    notifier->has_events = has_events;
    if (notifier->is_looking || has_events == notifier->is_signalled)
        return;
    notifier->is_signalled = has_events;
    if (has_events)
        sw_signal(notifier->signal);
    else
        sw_quiet(notifier->signal);
}

/* Serve the lent sockets. The caller takes the first event, which needs no signal. */
static int serve(struct sw_notifier *notifier, struct sw_wait *wait)
{
    notifier->is_looking = 1;
    int served = sw_serve_waited(wait, &notifier->has_events);
    notifier->is_looking = 0;
    return served;
}

static int wait_and_serve(struct sw_notifier *notifier, struct sw_wait *wait)
{
    int error = check_blocking(notifier->fd);

    notifier->blocks = !error;
    while (!error && !notifier->has_events && !wait->is_ready) {
        error = sw_wait_for(wait);
        serve(notifier, wait);
    }
    return error;
}

int sw_await_event(struct sw_notifier *notifier)
{
    struct sw_wait wait;
    int error = 0;

    sw_begin_wait(&wait, &notifier->progress, notifier->fd, notifier->blocks);
    int served = serve(notifier, &wait);
    if (!notifier->has_events && (!served || notifier->blocks))
        error = wait_and_serve(notifier, &wait);
    sw_end_wait(&wait);
    return notifier->has_events ? 0 : error;
}

void sw_lend(struct sw_notifier *notifier)
{
    if (notifier->progress.is_lent)
        notifier->progress.vain = 0;
    else if (notifier->progress.members && check_blocking(notifier->fd) == EAGAIN)
        sw_progress_lend(&notifier->progress);
}

/* -- events ------------------------------------------------------------------------------------ */

/*
 * The subject has an entry for each kind of event, so that no event is lost for lack of memory. An
 * event of a kind that is already raised and not taken is counted.
 */
void sw_raise(struct ibv_context *public, struct sw_subject *subject,
              const struct ibv_async_event *what)
{
    struct sw_context *context = sw_context_of(public);
    struct sw_async_event *event = subject->room, *end = event + SW_EVENT_KINDS;

    while (event < end && event->times && event->event.event_type != what->event_type)
        event++;
    if (event == end)
        return; /* more kinds than there are entries */
    if (event->times++)
        return;
    event->event = *what;
    event->subject = subject;
    event->next = NULL;
    if (context->last_event)
        context->last_event->next = event;
    else
        context->first_event = event;
    context->last_event = event;
    if (context->first_event == event)
        sw_signal(public->async_fd);
}

void sw_raise_port(enum ibv_event_type type)
{
    struct ibv_async_event event = {.element.port_num = 1, .event_type = type};

    for (struct sw_context *context = sw_device.own.contexts; context; context = context->next)
        sw_raise(&context->verbs.context, &context->port, &event);
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
    event->times = 0;
}

static int get_async_event(struct ibv_context *public, struct ibv_async_event *event)
{
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
        struct sw_async_event *first = context->first_event;
        *event = first->event;
        first->subject->taken++;
        if (!--first->times)
            unlink_event(context, &context->first_event, NULL);
    }
    sw_unlock();
    if (error)
        errno = error;
    return error ? -1 : 0;
}

static void ack_async_event(struct ibv_async_event *event)
{
    uint32_t *acknowledged = NULL;

    if (!event)
        return;
    switch (aiordma_subject_of(event->event_type)) {
    case AIORDMA_OF_QUEUE_PAIR:
        acknowledged = &event->element.qp->events_completed;
        break;
    case AIORDMA_OF_COMPLETION_QUEUE:
        acknowledged = &event->element.cq->async_events_completed;
        break;
    case AIORDMA_OF_SHARED_RECEIVE:
        acknowledged = &event->element.srq->events_completed;
        break;
    default:
        return;
    }
    sw_lock();
    ++*acknowledged;
    sw_changed();
    sw_unlock();
}

void sw_forget_events(struct ibv_context *public, const struct sw_subject *subject,
                      const uint32_t *acknowledged)
{
    struct sw_context *context = sw_context_of(public);
    struct sw_async_event **link = &context->first_event, *before = NULL;

    while (*link) {
        if ((*link)->subject == subject) {
            unlink_event(context, link, before);
        } else {
            before = *link;
            link = &before->next;
        }
    }
    while ((int32_t)(subject->taken - *acknowledged) > 0)
        sw_wait();
}

void sw_fill_events(struct aiordma_provider *table)
{
    table->get_async_event = get_async_event;
    table->ack_async_event = ack_async_event;
}
