/*
 * A simulation: which host's program runs, and with it which host's state the device has.
 *
 * The device's modules keep their state in variables. Each host has a copy of them, which is put in
 * place while the host runs, as a kernel does with the registers of a process. The program's own
 * device is a host like the others: its state waits until the simulation is over.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cm_handshakes.h"
#include "cm_silence.h"
#include "engine.h"
#include "faults.h"
#include "gids.h"
#include "guard.h"
#include "identifier.h"
#include "memory.h"
#include "descriptors.h"
#include "roce_port.h"
#include "simulated.h"
#include "stream.h"

static const struct sw_state *const states[] = {
    &sw_device_state,      &sw_engine_state,  &sw_gids_state,     &sw_handshakes_state,
    &sw_identifiers_state, &sw_memory_state,  &sw_progress_state, &sw_queue_pairs_state,
    &sw_roce_port_state,   &sw_silence_state, &sw_streams_state,
};

enum { STATES = sizeof(states) / sizeof(*states) };

static char *outside;            /* the program's own state */
static struct sw_host *in_place; /* whose state the variables have; NULL: the program's own */
static struct aiordma_software_memory memory_outside;
static struct aiordma_software_counts counts_outside;

static size_t state_size(void)
{
    size_t size = 0;

    for (size_t i = 0; i < STATES; i++)
        size += states[i]->size;
    return size;
}

static void save(char *to)
{
    for (size_t i = 0; i < STATES; to += states[i++]->size)
        memcpy(to, states[i]->at, states[i]->size);
}

static void load(const char *from)
{
    for (size_t i = 0; i < STATES; from += states[i++]->size)
        memcpy(states[i]->at, from, states[i]->size);
}

static struct sw_host *host_of(int number)
{
    return number >= 0 && number < sw_network.host_count ? sw_network.hosts[number] : NULL;
}

static void put_in_place(struct sw_host *host)
{
    if (host == in_place)
        return;
    save(in_place ? in_place->state : outside);
    load(host ? host->state : outside);
    in_place = host;
}

/* The host's program is over. What it has not closed stays in memory, as after a fork. */
static void forget(struct sw_host *host)
{
    put_in_place(host);
    sw_engine_forked();
    sw_memory_forked();
    put_in_place(NULL);
}

int aiordma_simulation_begin(uint64_t seed, int scrambles, void (*posted)(uint64_t, uint32_t),
                             const struct aiordma_simulated_range *kept, int kept_count)
{
    if (sw_system->is_simulated)
        return EBUSY;
    outside = malloc(state_size());
    if (!outside)
        return ENOMEM;
    sw_lock(); /* until the end: the engine's thread waits for it */
    memory_outside = sw_device.memory;
    counts_outside = sw_device.counts;
    in_place = NULL;
    sw_system = &sw_simulated_system;
    sw_choose_by(seed, kept, kept ? kept_count : -1);
    sw_network.scrambles = scrambles;
    sw_network.posted = posted;
    sw_network.now = 1;
    sw_network.link.latency = 10000;
    sw_forget_random();
    sw_count_faults();
    return 0;
}

void aiordma_simulation_end(void)
{
    if (!sw_system->is_simulated)
        return;
    for (int i = 0; i < sw_network.host_count; i++)
        forget(sw_network.hosts[i]);
    sw_network_clear();
    sw_guards_clear();
    free(outside);
    outside = NULL;
    sw_device.memory = memory_outside;
    sw_device.counts = counts_outside;
    sw_forget_random();
    sw_system = &sw_operating_system;
    sw_count_faults();
    sw_unlock();
}

uint64_t aiordma_simulated_choose(int kind, uint64_t count)
{
    return sw_choose((enum aiordma_simulated_choice)kind, count);
}

uint64_t aiordma_simulated_choices(int kind)
{
    return sw_network.choices[kind].made;
}

int aiordma_simulated_host(void)
{
    struct sw_host *host = sw_network_host();

    if (host)
        host->state = calloc(1, state_size());
    return host && host->state ? host->number : -ENOMEM;
}

int aiordma_simulated_address(int number, const struct sockaddr *address)
{
    struct sw_host *host = host_of(number);

    if (!host || host->address_count == SW_HOST_ADDRESSES)
        return ENOSPC;
    memcpy(&host->addresses[host->address_count++], address,
           address->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                                         : sizeof(struct sockaddr_in6));
    return 0;
}

void aiordma_simulated_enter(int number)
{
    sw_network.current = host_of(number);
    put_in_place(sw_network.current);
}

void aiordma_simulated_crash(int number)
{
    struct sw_host *host = host_of(number);

    if (!host)
        return;
    forget(host);
    sw_network.current = NULL;
    sw_network_crash(host);
    host->is_up = 0;
    memset(host->state, 0, state_size());
}

void aiordma_simulated_boot(int number)
{
    struct sw_host *host = host_of(number);

    if (host)
        host->is_up = 1;
}

int aiordma_simulated_set_link(int from, int to, const struct aiordma_simulated_link *link)
{
    struct sw_host *sender = host_of(from), *receiver = host_of(to);
    struct sw_path *path = NULL;

    if (!sender || !receiver) {
        sw_network.link = *link;
        return 0;
    }
    path = sw_network_path(sender, receiver);
    if (!path)
        return ENOMEM;
    path->has_link = 1;
    path->link = *link;
    return 0;
}

void aiordma_simulated_get_link(int from, int to, struct aiordma_simulated_link *link)
{
    struct sw_host *sender = host_of(from), *receiver = host_of(to);
    *link = sender && receiver ? *sw_link_to(sender, receiver) : sw_network.link;
}

uint64_t aiordma_simulated_turn(void)
{
    int epoll = sw_engine_turn();

    if (epoll >= 0)
        sw_network_wake(epoll);
    return sw_engine_deadline();
}

uint64_t aiordma_simulated_next(void)
{
    return sw_network.timers.first ? sw_network.timers.first->deadline : UINT64_MAX;
}

void aiordma_simulated_advance(uint64_t now)
{
    sw_network_advance(now);
}

int aiordma_simulated_awake(int *hosts, int most)
{
    int count = 0;

    for (; count < most && sw_network.awake; count++) {
        struct sw_host *host = sw_network.awake;
        sw_network.awake = host->next_awake;
        host->is_awake = 0;
        hosts[count] = host->number;
    }
    return count;
}

int aiordma_simulated_selector(void)
{
    return sw_system->epoll_create1(0);
}

int aiordma_simulated_watch(int selector, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};

    if (!events)
        return sw_system->epoll_ctl(selector, EPOLL_CTL_DEL, fd, &event) ? errno : 0;
    if (!sw_system->epoll_ctl(selector, EPOLL_CTL_MOD, fd, &event))
        return 0;
    return sw_system->epoll_ctl(selector, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

void aiordma_simulated_wake(int selector)
{
    sw_network_wake(selector);
}

int aiordma_simulated_ready(int selector, int *fds, uint32_t *events, int most)
{
    struct epoll_event ready[64];
    int count = sw_system->epoll_wait(selector, ready, most < 64 ? most : 64, 0);

    for (int i = 0; i < count; i++) {
        fds[i] = ready[i].data.fd;
        events[i] = ready[i].events;
    }
    return count;
}

uint64_t aiordma_simulated_count(void)
{
    return sw_network.traced;
}

void aiordma_simulated_trace(uint64_t i, struct aiordma_simulated_event *event)
{
    *event = sw_network.trace[i % AIORDMA_SIMULATED_TRACE];
}
