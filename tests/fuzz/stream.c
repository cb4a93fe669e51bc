/*
 * Fuzzes a queue pair with a stream. Its peer sends anything: raw bytes, invalid frames, and
 * responses, whether they were requested or not. An input is a list of acts of the peer and of the
 * program. PROMISE checks what must hold.
 */
#include "world.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "peer.h"
#include "software/connected.h"

enum {
    MOST_RAW = 4096,
    DEPTH = 16,         /* of the queues, posted at a time */
    RECEIVE_SIZE = 256, /* bytes of a receive; the region is twice as long as all receives */
    PARTS = 3,
    MOST_POSTS = 1000, /* sends of a run; also receives of a run */
    QUEUE = 4 * DEPTH,
};

/* Regions of different access, memory and protection domain. */
enum { ALL, READABLE, LONG, LOCAL, FOREIGN, REGIONS };

static const struct kind {
    size_t size;
    int access;
} kinds[REGIONS] = {
    [ALL] = {20000, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                        IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND},
    [READABLE] = {4096, IBV_ACCESS_REMOTE_READ},
    [LONG] = {200 * 1024, IBV_ACCESS_REMOTE_READ},
    [LOCAL] = {2 * DEPTH * RECEIVE_SIZE, IBV_ACCESS_LOCAL_WRITE},
    [FOREIGN] = {4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                           IBV_ACCESS_REMOTE_ATOMIC},
};

static const char secret[8] = {'\xc3', '\x5a', '\x96', '\x0f', '\xe1', '\x3c', '\x78', '\xb4'};

static struct {
    struct world *world;
    struct ibv_pd *domain, *foreign;
    struct ibv_cq *sends, *receives;
    char *memory[REGIONS];
    struct ibv_mr *regions[REGIONS];
    int file; /* LONG is mapped to it */
} setting;

/* One run. */
static struct {
    struct ibv_qp *queue_pair;
    struct ibv_srq *shared;
    struct ibv_mw *window;
    int fd;
    int is_deaf, has_ended; /* the peer does not read; it has shut down its sending side */
    struct peer peer;
    uint32_t sends, receives;           /* posted: the next wr_id to post */
    uint32_t sends_done, receives_done; /* completed: the next wr_id to complete */
    uint8_t raw[1 << 17];
    size_t raw_size;
} run;

/* Change the file's size, as another process can at any time. */
static void change_file(size_t size)
{
    PROMISE(!ftruncate(setting.file, (off_t)size));
}

static struct ibv_mr *region(int kind)
{
    struct ibv_pd *domain = kind == FOREIGN ? setting.foreign : setting.domain;

    if (!setting.regions[kind]) {
        if (kind == LONG)
            change_file(kinds[LONG].size);
        setting.regions[kind] = setting.world->table->reg_mr(domain, setting.memory[kind],
                                                             kinds[kind].size, kinds[kind].access);
        PROMISE(setting.regions[kind]);
    }
    return setting.regions[kind];
}

static char secrets[2 * DEPTH * RECEIVE_SIZE];

/* Map memory between two pages without access. It ends at a page's end. */
static char *pages(size_t size)
{
    size_t page = 4096, room = (size + page - 1) / page * page;
    char *all = mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    PROMISE(all != MAP_FAILED);
    PROMISE(!mprotect(all + page, room, PROT_READ | PROT_WRITE));
    for (size_t i = 0; i < room; i++)
        all[page + i] = (char)(i * 7);
    return all + page + room - size;
}

static char *pages_of_file(size_t size)
{
    setting.file = memfd_create("fuzz", MFD_CLOEXEC);
    PROMISE(setting.file >= 0);
    change_file(size);
    char *all = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, setting.file, 0);
    PROMISE(all != MAP_FAILED);
    return all;
}

static void protect(int kind, int protection)
{
    uintptr_t begin = (uintptr_t)setting.memory[kind] & ~(uintptr_t)4095;

    PROMISE(!mprotect((void *)begin, (uintptr_t)setting.memory[kind] + kinds[kind].size - begin,
                      protection));
}

