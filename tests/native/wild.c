/*
 * A client that connects, sends a message, gets it back, and then does what no program should:
 * wild PORT KIND. Compiled with rdma-core's own headers.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

static char buffer[64] = "hello";
static struct ibv_mr *region;
static struct rdma_cm_id *id;

static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    perror(what);
    exit(1);
}

static void converse(void)
{
    struct ibv_wc completion;

    check(!rdma_post_recv(id, NULL, buffer + 32, 32, region), "rdma_post_recv");
    check(!rdma_post_send(id, NULL, buffer, 6, region, 0), "rdma_post_send");
    check(rdma_get_recv_comp(id, &completion) == 1 && !completion.status, "rdma_get_recv_comp");
    check(!strcmp(buffer + 32, "hello"), "the echo");
    check(rdma_get_send_comp(id, &completion) == 1, "rdma_get_send_comp");
}

static void connect_to(const char *port)
{
    struct ibv_qp_init_attr attr = {
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
        .sq_sig_all = 1,
    };
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *result;

    check(!rdma_getaddrinfo("127.0.0.1", port, &hints, &result), "rdma_getaddrinfo");
    check(!rdma_create_ep(&id, result, NULL, &attr), "rdma_create_ep");
    region = rdma_reg_msgs(id, buffer, sizeof(buffer));
    check(region != NULL, "rdma_reg_msgs");
    check(!rdma_connect(id, NULL), "rdma_connect");
}

/* Requests with memory that is not registered, or not mapped. */
static void post_wild_requests(void)
{
    struct ibv_sge parts[] = {{1, 64, region->lkey},
                              {(uintptr_t)buffer, UINT32_MAX, region->lkey},
                              {(uintptr_t)buffer, 64, ~region->lkey}};
    struct ibv_send_wr *refused;

    for (int i = 0; i < 3; i++) {
        struct ibv_send_wr request = {.opcode = IBV_WR_SEND, .sg_list = &parts[i], .num_sge = 1};
        (void)ibv_post_send(id->qp, &request, &refused);
    }
    struct ibv_send_wr write = {.opcode = IBV_WR_RDMA_WRITE, .sg_list = parts, .num_sge = 1};
    write.wr.rdma.remote_addr = 1;
    write.wr.rdma.rkey = 1;
    (void)ibv_post_send(id->qp, &write, &refused);
    sleep(1);
}

int main(int count, char **arguments)
{
    check(count == 3, "arguments");
    const char *kind = arguments[2];
    connect_to(arguments[1]);
    converse();
    if (!strcmp(kind, "killed")) {
        raise(SIGKILL);
    } else if (!strcmp(kind, "corrupts")) {
        /* The device's own structures begin with these. */
        memset((char *)id->qp + sizeof(*id->qp), 0x5a, 512);
        converse();
    } else if (!strcmp(kind, "closes")) {
        for (int descriptor = 3; descriptor < 256; descriptor++)
            close(descriptor);
        alarm(2);
        converse();
    } else if (!strcmp(kind, "requests")) {
        post_wild_requests();
    } else if (!strcmp(kind, "nulls")) {
        rdma_destroy_id(NULL);
        (void)ibv_create_cq(id->verbs, 1, NULL, NULL, 7);
        (void)rdma_listen(NULL, 1);
        converse();
        ibv_destroy_qp((struct ibv_qp *)buffer);
    } else if (!strcmp(kind, "forks")) {
        pid_t child = fork();
        if (!child)
            _exit(0);
        check(waitpid(child, NULL, 0) == child, "waitpid");
        converse(); /* the parent's connection goes on */
        puts("went on");
    }
    return 0;
}
