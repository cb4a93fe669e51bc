/*
 * Half-open handshakes: see cm_handshakes.h. The bounds follow the current RLIMIT_NOFILE, because a
 * half-open handshake costs a descriptor and little else.
 */
#include "cm_handshakes.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum {
    TICK_MILLISECONDS = 1000,
    TICKS = 5, /* time for a peer's request: 4 to 5 seconds */
    MOST_HANDSHAKES = 2048,
    MOST_RESERVE = 256,
};

struct sw_source {
    struct sw_source *next;
    struct in6_addr address;
    uint32_t count;
};

static struct {
    struct sw_handshake *oldest, *newest;
    struct sw_source *sources;
    uint32_t count;
    struct sw_timer timer; /* runs while the list is not empty */
} handshakes;

const struct sw_state sw_handshakes_state = {&handshakes, sizeof(handshakes)};

/* -- bounds ------------------------------------------------------------------------------------ */

static uint64_t descriptor_limit(void)
{
    struct rlimit limit;

    if (sw_system->is_simulated)
        return UINT64_MAX;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return limit.rlim_cur;
}

static uint64_t within(uint64_t number, uint64_t least, uint64_t most)
{
    if (number < least)
        return least;
    return number < most ? number : most;
}

/* The bound of all addresses together. One address can have half of that. */
static uint64_t most_handshakes(void)
{
    return within(descriptor_limit() / 2, 2, MOST_HANDSHAKES);
}

/* A new descriptor has the lowest free number: all numbers below it are in use. */
int sw_is_scarce(int fd)
{
    uint64_t limit = descriptor_limit();

    return (uint64_t)fd + within(limit / 16, 2, MOST_RESERVE) >= limit;
}

/* -- sources ----------------------------------------------------------------------------------- */

/*
 * An IPv6 address counts as its /64, because a host has all addresses of that. IPv4 is mapped:
 * ::ffff:a.b.c.d.
 */
static void read_source(const struct sockaddr *peer, struct in6_addr *address)
{
    memset(address, 0, sizeof(*address));
    if (peer->sa_family == AF_INET) {
        const struct sockaddr_in *four = (const struct sockaddr_in *)(const void *)peer;
        memset(address->s6_addr + 10, 0xff, 2);
        memcpy(address->s6_addr + 12, &four->sin_addr, 4);
    } else if (peer->sa_family == AF_INET6) {
        const struct in6_addr *six = &((const struct sockaddr_in6 *)(const void *)peer)->sin6_addr;
        int is_whole = IN6_IS_ADDR_V4MAPPED(six) || IN6_IS_ADDR_LINKLOCAL(six);
        memcpy(address, six, is_whole ? sizeof(*six) : sizeof(*six) / 2);
    }
}

static struct sw_source *find_source(const struct in6_addr *address)
{
    struct sw_source *source = handshakes.sources;

    while (source && !IN6_ARE_ADDR_EQUAL(&source->address, address))
        source = source->next;
    return source;
}

static struct sw_source *add_source(const struct in6_addr *address)
{
    struct sw_source *source = calloc(1, sizeof(*source));

    if (source) {
        source->address = *address;
        source->next = handshakes.sources;
        handshakes.sources = source;
    }
    return source;
}

static void leave_source(struct sw_source *source)
{
    struct sw_source **link = &handshakes.sources;

    if (--source->count)
        return;
    while (*link != source)
        link = &(*link)->next;
    *link = source->next;
    free(source);
}

/* -- handshakes -------------------------------------------------------------------------------- */

static void tick(struct sw_timer *timer)
{
    struct sw_handshake *newer;

    for (struct sw_handshake *each = handshakes.oldest; each; each = newer) {
        newer = each->newer;
        if (!--each->ticks)
            each->drop(each);
    }
    if (handshakes.oldest && sw_call_later(timer, TICK_MILLISECONDS)) {
        /* This cannot fail: the engine runs, and it makes this call. */
    }
}

int sw_evict_handshake(void)
{
    struct sw_handshake *victim = handshakes.oldest;
    uint32_t most = 0;

    if (!victim)
        return 0;
    for (const struct sw_source *source = handshakes.sources; source; source = source->next)
        most = source->count > most ? source->count : most;
    while (victim->source->count < most)
        victim = victim->newer;
    victim->drop(victim);
    return 1;
}

static void drop_oldest_of(const struct sw_source *source)
{
    struct sw_handshake *victim = handshakes.oldest;

    while (victim->source != source)
        victim = victim->newer;
    victim->drop(victim);
}

static void make_room(const struct in6_addr *address)
{
    uint64_t most = most_handshakes();
    const struct sw_source *source;

    /* RLIMIT_NOFILE can be lower than it was: drop as many as that requires. */
    while ((source = find_source(address)) && source->count >= most / 2)
        drop_oldest_of(source);
    while (handshakes.count >= most)
        (void)sw_evict_handshake();
}

int sw_begin_handshake(struct sw_handshake *handshake, const struct sockaddr *peer)
{
    struct in6_addr address;

    read_source(peer, &address);
    make_room(&address);
    handshakes.timer.expired = tick;
    int error = handshakes.oldest ? 0 : sw_call_later(&handshakes.timer, TICK_MILLISECONDS);
    if (error)
        return error;
    struct sw_source *source = find_source(&address);
    if (!source)
        source = add_source(&address);
    if (!source)
        return ENOMEM;
    source->count++;
    handshake->source = source;
    handshake->ticks = TICKS;
    handshake->newer = NULL;
    handshake->older = handshakes.newest;
    if (handshake->older)
        handshake->older->newer = handshake;
    else
        handshakes.oldest = handshake;
    handshakes.newest = handshake;
    handshakes.count++;
    return 0;
}

void sw_end_handshake(struct sw_handshake *handshake)
{
    if (!handshake->source)
        return;
    leave_source(handshake->source);
    handshake->source = NULL;
    if (handshake->older)
        handshake->older->newer = handshake->newer;
    else
        handshakes.oldest = handshake->newer;
    if (handshake->newer)
        handshake->newer->older = handshake->older;
    else
        handshakes.newest = handshake->older;
    if (!--handshakes.count)
        sw_cancel(&handshakes.timer);
}

struct sw_handshake *sw_oldest_handshake(void)
{
    return handshakes.oldest;
}

void sw_handshakes_forked(void)
{
    memset(&handshakes, 0, sizeof(handshakes));
}
