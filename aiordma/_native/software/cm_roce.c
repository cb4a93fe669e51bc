/*
 * The TCP port space over RoCE: InfiniBand's connection manager (InfiniBand specification, volume 1,
 * 12.9), as Linux has it.
 *
 *     connects                          listens
 *     CONNECTING    -- REQ -->          REQUESTED   the program has a CONNECT_REQUEST
 *                   <-- MRA --                      ... and takes its time
 *                   <-- REP --          ACCEPTING   the program has accepted
 *     CONNECTED     -- RTU -->          CONNECTED
 *     DISCONNECTED  -- DREQ -->         DISCONNECTED, by either side
 *                   <-- DREP --
 *
 * Each message goes to queue pair 1, and can be lost, doubled and late. A REQ, a REP and a DREQ are
 * repeated until they are answered, or time is up. Whoever knows the two numbers of a connection can
 * end it, so they are random.
 */
#include "cm_roce.h"

#include <stdlib.h>
#include <string.h>

#include "cm_addresses.h"
#include "cm_datagram.h"
#include "cm_messages.h"
#include "datagram.h"
#include "gids.h"
#include "states.h"

enum {
    FIRST_PATIENCE = 200, /* milliseconds; doubled for each try */
    MOST_PATIENCE = 4096,
    LONG_PATIENCE = 60000,                /* at most, after an MRA */
    TRIES = 15,                           /* about 50 s */
    TRIES_TO_LEAVE = 5,                   /* 6 s */
    LONG_TIMEOUT = 23,                    /* 34 s, by an MRA */
    ACK_TIMEOUT = 18,                     /* 1.07 s, if the program chose none */
    RNR_TIMER = 20,                       /* 10 ms; Linux has 655 */
    SPACE = RDMA_PS_TCP & 0xff,           /* of claims */
    HEADERS = 96,                         /* of IPv6, UDP and RoCE, as Linux counts them */
    WORK_OF_MESSAGE = 16 * SW_FRAME_WORK, /* it can require a search through all identifiers */
    PSN_MASK = 0xffffff,
};

/* A connection, or an attempt to make one; or a port, for a listener. */
struct sw_conversation {
    struct sw_identifier *identifier;
    struct sw_claim claim; /* of its port; closed for a requested one, which has its listener's */
    uint32_t number, peers_number;
    uint32_t busy_number; /* the peer's, while it takes its time: another one can accept */
    uint64_t transaction, guid;
    struct ibv_ah_attr vector;
    struct sw_udp_route route; /* to the peer */
    uint32_t psn, peers_psn, peers_qpn;
    uint8_t mtu, ack_timeout, retry_count, rnr_retry_count; /* the last is what the peer asks for */
    uint8_t responder_resources, initiator_depth;           /* this side's, as agreed */
    int is_accepted;     /* connecting, and the REP has arrived; the program has to learn of it */
    int is_leaving;      /* disconnected, and the DREP has not arrived */
    uint8_t mad[SW_MAD]; /* the message that is repeated */
    uint32_t tries;
    struct sw_identifier *listener; /* of a requested one; NULL once it is destroyed */
    int backlog, waiting;           /* of a listener */
};

/* -- what both sides do ------------------------------------------------------------------------- */

static struct sw_queue_pair *pair_of(const struct sw_identifier *identifier)
{
    return (struct sw_queue_pair *)identifier->ibv.qp;
}

static uint8_t least(uint8_t one, uint8_t other)
{
    return one < other ? one : other;
}

/* What the program asked for; "as many as there are" is the device's maximum. */
static uint8_t depth(uint8_t asked)
{
    return least(asked, SW_MOST_DEPTH);
}

static struct sw_conversation *find(uint32_t number)
{
    for (struct sw_identifier *each = sw_identifiers; each; each = each->next)
        if (each->conversation && each->conversation->number == number)
            return each->conversation;
    return NULL;
}

static uint64_t random_64(void)
{
    uint64_t high = sw_random();

    return high << 32 | sw_random();
}

/* Create a conversation with a number, which keeps the port open. NULL: errno. */
static struct sw_conversation *begin(struct sw_identifier *identifier)
{
    struct sw_conversation *conversation = calloc(1, sizeof(*conversation));
    int error = conversation ? sw_roce_port_enter() : ENOMEM;

