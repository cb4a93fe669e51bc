/*
 * Simulated hosts, the paths between them, and their time.
 */
#include "network.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

struct sw_network sw_network;

/* -- random numbers, and the trace --------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) /* SplitMix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint64_t sw_network_random(void)
{
    return next_random(&sw_network.random);
}

void sw_choose_by(uint64_t seed, const struct aiordma_simulated_range *kept, int kept_count)
{
    sw_network.random = seed;
    for (int i = 0; i < AIORDMA_SIMULATED_CHOICES; i++) {
        struct sw_choices *choices = &sw_network.choices[i];
        choices->random = sw_network_random();
        choices->kept_count = kept_count < 0 ? -1 : 0;
        for (int j = 0; j < kept_count; j++)
            if (kept[j].kind == i && !choices->kept_count++)
                choices->kept = &kept[j];
    }
}

static int is_kept(struct sw_choices *choices)
{
    const uint64_t number = choices->made++;

    while (choices->kept_count > 0 && choices->kept->end <= number) {
        choices->kept++;
        choices->kept_count--;
    }
    return choices->kept_count < 0 || (choices->kept_count && choices->kept->first <= number);
}

uint64_t sw_choose(enum aiordma_simulated_choice kind, uint64_t count)
{
    struct sw_choices *choices = &sw_network.choices[kind];
    const uint64_t random = next_random(&choices->random); /* kept or not: the next one's stays */

    return is_kept(choices) ? random % count : 0;
}

int sw_is_lost(const struct aiordma_simulated_link *link)
{
    const uint64_t parts = 1u << 30;

    return link->loss > 0 && (double)(parts - 1 - sw_choose(AIORDMA_SIMULATED_LOSS, parts)) <
                                 link->loss * (double)parts;
}

void sw_trace(const struct sw_host *from, const struct sw_host *to,
              enum aiordma_simulated_kind kind, uint32_t size)
{
    sw_network.trace[sw_network.traced++ % AIORDMA_SIMULATED_TRACE] =
        (struct aiordma_simulated_event){
            .time = sw_network.now,
            .sender = from->number,
            .receiver = to ? to->number : -1,
            .kind = (int)kind,
            .size = size,
    };
}

/* -- timers -------------------------------------------------------------------------------- */

void sw_call_never(struct sw_timer *timer)
{
    if (timer->deadline)
        sw_timers_remove(&sw_network.timers, timer);
}

void sw_call_at(struct sw_timer *timer, uint64_t time, void (*expired)(struct sw_timer *))
{
    sw_call_never(timer);
    timer->expired = expired;
    timer->deadline = time ? time : 1;
    sw_timers_add(&sw_network.timers, timer);
}

void sw_network_advance(uint64_t now)
{
    sw_network.now = now;
    while (sw_network.timers.first && sw_network.timers.first->deadline <= now) {
        struct sw_timer *timer = sw_network.timers.first;
        sw_timers_remove(&sw_network.timers, timer);
        timer->expired(timer);
    }
}

/* -- hosts and paths ----------------------------------------------------------------------- */

int sw_is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 ==
               127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

