/*
 * Asynchronous events, a list for each context; and the descriptors that programs wait for.
 */
#ifndef AIORDMA_SOFTWARE_EVENTS_H
#define AIORDMA_SOFTWARE_EVENTS_H

#include "device.h"

enum { SW_EVENT_KINDS = 9 }; /* those of a port, and DEVICE_FATAL; others have fewer */

struct sw_async_event {
    struct sw_async_event *next;
    struct sw_subject *subject;
    struct ibv_async_event event;
    uint32_t times; /* raised and not taken; 0: it is in no list */
};

/* What asynchronous events are about: part of each object that has some. */
struct sw_subject {
    uint32_t taken; /* events */
    struct sw_async_event room[SW_EVENT_KINDS];
};

struct sw_context {
    struct verbs_context verbs; /* ends with the public struct ibv_context */
    struct sw_context *next;
    uint32_t generation;
    uint32_t objects; /* domains, queues and channels made from it: not closed before them */
    struct sw_async_event *first_event, *last_event; /* verbs.context.async_fd tells of them */
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
 * Before an object is freed: drop what of its events nobody has taken, and wait until all that
 * were taken are acknowledged. The lock is given up meanwhile: unhook the object first.
 */
void sw_forget_events(struct ibv_context *context, const struct sw_subject *subject,
                      const uint32_t *acknowledged);

/*
 * The descriptors that programs wait for: eventfds, readable from sw_signal to sw_quiet. They
 * are told only of the first event and the last, and never read by anybody else.
 */
int sw_new_signal(void); /* -1 and errno */
void sw_signal(int fd);
void sw_quiet(int fd);
/*
 * Wait, the lock given up, until it is readable; whatever was seen before may have changed. EAGAIN
 * where the program made it non-blocking, EINTR after a signal handler.
 */
int sw_await_signal(int fd);

void sw_fill_events(struct aiordma_provider *table);

#endif
