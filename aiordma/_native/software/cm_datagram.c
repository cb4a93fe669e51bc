/*
 * The UDP port space. A peer that wants to send datagrams to a port requests the number of its
 * queue pair (SIDR_REQ), and the program of the port replies (SIDR_REP). There is no connection. A
 * port is a UDP socket. Its packets are those of RoCE v2 to queue pair 1. On the RoCE device they
 * go to RoCE's own port, and the socket is a claim that the other processes respect (roce_port.h).
 *
 * A request is repeated until a reply arrives. The program of the port gets it once.
 */
#include "cm_datagram.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "cm_addresses.h"
#include "gids.h"
#include "group.h"
#include "cm_messages.h"
#include "udp.h"

enum {
    BURST = 64,
    WORK_OF_PACKET = 16 * SW_FRAME_WORK, /* a packet can require a search through all identifiers */
    REMEMBERED = 256,                    /* requests, and the replies to them */
    FIRST_PATIENCE = 100,                /* milliseconds; doubled for each try */
    MOST_PATIENCE = 4096,
    TRIES = 15,
    SPACE = RDMA_PS_UDP & 0xff, /* of claims */
};

struct answer {
    struct in6_addr peer;
    uint16_t peer_port;
    int is_taken, is_answered;
    struct sw_sidr_reply reply; /* number and transaction are set with the request */
};

struct sw_service {
    struct sw_identifier *identifier;
    /* The port, if the identifier has one: a socket of its own, or a claim on RoCE's port. */
    int is_open;
    uint16_t port;
    struct sw_udp udp;
    struct sw_watch watch;
    struct sw_claim claim;
    int backlog; /* 0: it does not listen */
    struct answer *answers;
    uint32_t next_answer;
    /* The request: sent by this identifier, or received from the peer that route leads to. */
    struct sw_udp_route route;
    uint16_t peers_port;
    uint64_t transaction;
    uint32_t number, tries;
    int failure;                    /* an errno of sending the request */
    struct sw_identifier *listener; /* that received the request; NULL once it is destroyed */
};

static int is_same(const struct in6_addr *one, const struct in6_addr *other)
{
    return IN6_ARE_ADDR_EQUAL(one, other);
}

static uint32_t scope_of(const struct sockaddr *address)
{
    return address->sa_family == AF_INET6
               ? ((const struct sockaddr_in6 *)(const void *)address)->sin6_scope_id
               : 0;
}

static void read_address(const struct sockaddr *address, struct in6_addr *to)
{
    union ibv_gid gid;

    sw_gid_of(address, &gid);
    memcpy(to, &gid, sizeof(*to));
}

/* -- packets ----------------------------------------------------------------------------- */

static int send_mad(const struct sw_udp *udp, const struct sw_udp_route *to, const uint8_t *mad)
{
    struct sw_udp_route route = *to;
    uint8_t packet[SW_ROCE_HEADERS + SW_MAD + SW_ROCE_TRAILER];
    struct sw_roce_packet datagram = {
        .opcode = SW_UD_SEND_ONLY,
        .destination_qpn = SW_QPN_SERVICES,
        .source_qpn = SW_QPN_SERVICES,
        .qkey = SW_QKEY_SERVICES,
        .size = SW_MAD,
    };

    route.path.source_port = udp->port;
    uint32_t headers = sw_roce_headers(packet, &datagram);
    memcpy(packet + headers, mad, SW_MAD);
    uint32_t size = sw_roce_seal(packet, headers + SW_MAD, &route.path, 0);
    /* The first error can be that of an earlier packet, reported by ICMP. */
    return sw_udp_send(udp, &route, packet, size) ? sw_udp_send(udp, &route, packet, size) : 0;
}

static int tell(const struct sw_service *service, const struct sw_udp_route *to, const uint8_t *mad)
{
    if (!service->identifier->is_roce)
        return send_mad(&service->udp, to, mad);
    sw_roce_port_tell(to, mad, SW_MAD);
    return 0;
}

