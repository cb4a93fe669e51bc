/*
 * Identifiers of the connection manager, the channels that they are on and the events there: what
 * its rooms share. A listener's requests are events first, and identifiers with them.
 */
#ifndef AIORDMA_SOFTWARE_IDENTIFIER_H
#define AIORDMA_SOFTWARE_IDENTIFIER_H

#include <errno.h>
#include <rdma/rdma_cma.h>

#include "engine.h"
#include "queue_pair.h"

struct sw_event_channel {
    struct rdma_event_channel ibv; /* an eventfd, readable while an event waits */
    uint32_t generation;           /* fork.c's, which sets it */
    struct sw_event *first, *last;
    uint32_t identifiers;
};

struct sw_event {
    struct rdma_cm_event ibv;
    struct sw_event *next;
    struct sw_identifier *counted; /* whose destruction waits for the acknowledgement: of a
                                      CONNECT_REQUEST the listener, else the identifier itself */
    uint8_t private_data[256];
};

enum sw_cm_state {
    SW_CM_IDLE,
    SW_CM_BOUND,
    SW_CM_RESOLVING_ADDRESS,
    SW_CM_ADDRESS_RESOLVED,
    SW_CM_RESOLVING_ROUTE,
    SW_CM_ROUTE_RESOLVED,
    SW_CM_LISTENING,
    SW_CM_CONNECTING,
    SW_CM_REQUESTED, /* came with a CONNECT_REQUEST, not answered yet */
    SW_CM_ACCEPTING, /* answered; the peer has not been heard */
    SW_CM_CONNECTED,
    SW_CM_DISCONNECTED,
};

/*
 * What a port space does for its identifiers: cm_stream.c and cm_listen.c for RDMA_PS_TCP,
 * cm_datagram.c for RDMA_PS_UDP. Most are the calls of rdma_cma.h, with the lock held. The caller
 * has checked the identifier's state, and parameters holds what connect or accept was given.
 */
struct sw_port_space {
    int (*bind)(struct sw_identifier *identifier); /* takes the port in ibv.route's source */
    int (*listen)(struct sw_identifier *identifier, int backlog);
    /* Finds the state SW_CM_CONNECTING, which is taken back where it fails. */
    int (*connect)(struct sw_identifier *identifier);
    int (*accept)(struct sw_identifier *identifier);
    int (*reject)(struct sw_identifier *identifier);
    int (*disconnect)(struct sw_identifier *identifier);
    void (*request_taken)(struct sw_identifier *listener); /* by the program */
    void (*forget)(struct sw_identifier *identifier);      /* it is being destroyed */
    void (*forked)(struct sw_identifier *identifier);      /* a parent's: close its socket */
    struct sw_told told; /* of the queue pair that the identifier has */
};

struct sw_identifier {
    struct rdma_cm_id ibv;
    struct sw_identifier *next, **link; /* in sw_identifiers */
    enum sw_cm_state state;
    uint32_t unacknowledged; /* events that the program has taken and not acknowledged */
    int has_port;            /* took one for itself: nobody else may, but who shares it */
    uint8_t tos, ack_timeout, reuse_address, ipv6_only;
    int has_tos, has_ipv6_only, has_ack_timeout;
    struct sw_timer timer;             /* of the step that is under way: resolved, timed out */
    struct rdma_conn_param parameters; /* of connect or accept; private_data in private_data[] */
    uint8_t private_data[256];
    struct sw_event *last_event; /* there from the start, so that the end is told in any case */
    const struct sw_port_space *space;
    struct sw_connection *connection; /* RDMA_PS_TCP: cm_stream.c's */
    struct sw_service *service;       /* RDMA_PS_UDP: cm_datagram.c's */
    struct sw_membership *groups;     /* joined: group.c's */
};

extern struct sw_identifier *sw_identifiers; /* all there are */

static inline struct sw_identifier *sw_identifier_of(struct rdma_cm_id *id)
{
    return (struct sw_identifier *)id;
}

static inline int sw_is_stream(const struct sw_identifier *identifier)
{
    return identifier->ibv.ps == RDMA_PS_TCP;
}

/* What most functions of rdma_cma.h return: 0, or -1 and errno. */
static inline int sw_result(int error)
{
    if (!error)
        return 0;
    errno = error;
    return -1;
}

/* NULL: out of memory. */
struct sw_identifier *sw_new_identifier(struct rdma_event_channel *channel, void *context,
                                        enum rdma_port_space port_space,
                                        const struct sw_port_space *space);
/* One for somebody who asks to connect, on the listener's channel. NULL: no memory. */
struct sw_identifier *sw_new_requesting(struct sw_identifier *listener);
/* That tells the listener's program of it, not reported yet. NULL: no memory. */
struct sw_event *sw_new_request_event(struct sw_identifier *listener,
                                      struct sw_identifier *requesting);
/* Free one that no program knows. */
void sw_drop_identifier(struct sw_identifier *identifier);
/* It has a queue pair, made by rdma_create_qp or the program's own; or it has it no longer. */
void sw_give_queue_pair(struct sw_identifier *identifier, struct sw_queue_pair *pair);
void sw_lose_queue_pair(struct sw_identifier *identifier);

/* Make an event, not reported yet. NULL: out of memory. */
struct sw_event *sw_new_event(struct sw_identifier *identifier, enum rdma_cm_event_type type,
                              int status);
/* Put it on its identifier's channel. */
void sw_report(struct sw_event *event);
/* The one that ends an attempt or a connection. There is one of each identifier, always. */
struct sw_event *sw_last_event(struct sw_identifier *identifier, enum rdma_cm_event_type type,
                               int status);
void sw_report_last(struct sw_identifier *identifier, enum rdma_cm_event_type type, int status);
/* With private data in the place where the port space has it (copied; at most 255 bytes). */
void sw_set_private_data(struct sw_event *event, const void *data, size_t size);

/* Drop what of its events nobody has taken; requests among them are refused. */
void sw_drop_events(struct sw_identifier *identifier);
/* Drop those that tell of joining a group, which it has left. */
void sw_drop_group_events(struct sw_identifier *identifier, const union ibv_gid *group);

void sw_identifiers_forked(void); /* closes those that the engine did not watch */

void sw_fill_identifier(struct aiordma_provider *table);

#endif
