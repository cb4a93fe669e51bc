/*
 * Fuzzes datagrams and SIDR over UDP. A queue pair gets packets from any sender. A listener gets
 * SIDR requests. A caller sends such requests, and gets replies that fit or do not fit.
 */
#include "manager.h"
#include "software/roce.h"
#include "software/cm_messages.h"

#include <arpa/inet.h>
#include <string.h>
#include <unistd.h>

enum {
    RECEIVES = 8,
    SIZE = 40 + 512, /* of a receive */
    ASKED = 4,
    SHARED_KEY = 0x1234,
    OUR_PORT = 555, /* the source port of the fuzzer's packets */
};

static struct {
    struct world *world;
    struct ibv_pd *domain;
    struct ibv_cq *queue;
    struct ibv_mr *region;
    struct rdma_event_channel *channel;
    char memory[RECEIVES * SIZE];
} setting;

static struct {
    struct ibv_qp *queue_pair;
    struct rdma_cm_id *listener, *caller, *asked[ASKED];
    uint16_t port;
    int calls, is_answered;
    uint32_t receives, receives_done;
    struct sw_sidr_request question; /* the caller's last request */
    uint16_t asks_from;
} run;

static const struct aiordma_provider *table(void)
{
    return setting.world->table;
}

static void set_up(void)
{
    setting.world = the_world();
    setting.channel = table()->create_event_channel();
    setting.domain = table()->alloc_pd(setting.world->context);
    setting.queue = table()->create_cq(setting.world->context, 64, NULL, NULL, 0);
    PROMISE(setting.channel && setting.domain && setting.queue);
    setting.region = table()->reg_mr(setting.domain, setting.memory, sizeof(setting.memory),
                                     IBV_ACCESS_LOCAL_WRITE);
    PROMISE(setting.region);
}

/* -- the program ------------------------------------------------------------------------------- */