    if (error) {
        free(conversation);
        errno = error;
        return NULL;
    }
    do
        conversation->number = sw_roce_port_number();
    while (!conversation->number || find(conversation->number));
    conversation->identifier = identifier;
    conversation->psn = sw_random() & PSN_MASK;
    conversation->guid = random_64(); /* Linux then finds no older connection to confuse it with */
    return conversation;
}

/* Compute the path to the peer from the identifier's addresses. */
static int find_way(struct sw_conversation *conversation, uint8_t traffic_class)
{
    const struct rdma_ib_addr *gids = &conversation->identifier->ibv.route.addr.addr.ibaddr;
    struct ibv_ah_attr *vector = &conversation->vector;
    int index = sw_gid_index(&gids->sgid);

    if (index < 0)
        return errno;
    vector->is_global = 1;
    vector->port_num = 1;
    vector->grh.dgid = gids->dgid;
    vector->grh.sgid_index = (uint8_t)index;
    vector->grh.hop_limit = SW_HOP_LIMIT;
    vector->grh.traffic_class = traffic_class;
    return sw_find_route(vector, &conversation->route);
}

/* The largest MTU of InfiniBand's that the network's way to the peer allows. */
static enum ibv_mtu find_mtu(const struct rdma_addr *addresses)
{
    const struct sockaddr *from = &addresses->src_addr, *to = &addresses->dst_addr;
    const int is_ipv6 = from->sa_family == AF_INET6;
    struct sockaddr_storage source = addresses->src_storage;
    socklen_t size = sw_address_length(from), length = sizeof(int);
    int fd = sw_system->socket(from->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP), bytes = 0;

    *sw_port_of((struct sockaddr *)&source) = 0;
    if (fd >= 0 && (sw_system->bind(fd, (struct sockaddr *)&source, size) ||
                    sw_system->connect(fd, to, size) ||
                    sw_system->getsockopt(fd, is_ipv6 ? IPPROTO_IPV6 : IPPROTO_IP,
                                          is_ipv6 ? IPV6_MTU : IP_MTU, &bytes, &length)))
        bytes = 0;
    if (fd >= 0)
        sw_system->close(fd);
    if (!bytes) /* a simulated network has none */
        return IBV_MTU_1024;
    enum ibv_mtu mtu = IBV_MTU_4096;
    while (mtu > IBV_MTU_256 && (128 << mtu) + HEADERS > bytes)
        mtu--;
    return mtu;
}

static void tell(struct sw_conversation *conversation)
{
    sw_roce_port_tell(&conversation->route, conversation->mad, SW_MAD);
}

static struct sw_cm_message message_of(const struct sw_conversation *conversation,
                                       enum sw_cm_kind kind)
{
    return (struct sw_cm_message){
        .kind = kind,
        .transaction = conversation->transaction,
        .sender = conversation->number,
        .receiver = conversation->peers_number,
    };
}

/* Send a message once. It is not the one that is repeated. */
static void tell_once(const struct sw_conversation *conversation,
                      const struct sw_cm_message *message)
{
    uint8_t mad[SW_MAD];

    sw_cm_write(mad, message);
    sw_roce_port_tell(&conversation->route, mad, SW_MAD);
}

static void tell_kind(struct sw_conversation *conversation, enum sw_cm_kind kind)
{
    const struct sw_cm_message message = message_of(conversation, kind);

    tell_once(conversation, &message);
}

static void refuse(const struct sw_conversation *conversation, enum sw_cm_about about,
                   enum sw_cm_reason reason, const void *data, size_t size)
{
    struct sw_cm_message message = message_of(conversation, SW_CM_REJ);

    message.about = (uint8_t)about;
    message.reason = (uint16_t)reason;
    if (size)
        memcpy(message.private_data, data, size);
    tell_once(conversation, &message);
}

static void tell_slow(struct sw_conversation *conversation)
{
    struct sw_cm_message message = message_of(conversation, SW_CM_MRA);

    message.about = SW_CM_ABOUT_REQ;
    message.timeout = LONG_TIMEOUT;
    tell_once(conversation, &message);
}

