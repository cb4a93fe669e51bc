/*
 * Simulated hosts, the paths between them, and their time. A part of the simulation: the device
 * knows the table in system.h only.
 */
#ifndef AIORDMA_SOFTWARE_NETWORK_H
#define AIORDMA_SOFTWARE_NETWORK_H

#include "device.h"
#include "timers.h"

enum { SW_HOST_ADDRESSES = 8 };

struct sw_path {
    struct sw_path *next;
    const struct sw_host *to;
    uint64_t is_free; /* when all that was sent before has left */
    int has_link;     /* 0: the network's */
    struct aiordma_simulated_link link;
};

struct sw_host {
    int number;
    int is_up;
    int is_awake; /* in the list of those that have something to do */
    struct sw_host *next_awake;
    struct sockaddr_storage addresses[SW_HOST_ADDRESSES];
    int address_count;
    uint16_t last_port;         /* of those that the host gave to a socket */
    struct sw_object *objects;  /* all of the host's */
    struct sw_object *services; /* those of them that have a port and no peer */
    struct sw_path *paths;      /* those that have a link of their own, or a bandwidth */
    char *state;                /* of the device; NULL: it is the one that runs */
};

/* Choices of one kind. */
struct sw_choices {
    uint64_t random, made;
    const struct aiordma_simulated_range *kept; /* the first that is not over */
    int kept_count;                             /* of those that follow; -1: all choices are kept */
};

struct sw_network {
    uint64_t now;    /* nanoseconds; set by sw_network_advance */
    uint64_t random; /* of what is no choice: keys and numbers */
    struct sw_choices choices[AIORDMA_SIMULATED_CHOICES];
    struct sw_timers timers;
    struct aiordma_simulated_link link; /* between any two hosts that have no other */
    struct sw_host **hosts;
    int host_count;
    struct sw_host *current; /* whose program runs */
    struct sw_host *awake, **last_awake;
    int scrambles; /* WRITEs are placed in any order */
    void (*posted)(uint64_t wr_id, uint32_t qp_num);
    uint64_t traced; /* events */
    struct aiordma_simulated_event trace[AIORDMA_SIMULATED_TRACE];
};
extern struct sw_network sw_network;

uint64_t sw_network_random(void);
/* What the seed decides; see simulation.h. kept_count -1: it makes all choices. */
void sw_choose_by(uint64_t seed, const struct aiordma_simulated_range *kept, int kept_count);
uint64_t sw_choose(enum aiordma_simulated_choice kind, uint64_t count);
int sw_is_lost(const struct aiordma_simulated_link *link);
struct sw_host *sw_network_host(void);
/* The path from one host to another, which is made if there is none. NULL: no memory. */
struct sw_path *sw_network_path(struct sw_host *from, const struct sw_host *to);
/* Deliver what is due by this time. */
void sw_network_advance(uint64_t now);

/* Note what arrived, or was lost. */
void sw_trace(const struct sw_host *from, const struct sw_host *to,
              enum aiordma_simulated_kind kind, uint32_t size);

/* Call a timer's function at this time, or never. */
void sw_call_at(struct sw_timer *timer, uint64_t time, void (*expired)(struct sw_timer *));
void sw_call_never(struct sw_timer *timer);

/* Addresses, IPv4 and IPv6. */
int sw_is_loopback(const struct sockaddr *address);
int sw_is_any(const struct sockaddr *address);
int sw_is_same_address(const struct sockaddr *one, const struct sockaddr *other);
in_port_t *sw_port_in(struct sockaddr_storage *address);
const struct sockaddr *sw_as_address(const struct sockaddr_storage *address);
socklen_t sw_size_of_address(sa_family_t family);
struct sockaddr_storage sw_loopback_of(int family);
int sw_host_has(const struct sw_host *host, const struct sockaddr *address);
struct sw_host *sw_host_at(struct sw_host *from,
                           const struct sockaddr *address); /* NULL: none has it */
/* The host's own address on the way to another. Returns 0 if it has none of that family. */
int sw_address_towards(const struct sw_host *host, const struct sockaddr *to,
                       struct sockaddr_storage *own);

const struct aiordma_simulated_link *sw_link_to(const struct sw_host *from,
                                                const struct sw_host *to);
uint64_t sw_latency(const struct aiordma_simulated_link *link); /* for the next packet */
/* When something of this size has left, that is sent now. All connections of a path share it. */
uint64_t sw_leaves_at(struct sw_host *from, const struct sw_host *to, uint32_t size);
int sw_is_open(const struct sw_host *from,
               const struct sw_host *to); /* whether something can go this way now */
void sw_wake_host(struct sw_host *host);  /* it has something to do */

#endif
