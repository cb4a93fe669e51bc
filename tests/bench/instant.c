/*
 * A device that takes no time: what is posted to the send queue has completed, and nothing is
 * sent. Put over a context of a real device, so that what is measured is all but the device.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { ROOM = 8192 };

static struct {
    struct ibv_context *context;
    struct ibv_context_ops kept;
    struct ibv_wc ring[ROOM];
    unsigned first, count;
    struct ibv_cq *queue; /* of the last post */
    int armed, signalled;
    int signal;    /* an eventfd in the channel's descriptor, which is an epoll; 0: not made */
    unsigned owed; /* events that were taken and not acknowledged */
    int untold;    /* the errno of the next post's doorbell */
    int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
    void (*ack_cq_events)(struct ibv_cq *, unsigned int);
} device;

static enum ibv_wc_opcode opcode_of(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    default:
        return IBV_WC_SEND;
    }
}

static int tell(int channel)
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

static int post_send(struct ibv_qp *queue_pair, struct ibv_send_wr *request,
                     struct ibv_send_wr **refused)
{
    int error = device.untold;

    device.untold = 0;
    if (error)
        return error;
    for (; request; request = request->next) {
        if (device.count == ROOM) {
            *refused = request;
            return ENOMEM;
        }
        device.ring[(device.first + device.count++) % ROOM] = (struct ibv_wc){
            .wr_id = request->wr_id,
            .status = IBV_WC_SUCCESS,
            .opcode = opcode_of(request->opcode),
            .qp_num = queue_pair->qp_num,
        };
    }
    device.queue = queue_pair->send_cq;
    if (device.armed && !device.signalled) {
        device.armed = 0;
        device.signalled = tell(device.queue->channel->fd);
    }
    return 0;
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

/* The calls that stand in the provider's table, and those of the device below. */
void instant_over(void *get_cq_event, void *ack_cq_events)
{
    device.get_cq_event = get_cq_event;
    device.ack_cq_events = ack_cq_events;
}

/* From now on, until instant_end. Its queues may be armed by now. */
void instant_begin(struct ibv_context *context)
{
    device.context = context;
    device.kept = context->ops;
    device.armed = 1;
    context->ops.post_send = post_send;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
}

/* The next post is taken, and the device cannot be told of it. */
void instant_doorbell_fails(int error)
{
    device.untold = error;
}

/* Returns how many completions nobody took. */
int instant_end(void)
{
    device.context->ops = device.kept;
    if (device.signal)
        close(device.signal);
    device.signal = 0;
    return (int)device.count;
}
