/*
 * The device's addresses: the table of GIDs, kept up to date by the kernel's notifications.
 */
#include "gids.h"

#include <errno.h>
#include <ifaddrs.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "engine.h"
#include "events.h"

enum { PORT = 1 };

static struct {
    struct {
        union ibv_gid gid;
        unsigned int interface;
        int is_used, is_seen;
        int is_routed; /* on no interface: by a local route */
    } entries[SW_MOST_GIDS];
    int has_changed;       /* since the last GID_CHANGE */
    int is_stale;          /* a notification was read, and the addresses could not be */
    struct sw_watch watch; /* of the kernel's notifications */
} gids;

const struct sw_state sw_gids_state = {&gids, sizeof(gids)};

static void map_ipv4(const void *address, union ibv_gid *gid)
{
    memset(gid, 0, sizeof(*gid));
    gid->raw[10] = gid->raw[11] = 0xff;
    memcpy(gid->raw + 12, address, 4);
}

void sw_gid_of(const struct sockaddr *address, union ibv_gid *gid)
{
    if (address->sa_family == AF_INET)
        map_ipv4(&((const struct sockaddr_in *)(const void *)address)->sin_addr, gid);
    else if (address->sa_family == AF_INET6)
        memcpy(gid->raw, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, 16);
    else
        memset(gid, 0, sizeof(*gid));
}

static int find_gid(const union ibv_gid *gid)
{
    for (int i = 0; i < SW_MOST_GIDS; i++)
        if (gids.entries[i].is_used && !memcmp(&gids.entries[i].gid, gid, sizeof(*gid)))
            return i;
    return -1;
}

/* Return the entry; -1: the table is full, and the device does not use the address. */
static int see_gid(const union ibv_gid *gid, unsigned int interface)
{
    int index = find_gid(gid);

    for (int i = 0; index < 0 && i < SW_MOST_GIDS; i++)
        if (!gids.entries[i].is_used)
            index = i;
    if (index < 0)
        return -1;
    gids.entries[index].gid = *gid;
    gids.entries[index].interface = interface;
    gids.entries[index].is_used = gids.entries[index].is_seen = 1;
    return index;
}

static void raise_change(void)
{
    gids.is_stale = 0;
    if (gids.has_changed)
        sw_raise_port(IBV_EVENT_GID_CHANGE);
    gids.has_changed = 0;
}

/* Compare the table with the interfaces' addresses. If that fails, the table stays as it was. */
static int refresh_gids(void)
{
    struct ifaddrs *addresses, *at;
    union ibv_gid gid;

    if (sw_system->getifaddrs(&addresses))
        return errno;
    for (int i = 0; i < SW_MOST_GIDS; i++)
        gids.entries[i].is_seen = gids.entries[i].is_routed;
    /* First mark the known addresses, so that a new address does not take an entry of theirs. */
    for (int pass = 0; pass < 2; pass++) {
        for (at = addresses; at; at = at->ifa_next) {
            if (!at->ifa_addr || !(at->ifa_flags & IFF_UP) ||
                (at->ifa_addr->sa_family != AF_INET && at->ifa_addr->sa_family != AF_INET6))
                continue;
            sw_gid_of(at->ifa_addr, &gid);
            int is_known = find_gid(&gid) >= 0;
            if (pass || is_known)
                (void)see_gid(&gid, sw_system->if_nametoindex(at->ifa_name));
            gids.has_changed |= pass && !is_known && find_gid(&gid) >= 0;
        }
        for (int i = 0; i < SW_MOST_GIDS; i++) {
            gids.has_changed |= gids.entries[i].is_used && !gids.entries[i].is_seen;
            gids.entries[i].is_used = gids.entries[i].is_seen;
        }
    }
    sw_system->freeifaddrs(addresses);
    if (gids.is_stale)
        raise_change(); /* the notification of it was read before */
    return 0;
}

