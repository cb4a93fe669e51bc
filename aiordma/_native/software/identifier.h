/*
 * Identifiers of the connection manager, their channels and events, for all modules of the
 * connection manager. A request to a listener creates an event together with its identifier.
 */
#ifndef AIORDMA_SOFTWARE_IDENTIFIER_H
#define AIORDMA_SOFTWARE_IDENTIFIER_H

#include <errno.h>

#include "engine.h"
#include "queue_pair.h"

struct sw_event_channel {
    struct rdma_event_channel ibv; /* fd: the notifier's */
    struct sw_notifier notifier;
    struct sw_event *first, *last;
    uint32_t identifiers;
};

struct sw_event {
    struct rdma_cm_event ibv;
    struct sw_event *next;
    struct sw_identifier *counted; /* destroying this identifier waits for the acknowledgement: of a
                                      CONNECT_REQUEST the listener, of other events ibv.id */
    uint8_t private_data[256];
};

enum sw_cm_state {
    SW_CM_IDLE,
    SW_CM_BOUND,
    SW_CM_ADDRESS_RESOLVED,
    SW_CM_ROUTE_RESOLVED,
    SW_CM_LISTENING,
    SW_CM_CONNECTING,
    SW_CM_REQUESTED, /* created for a CONNECT_REQUEST, not answered yet */
    SW_CM_ACCEPTING, /* accepted; no frame of the peer has arrived */
    SW_CM_CONNECTED,
    SW_CM_DISCONNECTED,
};

/*
 * The operations of a port space on its identifiers: cm_stream.c and cm_listen.c implement
 * RDMA_PS_TCP over iWARP, cm_roce.c over RoCE, cm_datagram.c implements RDMA_PS_UDP. Most are calls
 * of rdma_cma.h, made with the lock held. The caller has checked the identifier's state, and stored what connect or accept was
 * given in parameters.
 */
struct sw_port_space {
    int (*bind)(struct sw_identifier *identifier); /* takes the source address's port */
    int (*listen)(struct sw_identifier *identifier, int backlog);
    /* The state is SW_CM_CONNECTING. The caller restores the former state after a failure. */
    int (*connect)(struct sw_identifier *identifier);
    int (*accept)(struct sw_identifier *identifier);
    int (*reject)(struct sw_identifier *identifier);
    int (*disconnect)(struct sw_identifier *identifier);
    /* The program takes ESTABLISHED, or connects the queue pair itself. NULL: it cannot. */
    int (*establish)(struct sw_identifier *identifier);
    /* The program knows that an accepted connection is established: its peer has sent. NULL: the
     * port space reports that itself. */
    void (*notified)(struct sw_identifier *identifier);
    /* Fill in the attributes for attr->qp_state, RTR or RTS, as far as the peer has said them.
     * Returns their mask. NULL: it is 0. */
    int (*describe)(struct sw_identifier *identifier, struct ibv_qp_attr *attr);
    void (*request_taken)(struct sw_identifier *listener); /* no more in the channel, or dropped */
    void (*forget)(struct sw_identifier *identifier);      /* the identifier is being destroyed */
    void (*forked)(struct sw_identifier *identifier);      /* in a fork's child: close its socket */
    struct sw_reports reports; /* reports of the identifier's queue pair */
};

struct sw_identifier {
    struct rdma_cm_id ibv;
    struct sw_identifier *next, **link; /* in sw_identifiers */
    enum sw_cm_state state;
    uint32_t unacknowledged; /* events that the program has taken and not acknowledged */
    int has_port;            /* holds its port: others can use it only if both have reuse_address */
    uint8_t tos, ack_timeout, reuse_address, ipv6_only;
    int has_tos, has_ipv6_only, has_ack_timeout;
    struct sw_timer timer;             /* of the step in progress */
    struct rdma_conn_param parameters; /* of connect or accept; private_data in private_data[] */
    uint8_t private_data[256];
    struct sw_event *last_event; /* allocated in advance, so that the end can be reported */
    int is_roce;                 /* of the RoCE device */
    const struct sw_port_space *space;
    struct sw_connection *connection;     /* RDMA_PS_TCP over iWARP (cm_stream.c) */
    struct sw_listener *listener;         /* ... while it listens (cm_listen.c) */
    struct sw_conversation *conversation; /* RDMA_PS_TCP over RoCE (cm_roce.c) */
    struct sw_service *service;           /* RDMA_PS_UDP (cm_datagram.c) */
    struct sw_membership *groups;         /* joined groups (group.c) */
    void *slot;                           /* of exported/: aiordma_software_slot */
};

extern struct sw_identifier *sw_identifiers; /* a list of all identifiers */

static inline struct sw_identifier *sw_identifier_of(struct rdma_cm_id *id)
{
    return (struct sw_identifier *)id;
}

static inline int sw_is_connected(const struct sw_identifier *identifier)
{
    return identifier->ibv.ps == RDMA_PS_TCP;
}

/* The result of most functions of rdma_cma.h: 0, or -1 and errno. */
static inline int sw_result(int error)
{
    if (!error)
        return 0;
    errno = error;
    return -1;
}

/* Create an identifier. NULL: out of memory. */
struct sw_identifier *sw_new_identifier(struct rdma_event_channel *channel, void *context,
                                        enum rdma_port_space port_space, int is_roce,
                                        const struct sw_port_space *space);
/* Create the identifier for a request, on the listener's channel. NULL: out of memory. */
struct sw_identifier *sw_new_requesting(struct sw_identifier *listener);
/* Create its CONNECT_REQUEST, without reporting it. NULL: out of memory. */
struct sw_event *sw_new_request_event(struct sw_identifier *listener,
                                      struct sw_identifier *requesting);
/* Free an identifier that the program has not seen. */
void sw_drop_identifier(struct sw_identifier *identifier);
/* Attach a queue pair, or forget it when it is destroyed. */
void sw_give_queue_pair(struct sw_identifier *identifier, struct sw_queue_pair *pair);
void sw_lose_queue_pair(struct sw_identifier *identifier);

/* Create an event, without reporting it. NULL: out of memory. */
struct sw_event *sw_new_event(struct sw_identifier *identifier, enum rdma_cm_event_type type,
                              int status);
/* Append an event to its identifier's channel. Without a channel, drop it, and refuse the request
 * that it reports. */
void sw_report(struct sw_event *event);
/* The event that ends an attempt or a connection: one for each identifier, always available. */
struct sw_event *sw_last_event(struct sw_identifier *identifier, enum rdma_cm_event_type type,
                               int status);
void sw_report_last(struct sw_identifier *identifier, enum rdma_cm_event_type type, int status);
/* Copy private data, at most 255 bytes, to the event and to the field of its port space. */
void sw_set_private_data(struct sw_event *event, const void *data, size_t size);

/* The progress of the identifier's channel, for its sockets. NULL: it has no channel. */
struct sw_progress *sw_cm_progress(const struct sw_identifier *identifier);
/* Lend them, because the program has just made a call, and can be expected to wait for events. */
void sw_cm_lend(const struct sw_identifier *identifier);

/* Drop the events of joining a group that the identifier has left. */
void sw_drop_group_events(struct sw_identifier *identifier, const union ibv_gid *group);

void sw_identifiers_forked(void); /* closes the sockets that the engine does not watch */
extern const struct sw_state sw_identifiers_state;

void sw_fill_identifier(struct aiordma_provider *table);

#endif
