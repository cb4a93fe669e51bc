/*
 * Fuzzes the connection manager over RoCE: a listener that gets requests, and a caller, whose peers
 * answer with messages that fit or do not fit. Each identifier's events come in an order that the
 * program can expect, and nothing is left.
 */
#include "manager.h"
#include "software/cm_messages.h"
#include "software/roce.h"

#include <arpa/inet.h>
#include <string.h>

enum { ASKED = 4, PORT = 7000, PEERS_NUMBER = 0x01020304 };

/* What the program knows of one identifier. */
struct known {
    struct rdma_cm_id *id;
    int is_established, is_over;
    uint32_t number; /* the peer's, for a requested one */
};

static struct {
    struct world *world;
    const struct aiordma_provider *roce;
    struct rdma_event_channel *channel;
} setting;

static struct {
    struct rdma_cm_id *listener;
    struct known caller, asked[ASKED];
    uint32_t last_number;      /* of a request that was thrown */
    struct sw_cm_message said; /* the device's last message */
} run;

static void set_up(void)
{
    setting.world = the_world();
    setting.roce = aiordma_software_roce();
    setting.channel = setting.roce->create_event_channel();
    PROMISE(setting.channel);
}

static struct known *find(const struct rdma_cm_id *id)
{
    for (int i = 0; i < ASKED; i++)
        if (run.asked[i].id == id)
            return &run.asked[i];
    return id == run.caller.id ? &run.caller : NULL;
}

static void note_event(struct rdma_cm_event *event)
{
    struct known *known = find(event->id);

    switch (event->event) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        PROMISE(event->listen_id == run.listener && !known);
        PROMISE(event->param.conn.private_data && event->param.conn.private_data_len);
        for (int i = 0; i < ASKED; i++)
            if (!run.asked[i].id) {
                run.asked[i] = (struct known){.id = event->id, .number = run.last_number};
                return;
            }
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
        PROMISE(known && !known->is_established && !known->is_over);
        known->is_established = 1;
        break;
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
        PROMISE(known && !known->is_over);
        /* The peer may have given up since, or the program may have done it. */
        known->is_established |= !setting.roce->establish(event->id);
        break;
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_CONNECT_ERROR:
        PROMISE(known && !known->is_established && !known->is_over);
        known->is_over = 1;
        break;
    case RDMA_CM_EVENT_DISCONNECTED:
        PROMISE(known && !known->is_over);
        known->is_over = 1;
        break;
    case RDMA_CM_EVENT_ADDR_RESOLVED:
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
        break;
    default:
        fail("an event that has no place here");
    }
}

static int is_kept(const struct rdma_cm_id *id)
{
    return find(id) != NULL;
}

static void settle(void)
{
    serve();
    take_all_events(setting.channel, note_event, is_kept);
}

static struct rdma_cm_id *make_id(void)
{
    struct rdma_cm_id *id;

    PROMISE(!setting.roce->create_id(setting.channel, &id, NULL, RDMA_PS_TCP));
    return id;
}

static void call(void)
{
    struct sockaddr_in to = loopback(PORT + 1);
    struct rdma_conn_param parameters = {.qp_num = 77, .retry_count = 7, .initiator_depth = 1};

    if (run.caller.id)
        setting.roce->destroy_id(run.caller.id);
    run.caller = (struct known){.id = make_id()};
    PROMISE(!setting.roce->resolve_addr(run.caller.id, NULL, (struct sockaddr *)&to, 100));
    PROMISE(!setting.roce->resolve_route(run.caller.id, 100));
    PROMISE(!setting.roce->connect(run.caller.id, &parameters));
}

/* Read the device's last message to a peer. */
static void hear(void)
{
    uint8_t bytes[SW_ROCE_MOST];
    uint16_t port, from_port;
    struct sw_roce_path path = {.source_port = SW_ROCE_PORT, .destination_port = SW_ROCE_PORT};
    struct sw_roce_packet packet;
    struct sw_cm_message message;
    size_t size;

    inet_pton(AF_INET6, "::ffff:127.0.0.1", &path.source);
    path.destination = path.source;
    while ((size = catch_packet(bytes, sizeof(bytes), &port, &from_port)))
        if (size <= sizeof(bytes) && !sw_roce_read(bytes, size, &path, &packet) &&
            !sw_cm_read(packet.payload, packet.size, &message))
            run.said = message;
}

