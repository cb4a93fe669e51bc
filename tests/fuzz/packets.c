/*
 * Fuzzes queue pairs over RoCE: a requester and a responder that get packets of any kind, most of
 * them with a right ICRC, from what claims to be their peer. No byte outside the registered memory
 * changes, and every request ends.
 */
#include "software/roce.h"
#include "world.h"

#include <arpa/inet.h>
#include <string.h>

enum {
    RECEIVES = 4,
    SENDS = 8,
    MTU = 256,
    SIZE = 700, /* of a receive, and of the largest request: three packets */
    MARGIN = 512,
    SHARED = 4096, /* memory that the peer may access */
    PEER = 0x00beef,
    OWN = 0x5a,
};

static struct {
    struct world *world;
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_cq *queue;
    struct ibv_mr *shared, *own;
    /* The margins are nobody's. */
    uint8_t before[MARGIN], memory[SHARED], after[MARGIN];
    uint8_t buffers[RECEIVES + SENDS][SIZE];
} setting;

static struct {
    struct ibv_qp *queue_pair;
    int is_reliable;
    uint32_t expected; /* the number of the next request packet, if all were carried out */
    uint32_t receives, receives_done, sends, sends_done;
    int has_failed;
} run;

static const struct aiordma_provider *table(void)
{
    return setting.world->table;
}