static void set_up(void)
{
    const struct aiordma_provider *table;

    setting.world = the_world();
    table = setting.world->table;
    setting.domain = table->alloc_pd(setting.world->context);
    setting.foreign = table->alloc_pd(setting.world->context);
    setting.sends = table->create_cq(setting.world->context, QUEUE, NULL, NULL, 0);
    setting.receives = table->create_cq(setting.world->context, QUEUE, NULL, NULL, 0);
    PROMISE(setting.domain && setting.foreign && setting.sends && setting.receives);
    for (int kind = 0; kind < REGIONS; kind++) {
        if (kind == ALL || kind == LOCAL) /* with the sanitizer's red zones */
            setting.memory[kind] = malloc(kinds[kind].size);
        else if (kind == LONG)
            setting.memory[kind] = pages_of_file(kinds[kind].size);
        else
            setting.memory[kind] = pages(kinds[kind].size);
        region(kind);
    }
    /* Memory that the device must not write, or not access, is protected by the kernel. */
    protect(READABLE, PROT_READ);
    protect(LONG, PROT_READ);
    protect(FOREIGN, PROT_NONE);
    for (size_t i = 0; i < sizeof(secrets); i++)
        secrets[i] = secret[i % sizeof(secret)];
    memcpy(setting.memory[LOCAL], secrets, sizeof(secrets));
}

/* -- the program's side --------------------------------------------------------------------- */

