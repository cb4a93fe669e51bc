/*
 * Work requests built by calls (man ibv_wr_post), on a connection of one process with itself.
 * Compiled with rdma-core's own headers, and run with the libraries that export the software device.
 * Prints what is wrong.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <arpa/inet.h>
#include <pthread.h>

#include <rdma/rdma_cma.h>

enum { SLOTS = 4, INLINE = 32, BYTES = 64 };

static char local[BYTES], remote[BYTES] __attribute__((aligned(8)));
static struct ibv_mr *ours, *theirs;
static struct rdma_cm_id *client, *server;
static struct ibv_qp_ex *builder;

static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    printf("%s (errno %d)\n", what, errno);
    exit(1);
}

static struct ibv_qp_init_attr_ex attributes(uint64_t operations)
{
    return (struct ibv_qp_init_attr_ex){
        .cap = {.max_send_wr = SLOTS,
                .max_recv_wr = SLOTS,
                .max_send_sge = 2,
                .max_recv_sge = 1,
                .max_inline_data = INLINE},
        .qp_type = IBV_QPT_RC,
        .comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = operations,
    };
}

static void *accept_one(void *listener)
{
    struct ibv_qp_init_attr_ex attr = attributes(IBV_QP_EX_WITH_SEND);

    check(!rdma_get_request(listener, &server), "rdma_get_request");
    check(!rdma_create_qp_ex(server, &attr), "rdma_create_qp_ex of a server");
    theirs = ibv_reg_mr(server->pd, remote, BYTES,
                        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
                            IBV_ACCESS_REMOTE_ATOMIC);
    check(theirs != NULL, "ibv_reg_mr");
    check(!rdma_accept(server, NULL), "rdma_accept");
    return NULL;
}

static void connect_both(void)
{
    const uint64_t all = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
                         IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
                         IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
                         IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV |
                         IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct rdma_cm_id *listener;
    struct ibv_qp_init_attr_ex attr = attributes(all);
    pthread_t thread;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(!rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(!rdma_bind_addr(listener, (struct sockaddr *)&address), "rdma_bind_addr");
    check(!rdma_listen(listener, 1), "rdma_listen");
    address.sin_port = rdma_get_src_port(listener);
    pthread_create(&thread, NULL, accept_one, listener);
    check(!rdma_create_id(NULL, &client, NULL, RDMA_PS_TCP), "rdma_create_id");
    check(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 1000), "rdma_resolve_addr");
    check(!rdma_resolve_route(client, 1000), "rdma_resolve_route");
    check(!rdma_create_qp_ex(client, &attr), "rdma_create_qp_ex of a client");
    check(attr.cap.max_send_wr >= SLOTS && attr.cap.max_inline_data >= INLINE, "its capacity");
    builder = ibv_qp_to_qp_ex(client->qp);
    check(builder && &builder->qp_base == client->qp, "ibv_qp_to_qp_ex");
    ours = ibv_reg_mr(client->pd, local, BYTES, IBV_ACCESS_LOCAL_WRITE);
    check(ours != NULL, "ibv_reg_mr of a client");
    check(!rdma_connect(client, NULL), "rdma_connect");
    pthread_join(thread, NULL);
    check(!rdma_destroy_id(listener), "rdma_destroy_id of the listener");
}

static void disconnect_both(void)
{
    rdma_disconnect(client);
    rdma_disconnect(server);
    check(!ibv_dereg_mr(ours) && !ibv_dereg_mr(theirs), "ibv_dereg_mr");
    rdma_destroy_ep(client);
    rdma_destroy_ep(server);
}

static struct ibv_wc completion_of(struct ibv_cq *queue)
{
    struct ibv_wc completion;

    while (!ibv_poll_cq(queue, 1, &completion))
        ;
    check(completion.status == IBV_WC_SUCCESS, ibv_wc_status_str(completion.status));
    return completion;
}

static void begin(uint64_t wr_id)
{
    ibv_wr_start(builder);
    builder->wr_id = wr_id;
    builder->wr_flags = IBV_SEND_SIGNALED;
}

static void end(const char *what)
{
    check(!ibv_wr_complete(builder), what);
    check(completion_of(client->send_cq).wr_id == builder->wr_id, what);
}

static uint64_t number_at(size_t offset)
{
    uint64_t number;

    memcpy(&number, remote + offset, sizeof(number));
    return number;
}

static void transfer(void)
{
    const uint64_t at = (uintptr_t)remote;

    strcpy(local, "written");
    begin(1);
    ibv_wr_rdma_write(builder, theirs->rkey, at);
    ibv_wr_set_sge(builder, ours->lkey, (uintptr_t)local, 8);
    end("a WRITE");
    check(!strcmp(remote, "written"), "what a WRITE wrote");

    const struct ibv_sge parts[] = {{(uintptr_t)local + 32, 4, ours->lkey},
                                    {(uintptr_t)local + 40, 4, ours->lkey}};
    begin(2);
    ibv_wr_rdma_read(builder, theirs->rkey, at);
    ibv_wr_set_sge_list(builder, 2, parts);
    end("a READ");
    check(!memcmp(local + 32, "writ", 4) && !memcmp(local + 40, "ten", 4), "what a READ read");

    char gone[] = "inline";
    const struct ibv_data_buf buffers[] = {{gone, 3}, {gone + 3, 4}};
    begin(3);
    ibv_wr_rdma_write(builder, theirs->rkey, at);
    ibv_wr_set_inline_data_list(builder, 2, buffers);
    memset(gone, 'x', sizeof(gone)); /* the setter has copied it */
    end("an inline WRITE");
    check(!strcmp(remote, "inline"), "what an inline WRITE wrote");

    memset(remote, 0, 16);
    begin(4);
    ibv_wr_atomic_fetch_add(builder, theirs->rkey, at, 5);
    ibv_wr_set_sge(builder, ours->lkey, (uintptr_t)local + 48, 8);
    end("a fetch and add");
    begin(5);
    ibv_wr_atomic_cmp_swp(builder, theirs->rkey, at, 5, 7);
    ibv_wr_set_sge(builder, ours->lkey, (uintptr_t)local + 48, 8);
    end("a compare and swap");
    check(number_at(0) == 7, "what the atomics wrote");
}

