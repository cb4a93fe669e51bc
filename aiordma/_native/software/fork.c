/*
 * Forks. A child has copies of the parent's objects, none of its threads, and shares its sockets
 * and eventfds: using them would affect the parent's connections. So in a child, a call on an
 * object of the parent has no effect, and fails with EPERM if it has a result. The child closes its
 * copies of the sockets. TCP tells the peer nothing, because the parent still has the socket. The
 * memory stays as it is until the child ends. Objects that the child creates itself work.
 *
 * Each context and each event channel has the generation of the process that created it, and every
 * other object belongs to one of these. Guards, below, check each call through the table. For the
 * inline functions of verbs.h, the child replaces the operations of the parent's contexts.
 */
#include "fork.h"

#include <errno.h>
#include <string.h>

#include "../event_subjects.h"
#include "capture.h"
#include "cm_handshakes.h"
#include "cm_silence.h"
#include "gids.h"
#include "identifier.h"
#include "stream.h"

static struct aiordma_provider inner; /* the table that the modules filled */

/* -- the process that owns an object --------------------------------------------------------- */

static int is_foreign_context(struct ibv_context *context)
{
    return context && sw_context_of(context)->generation != sw_device.generation;
}

static int is_foreign_channel(const struct rdma_event_channel *channel)
{
    return channel && ((const struct sw_event_channel *)(const void *)channel)->generation !=
                          sw_device.generation;
}

/* Every public structure of verbs.h has its context. The guarded functions check for NULL. */
#define FOREIGN(object) ((object) && is_foreign_context((object)->context))

/* An identifier can outlive its channel, and has a context as soon as it has an address. */
static int is_foreign_id(const struct rdma_cm_id *id)
{
    return id && (is_foreign_channel(id->channel) || is_foreign_context(id->verbs));
}

/* A request's identifier can be destroyed before the event is acknowledged, its listener cannot. */
static int is_foreign_cm_event(const struct rdma_cm_event *event)
{
    if (!event)
        return 0;
    const struct sw_event *whole = (const struct sw_event *)(const void *)event;
    return whole->counted && is_foreign_id(&whole->counted->ibv);
}

/*
 * The context is the first field of each object that asynchronous events have. A port has none, and
 * its events need no acknowledgement.
 */
static int is_foreign_async_event(const struct ibv_async_event *event)
{
    if (!event)
        return 0;
    switch (aiordma_subject_of(event->event_type)) {
    case AIORDMA_OF_QUEUE_PAIR:
    case AIORDMA_OF_COMPLETION_QUEUE:
    case AIORDMA_OF_SHARED_RECEIVE:
        return FOREIGN(event->element.qp);
    default:
        return 0;
    }
}

/* -- guards ---------------------------------------------------------------------------------- */

#define REFUSE(result) \
    do {               \
        errno = EPERM; \
        return result; \
    } while (0)

#define GUARD(type, result, name, foreign, parameters, arguments) \
    static type guard_##name parameters                           \
    {                                                             \
        if (foreign)                                              \
            REFUSE(result);                                       \
        return inner.name arguments;                              \
    }

/* Functions that return an errno, -1 or NULL after a failure. */
#define GUARD_ERRNO(...) GUARD(int, EPERM, __VA_ARGS__)
#define GUARD_INT(...) GUARD(int, -1, __VA_ARGS__)
#define GUARD_NULL(type, ...) GUARD(type *, NULL, __VA_ARGS__)

#define GUARD_VOID(name, foreign, parameters, arguments) \
    static void guard_##name parameters                  \
    {                                                    \
        if (!(foreign))                                  \
            inner.name arguments;                        \
    }

GUARD_ERRNO(close_device, is_foreign_context(context), (struct ibv_context * context), (context))
GUARD_ERRNO(query_device, is_foreign_context(context),
            (struct ibv_context * context, struct ibv_device_attr *attr), (context, attr))
GUARD_ERRNO(query_port, is_foreign_context(context),
            (struct ibv_context * context, uint8_t port, struct _compat_ibv_port_attr *attr),
            (context, port, attr))
GUARD_INT(query_gid, is_foreign_context(context),
          (struct ibv_context * context, uint8_t port, int index, union ibv_gid *gid),
          (context, port, index, gid))
GUARD_ERRNO(query_gid_ex, is_foreign_context(context),
            (struct ibv_context * context, uint32_t port, uint32_t index,
             struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size),
            (context, port, index, entry, flags, entry_size))