/* If the reply is lost, the peer repeats its request. */
static void send_reply(const struct sw_service *service, const struct sw_udp_route *route,
                       const struct sw_sidr_reply *reply)
{
    uint8_t mad[SW_MAD];

    sw_sidr_write_reply(mad, reply);
    (void)tell(service, route, mad);
}

static void turn_around(const struct sw_udp_route *from, struct sw_udp_route *to)
{
    memset(to, 0, sizeof(*to));
    to->path.source = from->path.destination;
    to->path.destination = from->path.source;
    to->path.destination_port = from->path.source_port;
    to->path.hop_limit = SW_HOP_LIMIT;
    to->interface = from->interface;
}

/* -- requests from peers ----------------------------------------------------------------- */

static struct answer *find_answer(struct sw_service *service, const struct in6_addr *peer,
                                  uint16_t peer_port, uint64_t transaction, uint32_t number)
{
    for (uint32_t i = 0; i < REMEMBERED; i++) {
        struct answer *answer = &service->answers[i];
        if (answer->is_taken && answer->reply.number == number &&
            answer->reply.transaction == transaction && answer->peer_port == peer_port &&
            is_same(&answer->peer, peer))
            return answer;
    }
    return NULL;
}

static void remember(struct sw_service *service, const struct sw_sidr_request *request)
{
    struct answer *answer = &service->answers[service->next_answer++ % REMEMBERED];

    memset(answer, 0, sizeof(*answer));
    answer->is_taken = 1;
    answer->peer = request->source;
    answer->peer_port = request->source_port;
    answer->reply.transaction = request->transaction;
    answer->reply.number = request->number;
}

/* Count the requests that the program has not taken yet. */
static int count_waiting(const struct sw_identifier *listener)
{
    const struct sw_event_channel *channel = (const void *)listener->ibv.channel;
    int count = 0;

    for (const struct sw_event *event = channel ? channel->first : NULL; event; event = event->next)
        if (event->counted == listener && event->ibv.event == RDMA_CM_EVENT_CONNECT_REQUEST)
            count++;
    return count;
}

/*
 * Create an identifier and an event for a request, and remember it. Without memory the request is
 * dropped: the peer will repeat it.
 */
static void put_to_program(struct sw_service *asked, const struct sw_udp_route *from,
                           const struct sw_sidr_request *request)
{
    struct sw_identifier *identifier = sw_new_requesting(asked->identifier);

    if (!identifier)
        return;
    struct rdma_addr *addresses = &identifier->ibv.route.addr;
    struct sw_service *service = calloc(1, sizeof(*service));
    struct sw_event *event = sw_new_request_event(asked->identifier, identifier);
    int error = service && event ? 0 : ENOMEM;
    if (!error) {
        sw_set_address(&addresses->src_storage, &request->destination, asked->port,
                       from->interface);
        sw_set_address(&addresses->dst_storage, &request->source, request->source_port,
                       from->interface);
        error = sw_bind_device(identifier);
    }
    if (!error && identifier->is_roce)
        error = sw_roce_port_enter();
    if (error) {
        free(event);
        free(service);
        sw_drop_identifier(identifier);
        return;
    }
    service->identifier = identifier;
    service->listener = asked->identifier;
    service->peers_port = request->source_port;
    service->transaction = request->transaction;
    service->number = request->number;
    turn_around(from, &service->route);
    service->route.path.traffic_class = identifier->has_tos ? identifier->tos : 0;
    identifier->service = service;
    sw_set_private_data(event, request->private_data, SW_SIDR_REQUEST_DATA);
    remember(asked, request);
    sw_report(event);
}

static struct sw_sidr_reply nobody_for(const struct sw_sidr_request *request)
{
    return (struct sw_sidr_reply){
        .transaction = request->transaction,
        .number = request->number,
        .status = SW_SIDR_NOBODY,
        .port = request->port,
    };
}

/* The addresses in a request must be those of its packet. */
static int is_from(const struct sw_sidr_request *request, const struct sw_udp_route *from)
{
    return is_same(&request->source, &from->path.source) &&
           is_same(&request->destination, &from->path.destination);
}