static void make_queue_pair(struct input *input, int shares)
{
    const struct aiordma_provider *table = setting.world->table;
    struct ibv_qp_init_attr init = {
        .send_cq = setting.sends,
        .recv_cq = setting.receives,
        .cap = {DEPTH, DEPTH, PARTS, PARTS, 64},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};

    if (shares) {
        struct ibv_srq_init_attr shared = {.attr = {DEPTH, PARTS, 0}};
        init.srq = run.shared = table->create_srq(setting.domain, &shared);
        PROMISE(run.shared);
    }
    run.queue_pair = table->create_qp(setting.domain, &init);
    PROMISE(run.queue_pair);
    attr.qp_access_flags = take(input, 1) & 1 ? 0
                                              : IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                                    IBV_ACCESS_REMOTE_ATOMIC;
    PROMISE(
        !table->modify_qp(run.queue_pair, &attr,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    run.window = ibv_alloc_mw(setting.domain, IBV_MW_TYPE_2);
    PROMISE(run.window);
}

static void post_receive(struct input *input)
{
    uint32_t how = take(input, 1), slot = run.receives % DEPTH;
    char *at = setting.memory[LOCAL] + slot * RECEIVE_SIZE;
    struct ibv_sge parts[PARTS] = {{(uintptr_t)at, 64, region(LOCAL)->lkey},
                                   {(uintptr_t)at + 64, 0, 0},
                                   {(uintptr_t)at + 64, 192, region(LOCAL)->lkey}};
    struct ibv_recv_wr request = {.wr_id = run.receives, .sg_list = parts, .num_sge = 3}, *bad;

    if (how & 1)
        request.num_sge = 1;
    if (how & 2)
        parts[2].length = how >> 4;
    if ((how & 0xc) == 0xc)
        parts[how >> 4 & 1 ? 2 : 0].lkey++; /* an invalid key, which the device finds at delivery */
    if (run.receives - run.receives_done >= DEPTH || run.receives >= MOST_POSTS)
        return;
    int error = run.shared ? ibv_post_srq_recv(run.shared, &request, &bad)
                           : ibv_post_recv(run.queue_pair, &request, &bad);
    if (!error)
        run.receives++;
}

static void post_send(struct input *input)
{
    static const enum ibv_wr_opcode opcodes[] = {
        IBV_WR_SEND,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_SEND_WITH_IMM,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
        IBV_WR_RDMA_WRITE,
        IBV_WR_SEND_WITH_INV,
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_LOCAL_INV,
        IBV_WR_BIND_MW,
    };
    uint32_t what = take(input, 1), size = take(input, 2);
    enum ibv_wr_opcode opcode = opcodes[(what & 15) % (sizeof(opcodes) / sizeof(*opcodes))];
    int is_atomic = opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    int fills = is_atomic || opcode == IBV_WR_RDMA_READ;
    int kind = fills ? ALL : what & 16 && !(size & 15) ? LONG : READABLE;
    struct ibv_sge parts[2] = {{(uintptr_t)setting.memory[kind], size, region(kind)->lkey}};
    struct ibv_send_wr request = {.wr_id = run.sends,
                                  .sg_list = parts,
                                  .num_sge = 1,
                                  .opcode = opcode},
                       *bad;

    if (what & 32)
        request.send_flags |= IBV_SEND_SOLICITED;
    if (what & 64)
        request.send_flags |= IBV_SEND_FENCE;
    if (what & 128 && !fills && size <= 64)
        request.send_flags |= IBV_SEND_INLINE;
    parts[0].length =
        is_atomic ? 8 : (uint32_t)(size * (kind == LONG ? 3u : 1u) % kinds[kind].size);
    if (!is_atomic && parts[0].length > 1) { /* in two parts, in reverse order */
        parts[1] = parts[0];
        parts[1].length = parts[0].length / 2;
        parts[0].addr += parts[1].length;
        parts[0].length -= parts[1].length;
        request.num_sge = 2;
    }
    request.wr.rdma.remote_addr = 0x1000;
    request.wr.rdma.rkey = 0xabcdef01;
    if (is_atomic) {
        request.wr.atomic.remote_addr = 0x1000;
        request.wr.atomic.rkey = 0xabcdef01;
        request.wr.atomic.compare_add = size;
    } else if (opcode == IBV_WR_BIND_MW) {
        request.bind_mw.mw = run.window;
        request.bind_mw.rkey = ibv_inc_rkey(run.window->rkey);
        request.bind_mw.bind_info = (struct ibv_mw_bind_info){
            region(ALL), (uintptr_t)setting.memory[ALL] + 100, 200,
            IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC};
        request.num_sge = 0;
    } else if (opcode == IBV_WR_LOCAL_INV) {
        request.invalidate_rkey = run.window->rkey;
        request.num_sge = 0;
    } else if (opcode == IBV_WR_SEND_WITH_INV) {
        request.invalidate_rkey = 0xabcdef02;
    }
    if (run.sends >= MOST_POSTS || run.sends - run.sends_done >= DEPTH)
        return;
    if (!ibv_post_send(run.queue_pair, &request, &bad)) {
        run.sends++;
        if (opcode == IBV_WR_BIND_MW)
            run.window->rkey = request.bind_mw.rkey;
    }
}

/* Poll a queue. Every request completes once, in order. */
static void poll_one_queue(struct ibv_cq *queue, uint32_t posted, uint32_t *done)
{
    struct ibv_wc completions[QUEUE];
    int count = ibv_poll_cq(queue, QUEUE, completions);

    PROMISE(count >= 0);
    for (int i = 0; i < count; i++) {
        PROMISE(completions[i].qp_num == run.queue_pair->qp_num);
        PROMISE(completions[i].wr_id == *done && *done < posted);
        (*done)++;
        if (queue == setting.receives && completions[i].status == IBV_WC_SUCCESS &&
            completions[i].opcode == IBV_WC_RECV)
            PROMISE(completions[i].byte_len <= RECEIVE_SIZE);
    }
}

static void poll_queues(void)
{
    poll_one_queue(setting.sends, run.sends, &run.sends_done);
    poll_one_queue(setting.receives, run.receives, &run.receives_done);
}

static void change_state(uint32_t how)
{
    static const enum ibv_qp_state states[] = {IBV_QPS_SQD, IBV_QPS_RTS, IBV_QPS_ERR, IBV_QPS_RTS};
    struct ibv_qp_attr attr = {.qp_state = states[how & 3]};

    if (setting.world->table->modify_qp(run.queue_pair, &attr, IBV_QP_STATE)) {
        /* The transition is not allowed from the present state. */
    }
}

static void deregister(uint32_t how)
{
    static const int chosen[] = {ALL, READABLE, LONG, LOCAL};
    int kind = chosen[how & 3];

    if (setting.regions[kind] && !setting.world->table->dereg_mr(setting.regions[kind]))
        setting.regions[kind] = NULL;
    region(kind);
}

/* -- the peer's side ---------------------------------------------------------------------- */

static void listen_to_device(void)
{
    uint8_t bytes[1 << 16];
    ssize_t size;

    while ((size = recv(run.fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0) {
        PROMISE(!memmem(bytes, (size_t)size, secret, sizeof(secret)));
        peer_hears(&run.peer, bytes, (size_t)size);
    }
    if (!size)
        run.peer.has_heard_end = 1;
}

static void say(const uint8_t *bytes, size_t size)
{
    peer_says(&run.peer, bytes, size);
    if (run.raw_size + size > sizeof(run.raw))
        return;
    memcpy(run.raw + run.raw_size, bytes, size);
    run.raw_size += size;
}

/* Send at most `most` of the bytes that were said, and serve the device's sockets. */
static void send_some(size_t most)
{
    size_t size = most < run.raw_size ? most : run.raw_size;

    for (int i = 0; i < 8; i++) {
        if (size && !run.has_ended) {
            ssize_t sent = send(run.fd, run.raw, size, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent > 0) {
                run.raw_size -= (size_t)sent;
                size -= (size_t)sent;
                memmove(run.raw, run.raw + sent, run.raw_size);
            }
        }
        serve();
        if (run.is_deaf)
            break;
        listen_to_device();
        if (!size)
            break;
    }
}

/* Choose a key, and an address that is valid for it, or nearly valid. */
static void choose_target(struct input *input, struct saying *saying)
{
    uint32_t how = take(input, 1), more = take(input, 2);

    switch (how & 15) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4: {
        int kind = how & 15;
        saying->stag = region(kind)->rkey;
        saying->offset = (uintptr_t)setting.memory[kind];
        if (how & 16)
            saying->offset += kinds[kind].size - (more & 0xff);
        else
            saying->offset += more;
        break;
    }
    case 5:
        saying->stag = run.window->rkey;
        saying->offset = (uintptr_t)setting.memory[ALL] + 100 + (more & 0x1ff);
        break;
    case 6:
    case 7:
    case 8:
        saying->stag = run.peer.sink;
        saying->offset = run.peer.sink_offset + (how & 16 ? more : 0);
        break;
    case 9:
        saying->stag = region(ALL)->rkey ^ 1;
        saying->offset = (uintptr_t)setting.memory[ALL];
        break;
    case 10:
        saying->stag = region(ALL)->rkey;
        saying->offset = UINT64_MAX - more;
        break;
    default:
        saying->stag = more << 16 | how;
        saying->offset = (uint64_t)more << 48 | how;
    }
}

/* Choose a size. Most sizes are small, because large ones take long. */
static uint32_t choose_size(struct input *input, uint32_t head)
{
    uint32_t size = take(input, head & 64 ? 2 : 1);

    return size & 15 ? size & 0x3ff : size;
}

static void say_frame(struct input *input)
{
    uint8_t frame[PEER_MOST_FRAME];
    uint32_t head = take(input, 1);
    struct saying saying = {.operation = head & 15, .is_last = !(head & 16)};

    if (head & 32)
        saying.wrongs = take(input, 1);
    if (saying.wrongs)
        saying.wrong = take(input, 2);
    switch (saying.operation) {
    case 0:
    case 2: /* WRITE, READ response */
        choose_target(input, &saying);
        saying.size = choose_size(input, head);
        saying.fill = (uint8_t)head;
        /* A response of the requested length. */
        if (saying.operation == 2 && head & 128)
            saying.size = run.peer.sink_size;
        break;
    case 1: /* READ request */
        choose_target(input, &saying);
        saying.size = take(input, head & 64 ? 4 : 1);
        saying.sink = head;
        break;
    case 4:
    case 6: /* SEND with invalidate */
        choose_target(input, &saying);
        saying.size = take(input, 1);
        break;
    case 10: /* atomic request */
        choose_target(input, &saying);
        saying.size = take(input, 1);
        break;
    case 11: /* atomic response */
        saying.sink = run.peer.number + (head & 64 ? take(input, 1) : 0);
        break;
    default:
        saying.size = choose_size(input, head);
        saying.fill = (uint8_t)saying.size;
    }
    say(frame, peer_composes(&run.peer, &saying, frame));
}

/* -- one run ------------------------------------------------------------------------------ */

static void act(struct input *input)
{
    uint32_t what = take(input, 1);

    switch (what & 15) {
    case 0: {
        size_t size = what & 128 ? take(input, 2) % MOST_RAW : what >> 4;
        const uint8_t *bytes = take_bytes(input, &size);
        say(bytes, size);
        run.peer.is_garbled = 1;
        break;
    }
    case 1:
    case 2:
    case 3:
    case 4:
        say_frame(input);
        if (what & 128)
            break;
        send_some(run.raw_size);
        break;
    case 5:
    case 6:
        post_receive(input);
        serve();
        break;
    case 7:
    case 8:
        post_send(input);
        serve();
        if (!run.is_deaf)
            listen_to_device();
        break;
    case 9:
        poll_queues();
        break;
    case 10:
        send_some(9 * (what >> 4));
        break;
    case 11:
        deregister(what >> 4);
        break;
    case 12:
        if (what & 0x10)
            change_file(what & 0x80 ? kinds[LONG].size : 4096);
        if (what & 0x30)
            break;
        shutdown(run.fd, SHUT_WR);
        run.has_ended = 1;
        serve();
        break;
    case 13:
        run.is_deaf = what >> 4 & 1;
        break;
    case 14:
        change_state(what >> 4);
        run.peer.program_ends |= (what >> 4 & 3) == 2;
        break;
    default:
        pass(what);
    }
}

static void begin(struct input *input)
{
    uint32_t mode = take(input, 1), more = take(input, 1);
    struct sw_terms terms = {
        .crc = mode & 1,
        .is_initiator = mode >> 1 & 1,
        .must_hear_first = (mode & 6) == 4,
        .must_hear_soon = (mode & 6) == 4 && more & 1,
        .sends_ready = (mode & 6) == 6,
        .gives_word = more >> 1 & 1,
        .inbound_depth = mode & 8 ? 0 : 4,
        .outbound_depth = mode & 16 ? 0 : 4,
    };
    /* How many bytes the device may hold: the usual limit, none, one block or two. */
    static const uint64_t limits[] = {SW_MOST_HELD, 0, SW_BLOCK_SIZE, 2 * SW_BLOCK_SIZE};
    int ends[2];

    sw_device.memory.most_held = limits[more >> 2 & 3];
    memset(&run.peer, 0, offsetof(struct peer, heard));
    run.is_deaf = run.has_ended = 0;
    run.sends = run.receives = run.sends_done = run.receives_done = 0;
    run.raw_size = 0;
    run.shared = NULL;
    begin_anew();
    change_file(kinds[LONG].size);
    peer_begins(&run.peer, terms.crc);
    make_queue_pair(input, mode & 32);
    for (uint32_t i = mode >> 6; i; i--)
        post_receive(input);
    PROMISE(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends));
    run.fd = ends[0];
    size_t size = take(input, 1);
    terms.already = take_bytes(input, &size);
    terms.already_size = size & 64 ? size & 63 : 0;
    run.peer.is_garbled = terms.already_size > 0;
    peer_says(&run.peer, terms.already, terms.already_size);
    sw_lock();
    PROMISE(!sw_stream_begin((struct sw_queue_pair *)run.queue_pair, ends[1], &terms));
    sw_unlock();
}

/* A queue pair that failed has sent a TERMINATE, unless the peer or the program ended it. */
static void check_last_word(void)
{
    if (run.queue_pair->state != IBV_QPS_ERR)
        return;
    run.is_deaf = 0;
    serve();
    listen_to_device(); /* makes room in the socket for the device's last frames */
    serve();
    listen_to_device();
    PROMISE(run.peer.has_heard_end || run.has_ended);
    if (run.has_ended || run.peer.program_ends || run.peer.has_said_terminate)
        return;
    if (run.peer.is_garbled && run.peer.has_said_seven)
        return; /* a byte of the peer may have been a TERMINATE */
    PROMISE(run.peer.has_heard_terminate || run.peer.is_within_frame);
}

static void end(struct input *input)
{
    const struct aiordma_provider *table = setting.world->table;
    struct ibv_wc completion;

    (void)input;
    send_some(run.raw_size);
    check_last_word();
    change_state(2);
    poll_queues();
    PROMISE(run.sends_done == run.sends);
    PROMISE(run.shared || run.receives_done == run.receives);
    PROMISE(!table->destroy_qp(run.queue_pair));
    PROMISE(ibv_poll_cq(setting.sends, 1, &completion) == 0);
    PROMISE(ibv_poll_cq(setting.receives, 1, &completion) == 0);
    PROMISE(!ibv_dealloc_mw(run.window));
    if (run.shared)
        PROMISE(!table->destroy_srq(run.shared));
    close(run.fd);
    serve();
    pass(100000);
    PROMISE(sw_device.counts.sockets == 0);
    PROMISE(sw_device.memory.blocks == 0 && sw_device.memory.held == 0);
    PROMISE(sw_device.counts.queue_pairs == 0);
    PROMISE(sw_device.counts.regions == REGIONS);
    struct ibv_async_event event;
    while (((struct sw_context *)sw_context_of(setting.world->context))->first_event &&
           !table->get_async_event(setting.world->context, &event))
        table->ack_async_event(&event);
    /* The device must not write after the receives. */
    PROMISE(!memcmp(setting.memory[LOCAL] + DEPTH * RECEIVE_SIZE, secrets, DEPTH * RECEIVE_SIZE));
    if (run.receives)
        memcpy(setting.memory[LOCAL], secrets, sizeof(secrets));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const struct target target = {set_up, begin, act, end};

    return run_target(&target, bytes, size);
}
