/* RoCE's UDP port: see roce_port.h. */
#include "roce_port.h"

#include <errno.h>
#include <linux/filter.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "cm_messages.h"
#include "crc32.h"
#include "engine.h"

enum {
    BURST = 64, /* packets in a row */
    SLOTS = 256,
    SLOT_ADDRESS = 0x7f2f5b00, /* 127.47.91.0, and the slot */
    SLOT_PORT = 4796,
    /* Of claims; the claimed port is the socket's. */
    ANY_IPV4 = 0x7f2f5c00, /* 127.47.92.0, and the space */
    ANY_IPV6 = 0x7f2f5d00, /* 127.47.93.0, and the space */
    AT_ONE = 0x7f400000,   /* 127.64.0.0, and a hash of the space and the address */
    AT_ONE_MASK = 0x003fffff,
    MOST_PORTS_TRIED = 16,
    NUMBER_SHIFT = 24,
    SLOT_SHIFT = 16,
    TRIES = 4096,
    MOST_BATCH = 64, /* as many as the kernel takes */
    BATCH_BYTES = 65000,
    MOST_MERIT = 4,
    DEMERIT = 2,
    MOST_PAUSES = 100, /* 10 ms */
    /* Offsets in a packet. */
    QPN_BYTE = 5, /* the upper 8 bits of the number of the queue pair that it is for */
    MESSAGE = 36, /* what kind a message of the connection manager is */
    SIDR_REP_FOR = 44,
    ANY_FOR = 48, /* the receiver's own number, whose upper 8 bits are its process's slot */
};

static struct {
    uint32_t users; /* queue pairs */
    struct sw_watch watch;
    struct sw_member member;    /* the socket, which can be lent to the program's thread */
    int merit;                  /* recent bursts that made completions for one channel */
    struct sw_progress *served; /* of the queue pairs of this burst; NULL: of none, or of several */
    int is_mixed, has_requests;
    struct sw_udp udp;
    struct sw_claim own; /* packets that other processes pass on; not in a simulation */
    uint32_t slot;
    struct sw_due *due;
    struct sw_held held; /* the packets of `batch`, while the program may post more */
} port;

static const struct sw_services *services;

const struct sw_state sw_roce_port_state = {&port, sizeof(port)};

static void map_ipv4(struct in6_addr *to, uint32_t address)
{
    memset(to, 0, sizeof(*to));
    memset(to->s6_addr + 10, 0xff, 2);
    for (int i = 0; i < 4; i++)
        to->s6_addr[12 + i] = (uint8_t)(address >> (24 - 8 * i));
}

/* -- what is due at the end of a burst ------------------------------------------------------- */

void sw_roce_port_after(struct sw_due *due)
{
    if (due->link)
        return;
    due->next = port.due;
    if (due->next)
        due->next->link = &due->next;
    due->link = &port.due;
    port.due = due;
}

void sw_roce_port_forget(struct sw_due *due)
{
    if (!due->link)
        return;
    *due->link = due->next;
    if (due->next)
        due->next->link = due->link;
    due->link = NULL;
}

static void run_due(void)
{
    while (port.due) {
        struct sw_due *due = port.due;
        sw_roce_port_forget(due);
        due->run(due);
    }
}

/* -- slots: each is an address of the loopback interface, at a port of their own --------------- */

/* A packet for another process: where it came from, and its bytes. */
struct passed_on {
    struct sw_udp_route route;
    uint8_t bytes[SW_ROCE_MOST];
};

static int open_claim(struct sw_claim *claim, uint32_t host, int flags, uint16_t number)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(number)};

    address.sin_addr.s_addr = htonl(host);
    int error = sw_udp_open(&claim->udp, (struct sockaddr *)&address, flags);
    claim->is_open = !error;
    return error;
}

