/*
 * Fuzzes the connection manager's TCP port space: peers that connect to a listener, or that the
 * program connects to, and the bytes that they send before and just after the stream begins. The
 * program accepts, rejects and destroys meanwhile.
 */
#include "manager.h"

#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PEERS = 4, MOST_FRAME = 20 + 600, CALLERS = 2, ASKED = 6 };

static struct {
    struct world *world;
    struct ibv_pd *domain;
    struct ibv_cq *queue;
    struct rdma_event_channel *channel;
} setting;

/* One identifier of the program's, and its state. */
struct party {
    struct rdma_cm_id *id;
    int connects; /* it is the active side, and connect was called */
    int is_established, is_over;
};

static struct {
    struct rdma_cm_id *listener;
    uint16_t port;
    int is_short;     /* the listener has reported a shortage of descriptors */
    int peers[PEERS]; /* -1: none */
    struct party callers[CALLERS], asked[ASKED];
} run;

static const struct aiordma_provider *table(void)
{
    return setting.world->table;
}

static void set_up(void)
{
    setting.world = the_world();
    setting.channel = table()->create_event_channel();
    PROMISE(setting.channel);
}

static struct party *party_of(const struct rdma_cm_id *id)
{
    for (int i = 0; i < CALLERS; i++)
        if (run.callers[i].id == id)
            return &run.callers[i];
    for (int i = 0; i < ASKED; i++)
        if (run.asked[i].id == id)
            return &run.asked[i];
    return NULL;
}

static void make_queue_pair(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr init = {.cap = {2, 2, 1, 1, 0}, .qp_type = IBV_QPT_RC};

    if (!setting.domain) {
        setting.domain = table()->alloc_pd(id->verbs);
        setting.queue = table()->create_cq(id->verbs, 64, NULL, NULL, 0);
        PROMISE(setting.domain && setting.queue);
    }
    init.send_cq = init.recv_cq = setting.queue;
    PROMISE(!table()->cm_create_qp(id, setting.domain, &init));
}

static void note_event(struct rdma_cm_event *event)
{
    struct party *party = party_of(event->id);

    switch (event->event) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        PROMISE(event->listen_id == run.listener && !party);
        PROMISE(event->param.conn.private_data_len == 0 || event->param.conn.private_data);
        for (int i = 0; i < ASKED; i++)
            if (!run.asked[i].id) {
                run.asked[i] = (struct party){.id = event->id};
                return;
            }
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
        PROMISE(party && !party->is_established && !party->is_over);
        party->is_established = 1;
        break;
    case RDMA_CM_EVENT_CONNECT_ERROR:
        if (event->id == run.listener && event->param.conn.qp_num) { /* peers without a handshake */
            PROMISE(event->status < 0);
            PROMISE(event->param.conn.private_data_len == sizeof(struct sockaddr_in6));
            break;
        }
        if (event->id == run.listener) {
            PROMISE(event->status == -EMFILE && !run.is_short);
            run.is_short = 1;
            break;
        }
        /* fall through */
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_UNREACHABLE:
        PROMISE(party && !party->is_established && !party->is_over);
        party->is_over = 1;
        break;
    case RDMA_CM_EVENT_DISCONNECTED:
        PROMISE(party && party->is_established && !party->is_over);
        party->is_over = 1;
        break;
    case RDMA_CM_EVENT_ADDR_RESOLVED:
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
        break;
    default:
        fail("an event that has no place here");
    }
}

static int is_kept(const struct rdma_cm_id *id)
{
    return !!party_of(id);
}

static void take_events(void)
{
    take_all_events(setting.channel, note_event, is_kept);
}

static void settle(void)
{
    serve();
    take_events();
}

static void destroy(struct party *party)
{
    if (!party->id)
        return;
    if (party->id->qp)
        table()->cm_destroy_qp(party->id);
    take_events();
    PROMISE(!table()->destroy_id(party->id));
    party->id = NULL;
}

/* -- the program ---------------------------------------------------------------------------- */

static void call(struct party *party, uint32_t how)
{
    struct sockaddr_in to = loopback(7);
    struct rdma_conn_param parameters = {.private_data = "who goes there",
                                         .private_data_len = how & 15,
                                         .responder_resources = how & 16 ? 0 : 4,
                                         .initiator_depth = how & 32 ? 0 : 4};

    if (party->id)
        return;
    *party = (struct party){0};
    PROMISE(!table()->create_id(setting.channel, &party->id, NULL, RDMA_PS_TCP));
    PROMISE(!table()->resolve_addr(party->id, NULL, (struct sockaddr *)&to, 1000));
    pass(1);
    settle();
    PROMISE(!table()->resolve_route(party->id, 1000));
    pass(1);
    settle();
    make_queue_pair(party->id);
    PROMISE(!table()->connect(party->id, &parameters));
    party->connects = 1;
    settle();
    for (int i = 0; i < PEERS; i++)
        if (run.peers[i] < 0) {
            run.peers[i] = answer_call();
            break;
        }
    settle();
}