static void make_queue_pair(void)
{
    struct ibv_qp_init_attr init = {.send_cq = setting.queue,
                                    .recv_cq = setting.queue,
                                    .cap = {4, RECEIVES, 1, 2, 0},
                                    .qp_type = IBV_QPT_UD};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = SHARED_KEY};

    run.queue_pair = table()->create_qp(setting.domain, &init);
    PROMISE(run.queue_pair);
    PROMISE(!table()->modify_qp(run.queue_pair, &attr,
                                IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    attr.qp_state = IBV_QPS_RTR;
    PROMISE(!table()->modify_qp(run.queue_pair, &attr, IBV_QP_STATE));
    attr.qp_state = IBV_QPS_RTS;
    PROMISE(!table()->modify_qp(run.queue_pair, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static void post_receive(uint32_t how)
{
    char *at = setting.memory + run.receives % RECEIVES * SIZE;
    struct ibv_sge parts[2] = {{(uintptr_t)at, 40, setting.region->lkey},
                               {(uintptr_t)at + 40, SIZE - 40, setting.region->lkey}};
    struct ibv_recv_wr request = {.wr_id = run.receives, .sg_list = parts, .num_sge = 2}, *bad;

    if (run.receives - run.receives_done >= RECEIVES)
        return;
    if (how & 1)
        parts[0].length = how >> 4;
    if ((how & 6) == 6)
        parts[1].lkey++;
    if (!ibv_post_recv(run.queue_pair, &request, &bad))
        run.receives++;
}

static void poll(void)
{
    struct ibv_wc completions[64];
    int count = ibv_poll_cq(setting.queue, 64, completions);

    PROMISE(count >= 0);
    for (int i = 0; i < count; i++) {
        PROMISE(completions[i].wr_id == run.receives_done && run.receives_done < run.receives);
        run.receives_done++;
        if (completions[i].status != IBV_WC_SUCCESS)
            continue;
        PROMISE(completions[i].byte_len >= 40 && completions[i].byte_len <= SIZE);
        PROMISE(completions[i].wc_flags & IBV_WC_GRH);
        struct ibv_grh grh;
        struct ibv_ah_attr attr;
        memcpy(&grh, setting.memory + completions[i].wr_id % RECEIVES * SIZE, sizeof(grh));
        if (table()->init_ah_from_wc(setting.world->context, 1, &completions[i], &grh, &attr)) {
            /* The first part of the receive was too short for the whole header. */
        }
    }
}

static void note_event(struct rdma_cm_event *event)
{
    switch (event->event) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        PROMISE(event->listen_id == run.listener);
        PROMISE(!event->param.ud.private_data_len || event->param.ud.private_data);
        for (int i = 0; i < ASKED; i++)
            if (!run.asked[i]) {
                run.asked[i] = event->id;
                return;
            }
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
        if (event->id != run.caller)
            break;
        PROMISE(run.calls && !run.is_answered);
        PROMISE(event->param.ud.ah_attr.is_global);
        run.is_answered = 1;
        break;
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_CONNECT_ERROR:
        PROMISE(event->id == run.caller && run.calls && !run.is_answered);
        run.is_answered = 1;
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
    for (int i = 0; i < ASKED; i++)
        if (run.asked[i] == id)
            return 1;
    return 0;
}

static void take_events(void)
{
    take_all_events(setting.channel, note_event, is_kept);
}

static void settle(void)
{
    serve();
    take_events();
    poll();
}

/* Read the caller's request from the last packet that the device sent. */
static void hear_question(void)
{
    uint8_t packet[8192];
    uint16_t port, from_port;
    struct sw_roce_path path = {0};
    struct sw_roce_packet datagram;
    struct sw_sidr_request question;
    size_t size = catch_packet(packet, sizeof(packet), &port, &from_port);

    if (!size)
        return;
    inet_pton(AF_INET6, "::ffff:127.0.0.1", &path.source);
    path.destination = path.source;
    path.source_port = from_port;
    path.destination_port = port;
    PROMISE(!sw_roce_read(packet, size, &path, &datagram));
    if (!sw_sidr_read_request(datagram.payload, datagram.size, &question)) {
        run.question = question;
        run.asks_from = from_port;
    }
}

static void call(uint32_t how)
{
    struct sockaddr_in to = loopback(OUR_PORT);
    struct rdma_conn_param parameters = {.private_data = "anybody", .private_data_len = how & 7};

    if (run.caller)
        return;
    run.calls = run.is_answered = 0;
    PROMISE(!table()->create_id(setting.channel, &run.caller, NULL, RDMA_PS_UDP));
    PROMISE(!table()->resolve_addr(run.caller, NULL, (struct sockaddr *)&to, 1000));
    pass(1);
    settle();
    PROMISE(!table()->resolve_route(run.caller, 1000));
    pass(1);
    settle();
    PROMISE(!table()->connect(run.caller, &parameters));
    run.calls = 1;
    settle();
    hear_question();
}

static void answer(struct rdma_cm_id *id, uint32_t how)
{
    struct rdma_conn_param parameters = {
        .private_data = "here", .private_data_len = how & 3, .qp_num = run.queue_pair->qp_num};

    if (!id)
        return;
    if (how & 64 ? table()->reject(id, "no", 2) : table()->accept(id, &parameters)) {
        /* The request is already answered. */
    }
    settle();
}

static void destroy(struct rdma_cm_id **id)
{
    if (*id) {
        take_events();
        PROMISE(!table()->destroy_id(*id));
    }
    *id = NULL;
}

/* -- packets to the device --------------------------------------------------------------------- */

static void throw_sealed(uint16_t port, uint16_t from_port, struct sw_roce_packet *datagram)
{
    uint8_t packet[SW_ROCE_MOST];
    struct sw_roce_path path = {.source_port = from_port, .destination_port = port};

    inet_pton(AF_INET6, "::ffff:127.0.0.1", &path.source);
    path.destination = path.source;
    uint32_t headers = sw_roce_headers(packet, datagram);
    memcpy(packet + headers, datagram->payload, datagram->size);
    throw_packet(port, from_port, packet, sw_roce_seal(packet, headers + datagram->size, &path, 0));
}

static void throw_datagram(struct input *input)
{
    uint8_t payload[SW_DATAGRAM_MTU];
    uint32_t how = take(input, 1), size = take(input, 2);
    struct sw_roce_packet datagram = {
        .opcode = how >> 2 & 1 ? SW_UD_SEND_ONLY_IMMEDIATE : SW_UD_SEND_ONLY,
        .destination_qpn = run.queue_pair->qp_num ^ (how & 1 ? 1u << (how >> 3) : 0),
        .source_qpn = 0x777,
        .qkey = how & 2 ? SHARED_KEY : take(input, 4),
        .solicited = how >> 3 & 1,
        .payload = payload,
        .size = size & 0x8000 ? size % (SW_DATAGRAM_MTU + 1) : size % 600,
    };

    memset(payload, (int)how, datagram.size);
    throw_sealed((uint16_t)run.queue_pair->qp_num, OUR_PORT, &datagram);
}

/* Send a SIDR request or reply that is valid except for some bytes. */
static void throw_mad(struct input *input)
{
    uint8_t mad[SW_MAD] = {0};
    uint32_t how = take(input, 1), wrongs = how >> 5;
    struct sw_roce_packet datagram = {
        .opcode = SW_UD_SEND_ONLY,
        .destination_qpn = how & 16 ? take(input, 1) : SW_QPN_SERVICES,
        .source_qpn = SW_QPN_SERVICES,
        .qkey = SW_QKEY_SERVICES,
        .payload = mad,
        .size = SW_MAD,
    };
    uint16_t to = run.port, from_port = OUR_PORT;

    if (how & 1) {
        struct sw_sidr_request request = {.transaction = take(input, 1),
                                          .port = run.port,
                                          .number = take(input, 1),
                                          .source_port = OUR_PORT};
        inet_pton(AF_INET6, "::ffff:127.0.0.1", &request.source);
        request.destination = request.source;
        sw_sidr_write_request(mad, &request);
    } else {
        struct sw_sidr_reply reply = {.transaction = run.question.transaction,
                                      .number = run.question.number,
                                      .status = (uint8_t)(how & 2 ? take(input, 1) : 0),
                                      .port = OUR_PORT,
                                      .qp_num = take(input, 2),
                                      .qkey = 1};
        sw_sidr_write_reply(mad, &reply);
        to = run.asks_from;
    }
    for (; wrongs; wrongs--) {
        uint32_t at = take(input, 1);
        mad[at] = (uint8_t)take(input, 1);
    }
    if (how & 4)
        datagram.size = take(input, 2) % (SW_MAD + 1);
    if (how & 8)
        from_port = (uint16_t)take(input, 2);
    if (to)
        throw_sealed(to, from_port, &datagram);
}

static void act(struct input *input)
{
    uint32_t what = take(input, 1), which = what >> 4;

    switch (what & 15) {
    case 0: {
        size_t size = take(input, 2) & 0x1fff;
        const uint8_t *bytes = take_bytes(input, &size);
        throw_packet(which & 1 ? (uint16_t)run.queue_pair->qp_num : run.port, OUR_PORT, bytes,
                     size);
        settle();
        break;
    }
    case 1:
    case 2:
    case 3:
        throw_datagram(input);
        if (!(which & 1))
            settle();
        break;
    case 4:
    case 5:
    case 6:
        throw_mad(input);
        if (!(which & 1))
            settle();
        break;
    case 7:
    case 8:
        post_receive(take(input, 1));
        break;
    case 9:
        settle();
        break;
    case 10:
        call(which);
        break;
    case 11:
        answer(run.asked[which % ASKED], take(input, 1));
        break;
    case 12:
        destroy(which & 4 ? &run.caller : &run.asked[which % ASKED]);
        settle();
        break;
    default:
        pass(50u << which);
        settle();
        hear_question();
    }
}

static void begin(struct input *input)
{
    (void)input;
    memset(&run, 0, sizeof(run));
    begin_anew();
    make_queue_pair();
    run.port = start_listening(setting.channel, RDMA_PS_UDP, &run.listener);
}

static void end(struct input *input)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

    settle();
    /* A caller without a reply gets an event after its last retry. */
    for (int i = 0; i < 40; i++) {
        pass(5000);
        settle();
    }
    PROMISE(!run.caller || !run.calls || run.is_answered);
    PROMISE(!table()->modify_qp(run.queue_pair, &attr, IBV_QP_STATE));
    poll();
    PROMISE(run.receives == run.receives_done);
    PROMISE(!table()->destroy_qp(run.queue_pair));
    int listener_first = take(input, 1) & 1;
    if (listener_first)
        destroy(&run.listener);
    destroy(&run.caller);
    for (int i = 0; i < ASKED; i++)
        destroy(&run.asked[i]);
    destroy(&run.listener);
    settle();
    pass(1000000);
    promise_nothing_is_left();
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const struct target target = {set_up, begin, act, end};

    return run_target(&target, bytes, size);
}