static void set_up(void)
{
    setting.world = the_world();
    struct ibv_device **devices = table()->get_device_list(NULL);
    PROMISE(devices);
    setting.context = table()->open_device(devices[1]);
    table()->free_device_list(devices);
    PROMISE(setting.context);
    setting.domain = table()->alloc_pd(setting.context);
    setting.queue = table()->create_cq(setting.context, 64, NULL, NULL, 0);
    PROMISE(setting.domain && setting.queue);
    setting.shared = table()->reg_mr(setting.domain, setting.memory, SHARED,
                                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                         IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    setting.own = table()->reg_mr(setting.domain, setting.buffers, sizeof(setting.buffers),
                                  IBV_ACCESS_LOCAL_WRITE);
    PROMISE(setting.shared && setting.own);
    memset(setting.before, OWN, MARGIN);
    memset(setting.after, OWN, MARGIN);
}

/* -- the program ------------------------------------------------------------------------------- */

static void make_queue_pair(void)
{
    struct ibv_qp_init_attr init = {.send_cq = setting.queue,
                                    .recv_cq = setting.queue,
                                    .cap = {SENDS, RECEIVES, 1, 1, 0},
                                    .sq_sig_all = 1,
                                    .qp_type = run.is_reliable ? IBV_QPT_RC : IBV_QPT_UC};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                                  IBV_ACCESS_REMOTE_ATOMIC,
                               .path_mtu = IBV_MTU_256,
                               .dest_qp_num = PEER,
                               .max_dest_rd_atomic = 2,
                               .max_rd_atomic = 2,
                               .min_rnr_timer = 1,
                               .timeout = 10,
                               .retry_cnt = 2,
                               .rnr_retry = 2};
    int more = run.is_reliable ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0;

    run.queue_pair = table()->create_qp(setting.domain, &init);
    PROMISE(run.queue_pair);
    PROMISE(
        !table()->modify_qp(run.queue_pair, &attr,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr.qp_state = IBV_QPS_RTR;
    attr.ah_attr.is_global = attr.ah_attr.port_num = 1;
    inet_pton(AF_INET6, "::ffff:127.0.0.1", attr.ah_attr.grh.dgid.raw);
    PROMISE(!table()->modify_qp(run.queue_pair, &attr,
                                more | IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                                    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN));
    attr.qp_state = IBV_QPS_RTS;
    more = run.is_reliable
               ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC
               : 0;
    PROMISE(!table()->modify_qp(run.queue_pair, &attr, more | IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static void post_receive(uint32_t how)
{
    uint8_t *at = setting.buffers[run.receives % RECEIVES];
    struct ibv_sge part = {(uintptr_t)at, how & 1 ? SIZE : how >> 2, setting.own->lkey};
    struct ibv_recv_wr request = {.wr_id = run.receives, .sg_list = &part, .num_sge = 1}, *bad;

    if (how & 2 && how & 4)
        part.lkey++;
    if (run.receives - run.receives_done < RECEIVES &&
        !ibv_post_recv(run.queue_pair, &request, &bad))
        run.receives++;
}

static void post_send(uint32_t how, uint32_t size)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND,
                                                 IBV_WR_SEND_WITH_IMM,
                                                 IBV_WR_RDMA_WRITE,
                                                 IBV_WR_RDMA_WRITE_WITH_IMM,
                                                 IBV_WR_RDMA_READ,
                                                 IBV_WR_ATOMIC_CMP_AND_SWP,
                                                 IBV_WR_ATOMIC_FETCH_AND_ADD,
                                                 IBV_WR_SEND_WITH_INV};
    uint8_t *at = setting.buffers[RECEIVES + run.sends % SENDS];
    struct ibv_sge part = {(uintptr_t)at, size % (SIZE + 1), setting.own->lkey};
    struct ibv_send_wr request = {.wr_id = 1000 + run.sends,
                                  .sg_list = &part,
                                  .num_sge = 1,
                                  .opcode = opcodes[how & 7],
                                  .send_flags = how & 8 ? IBV_SEND_FENCE : 0},
                       *bad;

    if (how & 16 && how & 32)
        part.lkey++;
    request.wr.rdma.remote_addr = 0x1000;
    if (request.opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
        request.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        part.length = 8;
        request.wr.atomic.remote_addr = 0x1000;
    }
    if (run.sends - run.sends_done < SENDS && !ibv_post_send(run.queue_pair, &request, &bad))
        run.sends++;
}

static void poll(void)
{
    struct ibv_wc completions[64];
    int count = ibv_poll_cq(setting.queue, 64, completions);

    PROMISE(count >= 0);
    for (int i = 0; i < count; i++) {
        if (completions[i].wr_id >= 1000) {
            PROMISE(completions[i].wr_id == 1000 + run.sends_done && run.sends_done < run.sends);
            run.sends_done++;
        } else {
            PROMISE(completions[i].wr_id == run.receives_done && run.receives_done < run.receives);
            run.receives_done++;
        }
        run.has_failed |= completions[i].status != IBV_WC_SUCCESS;
    }
}

/* -- packets to it ----------------------------------------------------------------------------- */

static void throw_sealed(struct sw_roce_packet *packet, uint32_t wrongs, struct input *input)
{
    uint8_t bytes[SW_ROCE_MOST];
    struct sw_roce_path path = {.source_port = SW_ROCE_PORT, .destination_port = SW_ROCE_PORT};

    inet_pton(AF_INET6, "::ffff:127.0.0.1", &path.source);
    path.destination = path.source;
    uint32_t size = sw_roce_headers(bytes, packet);
    memcpy(bytes + size, packet->payload, packet->size);
    size += packet->size;
    for (; wrongs; wrongs--)
        bytes[take(input, 1) % size] = (uint8_t)take(input, 1);
    throw_packet(SW_ROCE_PORT, SW_ROCE_PORT, bytes, sw_roce_seal(bytes, size, &path, 0));
}

static void throw_request(struct input *input)
{
    uint8_t payload[SW_DATAGRAM_MTU];
    uint32_t how = take(input, 1), opcode = take(input, 1), size = take(input, 1);
    uint32_t address = take(input, 2);
    struct sw_roce_packet packet = {
        .opcode = opcode % (SW_RC_SEND_ONLY_INVALIDATE + 1),
        .destination_qpn = run.queue_pair->qp_num,
        .psn = run.expected,
        .acknowledge = how & 1,
        .solicited = how >> 1 & 1,
        .rkey = setting.shared->rkey,
        .address = (uintptr_t)setting.memory + address % SHARED,
        .length = how & 4 ? size * 3 : MTU * (size & 7),
        .swap_add = how,
        .compare = size,
        .syndrome = (uint8_t)size,
        .original = 0x1234,
        .payload = payload,
        .size = how & 8 ? size : MTU,
    };

    if (opcode >= 0xf0)
        packet.address = (uintptr_t)setting.memory + SHARED - opcode; /* over its end */
    if (how >> 4 == 15)
        packet.rkey++;
    else if (how >> 4 == 14)
        packet.psn = (run.expected + take(input, 1) - 128) & 0xffffff;
    if (opcode >= 0xe0)
        packet.opcode = opcode; /* UC's, UD's and unknown ones */
    else if (!run.is_reliable)
        packet.opcode |= SW_UC;
    if (!(sw_roce_parts((uint8_t)packet.opcode) & SW_HAS_PAYLOAD))
        packet.size = 0;
    memset(payload, (int)how, packet.size);
    if (packet.psn == run.expected && !(sw_roce_parts((uint8_t)packet.opcode) & SW_IS_ANSWER)) {
        uint32_t packets =
            packet.opcode == SW_RC_READ_REQUEST ? (packet.length + MTU - 1) / MTU : 1;
        run.expected = (run.expected + (packets ? packets : 1)) & 0xffffff;
    }
    throw_sealed(&packet, 0, input);
}

/* An answer to the program's requests, whose numbers begin with 0. */
static void throw_answer(struct input *input)
{
    static const uint8_t opcodes[] = {SW_RC_ACKNOWLEDGE,          SW_RC_ACKNOWLEDGE,
                                      SW_RC_ATOMIC_ACKNOWLEDGE,   SW_RC_READ_RESPONSE_FIRST,
                                      SW_RC_READ_RESPONSE_MIDDLE, SW_RC_READ_RESPONSE_LAST,
                                      SW_RC_READ_RESPONSE_ONLY,   SW_RC_ACKNOWLEDGE};
    uint8_t payload[MTU];
    uint32_t how = take(input, 1), psn = take(input, 1), size = take(input, 1);
    struct sw_roce_packet packet = {
        .opcode = opcodes[how & 7],
        .destination_qpn = run.queue_pair->qp_num,
        .psn = how & 8 ? (psn - 64) & 0xffffff : psn % 24,
        .syndrome = (uint8_t)(how & 16 ? SW_NO_CREDITS : size),
        .original = 0x77,
        .payload = payload,
        .size = how & 32 ? MTU : size,
    };

    if (!(sw_roce_parts((uint8_t)packet.opcode) & SW_HAS_PAYLOAD))
        packet.size = 0;
    memset(payload, (int)how, packet.size);
    throw_sealed(&packet, how >> 7, input);
}

static void act(struct input *input)
{
    uint32_t what = take(input, 1);

    switch (what & 7) {
    case 0: {
        size_t size = take(input, 1);
        const uint8_t *bytes = take_bytes(input, &size);
        throw_packet(what & 8 ? 0 : SW_ROCE_PORT, SW_ROCE_PORT, bytes, size);
        break;
    }
    case 1:
    case 2:
        throw_request(input);
        break;
    case 3:
        throw_answer(input);
        break;
    case 4:
        post_receive(take(input, 1));
        break;
    case 5:
        post_send(take(input, 1), take(input, 2));
        break;
    case 6:
        pass(1u << (what >> 4));
        break;
    default:
        serve();
        poll();
    }
    if (!(what & 128)) {
        serve();
        poll();
    }
}

static void begin(struct input *input)
{
    memset(&run, 0, sizeof(run));
    begin_anew();
    run.is_reliable = take(input, 1) != 0;
    make_queue_pair();
}

static void end(struct input *input)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

    (void)input;
    /* Nobody answers any more: the retries end every request. */
    for (int i = 0; i < 60; i++) {
        serve();
        poll();
        pass(1000);
    }
    serve();
    poll();
    PROMISE(run.sends == run.sends_done);
    PROMISE(!table()->modify_qp(run.queue_pair, &attr, IBV_QP_STATE));
    poll();
    PROMISE(run.receives == run.receives_done);
    PROMISE(!table()->destroy_qp(run.queue_pair));
    promise_nothing_is_left();
    for (int i = 0; i < MARGIN; i++)
        PROMISE(setting.before[i] == OWN && setting.after[i] == OWN);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const struct target target = {set_up, begin, act, end};

    return run_target(&target, bytes, size);
}