static void read_news(void)
{
    char message[4096];
    int count = 0;

    /* The contents of a message do not matter, nor do lost messages: the table is compared. */
    while (sw_system->recv(gids.watch.fd, message, sizeof(message), 0) >= 0 || errno == ENOBUFS)
        count++;
    if (!count)
        return;
    /* Listing the addresses takes a descriptor. */
    if (refresh_gids())
        gids.is_stale = 1;
    else
        raise_change();
}

static void news(struct sw_watch *watch, uint32_t events)
{
    (void)watch, (void)events;
    read_news();
}

static int is_shortage(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/*
 * Bring the table up to date: read the kernel's notifications. Compare all addresses only if the
 * kernel cannot notify, or if that was not possible at its last notification.
 */
static int update(void)
{
    if (gids.watch.slot)
        read_news();
    return gids.watch.slot && !gids.is_stale ? 0 : refresh_gids();
}

int sw_watch_gids(void)
{
    struct sockaddr_nl groups = {
        .nl_family = AF_NETLINK,
        .nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR,
    };
    int error = 0;

    if (gids.watch.slot)
        return 0;
    int fd = sw_system->socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE);
    if (fd < 0)
        return is_shortage(errno) ? errno : 0;
    gids.watch.ready = news;
    if (sw_system->bind(fd, (struct sockaddr *)&groups, sizeof(groups)))
        error = errno;
    if (!error)
        error = sw_watch(&gids.watch, fd, EPOLLIN);
    if (error) {
        sw_system->close(fd);
        return is_shortage(error) ? error : 0;
    }
    gids.is_stale = 0;
    gids.is_stale = !!refresh_gids();
    gids.has_changed = 0;
    return 0;
}

void sw_gids_forked(void)
{
    memset(&gids.watch, 0, sizeof(gids.watch));
}

int sw_has_gid(const union ibv_gid *gid)
{
    if (find_gid(gid) < 0)
        (void)update();
    return find_gid(gid) >= 0;
}

/*
 * Whether the kernel delivers an address that no interface has to this machine, by a local route.
 * (To bind a socket does not say: with the sysctl ip_nonlocal_bind, any address can be bound.)
 */
static int is_routed(const union ibv_gid *gid)
{
    struct {
        struct nlmsghdr header;
        struct rtmsg route;
        struct rtattr attribute;
        uint8_t address[sizeof(gid->raw)];
    } ask = {.header = {.nlmsg_type = RTM_GETROUTE, .nlmsg_flags = NLM_F_REQUEST}};
    struct {
        struct nlmsghdr header;
        struct rtmsg route;
        uint8_t rest[1024];
    } answer = {.route.rtm_type = RTN_UNSPEC};
    int is_ipv4 = IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)(const void *)gid->raw);
    unsigned int length = is_ipv4 ? 4 : sizeof(gid->raw);

    ask.route.rtm_family = is_ipv4 ? AF_INET : AF_INET6;
    ask.route.rtm_dst_len = (unsigned char)(8 * length);
    ask.attribute.rta_type = RTA_DST;
    ask.attribute.rta_len = (unsigned short)RTA_LENGTH(length);
    memcpy(ask.address, gid->raw + sizeof(gid->raw) - length, length);
    ask.header.nlmsg_len = (uint32_t)NLMSG_LENGTH(sizeof(ask.route)) + ask.attribute.rta_len;
    int fd = sw_system->socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (fd < 0)
        return 0;
    /* The kernel has answered when send returns. */
    int is_local = sw_system->send(fd, &ask, ask.header.nlmsg_len, 0) >= 0 &&
                   sw_system->recv(fd, &answer, sizeof(answer), MSG_DONTWAIT) >=
                       (ssize_t)NLMSG_LENGTH(sizeof(answer.route)) &&
                   answer.header.nlmsg_type == RTM_NEWROUTE && answer.route.rtm_type == RTN_LOCAL;
    sw_system->close(fd);
    return is_local;
}

int sw_is_local(const union ibv_gid *gid)
{
    int error = 0;

    if (!gids.watch.slot || find_gid(gid) < 0)
        error = update();
    if (find_gid(gid) >= 0 || is_routed(gid))
        return 1;
    errno = error ? error : ENODEV;
    return 0;
}