int sw_is_any(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return !((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr;
    return IN6_IS_ADDR_UNSPECIFIED(
        &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

int sw_is_same_address(const struct sockaddr *one, const struct sockaddr *other)
{
    if (one->sa_family != other->sa_family)
        return 0;
    if (one->sa_family == AF_INET)
        return ((const struct sockaddr_in *)(const void *)one)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)(const void *)other)->sin_addr.s_addr;
    return IN6_ARE_ADDR_EQUAL(&((const struct sockaddr_in6 *)(const void *)one)->sin6_addr,
                              &((const struct sockaddr_in6 *)(const void *)other)->sin6_addr);
}

in_port_t *sw_port_in(struct sockaddr_storage *address)
{
    /* In both families the port comes after the family. */
    return &((struct sockaddr_in *)(void *)address)->sin_port;
}

const struct sockaddr *sw_as_address(const struct sockaddr_storage *address)
{
    return (const struct sockaddr *)(const void *)address;
}

socklen_t sw_size_of_address(sa_family_t family)
{
    return family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}

struct sockaddr_storage sw_loopback_of(int family)
{
    struct sockaddr_storage address = {.ss_family = (sa_family_t)family};

    if (family == AF_INET)
        ((struct sockaddr_in *)(void *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else
        ((struct sockaddr_in6 *)(void *)&address)->sin6_addr = in6addr_loopback;
    return address;
}

int sw_host_has(const struct sw_host *host, const struct sockaddr *address)
{
    for (int i = 0; i < host->address_count; i++)
        if (sw_is_same_address(sw_as_address(&host->addresses[i]), address))
            return 1;
    return 0;
}

struct sw_host *sw_host_at(struct sw_host *from, const struct sockaddr *address)
{
    if (sw_is_loopback(address) || sw_is_any(address))
        return from;
    for (int i = 0; i < sw_network.host_count; i++)
        if (sw_host_has(sw_network.hosts[i], address))
            return sw_network.hosts[i];
    return NULL;
}

/* The host's own address on the way to another. Returns 0 if it has none of that family. */
int sw_address_towards(const struct sw_host *host, const struct sockaddr *to,
                       struct sockaddr_storage *own)
{
    if (sw_is_loopback(to) || sw_is_any(to)) {
        *own = sw_loopback_of(to->sa_family);
        return 1;
    }
    for (int i = 0; i < host->address_count; i++)
        if (host->addresses[i].ss_family == to->sa_family) {
            *own = host->addresses[i];
            return 1;
        }
    return 0;
}

struct sw_host *sw_network_host(void)
{
    int count = sw_network.host_count;
    struct sw_host *host = calloc(1, sizeof(*host)), **hosts;

    if (!host)
        return NULL;
    hosts = realloc(sw_network.hosts, (size_t)(count + 1) * sizeof(struct sw_host *));
    if (!hosts) {
        free(host);
        return NULL;
    }
    sw_network.hosts = hosts;
    hosts[sw_network.host_count++] = host;
    host->number = count;
    host->is_up = 1;
    return host;
}

static struct sw_path *own_path(const struct sw_host *from, const struct sw_host *to)
{
    struct sw_path *path = from->paths;

    while (path && path->to != to)
        path = path->next;
    return path;
}

struct sw_path *sw_network_path(struct sw_host *from, const struct sw_host *to)
{
    struct sw_path *path = own_path(from, to);

    if (path)
        return path;
    path = calloc(1, sizeof(*path));
    if (!path)
        return NULL;
    path->to = to;
    path->next = from->paths;
    from->paths = path;
    return path;
}

const struct aiordma_simulated_link *sw_link_to(const struct sw_host *from,
                                                const struct sw_host *to)
{
    static const struct aiordma_simulated_link within = {.latency = 5000};
    const struct sw_path *path;

    if (from == to)
        return &within;
    path = own_path(from, to);
    return path && path->has_link ? &path->link : &sw_network.link;
}

uint64_t sw_latency(const struct aiordma_simulated_link *link)
{
    return link->latency +
           (link->jitter ? sw_choose(AIORDMA_SIMULATED_DELAY, link->jitter + 1) : 0);
}

uint64_t sw_leaves_at(struct sw_host *from, const struct sw_host *to, uint32_t size)
{
    const uint64_t bandwidth = sw_link_to(from, to)->bandwidth;
    struct sw_path *path = bandwidth ? sw_network_path(from, to) : NULL;

    if (!path)
        return sw_network.now;
    if (path->is_free < sw_network.now)
        path->is_free = sw_network.now;
    path->is_free += (uint64_t)((double)size * 1e9 / (double)bandwidth);
    return path->is_free;
}

/* Whether something can go this way now. */
int sw_is_open(const struct sw_host *from, const struct sw_host *to)
{
    return to && to->is_up && !sw_link_to(from, to)->is_cut;
}

void sw_wake_host(struct sw_host *host)
{
    if (host->is_awake)
        return;
    host->is_awake = 1;
    host->next_awake = NULL;
    if (!sw_network.awake)
        sw_network.last_awake = &sw_network.awake;
    *sw_network.last_awake = host;
    sw_network.last_awake = &host->next_awake;
}
