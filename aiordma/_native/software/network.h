/*
 * Simulated hosts and the network between them, in memory: descriptors, epolls, TCP and UDP
 * sockets. A part of the simulation: the device knows the table in system.h only.
 */
#ifndef AIORDMA_SOFTWARE_NETWORK_H
#define AIORDMA_SOFTWARE_NETWORK_H

#include "device.h"
#include "timers.h"

enum { SW_HOST_ADDRESSES = 8 };

struct sw_path {
    struct sw_path *next;
    const struct sw_host *to;
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
    struct sw_path *paths;      /* those that differ from the network's */
    char *state;                /* of the device; NULL: it is the one that runs */
};

struct sw_network {
    uint64_t now; /* nanoseconds; set by sw_network_advance */
    uint64_t random;
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

extern const struct sw_system_calls sw_simulated_system;

uint64_t sw_network_random(void);
struct sw_host *sw_network_host(void);
struct aiordma_simulated_link *sw_network_path(struct sw_host *from, const struct sw_host *to);
/* The host has lost its power: its sockets are gone, and nobody is told. */
void sw_network_crash(struct sw_host *host);
/* Its host is awake if something is ready in this epoll. */
void sw_network_wake(int epoll);
/* Deliver what is due by this time. */
void sw_network_advance(uint64_t now);
/* Drop all hosts, descriptors, and what is on its way. */
void sw_network_clear(void);

#endif