static void asked(struct sw_service *service, const struct sw_udp_route *from,
                  const struct sw_sidr_request *request)
{
    struct sw_sidr_reply nobody = nobody_for(request);
    struct sw_udp_route back;

    turn_around(from, &back);
    if (!service->backlog) {
        send_reply(service, &back, &nobody);
        return;
    }
    const struct answer *known = find_answer(service, &request->source, request->source_port,
                                             request->transaction, request->number);
    if (known) {
        if (known->is_answered)
            send_reply(service, &back, &known->reply);
        return;
    }
    /* Beyond the backlog the request is dropped: the peer will repeat it. */
    if (count_waiting(service->identifier) < service->backlog)
        put_to_program(service, from, request);
}

static int answer(struct sw_identifier *identifier, enum sw_sidr_status status)
{
    struct sw_service *service = identifier->service;
    struct sw_sidr_reply reply = {.status = (uint8_t)status, .qkey = RDMA_UDP_QKEY};
    size_t size = identifier->parameters.private_data_len;

    if (!service || size > SW_SIDR_REPLY_DATA)
        return EINVAL;
    reply.transaction = service->transaction;
    reply.number = service->number;
    reply.port = ntohs(*sw_port_of(&identifier->ibv.route.addr.src_addr));
    if (status == SW_SIDR_FOUND)
        reply.qp_num = identifier->ibv.qp ? identifier->ibv.qp->qp_num
                                          : identifier->parameters.qp_num & 0xffffff;
    else
        reply.qkey = 0;
    memcpy(reply.private_data, identifier->private_data, size);
    if (service->listener) {
        struct sw_service *listening = service->listener->service;
        struct answer *kept = find_answer(listening, &service->route.path.destination,
                                          service->peers_port, reply.transaction, reply.number);
        if (kept) {
            kept->reply = reply;
            kept->is_answered = 1;
        }
    }
    if (service->listener || identifier->is_roce) {
        send_reply(service->listener ? service->listener->service : service, &service->route,
                   &reply);
        return 0;
    }
    /* The listener is gone, and another socket can have its port: reply from any other port. */
    struct sockaddr_storage source = identifier->ibv.route.addr.src_storage;
    struct sw_udp udp;
    *sw_port_of((struct sockaddr *)&source) = 0;
    int error = sw_udp_open(&udp, (struct sockaddr *)&source, 0);
    if (error)
        return error;
    uint8_t mad[SW_MAD];
    sw_sidr_write_reply(mad, &reply);
    (void)send_mad(&udp, &service->route, mad);
    sw_udp_close(&udp);
    return 0;
}

static int accept_question(struct sw_identifier *identifier)
{
    int error = answer(identifier, SW_SIDR_FOUND);

    if (!error)
        identifier->state = SW_CM_CONNECTED;
    return error;
}

static int reject_question(struct sw_identifier *identifier)
{
    return answer(identifier, SW_SIDR_REFUSED);
}

/* -- requests to peers ------------------------------------------------------------------- */

static int ask(struct sw_identifier *identifier)
{
    struct sw_service *service = identifier->service;
    const struct sw_roce_path *path = &service->route.path;
    struct sw_sidr_request request = {
        .transaction = service->transaction,
        .number = service->number,
        .source = path->source,
        .destination = path->destination,
        .source_port = service->port,
        .port = service->peers_port,
    };
    uint8_t mad[SW_MAD];

    memcpy(request.private_data, identifier->private_data, identifier->parameters.private_data_len);
    sw_sidr_write_request(mad, &request);
    return tell(service, &service->route, mad);
}

/* End without a queue pair. status is a negative errno, or the status of the peer's reply. */
static void give_up(struct sw_identifier *identifier, int status, const uint8_t *data)
{
    struct sw_event *event = sw_last_event(identifier, RDMA_CM_EVENT_UNREACHABLE, status);

    if (data)
        sw_set_private_data(event, data, SW_SIDR_REPLY_DATA);
    sw_cancel(&identifier->timer);
    identifier->state = SW_CM_DISCONNECTED;
    sw_report(event);
}

static int is_final(int error)
{
    return error == ECONNREFUSED || error == EHOSTUNREACH || error == ENETUNREACH ||
           error == EADDRNOTAVAIL || error == EINVAL || error == EACCES || error == EPERM;
}