/* Take the first free slot. EAGAIN: there are too many processes. */
static int take_slot(void)
{
    int error = EADDRINUSE;

    for (port.slot = 0; error == EADDRINUSE && port.slot < SLOTS; port.slot++)
        error = open_claim(&port.own, SLOT_ADDRESS | port.slot, 0, SLOT_PORT);
    port.slot--;
    return error == EADDRINUSE ? EAGAIN : error;
}

/*
 * Pass a packet on to another process. If there is none, or it is busy, the packet is lost. It comes
 * from this port, which only processes of this user have: so the other one believes it.
 */
static void pass_on(uint32_t host, uint16_t number, const struct sw_udp_route *route,
                    const uint8_t *bytes, size_t size)
{
    struct passed_on packet;
    struct sw_udp_route to = {.path.destination_port = number};

    if (size > sizeof(packet.bytes) || sw_system->is_simulated)
        return;
    map_ipv4(&to.path.source, INADDR_LOOPBACK);
    map_ipv4(&to.path.destination, host);
    packet.route = *route;
    memcpy(packet.bytes, bytes, size);
    (void)sw_udp_send(&port.udp, &to, &packet, offsetof(struct passed_on, bytes) + size);
}

/* -- packets ---------------------------------------------------------------------------------- */

static void arrived(const struct sw_udp_route *route, uint8_t *bytes, size_t size, int is_passed)
{
    struct sw_roce_packet packet;
    const int is_anyones = size > QPN_BYTE + 2 && !bytes[QPN_BYTE] && !bytes[QPN_BYTE + 1] &&
                           bytes[QPN_BYTE + 2] == SW_QPN_SERVICES;

    if (!is_passed && !is_anyones && size > QPN_BYTE && bytes[QPN_BYTE] != port.slot &&
        port.own.is_open) {
        pass_on(SLOT_ADDRESS | bytes[QPN_BYTE], SLOT_PORT, route, bytes, size);
        return;
    }
    if (sw_roce_read(bytes, size, &route->path, &packet))
        return;
    if (packet.destination_qpn == SW_QPN_SERVICES) {
        services->arrived(route, &packet, bytes, size, is_passed);
        return;
    }
    struct sw_queue_pair *pair = sw_find_queue_pair(packet.destination_qpn);
    if (!pair || !pair->transport->arrived)
        return;
    struct sw_progress *progress = sw_progress_of(&pair->ibv);
    port.is_mixed |= !progress || (port.served && port.served != progress);
    port.served = progress;
    port.has_requests |=
        packet.opcode < SW_RC_READ_RESPONSE_FIRST || packet.opcode > SW_RC_ATOMIC_ACKNOWLEDGE;
    pair->transport->arrived(pair, route, &packet, size);
}

/*
 * If the packets make completions for one channel, its thread serves the socket, because it has to
 * wake for them in any case (progress.c, and connected.c for streams). Requests of the peer that make
 * none are the engine's. Acknowledgements say nothing: each message that is sent has one.
 */
static void judge(int has_completed)
{
    if (has_completed && !port.is_mixed) {
        port.merit += port.merit < MOST_MERIT;
        if (port.merit == MOST_MERIT && port.member.progress != port.served)
            sw_progress_join(port.served, &port.member);
    } else if (port.has_requests && (port.merit -= DEMERIT) <= 0) {
        port.merit = 0;
        sw_progress_leave(&port.member);
    }
}

static void ready(struct sw_watch *watch, uint32_t events)
{
    static uint8_t bytes[1 << 16]; /* with the lock held */
    const uint64_t completions = sw_device.completions;
    struct sw_udp_route route;
    size_t each;

    (void)watch, (void)events;
    sw_roce_port_flush();
    port.served = NULL;
    port.is_mixed = port.has_requests = 0;
    for (int i = 0; i < BURST && port.users && !sw_turn_is_over(); i++) {
        ssize_t size = sw_udp_receive(&port.udp, bytes, sizeof(bytes), &route, &each);
        if (size < 0 && errno == EAGAIN)
            break;
        sw_add_work(SW_FRAME_WORK + (size < 0 ? 0 : (uint64_t)size));
        for (ssize_t at = 0; at < size && (size_t)size <= sizeof(bytes); at += (ssize_t)each)
            arrived(&route, bytes + at, (size_t)(size - at) < each ? (size_t)(size - at) : each, 0);
    }
    run_due();
    if (port.users && port.served)
        judge(sw_device.completions != completions);
}