GUARD(ssize_t, -EPERM, query_gid_table, is_foreign_context(context),
      (struct ibv_context * context, struct ibv_gid_entry *entries, size_t most, uint32_t flags,
       size_t entry_size),
      (context, entries, most, flags, entry_size))
GUARD_INT(query_pkey, is_foreign_context(context),
          (struct ibv_context * context, uint8_t port, int index, uint16_t *pkey),
          (context, port, index, pkey))
GUARD_INT(get_async_event, is_foreign_context(context),
          (struct ibv_context * context, struct ibv_async_event *event), (context, event))
GUARD_VOID(ack_async_event, is_foreign_async_event(event), (struct ibv_async_event * event),
           (event))

GUARD_NULL(struct ibv_pd, alloc_pd, is_foreign_context(context), (struct ibv_context * context),
           (context))
GUARD_ERRNO(dealloc_pd, FOREIGN(domain), (struct ibv_pd * domain), (domain))
GUARD_NULL(struct ibv_mr, reg_mr, FOREIGN(domain),
           (struct ibv_pd * domain, void *address, size_t length, int access),
           (domain, address, length, access))
GUARD_NULL(struct ibv_mr, reg_mr_iova, FOREIGN(domain),
           (struct ibv_pd * domain, void *address, size_t length, uint64_t iova, int access),
           (domain, address, length, iova, access))
GUARD_NULL(struct ibv_mr, reg_mr_iova2, FOREIGN(domain),
           (struct ibv_pd * domain, void *address, size_t length, uint64_t iova,
            unsigned int access),
           (domain, address, length, iova, access))
GUARD_NULL(struct ibv_mr, reg_dmabuf_mr, FOREIGN(domain),
           (struct ibv_pd * domain, uint64_t offset, size_t length, uint64_t iova, int fd,
            int access),
           (domain, offset, length, iova, fd, access))
GUARD(int, IBV_REREG_MR_ERR_INPUT, rereg_mr, FOREIGN(region),
      (struct ibv_mr * region, int flags, struct ibv_pd *domain, void *address, size_t length,
       int access),
      (region, flags, domain, address, length, access))
GUARD_ERRNO(dereg_mr, FOREIGN(region), (struct ibv_mr * region), (region))

GUARD_NULL(struct ibv_comp_channel, create_comp_channel, is_foreign_context(context),
           (struct ibv_context * context), (context))
GUARD_ERRNO(destroy_comp_channel, FOREIGN(channel), (struct ibv_comp_channel * channel), (channel))
GUARD_NULL(struct ibv_cq, create_cq, is_foreign_context(context) || FOREIGN(channel),
           (struct ibv_context * context, int entries, void *cq_context,
            struct ibv_comp_channel *channel, int vector),
           (context, entries, cq_context, channel, vector))
GUARD_ERRNO(resize_cq, FOREIGN(queue), (struct ibv_cq * queue, int entries), (queue, entries))
GUARD_ERRNO(destroy_cq, FOREIGN(queue), (struct ibv_cq * queue), (queue))
GUARD_INT(get_cq_event, FOREIGN(channel),
          (struct ibv_comp_channel * channel, struct ibv_cq **queue, void **cq_context),
          (channel, queue, cq_context))
GUARD_VOID(ack_cq_events, FOREIGN(queue), (struct ibv_cq * queue, unsigned int count),
           (queue, count))

GUARD_NULL(struct ibv_qp, create_qp, FOREIGN(domain),
           (struct ibv_pd * domain, struct ibv_qp_init_attr *attr), (domain, attr))
GUARD_ERRNO(modify_qp, FOREIGN(queue_pair),
            (struct ibv_qp * queue_pair, struct ibv_qp_attr *attr, int mask),
            (queue_pair, attr, mask))
GUARD_ERRNO(query_qp, FOREIGN(queue_pair),
            (struct ibv_qp * queue_pair, struct ibv_qp_attr *attr, int mask,
             struct ibv_qp_init_attr *init),
            (queue_pair, attr, mask, init))
GUARD(int, 0, query_qp_data_in_order, FOREIGN(queue_pair),
      (struct ibv_qp * queue_pair, enum ibv_wr_opcode opcode, uint32_t flags),
      (queue_pair, opcode, flags))