int sw_gid_index(const union ibv_gid *gid)
{
    if (!sw_is_local(gid))
        return -1;
    int index = find_gid(gid), routed = 0;
    if (index >= 0)
        return index;
    for (int i = 0; i < SW_MOST_GIDS; i++)
        routed += gids.entries[i].is_routed;
    /* The entry stays: a program may use its index. The interfaces' addresses have the other half. */
    index = routed < SW_MOST_GIDS / 2 ? see_gid(gid, sw_system->if_nametoindex("lo")) : -1;
    if (index < 0)
        errno = ENOSPC;
    else
        gids.entries[index].is_routed = 1;
    return index;
}

static int read_gid(int index, struct ibv_gid_entry *entry)
{
    if (index < 0 || index >= SW_MOST_GIDS)
        return EINVAL;
    if (!gids.entries[index].is_used)
        return ENODATA;
    entry->gid = gids.entries[index].gid;
    entry->gid_index = (uint32_t)index;
    entry->port_num = PORT;
    entry->gid_type = IBV_GID_TYPE_ROCE_V2;
    entry->ndev_ifindex = gids.entries[index].interface;
    return 0;
}

int sw_gid_entry(int index, struct ibv_gid_entry *entry)
{
    int error = update();
    int missing = read_gid(index, entry);

    return missing == ENODATA && error ? error : missing;
}

void sw_address_of(const union ibv_gid *gid, struct sockaddr_storage *address)
{
    memset(address, 0, sizeof(*address));
    if (IN6_IS_ADDR_V4MAPPED((const struct in6_addr *)(const void *)gid->raw)) {
        struct sockaddr_in *in = (struct sockaddr_in *)address;
        in->sin_family = AF_INET;
        memcpy(&in->sin_addr, gid->raw + 12, 4);
        return;
    }
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)address;
    in6->sin6_family = AF_INET6;
    memcpy(&in6->sin6_addr, gid->raw, 16);
    /* A link-local address of this machine can be bound only with its interface. */
    if (!IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr))
        return;
    if (gids.is_stale)
        (void)refresh_gids();
    int index = find_gid(gid);
    if (index >= 0)
        in6->sin6_scope_id = gids.entries[index].interface;
}

/* Copy as many bytes of an entry as the program's structure has, and fill the rest of it with 0. */
static void give_entry(void *to, const struct ibv_gid_entry *entry, size_t entry_size)
{
    memset(to, 0, entry_size);
    memcpy(to, entry, entry_size < sizeof(*entry) ? entry_size : sizeof(*entry));
}

static int query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                        struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size)
{
    struct ibv_gid_entry found = {0};

    if (!context || !entry || !entry_size || flags || port != PORT || index >= SW_MOST_GIDS)
        return EINVAL;
    sw_lock();
    int error = sw_gid_entry((int)index, &found);
    sw_unlock();
    if (!error)
        give_entry(entry, &found, entry_size);
    return error;
}

static int query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    struct ibv_gid_entry entry = {0};
    int error = EINVAL;

    if (context && gid && index >= 0)
        error = query_gid_ex(context, port, (uint32_t)index, &entry, 0, sizeof(entry));
    /* ibv_query_gid returns a GID of zeros for an empty entry. */
    if (error && error != ENODATA) {
        errno = error;
        return -1;
    }
    *gid = entry.gid;
    return 0;
}

static ssize_t query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                               size_t most, uint32_t flags, size_t entry_size)
{
    struct ibv_gid_entry found = {0};
    size_t count = 0;

    if (!context || !entries || !most || flags || !entry_size)
        return -EINVAL;
    sw_lock();
    (void)update();
    for (int i = 0; i < SW_MOST_GIDS; i++) {
        if (read_gid(i, &found))
            continue;
        if (count < most)
            give_entry((char *)entries + count * entry_size, &found, entry_size);
        count++;
    }
    sw_unlock();
    return count > most ? -EINVAL : (ssize_t)count;
}

void sw_fill_gids(struct aiordma_provider *table)
{
    table->query_gid = query_gid;
    table->query_gid_ex = query_gid_ex;
    table->query_gid_table = query_gid_table;
}