/* Packets that other processes of this user pass on. */
static void passed_ready(struct sw_watch *watch, uint32_t events)
{
    const size_t head = offsetof(struct passed_on, bytes);
    struct sw_claim *claim = SW_CONTAINER(watch, struct sw_claim, watch);
    struct passed_on packet;
    struct sw_udp_route from;

    (void)events;
    for (int i = 0; i < BURST && claim->is_open && !sw_turn_is_over(); i++) {
        ssize_t size = sw_udp_receive(&claim->udp, &packet, sizeof(packet), &from, NULL);
        if (size < 0 && errno == EAGAIN)
            break;
        sw_add_work(SW_FRAME_WORK + SW_DATAGRAM_MTU);
        if (size < (ssize_t)head || (size_t)size > sizeof(packet) ||
            from.path.source_port != SW_ROCE_PORT || from.path.source.s6_addr[12] != 127)
            continue;
        arrived(&packet.route, packet.bytes, (size_t)size - head, 1);
    }
    run_due();
}

/* -- queue pair 1 ----------------------------------------------------------------------------- */

void sw_roce_port_serve(const struct sw_services *by)
{
    services = by;
}

uint32_t sw_roce_port_number(void)
{
    return port.slot << NUMBER_SHIFT | (sw_random() >> (32 - NUMBER_SHIFT));
}

int sw_roce_port_is_ours(uint32_t number)
{
    return number >> NUMBER_SHIFT == port.slot;
}

void sw_roce_port_pass(uint32_t number, const struct sw_udp_route *route, const uint8_t *bytes,
                       size_t size)
{
    pass_on(SLOT_ADDRESS | number >> NUMBER_SHIFT, SLOT_PORT, route, bytes, size);
}

/* The loopback interface says at once that nobody has the port. The owner drops the empty packet. */
static int is_claimed(uint32_t host, uint16_t number)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(number)};
    int fd = sw_system->socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), error = 0;
    socklen_t size = sizeof(error);

    address.sin_addr.s_addr = htonl(host);
    if (fd < 0)
        return 1;
    if (sw_system->connect(fd, (struct sockaddr *)&address, sizeof(address)) ||
        sw_system->send(fd, "", 0, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ||
        sw_system->getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size))
        error = errno;
    sw_system->close(fd);
    return error != ECONNREFUSED;
}

static uint32_t place_of_claim(uint8_t space, const struct in6_addr *address)
{
    struct in6_addr any;

    map_ipv4(&any, INADDR_ANY);
    if (IN6_IS_ADDR_UNSPECIFIED(address))
        return ANY_IPV6 | space;
    if (IN6_ARE_ADDR_EQUAL(address, &any))
        return ANY_IPV4 | space;
    return AT_ONE | (sw_crc32(space, address->s6_addr, sizeof(*address)) & AT_ONE_MASK);
}

int sw_roce_port_pass_to_claim(uint8_t space, uint16_t number, const struct sw_udp_route *route,
                               const uint8_t *bytes, size_t size)
{
    const struct in6_addr *to = &route->path.destination;
    const uint32_t places[] = {
        place_of_claim(space, to),
        (IN6_IS_ADDR_V4MAPPED(to) ? ANY_IPV4 : ANY_IPV6) | space,
        ANY_IPV6 | space,
    };

    for (size_t i = 0; !sw_system->is_simulated && i < sizeof(places) / sizeof(*places); i++) {
        if (!is_claimed(places[i], number))
            continue;
        pass_on(places[i], number, route, bytes, size);
        return 1;
    }
    return 0;
}