GUARD_ERRNO(destroy_qp, FOREIGN(queue_pair), (struct ibv_qp * queue_pair), (queue_pair))
GUARD_NULL(struct ibv_srq, create_srq, FOREIGN(domain),
           (struct ibv_pd * domain, struct ibv_srq_init_attr *init), (domain, init))
GUARD_ERRNO(modify_srq, FOREIGN(queue),
            (struct ibv_srq * queue, struct ibv_srq_attr *attr, int mask), (queue, attr, mask))
GUARD_ERRNO(query_srq, FOREIGN(queue), (struct ibv_srq * queue, struct ibv_srq_attr *attr),
            (queue, attr))
GUARD_ERRNO(destroy_srq, FOREIGN(queue), (struct ibv_srq * queue), (queue))

GUARD_NULL(struct ibv_ah, create_ah, FOREIGN(domain),
           (struct ibv_pd * domain, struct ibv_ah_attr *attr), (domain, attr))
GUARD_INT(init_ah_from_wc, is_foreign_context(context),
          (struct ibv_context * context, uint8_t port, struct ibv_wc *completion,
           struct ibv_grh *header, struct ibv_ah_attr *attr),
          (context, port, completion, header, attr))
GUARD_ERRNO(destroy_ah, FOREIGN(handle), (struct ibv_ah * handle), (handle))
GUARD_ERRNO(attach_mcast, FOREIGN(queue_pair),
            (struct ibv_qp * queue_pair, const union ibv_gid *gid, uint16_t lid),
            (queue_pair, gid, lid))
GUARD_ERRNO(detach_mcast, FOREIGN(queue_pair),
            (struct ibv_qp * queue_pair, const union ibv_gid *gid, uint16_t lid),
            (queue_pair, gid, lid))

static struct rdma_event_channel *guard_create_event_channel(void)
{
    struct rdma_event_channel *channel = inner.create_event_channel();

    if (channel)
        ((struct sw_event_channel *)(void *)channel)->generation = sw_device.generation;
    return channel;
}

GUARD_VOID(destroy_event_channel, is_foreign_channel(channel),
           (struct rdma_event_channel * channel), (channel))
GUARD_INT(get_cm_event, is_foreign_channel(channel),
          (struct rdma_event_channel * channel, struct rdma_cm_event **event), (channel, event))
GUARD_INT(ack_cm_event, is_foreign_cm_event(event), (struct rdma_cm_event * event), (event))
GUARD_INT(create_id, is_foreign_channel(channel),
          (struct rdma_event_channel * channel, struct rdma_cm_id **id, void *context,
           enum rdma_port_space port_space),
          (channel, id, context, port_space))
GUARD_INT(destroy_id, is_foreign_id(id), (struct rdma_cm_id * id), (id))
GUARD_INT(bind_addr, is_foreign_id(id), (struct rdma_cm_id * id, struct sockaddr *address),
          (id, address))
GUARD_INT(resolve_addr, is_foreign_id(id),
          (struct rdma_cm_id * id, struct sockaddr *source, struct sockaddr *destination,
           int timeout_ms),
          (id, source, destination, timeout_ms))
GUARD_INT(resolve_route, is_foreign_id(id), (struct rdma_cm_id * id, int timeout_ms),
          (id, timeout_ms))
GUARD_INT(cm_create_qp, is_foreign_id(id) || FOREIGN(domain),
          (struct rdma_cm_id * id, struct ibv_pd *domain, struct ibv_qp_init_attr *attr),
          (id, domain, attr))
GUARD_VOID(cm_destroy_qp, is_foreign_id(id), (struct rdma_cm_id * id), (id))
GUARD_INT(connect, is_foreign_id(id), (struct rdma_cm_id * id, struct rdma_conn_param *parameters),
          (id, parameters))
GUARD_INT(listen, is_foreign_id(id), (struct rdma_cm_id * id, int backlog), (id, backlog))
GUARD_INT(accept, is_foreign_id(id), (struct rdma_cm_id * id, struct rdma_conn_param *parameters),
          (id, parameters))
GUARD_INT(reject, is_foreign_id(id),
          (struct rdma_cm_id * id, const void *private_data, uint8_t length),
          (id, private_data, length))
GUARD_INT(disconnect, is_foreign_id(id), (struct rdma_cm_id * id), (id))
GUARD_INT(establish, is_foreign_id(id), (struct rdma_cm_id * id), (id))
GUARD_INT(notify, is_foreign_id(id), (struct rdma_cm_id * id, enum ibv_event_type event),
          (id, event))
