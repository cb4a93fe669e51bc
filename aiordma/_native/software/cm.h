/*
 * The connection manager's own: what cm.c (identifiers), cm_events.c (channels, events),
 * cm_addresses.c, cm_stream.c (TCP and the MPA handshake), cm_datagram.c (the UDP port space) and
 * group.c (multicast) share.
 */
#ifndef AIORDMA_SOFTWARE_CM_H
#define AIORDMA_SOFTWARE_CM_H

#include "software.h"

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

struct sw_identifier {
    struct rdma_cm_id ibv;
    struct sw_identifier *next, **link; /* in sw_device.identifiers */
    enum sw_cm_state state;
    uint32_t unacknowledged; /* events that the program has taken and not acknowledged */
    int has_port;            /* took one for itself: nobody else may, but who shares it */
    int made_queue_pair;     /* by rdma_create_qp: ibv.qp is ours to move and to destroy */
    uint8_t tos, ack_timeout, reuse_address, ipv6_only;
    int has_tos, has_ipv6_only, has_ack_timeout;
    struct sw_timer timer;  /* of the step that is under way: resolved, timed out */
    struct rdma_conn_param parameters; /* of connect or accept; private_data in private_data[] */
    uint8_t private_data[256];
    struct sw_connection *connection; /* RDMA_PS_TCP: cm_stream.c's */
    struct sw_service *service;       /* RDMA_PS_UDP: cm_datagram.c's */
    struct sw_membership *groups;     /* joined: group.c's */
};

static inline struct sw_identifier *sw_identifier_of(struct rdma_cm_id *id)
{
    return (struct sw_identifier *)id;
}

/* Make an event, not reported yet. NULL: out of memory. */
struct sw_event *sw_new_event(struct sw_identifier *identifier, enum rdma_cm_event_type type,
                              int status);
/* Put it on its identifier's channel. */
void sw_report(struct sw_event *event);
/* The two in one, for events that carry nothing. */
void sw_report_plain(struct sw_identifier *identifier, enum rdma_cm_event_type type, int status);
/* With private data in the place where the port space has it (copied; at most 255 bytes). */
void sw_set_private_data(struct sw_event *event, const void *data, size_t size);

/* Drop what of its events nobody has taken; requests among them are refused. */
void sw_drop_events(struct sw_identifier *identifier);
/* Drop those that tell of joining a group, which it has left. */
void sw_drop_group_events(struct sw_identifier *identifier, const union ibv_gid *group);

/* Of an address that a program gave: 0 where the family is none of ours. */
socklen_t sw_address_length(const struct sockaddr *address);
/* Where its port is, of IPv4 and IPv6 alike. */
in_port_t *sw_port_of(struct sockaddr *address);
/* Take an address for an identifier that has none: it is SW_CM_BOUND then. */
int sw_bind_to(struct sw_identifier *identifier, const struct sockaddr *address);
/*
 * Whether others of this process have the identifier's port, by the kernel's rules for RDMA,
 * which TCP's own are looser than. may_share: with those who share it.
 */
int sw_check_port(struct sw_identifier *identifier, int may_share);

/* An identifier for somebody who asks to connect, on the listener's channel. NULL: no memory. */
struct sw_identifier *sw_new_requesting(struct sw_identifier *listener);
/* Free one that no program knows. */
void sw_drop_identifier(struct sw_identifier *identifier);
/* ibv.verbs and ibv.port_num, from the local address; ENODEV where it is no address of ours. */
int sw_bind_device(struct sw_identifier *identifier);

/*
 * cm_stream.c: each is the call of rdma_cma.h for RDMA_PS_TCP, with the lock held. The caller
 * has checked the identifier's state, and parameters holds what connect or accept was given.
 * connect finds the state SW_CM_CONNECTING, which is taken back where it fails.
 */
int sw_stream_bind(struct sw_identifier *identifier); /* takes the port in ibv.route's source */
int sw_stream_listen(struct sw_identifier *identifier, int backlog);
int sw_stream_connect(struct sw_identifier *identifier);
int sw_stream_accept(struct sw_identifier *identifier);
int sw_stream_reject(struct sw_identifier *identifier);
int sw_stream_disconnect(struct sw_identifier *identifier);
void sw_stream_forget(struct sw_identifier *identifier); /* it is being destroyed */
void sw_stream_lost_queue_pair(struct sw_identifier *identifier);
void sw_stream_request_taken(struct sw_identifier *listener); /* by the program */
void sw_stream_forked(struct sw_identifier *identifier); /* a parent's: close its socket */

/* cm_datagram.c: the same for RDMA_PS_UDP, by SIDR_REQ and SIDR_REP. */
int sw_service_bind(struct sw_identifier *identifier);
int sw_service_listen(struct sw_identifier *identifier, int backlog);
int sw_service_connect(struct sw_identifier *identifier);
int sw_service_accept(struct sw_identifier *identifier);
int sw_service_reject(struct sw_identifier *identifier);
void sw_service_forget(struct sw_identifier *identifier);

void sw_fill_cm_events(struct aiordma_provider *table);
void sw_fill_cm_addresses(struct aiordma_provider *table);

/* group.c: destroying an identifier leaves its groups. */
void sw_groups_forget(struct sw_identifier *identifier);

#endif