static void fail(struct sw_identifier *identifier, int error)
{
    /* ICMP reports that no socket has the port. The kernel's CM would send this reply. */
    give_up(identifier, error == ECONNREFUSED ? SW_SIDR_NOBODY : -error, NULL);
}

/* Send the request, at first or again. */
static void expired(struct sw_timer *timer)
{
    struct sw_identifier *identifier = SW_CONTAINER(timer, struct sw_identifier, timer);
    struct sw_service *service = identifier->service;

    if (identifier->state != SW_CM_CONNECTING)
        return;
    if (!service->failure && service->tries >= TRIES)
        service->failure = ETIMEDOUT;
    if (!service->failure) {
        int error = ask(identifier);
        service->failure = is_final(error) ? error : 0;
    }
    if (service->failure) {
        fail(identifier, service->failure);
        return;
    }
    uint32_t patience = FIRST_PATIENCE;
    for (uint32_t i = 0; i < service->tries && patience < MOST_PATIENCE; i++)
        patience *= 2;
    service->tries++;
    (void)sw_call_later(timer, patience < MOST_PATIENCE ? patience : MOST_PATIENCE);
}

/* Find the identifier that sent the request. Another one can share its port and get the reply. */
static struct sw_identifier *find_asking(const struct sw_sidr_reply *reply,
                                         const struct in6_addr *peer)
{
    struct sw_identifier *each;

    for (each = sw_identifiers; each; each = each->next) {
        const struct sw_service *service = each->service;
        if (service && each->state == SW_CM_CONNECTING && service->number == reply->number &&
            service->transaction == reply->transaction && service->peers_port == reply->port &&
            is_same(&service->route.path.destination, peer))
            return each;
    }
    return NULL;
}

static int fill_address_vector(struct sw_identifier *identifier, struct ibv_ah_attr *attr)
{
    const struct sw_roce_path *path = &identifier->service->route.path;
    union ibv_gid ours;

    memcpy(&ours, &path->source, sizeof(ours));
    int index = sw_gid_index(&ours);
    if (index < 0)
        return errno;
    attr->is_global = 1;
    attr->port_num = 1;
    memcpy(&attr->grh.dgid, &path->destination, sizeof(attr->grh.dgid));
    attr->grh.sgid_index = (uint8_t)index;
    attr->grh.hop_limit = SW_HOP_LIMIT;
    attr->grh.traffic_class = path->traffic_class;
    return 0;
}

static void answered(struct sw_identifier *identifier, const struct sw_sidr_reply *reply)
{
    /* perftest's server listens anew, as for connections (cm_roce.c). */
    if (reply->status == SW_SIDR_NOBODY && identifier->is_roce && identifier->service->tries == 1)
        return;
    if (reply->status != SW_SIDR_FOUND) {
        give_up(identifier, reply->status, reply->private_data);
        return;
    }
    struct sw_event *event = sw_new_event(identifier, RDMA_CM_EVENT_ESTABLISHED, 0);
    if (!event)
        return; /* the request and its reply will be repeated */
    int error = fill_address_vector(identifier, &event->ibv.param.ud.ah_attr);
    if (error) {
        free(event);
        give_up(identifier, -error, NULL);
        return;
    }
    event->ibv.param.ud.qp_num = reply->qp_num;
    event->ibv.param.ud.qkey = reply->qkey;
    sw_set_private_data(event, reply->private_data, SW_SIDR_REPLY_DATA);
    sw_cancel(&identifier->timer);
    identifier->state = SW_CM_CONNECTED;
    sw_report(event);
}

/* -- the port ---------------------------------------------------------------------------- */

static void read_refusals(struct sw_service *service)
{
    struct in6_addr peer;
    uint16_t port;
    int error;

    for (int i = 0; i < BURST && (error = sw_udp_refusal(&service->udp, &peer, &port)); i++) {
        struct sw_identifier *identifier = service->identifier;
        if (identifier->state == SW_CM_CONNECTING && is_final(error) &&
            port == service->peers_port && is_same(&peer, &service->route.path.destination))
            fail(identifier, error);
    }
}