GUARD_INT(migrate_id, is_foreign_id(id) || is_foreign_channel(channel),
          (struct rdma_cm_id * id, struct rdma_event_channel *channel), (id, channel))
GUARD_INT(init_qp_attr, is_foreign_id(id),
          (struct rdma_cm_id * id, struct ibv_qp_attr *attr, int *mask), (id, attr, mask))
GUARD_INT(join_multicast, is_foreign_id(id),
          (struct rdma_cm_id * id, struct sockaddr *group, void *context), (id, group, context))
GUARD_INT(join_multicast_ex, is_foreign_id(id),
          (struct rdma_cm_id * id, struct rdma_cm_join_mc_attr_ex *attr, void *context),
          (id, attr, context))
GUARD_INT(leave_multicast, is_foreign_id(id), (struct rdma_cm_id * id, struct sockaddr *group),
          (id, group))
GUARD_INT(set_local_ece, is_foreign_id(id), (struct rdma_cm_id * id, struct ibv_ece *ece),
          (id, ece))
GUARD_INT(get_remote_ece, is_foreign_id(id), (struct rdma_cm_id * id, struct ibv_ece *ece),
          (id, ece))
GUARD_INT(reject_ece, is_foreign_id(id),
          (struct rdma_cm_id * id, const void *private_data, uint8_t length),
          (id, private_data, length))
GUARD_INT(set_option, is_foreign_id(id),
          (struct rdma_cm_id * id, int level, int name, void *value, size_t length),
          (id, level, name, value, length))

/* -- replacements of the inline functions, in a child ---------------------------------------- */

static int refuse_post_send(struct ibv_qp *queue_pair, struct ibv_send_wr *request,
                            struct ibv_send_wr **refused)
{
    (void)queue_pair;
    *refused = request;
    REFUSE(EPERM);
}

static int refuse_post_recv(struct ibv_qp *queue_pair, struct ibv_recv_wr *request,
                            struct ibv_recv_wr **refused)
{
    (void)queue_pair;
    *refused = request;
    REFUSE(EPERM);
}

static int refuse_post_srq_recv(struct ibv_srq *queue, struct ibv_recv_wr *request,
                                struct ibv_recv_wr **refused)
{
    (void)queue;
    *refused = request;
    REFUSE(EPERM);
}

static int refuse_poll_cq(struct ibv_cq *queue, int most, struct ibv_wc *completions)
{
    (void)queue;
    (void)most;
    (void)completions;
    REFUSE(-EPERM);
}

static int refuse_req_notify_cq(struct ibv_cq *queue, int solicited_only)
{
    (void)queue;
    (void)solicited_only;
    REFUSE(EPERM);
}

static struct ibv_mw *refuse_alloc_mw(struct ibv_pd *domain, enum ibv_mw_type type)
{
    (void)domain;
    (void)type;
    REFUSE(NULL);
}

static int refuse_bind_mw(struct ibv_qp *queue_pair, struct ibv_mw *window,
                          struct ibv_mw_bind *bind)
{
    (void)queue_pair;
    (void)window;
    (void)bind;
    REFUSE(EPERM);
}

static int refuse_dealloc_mw(struct ibv_mw *window)
{
    (void)window;
    REFUSE(EPERM);
}

static struct ibv_cq_ex *refuse_create_cq_ex(struct ibv_context *context,
                                             struct ibv_cq_init_attr_ex *attr)
{
    (void)context;
    (void)attr;
    REFUSE(NULL);
}

static int refuse_modify_cq(struct ibv_cq *queue, struct ibv_modify_cq_attr *attr)
{
    (void)queue;
    (void)attr;
    REFUSE(EPERM);
}

static int refuse_advise_mr(struct ibv_pd *domain, enum ib_uverbs_advise_mr_advice advice,
                            uint32_t flags, struct ibv_sge *parts, uint32_t count)
{
    (void)domain;
    (void)advice;
    (void)flags;
    (void)parts;
    (void)count;
    REFUSE(EPERM);
}

static int refuse_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
    (void)context;
    (void)values;
    REFUSE(EPERM);
}

static int refuse_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr,
                             size_t size)
{
    (void)context;
    (void)port;
    (void)attr;
    (void)size;
    REFUSE(EPERM);
}