/* The program has taken ESTABLISHED, or will. */
static int is_established(const struct sw_identifier *identifier)
{
    return identifier->state == SW_CM_CONNECTED ||
           (identifier->state == SW_CM_CONNECTING && identifier->conversation->is_accepted &&
            identifier->ibv.qp);
}

/* There is no connection, or no more: report that, once, and flush what was posted. */
static void over(struct sw_identifier *identifier, struct sw_event *event)
{
    struct sw_queue_pair *pair = pair_of(identifier);
    const int was_connected = is_established(identifier);

    sw_cancel(&identifier->timer);
    identifier->state = SW_CM_DISCONNECTED;
    identifier->conversation->is_leaving = 0;
    sw_report(event);
    if (pair &&
        !was_connected) /* a connected one fails when the program disconnects, as in Linux */
        sw_queue_pair_failed(pair);
}

static void over_by(struct sw_identifier *identifier, enum rdma_cm_event_type type, int status)
{
    over(identifier, sw_last_event(identifier, type, status));
}

/* -- messages that are repeated ----------------------------------------------------------------- */

static void time_is_up(struct sw_identifier *identifier)
{
    if (identifier->conversation->is_leaving)
        over_by(identifier, RDMA_CM_EVENT_DISCONNECTED, -ETIMEDOUT);
    else
        over_by(identifier, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
}

static void expired(struct sw_timer *timer)
{
    struct sw_identifier *identifier = SW_CONTAINER(timer, struct sw_identifier, timer);
    struct sw_conversation *conversation = identifier->conversation;
    const uint32_t most = conversation->is_leaving ? TRIES_TO_LEAVE : TRIES;
    uint32_t patience = FIRST_PATIENCE;

    if (conversation->tries >= most) {
        time_is_up(identifier);
        return;
    }
    tell(conversation);
    for (uint32_t i = 0; i < conversation->tries && patience < MOST_PATIENCE; i++)
        patience *= 2;
    conversation->tries++;
    (void)sw_call_later(timer, patience < MOST_PATIENCE ? patience : MOST_PATIENCE);
}

/* Send a message, and repeat it until the timer is cancelled. */
static int repeat(struct sw_conversation *conversation, const struct sw_cm_message *message)
{
    struct sw_timer *timer = &conversation->identifier->timer;

    sw_cm_write(conversation->mad, message);
    conversation->tries = 1;
    timer->expired = expired;
    int error = sw_call_later(timer, FIRST_PATIENCE);
    if (!error)
        tell(conversation);
    return error;
}

/* -- queue pairs -------------------------------------------------------------------------------- */

static int describe(struct sw_identifier *identifier, struct ibv_qp_attr *attr)
{
    const struct sw_conversation *conversation = identifier->conversation;

    if (!conversation || !conversation->peers_qpn)
        return IBV_QP_STATE;
    if (attr->qp_state == IBV_QPS_RTR) {
        attr->ah_attr = conversation->vector;
        attr->path_mtu = (enum ibv_mtu)conversation->mtu;
        attr->dest_qp_num = conversation->peers_qpn;
        attr->rq_psn = conversation->psn; /* each side says with what the other one begins */
        attr->max_dest_rd_atomic = conversation->responder_resources;
        attr->min_rnr_timer = RNR_TIMER;
        return IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    }
    attr->sq_psn = conversation->peers_psn;
    attr->timeout = conversation->ack_timeout;
    attr->retry_cnt = conversation->retry_count;
    attr->rnr_retry = conversation->rnr_retry_count;
    attr->max_rd_atomic = conversation->initiator_depth;
    return IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
           IBV_QP_MAX_QP_RD_ATOMIC;
}

/* Move the identifier's queue pair, if it has one, from INIT to RTS. */
static int connect_pair(struct sw_identifier *identifier)
{
    static const enum ibv_qp_state states[] = {IBV_QPS_RTR, IBV_QPS_RTS};
    struct sw_queue_pair *pair = pair_of(identifier);
    int error = 0;

    for (int i = 0; pair && !error && i < 2; i++) {
        struct ibv_qp_attr attr = {.qp_state = states[i]};
        int mask = describe(identifier, &attr);
        error = sw_modify_queue_pair(pair, &attr, mask);
    }
    return error;
}

static uint32_t pairs_number(const struct sw_identifier *identifier)
{
    return identifier->ibv.qp ? identifier->ibv.qp->qp_num
                              : identifier->parameters.qp_num & 0xffffff;
}

static int is_shared(const struct sw_identifier *identifier)
{
    return identifier->ibv.qp ? !!identifier->ibv.qp->srq : !!identifier->parameters.srq;
}

/* A REQ or a REP, with what both say of this side's queue pair. */
static struct sw_cm_message offer(const struct sw_conversation *conversation, enum sw_cm_kind kind)
{
    const struct sw_identifier *identifier = conversation->identifier;
    struct sw_cm_message message = message_of(conversation, kind);

    message.qp_num = pairs_number(identifier);
    message.psn = conversation->psn;
    message.responder_resources = conversation->responder_resources;
    message.initiator_depth = conversation->initiator_depth;
    message.rnr_retry_count = least(identifier->parameters.rnr_retry_count, 7);
    message.flow_control = identifier->parameters.flow_control;
    message.is_shared = (uint8_t)is_shared(identifier);
    message.guid = conversation->guid;
    memcpy(message.private_data, identifier->private_data, identifier->parameters.private_data_len);
    return message;
}

/* -- ports -------------------------------------------------------------------------------------- */

static int take_port(struct sw_identifier *identifier)
{
    struct sw_conversation *conversation = begin(identifier);

    if (!conversation)
        return errno;
    int error = sw_take_roce_port(identifier, SPACE, &conversation->claim);
    if (error) {
        sw_roce_port_leave();
        free(conversation);
        return error;
    }
    identifier->conversation = conversation;
    return 0;
}

static int listen_to(struct sw_identifier *identifier, int backlog)
{
    identifier->conversation->backlog = backlog;
    return 0;
}

/* -- the side that connects --------------------------------------------------------------------- */

static int request(struct sw_identifier *identifier)
{
    const struct rdma_conn_param *parameters = &identifier->parameters;
    const struct rdma_addr *addresses = &identifier->ibv.route.addr;
    int error = 0;

    if (parameters->private_data_len > SW_CM_REQUEST_DATA)
        return EINVAL;
    if (!identifier->conversation)
        error = take_port(identifier);
    if (error)
        return error;
    struct sw_conversation *conversation = identifier->conversation;
    error = find_way(conversation, identifier->has_tos ? identifier->tos : 0);
    if (error)
        return error;
    conversation->transaction = random_64();
    conversation->mtu = (uint8_t)find_mtu(addresses);
    conversation->ack_timeout =
        identifier->has_ack_timeout ? identifier->ack_timeout : (uint8_t)ACK_TIMEOUT;
    conversation->retry_count = least(parameters->retry_count, 7);
    conversation->responder_resources = depth(parameters->responder_resources);
    conversation->initiator_depth = depth(parameters->initiator_depth);
    struct sw_cm_message message = offer(conversation, SW_CM_REQ);
    message.retry_count = conversation->retry_count;
    message.ack_timeout = conversation->ack_timeout;
    message.mtu = conversation->mtu;
    message.traffic_class = conversation->route.path.traffic_class;
    message.source = conversation->route.path.source;
    message.destination = conversation->route.path.destination;
    message.source_port = ntohs(*sw_port_of((struct sockaddr *)(uintptr_t)&addresses->src_addr));
    message.port = ntohs(*sw_port_of((struct sockaddr *)(uintptr_t)&addresses->dst_addr));
    return repeat(conversation, &message);
}

static void fill_event(struct sw_event *event, const struct sw_cm_message *message, size_t size)
{
    struct rdma_conn_param *what = &event->ibv.param.conn;

    /* What the peer can do at once is what this side may ask of it. */
    what->responder_resources = message->initiator_depth;
    what->initiator_depth = message->responder_resources;
    what->flow_control = message->flow_control;
    what->retry_count = message->retry_count;
    what->rnr_retry_count = message->rnr_retry_count;
    what->srq = message->is_shared;
    what->qp_num = message->qp_num;
    sw_set_private_data(event, message->private_data, size);
}

static void accepted(struct sw_conversation *conversation, const struct sw_cm_message *message)
{
    struct sw_identifier *identifier = conversation->identifier;
    const int has_pair = !!identifier->ibv.qp;

    if (identifier->state == SW_CM_CONNECTED && message->sender == conversation->peers_number) {
        tell_kind(conversation, SW_CM_RTU); /* the first one was lost */
        return;
    }
    if (identifier->state != SW_CM_CONNECTING || conversation->is_accepted)
        return;
    struct sw_event *event = sw_new_event(
        identifier, has_pair ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    if (!event)
        return; /* the peer repeats it */
    sw_cancel(&identifier->timer);
    conversation->peers_number = message->sender;
    conversation->peers_qpn = message->qp_num;
    conversation->peers_psn = message->psn;
    conversation->rnr_retry_count = message->rnr_retry_count;
    conversation->responder_resources =
        least(conversation->responder_resources, message->initiator_depth);
    conversation->initiator_depth =
        least(conversation->initiator_depth, message->responder_resources);
    fill_event(event, message, SW_CM_REPLY_DATA);
    int error = connect_pair(identifier);
    if (error) {
        free(event);
        refuse(conversation, SW_CM_ABOUT_REP, SW_CM_BY_PROGRAM, NULL, 0);
        over_by(identifier, RDMA_CM_EVENT_CONNECT_ERROR, -error);
        return;
    }
    conversation->is_accepted = 1;
    sw_report(event);
}

/*
 * The program has taken ESTABLISHED, or has connected its own queue pair, after a CONNECT_RESPONSE.
 * So a connect that the program abandons is none for its peer, either.
 */
static int establish(struct sw_identifier *identifier)
{
    if (identifier->state != SW_CM_CONNECTING || !identifier->conversation->is_accepted)
        return EINVAL;
    identifier->state = SW_CM_CONNECTED;
    tell_kind(identifier->conversation, SW_CM_RTU);
    return 0;
}

/* -- the side that listens ---------------------------------------------------------------------- */

/* Find what a peer has requested, also if it does not know the number of that. */
static struct sw_conversation *find_requested(const struct in6_addr *peer,
                                              const struct sw_cm_message *message)
{
    for (struct sw_identifier *each = sw_identifiers; each; each = each->next) {
        struct sw_conversation *conversation = each->conversation;
        if (conversation && conversation->listener &&
            conversation->peers_number == message->sender &&
            conversation->transaction == message->transaction &&
            !memcmp(&conversation->route.path.destination, peer, sizeof(*peer)))
            return conversation;
    }
    return NULL;
}

/* Whether a request has come before: its peer repeats it until there is an answer. */
static int is_known(const struct sw_cm_message *message)
{
    struct sw_conversation *conversation = find_requested(&message->source, message);

    if (conversation && conversation->identifier->state == SW_CM_REQUESTED)
        tell_slow(conversation);
    else if (conversation && conversation->identifier->state == SW_CM_ACCEPTING)
        tell(conversation);
    return !!conversation;
}

static struct sw_conversation *new_requested(struct sw_identifier *identifier,
                                             const struct sw_udp_route *from,
                                             const struct sw_cm_message *message)
{
    struct rdma_addr *addresses = &identifier->ibv.route.addr;

    sw_set_address(&addresses->src_storage, &message->destination, message->port, from->interface);
    sw_set_address(&addresses->dst_storage, &message->source, message->source_port,
                   from->interface);
    int error = sw_bind_device(identifier);
    if (error)
        return NULL;
    struct sw_conversation *conversation = begin(identifier);
    if (!conversation)
        return NULL;
    identifier->conversation = conversation;
    conversation->transaction = message->transaction;
    conversation->peers_number = message->sender;
    conversation->peers_qpn = message->qp_num;
    conversation->peers_psn = message->psn;
    conversation->mtu = message->mtu;
    conversation->ack_timeout = message->ack_timeout;
    conversation->retry_count = message->retry_count;
    conversation->rnr_retry_count = message->rnr_retry_count;
    conversation->responder_resources = depth(message->initiator_depth);
    conversation->initiator_depth = depth(message->responder_resources);
    return find_way(conversation, message->traffic_class) ? NULL : conversation;
}

/*
 * Create an identifier and an event for a request. Beyond the backlog and without memory it is
 * dropped: the peer repeats it.
 */
static void requested(struct sw_identifier *listener, const struct sw_udp_route *from,
                      const struct sw_cm_message *message)
{
    if (is_known(message) || listener->conversation->waiting >= listener->conversation->backlog)
        return;
    struct sw_identifier *identifier = sw_new_requesting(listener);
    if (!identifier)
        return;
    struct sw_conversation *conversation = new_requested(identifier, from, message);
    struct sw_event *event = conversation ? sw_new_request_event(listener, identifier) : NULL;
    if (!event) {
        identifier->state = SW_CM_DISCONNECTED; /* it is dropped without an answer */
        sw_drop_identifier(identifier);
        return;
    }
    conversation->listener = listener;
    listener->conversation->waiting++;
    fill_event(event, message, SW_CM_REQUEST_DATA);
    sw_report(event);
    tell_slow(conversation);
}

static int accept_request(struct sw_identifier *identifier)
{
    const struct rdma_conn_param *parameters = &identifier->parameters;
    struct sw_conversation *conversation = identifier->conversation;

    if (parameters->private_data_len > SW_CM_REPLY_DATA)
        return EINVAL;
    if (identifier->has_ack_timeout)
        conversation->ack_timeout = identifier->ack_timeout;
    conversation->responder_resources =
        least(conversation->responder_resources, depth(parameters->responder_resources));
    conversation->initiator_depth =
        least(conversation->initiator_depth, depth(parameters->initiator_depth));
    int error = connect_pair(identifier);
    if (error)
        return error;
    const struct sw_cm_message message = offer(conversation, SW_CM_REP);
    error = repeat(conversation, &message);
    if (!error)
        identifier->state = SW_CM_ACCEPTING;
    return error;
}

static int reject_request(struct sw_identifier *identifier)
{
    size_t size = identifier->parameters.private_data_len;

    if (size > SW_CM_REJECT_DATA)
        return EINVAL;
    refuse(identifier->conversation, SW_CM_ABOUT_REQ, SW_CM_BY_PROGRAM, identifier->private_data,
           size);
    return 0;
}

/* The peer has the reply: it says so (RTU), or its message does. */
static void is_ready(struct sw_identifier *identifier)
{
    struct sw_event *event;

    if (identifier->state != SW_CM_ACCEPTING ||
        !(event = sw_new_event(identifier, RDMA_CM_EVENT_ESTABLISHED, 0)))
        return; /* without memory, the reply is repeated, and so this is */
    sw_cancel(&identifier->timer);
    identifier->state = SW_CM_CONNECTED;
    sw_report(event);
}

static void request_taken(struct sw_identifier *listener)
{
    if (listener->conversation)
        listener->conversation->waiting--;
}

/* -- the end ------------------------------------------------------------------------------------ */

static void rejected(struct sw_conversation *conversation, const struct sw_cm_message *message)
{
    struct sw_identifier *identifier = conversation->identifier;

    if (is_established(identifier)) { /* the peer accepted, and left before it had the RTU */
        over_by(identifier, RDMA_CM_EVENT_DISCONNECTED, 0);
        return;
    }
    if (identifier->state != SW_CM_CONNECTING && identifier->state != SW_CM_ACCEPTING &&
        identifier->state != SW_CM_REQUESTED)
        return;
    /* perftest connects a second time at once, and its server listens a moment later. Adapters take
     * longer to find an address, so that it works on them. Here, the first repetition is enough. */
    if (message->reason == SW_CM_NO_SERVICE && identifier->state == SW_CM_CONNECTING &&
        conversation->tries == 1)
        return;
    struct sw_event *event = sw_last_event(identifier, RDMA_CM_EVENT_REJECTED, message->reason);
    sw_set_private_data(event, message->private_data, SW_CM_REJECT_DATA);
    over(identifier, event);
}

static void asked_for_time(struct sw_conversation *conversation,
                           const struct sw_cm_message *message)
{
    const uint64_t patience = 4096ull << message->timeout; /* nanoseconds */

    if (conversation->identifier->state != SW_CM_CONNECTING || conversation->is_accepted ||
        message->about != SW_CM_ABOUT_REQ)
        return;
    conversation->busy_number = message->sender;
    uint64_t milliseconds = patience / 1000000;
    (void)sw_call_later(&conversation->identifier->timer,
                        (uint32_t)(milliseconds < LONG_PATIENCE ? milliseconds : LONG_PATIENCE));
}

static void left(struct sw_conversation *conversation, const struct sw_cm_message *message)
{
    struct sw_identifier *identifier = conversation->identifier;
    const struct sw_queue_pair *pair = pair_of(identifier);

    if (pair && message->qp_num != pairs_number(identifier))
        return;
    tell_kind(conversation, SW_CM_DREP);
    if (identifier->state == SW_CM_ACCEPTING || is_established(identifier) ||
        conversation->is_leaving)
        over_by(identifier, RDMA_CM_EVENT_DISCONNECTED, pair ? -pair->broken : 0);
}

static void may_leave(struct sw_conversation *conversation)
{
    if (conversation->is_leaving)
        over_by(conversation->identifier, RDMA_CM_EVENT_DISCONNECTED, 0);
}

/* A peer that has the REP, and still has to connect its own queue pair, takes only a REJ, as Linux. */
static struct sw_cm_message begin_to_leave(const struct sw_conversation *conversation)
{
    struct sw_cm_message message = message_of(conversation, SW_CM_DREQ);

    if (conversation->identifier->state == SW_CM_ACCEPTING)
        refuse(conversation, SW_CM_ABOUT_OTHER, SW_CM_BY_PROGRAM, NULL, 0);
    message.transaction = random_64();
    message.qp_num = conversation->peers_qpn;
    return message;
}

static int disconnect(struct sw_identifier *identifier)
{
    struct sw_conversation *conversation = identifier->conversation;
    struct sw_queue_pair *pair = pair_of(identifier);
    const int is_connected =
        identifier->state == SW_CM_CONNECTED || identifier->state == SW_CM_ACCEPTING;

    if (!conversation || (!is_connected && identifier->state != SW_CM_DISCONNECTED))
        return EINVAL;
    if (pair)
        sw_queue_pair_failed(pair);
    if (!is_connected)
        return 0;
    const struct sw_cm_message message = begin_to_leave(conversation);
    identifier->state = SW_CM_DISCONNECTED;
    conversation->is_leaving = 1;
    return repeat(conversation, &message);
}

/* Tell the peer that the identifier goes. */
static void say_goodbye(struct sw_identifier *identifier)
{
    struct sw_conversation *conversation = identifier->conversation;

    if (identifier->state == SW_CM_REQUESTED) {
        refuse(conversation, SW_CM_ABOUT_REQ, SW_CM_BY_PROGRAM, NULL, 0);
    } else if (identifier->state == SW_CM_CONNECTING && conversation->is_accepted) {
        refuse(conversation, SW_CM_ABOUT_REP, SW_CM_BY_PROGRAM, NULL, 0);
    } else if (identifier->state == SW_CM_CONNECTING) {
        struct sw_cm_message withdrawal = message_of(conversation, SW_CM_REJ);
        withdrawal.receiver = conversation->busy_number;
        withdrawal.about = SW_CM_ABOUT_OTHER;
        withdrawal.reason = SW_CM_TIMEOUT;
        withdrawal.guid = conversation->guid;
        tell_once(conversation, &withdrawal);
    } else if (identifier->state == SW_CM_ACCEPTING || identifier->state == SW_CM_CONNECTED) {
        const struct sw_cm_message message = begin_to_leave(conversation);
        tell_once(conversation, &message);
    }
}

static void forget(struct sw_identifier *identifier)
{
    struct sw_conversation *conversation = identifier->conversation;

    if (!conversation)
        return;
    say_goodbye(identifier);
    if (conversation->backlog)
        for (struct sw_identifier *each = sw_identifiers; each; each = each->next)
            if (each->conversation && each->conversation->listener == identifier)
                each->conversation->listener = NULL;
    sw_roce_port_unclaim(&conversation->claim);
    sw_roce_port_leave();
    identifier->conversation = NULL;
    free(conversation);
}

static void do_nothing(struct sw_identifier *identifier)
{
    (void)identifier;
}

/* -- messages that arrive ----------------------------------------------------------------------- */

/* A REQ names a port. If another process of this host has it, it gets the packet. */
static void find_service(const struct sw_udp_route *from, const struct sw_cm_message *message,
                         const uint8_t *bytes, size_t size, int is_passed)
{
    /* The addresses in the request must be those of the packet. */
    if (memcmp(&message->source, &from->path.source, sizeof(message->source)) ||
        memcmp(&message->destination, &from->path.destination, sizeof(message->source)))
        return;
    struct sw_identifier *listener =
        sw_find_listener(&sw_roce_space, &message->destination, message->port);
    if (listener) {
        requested(listener, from, message);
        return;
    }
    if (!is_passed && sw_roce_port_pass_to_claim(SPACE, message->port, from, bytes, size))
        return;
    struct sw_cm_message nobody = {
        .kind = SW_CM_REJ,
        .transaction = message->transaction,
        .receiver = message->sender,
        .about = SW_CM_ABOUT_REQ,
        .reason = SW_CM_NO_SERVICE,
    };
    uint8_t mad[SW_MAD];
    sw_cm_write(mad, &nobody);
    sw_roce_port_answer(from, mad, SW_MAD);
}

/* The peer repeats a DREQ whose answer was lost, and the identifier may be gone. */
static void answer_stranger(const struct sw_udp_route *from, const struct sw_cm_message *message)
{
    const struct sw_cm_message answer = {
        .kind = SW_CM_DREP,
        .transaction = message->transaction,
        .sender = message->receiver,
        .receiver = message->sender,
    };
    uint8_t mad[SW_MAD];

    if (message->kind != SW_CM_DREQ)
        return;
    sw_cm_write(mad, &answer);
    sw_roce_port_answer(from, mad, SW_MAD);
}

static void arrived(const struct sw_udp_route *from, const struct sw_roce_packet *packet,
                    const uint8_t *bytes, size_t size, int is_passed)
{
    struct sw_cm_message message;

    sw_add_work(WORK_OF_MESSAGE);
    if (packet->qkey != SW_QKEY_SERVICES)
        return;
    if (sw_cm_read(packet->payload, packet->size, &message)) {
        sw_datagram_came(from, packet, bytes, size, is_passed);
        return;
    }
    if (message.kind == SW_CM_REQ) {
        find_service(from, &message, bytes, size, is_passed);
        return;
    }
    if (!sw_roce_port_is_ours(message.receiver)) {
        if (!is_passed)
            sw_roce_port_pass(message.receiver, from, bytes, size);
        return;
    }
    struct sw_conversation *conversation = find(message.receiver);
    if (!conversation && message.kind == SW_CM_REJ)
        conversation = find_requested(&from->path.source, &message);
    if (!conversation || memcmp(&conversation->route.path.destination, &from->path.source,
                                sizeof(from->path.source))) {
        answer_stranger(from, &message);
        return;
    }
    /* Only the first answer to a REQ cannot know the sender's number. */
    if (conversation->peers_number ? message.sender != conversation->peers_number
                                   : message.transaction != conversation->transaction)
        return;
    switch (message.kind) {
    case SW_CM_REP:
        accepted(conversation, &message);
        break;
    case SW_CM_RTU:
        is_ready(conversation->identifier);
        break;
    case SW_CM_REJ:
        rejected(conversation, &message);
        break;
    case SW_CM_MRA:
        asked_for_time(conversation, &message);
        break;
    case SW_CM_DREQ:
        left(conversation, &message);
        break;
    default:
        may_leave(conversation);
        break;
    }
}

const struct sw_services sw_roce_services = {.arrived = arrived};

const struct sw_port_space sw_roce_space = {
    .bind = take_port,
    .listen = listen_to,
    .connect = request,
    .accept = accept_request,
    .reject = reject_request,
    .disconnect = disconnect,
    .establish = establish,
    .notified = is_ready,
    .describe = describe,
    .request_taken = request_taken,
    .forget = forget,
    .forked = do_nothing, /* the engine watches its socket and closes it */
    .reports = {.first_frame = do_nothing, .ended = do_nothing, .lost = sw_lose_queue_pair},
};