static void answer(struct party *party, uint32_t how)
{
    struct rdma_conn_param parameters = {.private_data = "come in",
                                         .private_data_len = how & 7,
                                         .responder_resources = how & 16 ? 0 : 4,
                                         .initiator_depth = how & 32 ? 0 : 4};

    if (!party->id || party->id->qp)
        return;
    if (how & 64) {
        if (table()->reject(party->id, "no", how & 1 ? 2 : 0)) {
            /* The peer has disconnected, or was rejected before. */
        }
        return;
    }
    make_queue_pair(party->id);
    if (table()->accept(party->id, &parameters)) {
        /* The peer has disconnected, or was rejected. */
    }
    settle();
}

/* -- the peers -------------------------------------------------------------------------------- */

static size_t compose(struct input *input, uint8_t *frame)
{
    uint32_t kind = take(input, 1), flags = take(input, 1), size = take(input, 1);

    memcpy(frame, kind & 1 ? "MPA ID Rep Frame" : "MPA ID Req Frame", 16);
    frame[16] = (uint8_t)flags;
    frame[17] = kind & 2 ? (uint8_t)(kind >> 4) : 2;
    if (kind & 4)
        size += 300;
    frame[18] = (uint8_t)(size >> 8);
    frame[19] = (uint8_t)size;
    memset(frame + 20, 0x11, size);
    for (uint32_t i = 0; i < 4 && i < size; i++)
        frame[20 + i] = (uint8_t)take(input, 1);
    return 20 + size;
}

static void hear(int fd)
{
    uint8_t bytes[4096];

    while (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
        continue;
}

static void act(struct input *input)
{
    uint32_t what = take(input, 1), which = what >> 4;
    int *peer = &run.peers[which % PEERS];
    uint8_t frame[MOST_FRAME];

    switch (what & 15) {
    case 0:
        if (*peer < 0)
            *peer = dial(run.port);
        settle();
        break;
    case 1:
    case 2:
    case 3: {
        if (*peer < 0)
            *peer = dial(run.port);
        size_t size = compose(input, frame), cut = 0;
        if (*peer < 0)
            break;
        if (what & 64) {
            cut = take(input, 2) % size;
            send(*peer, frame, cut, MSG_DONTWAIT);
            settle();
        }
        send(*peer, frame + cut, size - cut, MSG_DONTWAIT);
        settle();
        hear(*peer);
        break;
    }
    case 4:
    case 5: {
        size_t size = take(input, 1);
        const uint8_t *bytes = take_bytes(input, &size);
        if (*peer >= 0)
            send(*peer, bytes, size, MSG_DONTWAIT);
        settle();
        break;
    }
    case 6:
        if (*peer >= 0)
            close(*peer);
        *peer = -1;
        settle();
        break;
    case 7:
        if (*peer >= 0)
            shutdown(*peer, SHUT_WR);
        settle();
        break;
    case 8:
    case 9:
        answer(&run.asked[which % ASKED], take(input, 1));
        break;
    case 10:
        call(&run.callers[which % CALLERS], take(input, 1));
        break;
    case 11:
        destroy(which & 1 ? &run.callers[which / 2 % CALLERS] : &run.asked[which / 2 % ASKED]);
        settle();
        break;
    case 12: {
        struct party *party = &run.asked[which % ASKED];
        if (party->id && party->id->qp && table()->disconnect(party->id)) {
            /* It is not connected. */
        }
        settle();
        break;
    }
    case 13:
        run.is_short = 0; /* the listener may report a shortage again */
        pass(1000 << (which & 7));
        settle();
        break;
    case 14:
        set_descriptors((enum descriptors)(which & 3));
        settle();
        break;
    default:
        if (*peer >= 0)
            hear(*peer);
        settle();
    }
}

static void begin(struct input *input)
{
    (void)input;
    memset(&run, 0, sizeof(run));
    for (int i = 0; i < PEERS; i++)
        run.peers[i] = -1;
    begin_anew();
    set_descriptors(MANY_DESCRIPTORS);
    run.port = start_listening(setting.channel, RDMA_PS_TCP, &run.listener);
}

static void end(struct input *input)
{
    struct ibv_wc completion[64];
    int fd;

    set_descriptors(MANY_DESCRIPTORS);
    /* An identifier that waits for a silent peer gets an event in the end. */
    run.is_short = 0;
    pass(1000000);
    settle();
    for (int i = 0; i < CALLERS; i++)
        PROMISE(!run.callers[i].id || !run.callers[i].connects || run.callers[i].is_established ||
                run.callers[i].is_over);
    int listener_first = take(input, 1) & 1;
    if (listener_first)
        PROMISE(!table()->destroy_id(run.listener));
    for (int i = 0; i < CALLERS; i++)
        destroy(&run.callers[i]);
    for (int i = 0; i < ASKED; i++)
        destroy(&run.asked[i]);
    if (!listener_first)
        PROMISE(!table()->destroy_id(run.listener));
    take_events();
    for (int i = 0; i < PEERS; i++)
        if (run.peers[i] >= 0)
            close(run.peers[i]);
    while ((fd = answer_call()) >= 0)
        close(fd);
    settle();
    pass(1000000);
    settle();
    promise_nothing_is_left();
    if (setting.queue)
        PROMISE(ibv_poll_cq(setting.queue, 64, completion) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const struct target target = {set_up, begin, act, end};

    return run_target(&target, bytes, size);
}
