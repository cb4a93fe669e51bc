/*
 * Tests that the answer to a READ costs no more after many requests than after few, however small
 * its pieces are: the device does not search the send queue for each piece. The memory of the
 * requests before the READ is made inaccessible meanwhile. Prints nothing and returns 0, or prints
 * the error and returns 1.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "software/connected.h"
#include "software/engine.h"
#include "software/stream.h"

#include "queue_pair.h"

enum { BEFORE = 20000, SIZE = 64, PATIENCE = 60000 /* milliseconds */ };

/* Post many SENDs of no bytes, and a READ after them, in one call. */
static void post(struct ibv_qp *queue_pair, struct ibv_sge *part)
{
    struct ibv_send_wr *requests = calloc(BEFORE + 1, sizeof(*requests)), *refused;

    check(requests != NULL, "calloc failed");
    for (int i = 0; i < BEFORE; i++) {
        requests[i].opcode = IBV_WR_SEND;
        requests[i].next = &requests[i + 1];
    }
    struct ibv_send_wr *read = &requests[BEFORE];
    read->wr_id = 7;
    read->opcode = IBV_WR_RDMA_READ;
    read->send_flags = IBV_SEND_SIGNALED;
    read->sg_list = part;
    read->num_sge = 1;
    check(!ibv_post_send(queue_pair, requests, &refused), "ibv_post_send failed");
    free(requests);
}

static void read_all(int fd, char *to, size_t size)
{
    while (size) {
        struct pollfd wanted = {.fd = fd, .events = POLLIN};
        check(poll(&wanted, 1, PATIENCE) == 1, "the device sends no more");
        ssize_t got = read(fd, to, size);
        check(got > 0, "the connection has ended");
        to += got;
        size -= (size_t)got;
    }
}

/* Read the frames of all requests. Returns the sink of the READ. */
static uint32_t hear(int fd)
{
    char bytes[SW_UNTAGGED_HEADER + SW_READ_REQUEST_SIZE + 4];
    struct sw_read_request request;

    for (int i = 0; i < BEFORE; i++)
        read_all(fd, bytes, SW_UNTAGGED_HEADER + 4);
    read_all(fd, bytes, sizeof(bytes));
    sw_read_request_read(bytes + SW_UNTAGGED_HEADER, &request);
    return request.sink;
}

/* Answer the READ with one byte. */
static void say(int fd, uint32_t sink, uint32_t offset)
{
    char bytes[SW_TAGGED_HEADER + 1 + 8] = "";
    struct sw_frame what = {
        .operation = SW_READ_RESPONSE,
        .is_tagged = 1,
        .is_last = offset == SIZE - 1,
        .stag = sink,
        .offset = offset,
        .payload = 1,
    };

    uint32_t header = sw_frame_write(bytes, &what);
    bytes[header] = (char)(offset + 1);
    check(write(fd, bytes, sw_frame_size(&what)) == (ssize_t)sw_frame_size(&what), "write failed");
}

/* Change the access to all requests between the first one and the READ. */
static void protect(const struct sw_queue_pair *pair, int access)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)&pair->sends[1] + page - 1) / page * page;
    uintptr_t to = (uintptr_t)&pair->sends[BEFORE] / page * page;

    check(!mprotect((void *)from, to - from, access), "mprotect failed");
}

static void await_progress(const struct sw_queue_pair *pair, uint32_t size)
{
    for (int i = 0; i < PATIENCE; i++) {
        sw_lock();
        uint32_t progress = pair->sends[BEFORE].progress;
        sw_unlock();
        if (progress == size)
            return;
        usleep(1000);
    }
    check(0, "the answer does not arrive");
}

static void check_answer(const struct aiordma_provider *table, struct ibv_pd *domain)
{
    static char memory[SIZE];
    struct ibv_mr *region = table->reg_mr(domain, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp *queue_pair = make_queue_pair(table, domain, BEFORE + 1);
    struct sw_queue_pair *pair = (struct sw_queue_pair *)queue_pair;
    struct sw_terms terms = {.gives_word = 1, .inbound_depth = 4, .outbound_depth = 4};
    struct ibv_cq *queue = queue_pair->send_cq;
    struct ibv_wc completion;
    int ends[2];

    check(region != NULL, "reg_mr failed");
    struct ibv_sge part = {(uintptr_t)memory, SIZE, region->lkey};
    check(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), "socketpair");
    sw_lock();
    check(!sw_stream_begin(pair, ends[1], &terms), "sw_stream_begin failed");
    sw_unlock();
    post(queue_pair, &part);
    uint32_t sink = hear(ends[0]);
    sw_lock();
    protect(pair, PROT_NONE);
    sw_unlock();
    for (uint32_t offset = 0; offset < SIZE - 1; offset++)
        say(ends[0], sink, offset);
    await_progress(pair, SIZE - 1);
    sw_lock();
    protect(pair, PROT_READ | PROT_WRITE);
    sw_unlock();
    say(ends[0], sink, SIZE - 1);
    for (int i = 0; !ibv_poll_cq(queue, 1, &completion); i++) {
        check(i < PATIENCE, "the READ does not complete");
        usleep(1000);
    }
    check(completion.wr_id == 7 && completion.status == IBV_WC_SUCCESS, "the READ failed");
    for (int i = 0; i < SIZE; i++)
        check(memory[i] == (char)(i + 1), "other bytes were read");
    check(!table->destroy_qp(queue_pair) && !table->destroy_cq(queue) && !table->dereg_mr(region),
          "destroy failed");
    close(ends[0]);
}

int main(void)
{
    const struct aiordma_provider *table = aiordma_software();
    struct ibv_device **devices = table->get_device_list(NULL);
    struct ibv_context *context = devices ? table->open_device(devices[0]) : NULL;
    struct ibv_pd *domain = context ? table->alloc_pd(context) : NULL;

    check(domain != NULL, "the device does not open");
    table->free_device_list(devices);
    check_answer(table, domain);
    check(!table->dealloc_pd(domain) && !table->close_device(context), "something is left");
    return 0;
}