static void throw_mad(uint8_t *mad, uint32_t wrongs, struct input *input)
{
    uint8_t bytes[SW_ROCE_MOST];
    struct sw_roce_path path = {.source_port = SW_ROCE_PORT, .destination_port = SW_ROCE_PORT};
    const struct sw_roce_packet packet = {
        .opcode = SW_UD_SEND_ONLY,
        .destination_qpn = SW_QPN_SERVICES,
        .source_qpn = SW_QPN_SERVICES,
        .qkey = SW_QKEY_SERVICES,
        .size = SW_MAD,
    };

    inet_pton(AF_INET6, "::ffff:127.0.0.1", &path.source);
    path.destination = path.source;
    for (; wrongs; wrongs--)
        mad[take(input, 1)] = (uint8_t)take(input, 1);
    uint32_t size = sw_roce_headers(bytes, &packet);
    memcpy(bytes + size, mad, SW_MAD);
    throw_packet(SW_ROCE_PORT, SW_ROCE_PORT, bytes, sw_roce_seal(bytes, size + SW_MAD, &path, 0));
}

static void throw_message(struct input *input)
{
    uint8_t mad[SW_MAD];
    uint32_t how = take(input, 1), what = take(input, 1);
    struct sw_cm_message message = {
        .kind = SW_CM_REQ + what % 7,
        .transaction = how & 1 ? run.said.transaction : what,
        .sender = how & 2 && run.said.receiver ? run.said.receiver : PEERS_NUMBER + (how >> 5),
        .receiver = run.said.sender,
        .qp_num = how & 4 ? run.said.qp_num : 77,
        .psn = what,
        .responder_resources = (uint8_t)what,
        .initiator_depth = (uint8_t)how,
        .retry_count = how & 7,
        .mtu = how % 6,
        .port = PORT + (how >> 3 & 1),
        .source_port = 1000,
        .about = how >> 3 & 3,
        .timeout = what & 31,
        .reason = (uint16_t)what,
    };

    inet_pton(AF_INET6, "::ffff:127.0.0.1", &message.source);
    message.destination = message.source;
    if (message.kind == SW_CM_REQ)
        message.sender = run.last_number = PEERS_NUMBER + (how >> 4);
    sw_cm_write(mad, &message);
    throw_mad(mad, what >> 6, input);
}

/* The program does something with an identifier. */
static void use(struct known *known, uint32_t how)
{
    struct rdma_conn_param parameters = {.qp_num = 78,
                                         .retry_count = 7,
                                         .private_data = "1234567",
                                         .private_data_len = (uint8_t)(how >> 5)};
    struct rdma_cm_id *id = known->id;
    int result = 0;

    if (!id)
        return;
    switch (how >> 2 & 7) {
    case 0:
    case 1:
    case 2:
        result = setting.roce->accept(id, &parameters);
        break;
    case 3:
        result = setting.roce->reject(id, "no", (uint8_t)(how >> 6));
        break;
    case 4:
    case 5:
        result = setting.roce->disconnect(id);
        break;
    case 6:
        settle();
        setting.roce->destroy_id(id);
        *known = (struct known){0};
        break;
    default:
        result = setting.roce->establish(id);
        if (!result)
            known->is_established = 1;
    }
    (void)result; /* any state refuses some of them */
}

static void act(struct input *input)
{
    uint32_t what = take(input, 1);

    switch (what & 7) {
    case 0: {
        size_t size = take(input, 1);
        const uint8_t *bytes = take_bytes(input, &size);
        uint8_t mad[SW_MAD] = {0};
        memcpy(mad, bytes, size);
        throw_mad(mad, 0, input);
        break;
    }
    case 1:
    case 2:
    case 3:
        throw_message(input);
        break;
    case 4:
        use(&run.asked[what >> 3 & 3], take(input, 1));
        break;
    case 5:
        if (what & 8)
            call();
        else
            use(&run.caller, take(input, 1));
        break;
    case 6:
        pass(1u << (what >> 4));
        break;
    default:
        hear();
    }
    if (!(what & 128))
        settle();
}

static void begin(struct input *input)
{
    struct sockaddr_in at = loopback(PORT);

    (void)input;
    memset(&run, 0, sizeof(run));
    begin_anew();
    run.listener = make_id();
    PROMISE(!setting.roce->bind_addr(run.listener, (struct sockaddr *)&at));
    PROMISE(!setting.roce->listen(run.listener, 3));
}

static void end(struct input *input)
{
    (void)input;
    /* Nobody answers any more: all that is begun comes to an end. */
    for (int i = 0; i < 40; i++) {
        settle();
        pass(5000);
    }
    settle();
    PROMISE(!run.caller.id || run.caller.is_established || run.caller.is_over);
    setting.roce->destroy_id(run.listener);
    for (int i = 0; i < ASKED; i++)
        if (run.asked[i].id)
            setting.roce->destroy_id(run.asked[i].id);
    if (run.caller.id)
        setting.roce->destroy_id(run.caller.id);
    settle();
    promise_nothing_is_left();
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const struct target target = {set_up, begin, act, end};

    return run_target(&target, bytes, size);
}
