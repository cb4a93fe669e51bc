/*
 * Asynchronous events, in a list for each context, and the descriptors that programs wait for.
 */
#ifndef AIORDMA_SOFTWARE_EVENTS_H
#define AIORDMA_SOFTWARE_EVENTS_H

#include "progress.h"

enum { SW_EVENT_KINDS = 9 }; /* the kinds of a port, and DEVICE_FATAL; other subjects have fewer */

struct sw_async_event {
    struct sw_async_event *next;
    struct sw_subject *subject;
    struct ibv_async_event event;
    uint32_t times; /* raised and not taken; 0: not in a list */
};

/* The subject of asynchronous events: a part of each object that can have some. */
struct sw_subject {
    uint32_t taken; /* events that the program took */
    struct sw_async_event room[SW_EVENT_KINDS];
};

struct sw_context {
    struct verbs_context verbs; /* ends with the public struct ibv_context */
    struct sw_context *next;
    uint32_t objects; /* domains, queues and channels: they keep the context from being closed */
    struct sw_async_event *first_event, *last_event; /* verbs.context.async_fd signals them */
    struct sw_subject port;
};

static inline struct sw_context *sw_context_of(struct ibv_context *context)
{
    return SW_CONTAINER(context, struct sw_context, verbs.context);
}

void sw_raise(struct ibv_context *context, struct sw_subject *subject,
              const struct ibv_async_event *event);
void sw_raise_port(enum ibv_event_type type); /* to every context */
/*
 * Before an object is freed: drop its events that the program has not taken, and wait until all
 * taken ones are acknowledged. The lock is released meanwhile, so unhook the object first.
 */
void sw_forget_events(struct ibv_context *context, const struct sw_subject *subject,
                      const uint32_t *acknowledged);

/*
 * The descriptors that programs wait for: eventfds, readable from sw_signal to sw_quiet. The first
 * event of a list signals its descriptor, and the last one quiets it. Only these functions read or
 * write it.
 */
int sw_new_signal(void); /* -1 and errno on failure */
void sw_signal(int fd);
void sw_quiet(int fd);
/*
 * Wait until the descriptor is readable, with the lock released: the caller must check everything
 * again. EAGAIN if the program made it non-blocking, EINTR after a signal handler.
 */
int sw_await_signal(int fd);

/*
 * The descriptor of a channel: readable while the channel has an event, and when a socket is that is
 * lent to the program (progress.h). It is an epoll of a signal and of these sockets.
 */
struct sw_notifier {
    int fd, signal;
    int has_events, is_signalled; /* the same, except in sw_await_event */
    int is_looking; /* sw_await_event is serving sockets: the caller takes the first event */
    int blocks;     /* the descriptor did when the program found no event last */
    struct sw_progress progress;
};

int sw_open_notifier(struct sw_notifier *notifier);
void sw_close_notifier(struct sw_notifier *notifier);
/* Note whether the channel has an event. */
void sw_notify(struct sw_notifier *notifier, int has_events);
/*
 * Serve the lent sockets, or wait as sw_await_signal does: the caller must check everything again.
 * Before it returns EAGAIN, it serves until nothing is left, for programs that watch edges.
 */
int sw_await_event(struct sw_notifier *notifier);
/* Lend the sockets if the program waits for the descriptor outside of the device. */
void sw_lend(struct sw_notifier *notifier);

void sw_fill_events(struct aiordma_provider *table);

#endif
