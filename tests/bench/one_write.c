/*
 * What one signaled RDMA WRITE costs in C: posted, and polled for, one at a time. (ib_write_lat
 * reports half a ping-pong of WRITEs, which is something else.)
 *
 *   one_write serve ADDRESS PORT SIZE          serves one client
 *   one_write ask ADDRESS PORT SIZE ROUNDS     prints: median and mean, in nanoseconds
 */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct place {
    uint64_t address;
    uint32_t rkey;
} __attribute__((packed));

static void check(int failed, const char *what)
{
    if (failed) {
        perror(what);
        exit(1);
    }
}

static uint64_t now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static struct rdma_cm_id *endpoint(char *address, char *port, int passive)
{
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *found;
    struct ibv_qp_init_attr attributes = {
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
        .sq_sig_all = 1,
        .qp_type = IBV_QPT_RC,
    };
    struct rdma_cm_id *id;

    hints.ai_flags = passive ? RAI_PASSIVE : 0;
    check(rdma_getaddrinfo(address, port, &hints, &found), "rdma_getaddrinfo");
    check(rdma_create_ep(&id, found, NULL, &attributes), "rdma_create_ep");
    rdma_freeaddrinfo(found);
    return id;
}

static void serve(char *address, char *port, size_t size)
{
    struct rdma_cm_id *listener = endpoint(address, port, 1), *id;
    struct rdma_cm_event *event;
    char *memory = calloc(1, size);

    check(!memory, "calloc");
    check(rdma_listen(listener, 1), "rdma_listen");
    check(rdma_get_request(listener, &id), "rdma_get_request");
    struct ibv_mr *region = rdma_reg_write(id, memory, size);
    check(!region, "rdma_reg_write");
    struct place place = {(uintptr_t)memory, region->rkey};
    struct rdma_conn_param parameters = {
        .private_data = &place,
        .private_data_len = sizeof(place),
        .responder_resources = 1,
        .initiator_depth = 1,
        .rnr_retry_count = 7,
    };
    check(rdma_accept(id, &parameters), "rdma_accept");
    /* The endpoint is synchronous: its channel's next event is the disconnect. */
    check(rdma_get_cm_event(id->channel, &event), "rdma_get_cm_event");
    check(event->event != RDMA_CM_EVENT_DISCONNECTED, "not a disconnect");
    rdma_ack_cm_event(event);
    rdma_dereg_mr(region);
    rdma_destroy_ep(id);
    rdma_destroy_ep(listener);
}

static int ascending(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

    return a < b ? -1 : a > b;
}

static void ask(char *address, char *port, size_t size, int rounds)
{
    struct rdma_cm_id *id = endpoint(address, port, 0);
    struct rdma_conn_param parameters = {
        .responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
    struct place place;
    uint64_t *samples = calloc((size_t)rounds, sizeof(*samples)), total = 0;
    char *memory = calloc(1, size);

    check(!samples || !memory, "calloc");
    check(rdma_connect(id, &parameters), "rdma_connect");
    check(!id->event || id->event->param.conn.private_data_len < sizeof(place), "no answer");
    memcpy(&place, id->event->param.conn.private_data, sizeof(place));
    struct ibv_mr *region = rdma_reg_msgs(id, memory, size);
    check(!region, "rdma_reg_msgs");

    int warm_up = rounds / 10;
    for (int i = -warm_up; i < rounds; i++) {
        struct ibv_wc completion;
        int found;
        uint64_t began = now();
        check(rdma_post_write(id, NULL, memory, size, region, IBV_SEND_SIGNALED, place.address,
                              place.rkey),
              "rdma_post_write");
        while (!(found = ibv_poll_cq(id->send_cq, 1, &completion)))
            ;
        check(found < 0 || completion.status != IBV_WC_SUCCESS, "ibv_poll_cq");
        if (i >= 0)
            total += samples[i] = now() - began;
    }
    qsort(samples, (size_t)rounds, sizeof(*samples), ascending);
    printf("%llu %llu\n", (unsigned long long)samples[rounds / 2],
           (unsigned long long)(total / (uint64_t)rounds));
    rdma_disconnect(id);
    rdma_dereg_mr(region);
    rdma_destroy_ep(id);
}

int main(int count, char **words)
{
    if (count == 5 && !strcmp(words[1], "serve"))
        serve(words[2], words[3], (size_t)atol(words[4]));
    else if (count == 6 && !strcmp(words[1], "ask"))
        ask(words[2], words[3], (size_t)atol(words[4]), atoi(words[5]));
    else
        return 2;
    return 0;
}