void sw_roce_port_answer(const struct sw_udp_route *from, const uint8_t *payload, uint32_t size)
{
    struct sw_udp_route route = {
        .path.source = from->path.destination,
        .path.destination = from->path.source,
        .path.hop_limit = SW_HOP_LIMIT,
        .interface = from->interface,
    };

    sw_roce_port_tell(&route, payload, size);
}

void sw_roce_port_tell(const struct sw_udp_route *to, const uint8_t *payload, uint32_t size)
{
    struct sw_udp_route route = *to;
    uint8_t bytes[SW_ROCE_MOST];
    const struct sw_roce_packet packet = {
        .opcode = SW_UD_SEND_ONLY,
        .destination_qpn = SW_QPN_SERVICES,
        .source_qpn = SW_QPN_SERVICES,
        .qkey = SW_QKEY_SERVICES,
        .size = size,
    };

    sw_roce_port_flush(); /* a goodbye comes after what was posted before it */
    route.path.source_port = route.path.destination_port = SW_ROCE_PORT;
    const uint32_t headers = sw_roce_headers(bytes, &packet);
    memcpy(bytes + headers, payload, size);
    (void)sw_udp_send(&port.udp, &route, bytes,
                      sw_roce_seal(bytes, headers + size, &route.path, 0));
}

/* A port that is free at all addresses of IPv4, and at this place. */
static int open_free(struct sw_claim *claim, uint32_t place, uint8_t space, int flags)
{
    struct sw_claim any = {0};
    int error = EADDRINUSE;

    for (int i = 0; error == EADDRINUSE && i < MOST_PORTS_TRIED; i++) {
        error = open_claim(&any, ANY_IPV4 | space, 0, 0);
        if (error)
            break;
        error = open_claim(claim, place, flags, any.udp.port);
        sw_udp_close(&any.udp);
    }
    return error;
}

static int open_given(struct sw_claim *claim, uint32_t place, uint8_t space, int flags,
                      uint16_t number)
{
    if (place >= AT_ONE && !flags &&
        (is_claimed(ANY_IPV4 | space, number) || is_claimed(ANY_IPV6 | space, number)))
        return EADDRINUSE;
    return open_claim(claim, place, flags, number);
}

int sw_roce_port_claim(struct sw_claim *claim, uint8_t space, const struct in6_addr *address,
                       int may_share, uint16_t *number)
{
    const uint32_t place = place_of_claim(space, address);

    const int flags = may_share ? SW_UDP_SHARED : 0;

    if (sw_system->is_simulated) /* such a host is one process: the caller compares */
        return 0;
    int error = !*number && place != (ANY_IPV4 | space)
                    ? open_free(claim, place, space, flags)
                    : open_given(claim, place, space, flags, *number);
    if (error)
        return error;
    claim->watch.ready = passed_ready;
    error = sw_watch(&claim->watch, claim->udp.fd, EPOLLIN);
    if (error) {
        sw_udp_close(&claim->udp);
        claim->is_open = 0;
        return error;
    }
    *number = claim->udp.port;
    return 0;
}

void sw_roce_port_unclaim(struct sw_claim *claim)
{
    if (!claim->is_open)
        return;
    claim->is_open = 0;
    sw_unwatch(&claim->watch);
    sw_udp_close(&claim->udp);
}

/* -- sending ---------------------------------------------------------------------------------- */

/*
 * Packets for one call. They go to one queue pair, and all but the last have the same size. The room
 * of one more is free. Used with the lock held, and empty when it is returned, unless it is held.
 */
static struct {
    uint8_t bytes[BATCH_BYTES + SW_ROCE_MOST];
    uint32_t used, count, each;
    struct sw_udp_route route;
} batch;