static int refuse_query_device_ex(struct ibv_context *context,
                                  const struct ibv_query_device_ex_input *input,
                                  struct ibv_device_attr_ex *attr, size_t size)
{
    (void)context;
    (void)input;
    (void)attr;
    (void)size;
    REFUSE(EPERM);
}

static void refuse_all(struct verbs_context *verbs)
{
    struct ibv_context_ops *operations = &verbs->context.ops;

    operations->post_send = refuse_post_send;
    operations->post_recv = refuse_post_recv;
    operations->post_srq_recv = refuse_post_srq_recv;
    operations->poll_cq = refuse_poll_cq;
    operations->req_notify_cq = refuse_req_notify_cq;
    operations->alloc_mw = refuse_alloc_mw;
    operations->bind_mw = refuse_bind_mw;
    operations->dealloc_mw = refuse_dealloc_mw;
    verbs->create_cq_ex = refuse_create_cq_ex;
    verbs->modify_cq = refuse_modify_cq;
    verbs->advise_mr = refuse_advise_mr;
    verbs->query_rt_values = refuse_query_rt_values;
    verbs->query_port = refuse_query_port;
    verbs->query_device_ex = refuse_query_device_ex;
}

/* -- the fork -------------------------------------------------------------------------------- */

static void in_child(void)
{
    sw_lock_forked();
    for (struct sw_context *context = sw_device.contexts; context; context = context->next)
        refuse_all(&context->verbs);
    sw_device.generation++;
    sw_device.contexts = sw_device.manager = NULL;
    memset(&sw_device.counts, 0, sizeof(sw_device.counts));
    sw_engine_forked();
    sw_progress_forked();
    sw_streams_forked();
    sw_capture_forked();
    sw_gids_forked();
    sw_identifiers_forked();
    sw_silence_forked();
    sw_handshakes_forked();
    sw_memory_forked();
    sw_queue_pairs_forked();
}

int sw_guard(struct aiordma_provider *table)
{
    inner = *table;
/* A function that no module implements stays NULL: not supported. */
#define ENTER(name) table->name = inner.name ? guard_##name : NULL
    ENTER(close_device);
    ENTER(query_device);
    ENTER(query_port);
    ENTER(query_gid);
    ENTER(query_gid_ex);
    ENTER(query_gid_table);
    ENTER(query_pkey);
    ENTER(get_async_event);
    ENTER(ack_async_event);
    ENTER(alloc_pd);
    ENTER(dealloc_pd);
    ENTER(reg_mr);
    ENTER(reg_mr_iova);
    ENTER(reg_mr_iova2);
    ENTER(reg_dmabuf_mr);
    ENTER(rereg_mr);
    ENTER(dereg_mr);
    ENTER(create_comp_channel);
    ENTER(destroy_comp_channel);
    ENTER(create_cq);
    ENTER(resize_cq);
    ENTER(destroy_cq);
    ENTER(get_cq_event);
    ENTER(ack_cq_events);
    ENTER(create_qp);
    ENTER(modify_qp);
    ENTER(query_qp);
    ENTER(query_qp_data_in_order);
    ENTER(destroy_qp);
    ENTER(create_srq);
    ENTER(modify_srq);
    ENTER(query_srq);
    ENTER(destroy_srq);
    ENTER(create_ah);
    ENTER(init_ah_from_wc);
    ENTER(destroy_ah);
    ENTER(attach_mcast);
    ENTER(detach_mcast);
    ENTER(create_event_channel);
    ENTER(destroy_event_channel);
    ENTER(get_cm_event);
    ENTER(ack_cm_event);
    ENTER(create_id);
    ENTER(destroy_id);
    ENTER(bind_addr);
    ENTER(resolve_addr);
    ENTER(resolve_route);
    ENTER(cm_create_qp);
    ENTER(cm_destroy_qp);
    ENTER(connect);
    ENTER(listen);
    ENTER(accept);
    ENTER(reject);
    ENTER(disconnect);
    ENTER(establish);
    ENTER(notify);
    ENTER(migrate_id);
    ENTER(init_qp_attr);
    ENTER(join_multicast);
    ENTER(join_multicast_ex);
    ENTER(leave_multicast);
    ENTER(set_local_ece);
    ENTER(get_remote_ece);
    ENTER(reject_ece);
    ENTER(set_option);
#undef ENTER
    /* Fork with the lock held, so that the child's copy of the state is consistent. */
    return pthread_atfork(sw_lock, sw_unlock, in_child);
}