static void post_receive(uint64_t wr_id)
{
    struct ibv_sge part = {(uintptr_t)remote + 32, 32, theirs->lkey};
    struct ibv_recv_wr request = {.wr_id = wr_id, .sg_list = &part, .num_sge = 1}, *refused;

    check(!ibv_post_recv(server->qp, &request, &refused), "ibv_post_recv");
}

static void send_messages(void)
{
    struct ibv_wc completion;

    for (uint64_t wr_id = 0; wr_id < 3; wr_id++)
        post_receive(wr_id);
    /* Three requests, one of them signaled. */
    ibv_wr_start(builder);
    builder->wr_flags = 0;
    builder->wr_id = 10;
    ibv_wr_send(builder);
    ibv_wr_set_inline_data(builder, "first", 6);
    builder->wr_id = 11;
    ibv_wr_send_imm(builder, htonl(17));
    builder->wr_id = 12;
    builder->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write_imm(builder, theirs->rkey, (uintptr_t)remote, htonl(18));
    ibv_wr_set_inline_data(builder, "third", 6);
    end("three requests");
    completion = completion_of(server->recv_cq);
    check(completion.wr_id == 0 && completion.byte_len == 6, "a message");
    completion = completion_of(server->recv_cq);
    check(completion.wr_id == 1 && completion.imm_data == htonl(17), "a message's immediate data");
    completion = completion_of(server->recv_cq);
    check(completion.wr_id == 2 && completion.imm_data == htonl(18) && !strcmp(remote, "third"),
          "a WRITE with immediate data");
}