/* One by one, if the kernel refuses several. They have another identification then. */
static void send_each(void)
{
    for (uint32_t at = 0, size; at < batch.used; at += size) {
        size = batch.used - at < batch.each ? batch.used - at : batch.each;
        sw_roce_seal(batch.bytes + at, size - SW_ROCE_ICRC, &batch.route.path, 0);
        (void)sw_udp_send(&port.udp, &batch.route, batch.bytes + at, size);
    }
}

void sw_roce_port_flush(void)
{
    sw_unhold(&port.held);
    if (!batch.count)
        return;
    if (batch.count == 1)
        (void)sw_udp_send(&port.udp, &batch.route, batch.bytes, batch.used);
    else if (sw_udp_send_several(&port.udp, &batch.route, batch.bytes, batch.used,
                                 (uint16_t)batch.each))
        send_each();
    batch.used = batch.count = 0;
}

static void release(struct sw_held *held, int is_late)
{
    (void)held, (void)is_late;
    sw_roce_port_flush();
}

void sw_roce_port_flush_soon(void)
{
    struct sw_progress *progress = port.member.progress;

    if (!progress || !progress->is_lent || !batch.count || sw_system->is_simulated) {
        sw_roce_port_flush();
        return;
    }
    port.held.release = release;
    sw_hold(progress, &port.held);
}

uint8_t *sw_roce_port_room(void)
{
    return batch.bytes + batch.used;
}

/* Whether a packet of this size can be in one call with the others. */
static int fits(uint32_t size)
{
    const uint8_t *packet = batch.bytes + batch.used;

    /* The simulated network takes them one by one. */
    return !sw_system->is_simulated && batch.count < MOST_BATCH && size <= batch.each &&
           batch.used + size <= BATCH_BYTES && batch.used == batch.count * batch.each &&
           !memcmp(packet + QPN_BYTE, batch.bytes + QPN_BYTE, 3);
}

void sw_roce_port_add(struct sw_udp_route *route, uint32_t size)
{
    const uint32_t whole = ((size + 3) & ~3u) + SW_ROCE_ICRC;

    route->path.source_port = route->path.destination_port = SW_ROCE_PORT;
    if (batch.count && (memcmp(&batch.route, route, sizeof(*route)) || !fits(whole))) {
        const uint32_t at = batch.used;
        sw_roce_port_flush();
        memmove(batch.bytes, batch.bytes + at, size);
    }
    if (!batch.count) {
        batch.route = *route;
        batch.each = whole;
    }
    batch.used += sw_roce_seal(batch.bytes + batch.used, size, &route->path, batch.count);
    batch.count++;
}

/* -- opening and closing ---------------------------------------------------------------------- */

/*
 * Have the kernel give a packet to the process of its queue pair, or of its conversation: a process
 * that says goodbye and exits would lose what it has to pass on. The kernel numbers the processes in
 * the order in which they came, until one goes: then the last one gets the number of that one.
 */
static void steer(int fd)
{
    struct sock_filter steps[] = {
        {.code = BPF_LD | BPF_W | BPF_ABS, .k = QPN_BYTE - 1},
        {.code = BPF_ALU | BPF_AND | BPF_K, .k = 0xffffff},
        {.code = BPF_JMP | BPF_JEQ | BPF_K, .k = SW_QPN_SERVICES, .jt = 2},
        {.code = BPF_LD | BPF_B | BPF_ABS, .k = QPN_BYTE},
        {.code = BPF_RET | BPF_A},
        {.code = BPF_LD | BPF_H | BPF_ABS, .k = MESSAGE},
        {.code = BPF_JMP | BPF_JEQ | BPF_K, .k = SW_CM_REQ, .jt = 6},
        {.code = BPF_JMP | BPF_JEQ | BPF_K, .k = SW_SIDR_REQ, .jt = 5},
        {.code = BPF_JMP | BPF_JEQ | BPF_K, .k = SW_SIDR_REP, .jt = 2},
        {.code = BPF_LD | BPF_B | BPF_ABS, .k = ANY_FOR},
        {.code = BPF_RET | BPF_A},
        {.code = BPF_LD | BPF_B | BPF_ABS, .k = SIDR_REP_FOR},
        {.code = BPF_RET | BPF_A},
        {.code = BPF_RET | BPF_K, .k = 0},
    };
    struct sock_fprog program = {.len = sizeof(steps) / sizeof(*steps), .filter = steps};

    if (sw_system->setsockopt(fd, SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program,
                              sizeof(program))) {
        /* Any process then gets a packet, and passes it on. */
    }
}