static void read_packet(struct sw_service *service, const struct sw_udp_route *from,
                        const uint8_t *packet, size_t size)
{
    struct sw_roce_packet datagram;
    struct sw_sidr_request request;
    struct sw_sidr_reply reply;

    if (sw_roce_read(packet, size, &from->path, &datagram) ||
        datagram.destination_qpn != SW_QPN_SERVICES || datagram.qkey != SW_QKEY_SERVICES)
        return;
    if (!sw_sidr_read_request(datagram.payload, datagram.size, &request)) {
        if (request.port == service->port && request.source_port == from->path.source_port &&
            is_from(&request, from))
            asked(service, from, &request);
    } else if (!sw_sidr_read_reply(datagram.payload, datagram.size, &reply)) {
        struct sw_identifier *identifier = find_asking(&reply, &from->path.source);
        if (identifier)
            answered(identifier, &reply);
    }
}

static void ready(struct sw_watch *watch, uint32_t events)
{
    struct sw_service *service = SW_CONTAINER(watch, struct sw_service, watch);
    uint8_t packet[SW_ROCE_HEADERS + SW_MAD + SW_ROCE_TRAILER];
    struct sw_udp_route from;

    if (events & EPOLLERR)
        read_refusals(service);
    for (int i = 0; i < BURST && !sw_turn_is_over(); i++) {
        ssize_t size = sw_udp_receive(&service->udp, packet, sizeof(packet), &from, NULL);
        if (size < 0 && (errno == EAGAIN || errno == EBADF))
            return;
        sw_add_work(WORK_OF_PACKET);
        if (size >= 0 && (size_t)size <= sizeof(packet))
            read_packet(service, &from, packet, (size_t)size);
    }
}

/* A socket of its own. */
static int open_socket(struct sw_service *service, const struct sw_identifier *identifier)
{
    const struct sockaddr *address = &identifier->ibv.route.addr.src_addr;
    int flags = SW_UDP_ERRORS | (identifier->reuse_address ? SW_UDP_SHARED : 0) |
                (identifier->ipv6_only ? SW_UDP_IPV6_ONLY : 0);
    int error = sw_udp_open(&service->udp, address, flags);
    if (!error) {
        service->watch.ready = ready;
        error = sw_watch(&service->watch, service->udp.fd, EPOLLIN);
        if (error)
            sw_udp_close(&service->udp);
    }
    service->port = service->udp.port;
    return error;
}

/* A claim: the packets come to RoCE's port. */
static int enter_port(struct sw_service *service, struct sw_identifier *identifier)
{
    int error = sw_roce_port_enter();

    if (error)
        return error;
    error = sw_take_roce_port(identifier, SPACE, &service->claim);
    service->port = ntohs(*sw_port_of(&identifier->ibv.route.addr.src_addr));
    if (error)
        sw_roce_port_leave();
    return error;
}

static int take_port(struct sw_identifier *identifier)
{
    struct sw_service *service = calloc(1, sizeof(*service));

    if (!service)
        return ENOMEM;
    int error =
        identifier->is_roce ? enter_port(service, identifier) : open_socket(service, identifier);
    if (error) {
        free(service);
        return error;
    }
    service->is_open = 1;
    service->identifier = identifier;
    *sw_port_of(&identifier->ibv.route.addr.src_addr) = htons(service->port);
    identifier->service = service;
    return 0;
}

static int begin_asking(struct sw_identifier *identifier)
{
    struct rdma_addr *addresses = &identifier->ibv.route.addr;

    if (identifier->parameters.private_data_len > SW_SIDR_REQUEST_DATA)
        return EINVAL;
    int error = identifier->service ? 0 : take_port(identifier);
    if (error)
        return error;
    struct sw_service *service = identifier->service;
    memset(&service->route, 0, sizeof(service->route));
    read_address(&addresses->src_addr, &service->route.path.source);
    read_address(&addresses->dst_addr, &service->route.path.destination);
    service->peers_port = ntohs(*sw_port_of(&addresses->dst_addr));
    service->route.path.destination_port = service->peers_port;
    service->route.path.hop_limit = SW_HOP_LIMIT;
    service->route.path.traffic_class = identifier->has_tos ? identifier->tos : 0;
    service->route.interface = scope_of(&addresses->dst_addr);
    if (!service->route.interface)
        service->route.interface = scope_of(&addresses->src_addr);
    service->transaction = (uint64_t)sw_random() << 32;
    service->transaction |= sw_random();
    service->number = identifier->is_roce ? sw_roce_port_number() : sw_random();
    service->tries = 0;
    service->failure = 0;
    identifier->timer.expired = expired;
    return sw_call_later(&identifier->timer, 0);
}

