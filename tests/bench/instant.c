/*
 * A device that takes no time: each posted request has completed at once, and nothing is sent.
 * It replaces calls of a real device's context, so that everything but the device is measured.
 */
#include <errno.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "completion_opcodes.h"

enum { ROOM = 8192, HEADER = 40, MESSAGE = 64 };

static struct {
    struct ibv_context *context;
    struct ibv_context_ops kept;
    struct ibv_wc ring[ROOM];
    unsigned first, count;
    struct ibv_cq *queue; /* of the latest post */
    int armed, signalled;
    int signal;    /* an eventfd in the channel's descriptor, which is an epoll; 0: not made */
    unsigned owed; /* events that were taken and not acknowledged */
    int doorbell;  /* the errno of the next post's doorbell */
    int refusal;   /* the errno of the next post on a send queue */
    int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
    void (*ack_cq_events)(struct ibv_cq *, unsigned int);
} device;

static int notify(int channel)
{
    struct epoll_event event = {.events = EPOLLIN};
    uint64_t one = 1;

    if (!device.signal) {
        device.signal = eventfd(0, EFD_CLOEXEC);
        if (epoll_ctl(channel, EPOLL_CTL_ADD, device.signal, &event))
            return 0;
    }
    return write(device.signal, &one, sizeof(one)) == sizeof(one);
}

static int complete(uint64_t wr_id, enum ibv_wc_opcode opcode, uint32_t qp_num, uint32_t byte_len)
{
    if (device.count == ROOM)
        return ENOMEM;
    device.ring[(device.first + device.count++) % ROOM] = (struct ibv_wc){
        .wr_id = wr_id,
        .status = IBV_WC_SUCCESS,
        .opcode = opcode,
        .qp_num = qp_num,
        .byte_len = byte_len,
    };
    return 0;
}

static void signal_queue(struct ibv_cq *queue)
{
    device.queue = queue;
    if (device.armed && !device.signalled) {
        device.armed = 0;
        device.signalled = notify(queue->channel->fd);
    }
}

static int post_send(struct ibv_qp *queue_pair, struct ibv_send_wr *request,
                     struct ibv_send_wr **refused)
{
    int error = device.doorbell, refusal = device.refusal;

    device.doorbell = device.refusal = 0;
    if (refusal)
        *refused = request;
    if (error || refusal)
        return error ? error : refusal;
    for (; request; request = request->next)
        if (complete(request->wr_id, aiordma_completes_as(request->opcode), queue_pair->qp_num,
                     0)) {
            *refused = request;
            return ENOMEM;
        }
    signal_queue(queue_pair->send_cq);
    return 0;
}

/* A message of at most 64 bytes arrives, and room for a datagram's header before it. */
static uint32_t message_of(const struct ibv_recv_wr *request)
{
    uint32_t room = 0;

    for (int i = 0; i < request->num_sge; i++)
        room += request->sg_list[i].length;
    return room < HEADER + MESSAGE ? room : HEADER + MESSAGE;
}

static int receive_all(struct ibv_recv_wr *request, struct ibv_recv_wr **refused, uint32_t qp_num)
{
    for (; request; request = request->next)
        if (complete(request->wr_id, IBV_WC_RECV, qp_num, message_of(request))) {
            *refused = request;
            return ENOMEM;
        }
    return 0;
}

static int post_recv(struct ibv_qp *queue_pair, struct ibv_recv_wr *request,
                     struct ibv_recv_wr **refused)
{
    int error = receive_all(request, refused, queue_pair->qp_num);

    signal_queue(queue_pair->recv_cq);
    return error;
}

/* Completes on the queue of the latest send, which therefore comes first. */
static int post_srq_recv(struct ibv_srq *shared, struct ibv_recv_wr *request,
                         struct ibv_recv_wr **refused)
{
    (void)shared;
    return device.queue ? receive_all(request, refused, 0) : EINVAL;
}

static int poll_cq(struct ibv_cq *queue, int most, struct ibv_wc *found)
{
    int count = 0;

    if (queue == device.queue)
        for (; count < most && device.count; count++, device.count--) {
            found[count] = device.ring[device.first];
            device.first = (device.first + 1) % ROOM;
        }
    return count ? count : device.kept.poll_cq(queue, most, found);
}

static int req_notify_cq(struct ibv_cq *queue, int solicited_only)
{
    device.armed = 1;
    return device.kept.req_notify_cq(queue, solicited_only);
}

int instant_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **queue, void **context)
{
    uint64_t count;

    if (!device.signalled)
        return device.get_cq_event(channel, queue, context);
    device.signalled = 0;
    if (read(device.signal, &count, sizeof(count)) < 0)
        return -1;
    device.owed++;
    *queue = device.queue;
    *context = device.queue->cq_context;
    return 0;
}

void instant_ack_cq_events(struct ibv_cq *queue, unsigned int count)
{
    unsigned ours = count < device.owed ? count : device.owed;

    device.owed -= ours;
    if (count > ours)
        device.ack_cq_events(queue, count - ours);
}

/* Set the calls of the real device that the two calls above replace in the provider's table. */
void instant_over(void *get_cq_event, void *ack_cq_events)
{
    device.get_cq_event = get_cq_event;
    device.ack_cq_events = ack_cq_events;
}

/* Complete all posts at once until instant_end. The queues may be armed already. */
void instant_begin(struct ibv_context *context)
{
    device.context = context;
    device.kept = context->ops;
    device.armed = 1;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    context->ops.post_srq_recv = post_srq_recv;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
}

/* Accept the next post, but fail its doorbell. */
void instant_doorbell_fails(int error)
{
    device.doorbell = error;
}

/* Refuse the next post on a send queue. */
void instant_refuses(int error)
{
    device.refusal = error;
}

/* Return the number of completions that were not polled. */
int instant_end(void)
{
    device.context->ops = device.kept;
    if (device.signal)
        close(device.signal);
    device.signal = 0;
    return (int)device.count;
}