/*
 * Processes that open the port at the same time would get slots in another order than the kernel's:
 * let one after the other do it. A name of the kernel's is the key, which it takes back from a
 * process that ends. Returns its descriptor; -1: it cannot be had, and the order does not matter that
 * much.
 */
static int take_key(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "\0aiordma-roce"};
    const struct timespec pause = {.tv_nsec = 100000};
    int fd = sw_system->is_simulated
                 ? -1
                 : sw_system->socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    for (int i = 0; fd >= 0 && i < MOST_PAUSES; i++) {
        if (!sw_system->bind(fd, (struct sockaddr *)&name, sizeof(name)))
            return fd;
        nanosleep(&pause, NULL);
    }
    if (fd >= 0)
        sw_system->close(fd);
    return -1;
}

static int open_sockets(void)
{
    struct sockaddr_in6 ipv6 = {.sin6_family = AF_INET6, .sin6_port = htons(SW_ROCE_PORT)};
    struct sockaddr_in ipv4 = {.sin_family = AF_INET, .sin_port = htons(SW_ROCE_PORT)};
    const int flags = SW_UDP_PORT_SHARED | SW_UDP_SEVERAL;

    int error = sw_system->is_simulated ? 0 : take_slot();
    if (error)
        return error;
    error = sw_udp_open(&port.udp, (struct sockaddr *)&ipv6, flags);
    if (error == EAFNOSUPPORT || error == EADDRNOTAVAIL)
        error = sw_udp_open(&port.udp, (struct sockaddr *)&ipv4, flags);
    if (error && port.own.is_open) {
        sw_udp_close(&port.own.udp);
        port.own.is_open = 0;
    }
    return error;
}

static void close_port(void)
{
    sw_roce_port_flush();
    sw_progress_unwatch(&port.member);
    sw_udp_close(&port.udp);
    sw_roce_port_unclaim(&port.own);
}

static int open_port(void)
{
    int key = take_key(), error = open_sockets();

    if (key >= 0)
        sw_system->close(key);
    if (error)
        return error;
    steer(port.udp.fd);
    port.watch.ready = ready;
    port.member.watch = &port.watch;
    port.own.watch.ready = passed_ready;
    error = sw_progress_watch(NULL, &port.member, port.udp.fd, EPOLLIN);
    if (!error && port.own.is_open)
        error = sw_watch(&port.own.watch, port.own.udp.fd, EPOLLIN);
    if (error)
        close_port();
    return error;
}

static uint32_t free_number(void)
{
    for (int i = 0; i < TRIES; i++) {
        uint32_t number = port.slot << SLOT_SHIFT | (sw_random() & 0xffff);
        /* 0 and 1 are reserved for management, and the highest number for multicast. */
        if (number > 1 && number != SW_QPN_GROUP && !sw_find_queue_pair(number))
            return number;
    }
    return 0;
}

int sw_roce_port_enter(void)
{
    int error = port.users ? 0 : open_port();

    port.users += !error;
    return error;
}

int sw_roce_port_join(uint32_t *number)
{
    int error = sw_roce_port_enter();

    if (error)
        return error;
    *number = free_number();
    if (*number)
        return 0;
    sw_roce_port_leave();
    return EAGAIN;
}

void sw_roce_port_leave(void)
{
    if (--port.users)
        return;
    close_port();
}

void sw_roce_port_forked(void)
{
    memset(&port, 0, sizeof(port));
    batch.used = batch.count = 0;
}
