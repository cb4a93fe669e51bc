/*
 * Descriptors of simulated hosts, in memory: signals (eventfd), epolls and sockets.
 */
#ifndef AIORDMA_SOFTWARE_DESCRIPTORS_H
#define AIORDMA_SOFTWARE_DESCRIPTORS_H

#include "network.h"

enum sw_kind { SW_SIGNAL, SW_EPOLL, SW_STREAM, SW_LISTENER, SW_DATAGRAM };

enum sw_data_kind { SW_DATA, SW_END };

/* What one call has sent. */
struct sw_data {
    struct sw_data *next;
    uint64_t due;
    enum sw_data_kind kind;
    uint32_t size, start;
    struct sockaddr_storage from, to; /* of a datagram */
    char bytes[];
};

struct sw_pieces {
    struct sw_data *first, **last;
};

/* An object in an epoll. */
struct sw_interest {
    struct sw_object *object, *epoll;
    uint32_t events;
    epoll_data_t data;
    struct sw_interest *next, **link;            /* of the object */
    struct sw_interest *next_watched, **watched; /* of the epoll */
    struct sw_interest *next_queued, **queued;   /* in the epoll's queue; queued NULL: it is not */
};

struct sw_object {
    enum sw_kind kind;
    uint32_t (*ready)(struct sw_object *object); /* EPOLLIN, ... */
    int fd;                                      /* -1: it has none (any more) */
    struct sw_host *host;
    struct sw_object *next, **link;                 /* of the host */
    struct sw_object *next_service, **service_link; /* NULL: it is none */
    struct sw_interest *interests;

    uint64_t count; /* of a signal */

    struct sw_interest *watched; /* of an epoll */
    struct sw_interest *queue, **last_queued;

    /* sockets */
    int family;
    struct sockaddr_storage local, remote;
    struct sw_pieces arrived;
    uint32_t buffered; /* bytes, or datagrams */

    /* of TCP */
    struct sw_object *peer;    /* NULL: none yet, or none any more */
    struct sw_host *peer_host; /* NULL: nobody has its address */
    int is_connected, is_shut, has_ended, error, is_refused;
    int resets, keeps_alive; /* SO_LINGER of 0; SO_KEEPALIVE */
    uint32_t low_water;
    struct sw_pieces flying;
    uint32_t in_flight; /* bytes without an acknowledgement */
    uint64_t last_due;
    uint32_t attempts, delivered;   /* delivered: bytes whose acknowledgement is on its way */
    uint64_t heard;                 /* the last acknowledgement */
    struct sw_timer flight, answer; /* the first piece arrives; an acknowledgement does */
    /* of a listener, and of what waits there */
    uint32_t backlog, waiting;
    struct sw_object *waits, **last_waiting, *next_waiting, *listener;
};

/* What is ready has changed: tell the epolls, and wake the host's loop. */
void sw_object_changed(struct sw_object *object);

/* Set errno, and return -1. */
int sw_fail(int error);
struct sw_object *sw_object_of(int fd); /* NULL and EBADF: there is none */
int sw_give_descriptor(struct sw_object *object);
struct sw_object *sw_new_object(struct sw_host *host, enum sw_kind kind,
                                uint32_t (*ready)(struct sw_object *));
int sw_open_object(enum sw_kind kind, int family,
                   uint32_t (*ready)(struct sw_object *)); /* of the current host */
/* Take the object's descriptor, and all that the program knows of it. */
void sw_detach_object(struct sw_object *object);
void sw_drop_object(struct sw_object *object);
/* The host has lost its power: its sockets are gone, and nobody is told. */
void sw_network_crash(struct sw_host *host);
/* Drop all hosts, descriptors, and what is on its way. */
void sw_network_clear(void);
/* The host of an epoll is awake if something is ready there. */
void sw_network_wake(int epoll);

void sw_add_piece(struct sw_pieces *pieces, struct sw_data *piece);
struct sw_data *sw_take_piece(struct sw_pieces *pieces);
void sw_free_pieces(struct sw_pieces *pieces);
/* A socket with a port and without a peer. */
void sw_be_service(struct sw_object *object);
struct sw_object *sw_service_at(struct sw_host *host, enum sw_kind kind,
                                const struct sockaddr_storage *address);
void sw_give_port(struct sw_object *object);
int sw_copy_name(const struct sockaddr_storage *from, struct sockaddr *to, socklen_t *size);

/* The C library's functions of these names. */
int sw_sim_eventfd(unsigned int count, int flags);
void sw_sim_ring(int fd);
void sw_sim_quiet(int fd);
int sw_sim_epoll_create1(int flags);
int sw_sim_epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event);
int sw_sim_epoll_wait(int fd, struct epoll_event *events, int most, int milliseconds);

#endif