/* Nothing is posted: the next completion is another batch's. */
static void abandon(void)
{
    const struct ibv_sge three[3] = {{0}};
    char large[INLINE + 1] = "";

    begin(20);
    ibv_wr_rdma_write(builder, theirs->rkey, (uintptr_t)remote);
    ibv_wr_set_inline_data(builder, "aborted", 8);
    ibv_wr_abort(builder);

    begin(21);
    for (int i = 0; i <= SLOTS; i++) {
        ibv_wr_rdma_write(builder, theirs->rkey, (uintptr_t)remote);
        ibv_wr_set_inline_data(builder, "too many", 9);
    }
    check(ibv_wr_complete(builder) == ENOMEM, "more requests than the queue has are refused");

    begin(22);
    ibv_wr_rdma_write(builder, theirs->rkey, (uintptr_t)remote);
    ibv_wr_set_inline_data(builder, "before", 7);
    ibv_wr_rdma_write(builder, theirs->rkey, (uintptr_t)remote);
    ibv_wr_set_inline_data(builder, large, sizeof(large));
    check(ibv_wr_complete(builder) == EINVAL, "too much inline data is refused");

    begin(23);
    ibv_wr_rdma_write(builder, theirs->rkey, (uintptr_t)remote);
    ibv_wr_set_sge_list(builder, 3, three);
    check(ibv_wr_complete(builder) == EINVAL, "too many parts are refused");

    begin(24);
    ibv_wr_rdma_write(builder, theirs->rkey, (uintptr_t)remote);
    ibv_wr_set_inline_data(builder, "half", 5);
    ibv_wr_atomic_fetch_add(builder, theirs->rkey, (uintptr_t)remote + 1, 1); /* not aligned */
    check(ibv_wr_complete(builder) == EINVAL, "a batch with a wrong request is refused");

    begin(25);
    ibv_wr_rdma_write(builder, theirs->rkey, (uintptr_t)remote);
    ibv_wr_set_inline_data(builder, "after", 6);
    end("a batch after those that were refused");
    check(!strcmp(remote, "after"), "it alone has been carried out");
    ibv_wr_start(builder);
    check(!ibv_wr_complete(builder), "an empty batch");
}

static void create(void)
{
    struct ibv_qp_init_attr_ex attr = attributes(IBV_QP_EX_WITH_SEND);

    attr.pd = client->pd;
    attr.send_cq = attr.recv_cq = client->send_cq;
    attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
    attr.qp_type = IBV_QPT_UD;
    struct ibv_qp *queue_pair = ibv_create_qp_ex(client->verbs, &attr);
    check(queue_pair != NULL, "ibv_create_qp_ex of datagrams");
    check(ibv_qp_to_qp_ex(queue_pair)->wr_set_ud_addr != NULL, "datagrams have an address");
    check(!ibv_destroy_qp(queue_pair), "ibv_destroy_qp");

    attr.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ;
    errno = 0;
    check(!ibv_create_qp_ex(client->verbs, &attr) && errno == EOPNOTSUPP, "READ of datagrams");
    attr.qp_type = IBV_QPT_RC;
    attr.send_ops_flags = IBV_QP_EX_WITH_TSO;
    errno = 0;
    check(!ibv_create_qp_ex(client->verbs, &attr) && errno == EOPNOTSUPP, "segmentation offload");
    attr.comp_mask |= IBV_QP_INIT_ATTR_RX_HASH;
    errno = 0;
    check(!ibv_create_qp_ex(client->verbs, &attr) && errno == EOPNOTSUPP, "hashing");
    attr.comp_mask = IBV_QP_INIT_ATTR_PD;
    queue_pair = ibv_create_qp_ex(client->verbs, &attr);
    check(queue_pair && !ibv_qp_to_qp_ex(queue_pair), "a plain queue pair has no builder");
    check(!ibv_destroy_qp(queue_pair), "ibv_destroy_qp of a plain one");
}

int main(void)
{
    connect_both();
    transfer();
    send_messages();
    abandon();
    create();
    disconnect_both();
    return 0;
}