static int hear_questions(struct sw_identifier *identifier, int backlog)
{
    struct sw_service *service = identifier->service;

    if (!service || !service->is_open || service->backlog)
        return EINVAL;
    service->answers = calloc(REMEMBERED, sizeof(*service->answers));
    if (!service->answers)
        return ENOMEM;
    service->backlog = backlog;
    return 0;
}

static void forget(struct sw_identifier *identifier)
{
    struct sw_service *service = identifier->service;

    sw_groups_forget(identifier);
    if (!service)
        return;
    if (identifier->state == SW_CM_REQUESTED) {
        identifier->parameters.private_data_len = 0;
        (void)answer(identifier, SW_SIDR_REFUSED);
    }
    identifier->service = NULL;
    if (service->backlog)
        for (struct sw_identifier *each = sw_identifiers; each; each = each->next)
            if (each->service && each->service->listener == identifier)
                each->service->listener = NULL;
    if (identifier->is_roce) {
        sw_roce_port_unclaim(&service->claim);
        sw_roce_port_leave();
    } else if (service->is_open) {
        sw_unwatch(&service->watch);
        sw_udp_close(&service->udp);
    }
    free(service->answers);
    free(service);
}

/* -- what comes to RoCE's port ----------------------------------------------------------- */

static void came_request(const struct sw_udp_route *from, const struct sw_sidr_request *request,
                         const uint8_t *bytes, size_t size, int is_passed)
{
    const struct sw_sidr_reply nobody = nobody_for(request);
    uint8_t mad[SW_MAD];

    if (!is_from(request, from))
        return;
    struct sw_identifier *listener =
        sw_find_listener(&sw_datagram_space, &request->destination, request->port);
    if (listener) {
        asked(listener->service, from, request);
        return;
    }
    if (!is_passed && sw_roce_port_pass_to_claim(SPACE, request->port, from, bytes, size))
        return;
    sw_sidr_write_reply(mad, &nobody);
    sw_roce_port_answer(from, mad, SW_MAD);
}

void sw_datagram_came(const struct sw_udp_route *from, const struct sw_roce_packet *packet,
                      const uint8_t *bytes, size_t size, int is_passed)
{
    struct sw_sidr_request request;
    struct sw_sidr_reply reply;

    if (!sw_sidr_read_request(packet->payload, packet->size, &request)) {
        came_request(from, &request, bytes, size, is_passed);
    } else if (!sw_sidr_read_reply(packet->payload, packet->size, &reply)) {
        struct sw_identifier *identifier = find_asking(&reply, &from->path.source);
        if (identifier)
            answered(identifier, &reply);
        else if (!is_passed && !sw_roce_port_is_ours(reply.number))
            sw_roce_port_pass(reply.number, from, bytes, size);
    }
}

/* There is no connection to end. */
static int disconnect(struct sw_identifier *identifier)
{
    (void)identifier;
    return EINVAL;
}

static void do_nothing(struct sw_identifier *identifier)
{
    (void)identifier;
}

const struct sw_port_space sw_datagram_space = {
    .bind = take_port,
    .listen = hear_questions,
    .connect = begin_asking,
    .accept = accept_question,
    .reject = reject_question,
    .disconnect = disconnect,
    .request_taken = do_nothing,
    .forget = forget,
    .forked = do_nothing, /* the engine watches its socket and closes it */
    .reports = {.first_frame = do_nothing, .ended = do_nothing, .lost = sw_lose_queue_pair},
};
