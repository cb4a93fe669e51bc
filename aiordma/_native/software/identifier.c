/*
 * Identifiers and their events: created, reported, taken, acknowledged, dropped and destroyed.
 */
#include "identifier.h"

#include <stdlib.h>
#include <string.h>

#include "gids.h"

struct sw_identifier *sw_identifiers;

const struct sw_state sw_identifiers_state = {&sw_identifiers, sizeof(sw_identifiers)};

static struct sw_event_channel *channel_of(struct rdma_event_channel *channel)
{
    return (struct sw_event_channel *)channel;
}

static struct sw_event *event_of(struct rdma_cm_event *event)
{
    return (struct sw_event *)event;
}

static void append(struct sw_event_channel *channel, struct sw_event *event)
{
    event->next = NULL;
    if (channel->last) {
        channel->last->next = event;
    } else {
        channel->first = event;
        sw_notify(&channel->notifier, 1);
    }
    channel->last = event;
}

static struct sw_event *take_first(struct sw_event_channel *channel)
{
    struct sw_event *event = channel->first;

    channel->first = event->next;
    if (!channel->first)
        channel->last = NULL;
    sw_notify(&channel->notifier, channel->first != NULL);
    event->next = NULL;
    return event;
}

/* Take out the oldest event that counts for an identifier. NULL: there is none. */
static struct sw_event *take_one_of(struct sw_event_channel *channel,
                                    const struct sw_identifier *identifier)
{
    struct sw_event *before = NULL, *event = channel->first;

    while (event && event->counted != identifier) {
        before = event;
        event = event->next;
    }
    if (!event)
        return NULL;
    if (!before)
        return take_first(channel);
    before->next = event->next;
    if (channel->last == event)
        channel->last = before;
    event->next = NULL;
    return event;
}

/* -- events: created and reported -------------------------------------------------------------- */

static struct sw_event *fill_event(struct sw_event *event, struct sw_identifier *identifier,
                                   enum rdma_cm_event_type type, int status)
{
    event->ibv.id = &identifier->ibv;
    event->ibv.event = type;
    event->ibv.status = status;
    event->counted = identifier;
    return event;
}

struct sw_event *sw_new_event(struct sw_identifier *identifier, enum rdma_cm_event_type type,
                              int status)
{
    struct sw_event *event = calloc(1, sizeof(*event));

    return event ? fill_event(event, identifier, type, status) : NULL;
}

struct sw_event *sw_last_event(struct sw_identifier *identifier, enum rdma_cm_event_type type,
                               int status)
{
    struct sw_event *event = identifier->last_event;

    identifier->last_event = NULL;
    return fill_event(event, identifier, type, status);
}

/* Free an event that the program did not take. Refuse the peer's request that it reports. */
static void drop_event(struct sw_event *event)
{
    if (event->ibv.event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        event->counted->space->request_taken(event->counted);
        sw_drop_identifier(sw_identifier_of(event->ibv.id));
    }
    free(event);
}

void sw_report(struct sw_event *event)
{
    struct rdma_event_channel *channel = event->counted->ibv.channel;

    if (channel)
        append(channel_of(channel), event);
    else
        drop_event(event); /* its channel was destroyed: the program cannot take the event */
}

void sw_report_last(struct sw_identifier *identifier, enum rdma_cm_event_type type, int status)
{
    sw_report(sw_last_event(identifier, type, status));
}

void sw_set_private_data(struct sw_event *event, const void *data, size_t size)
{
    if (size > UINT8_MAX)
        size = UINT8_MAX;
    if (!size)
        return;
    memcpy(event->private_data, data, size);
    if (!sw_is_connected(event->counted)) {
        event->ibv.param.ud.private_data = event->private_data;
        event->ibv.param.ud.private_data_len = (uint8_t)size;
    } else {
        event->ibv.param.conn.private_data = event->private_data;
        event->ibv.param.conn.private_data_len = (uint8_t)size;
    }
}

/* Drop an identifier's events that the program has not taken. Refuse the requests among them. */
static void drop_events(struct sw_identifier *identifier)
{
    struct rdma_event_channel *channel = identifier->ibv.channel;
    struct sw_event *event;

    while (channel && (event = take_one_of(channel_of(channel), identifier)))
        drop_event(event);
}

void sw_drop_group_events(struct sw_identifier *identifier, const union ibv_gid *group)
{
    struct sw_event_channel *channel = channel_of(identifier->ibv.channel);
    struct sw_event *kept = NULL, *event;

    if (!channel || !channel->first)
        return;
    for (struct sw_event **link = &channel->first; (event = *link);) {
        int tells =
            event->counted == identifier && (event->ibv.event == RDMA_CM_EVENT_MULTICAST_JOIN ||
                                             event->ibv.event == RDMA_CM_EVENT_MULTICAST_ERROR);
        if (tells && !memcmp(&event->ibv.param.ud.ah_attr.grh.dgid, group, sizeof(*group))) {
            *link = event->next;
            free(event);
            continue;
        }
        kept = event;
        link = &event->next;
    }
    channel->last = kept;
    sw_notify(&channel->notifier, kept != NULL);
}

/* -- identifiers: created and destroyed -------------------------------------------------------- */

struct sw_identifier *sw_new_identifier(struct rdma_event_channel *channel, void *context,
                                        enum rdma_port_space port_space, int is_roce,
                                        const struct sw_port_space *space)
{
    struct sw_identifier *identifier = calloc(1, sizeof(*identifier));
    struct sw_event *last_event = calloc(1, sizeof(*last_event));

    if (!identifier || !last_event) {
        free(identifier);
        free(last_event);
        return NULL;
    }
    identifier->last_event = last_event;
    identifier->space = space;
    identifier->is_roce = is_roce;
    identifier->ibv.channel = channel;
    identifier->ibv.context = context;
    identifier->ibv.ps = port_space;
    identifier->ibv.qp_type = port_space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC;
    identifier->next = sw_identifiers;
    identifier->link = &sw_identifiers;
    if (identifier->next)
        identifier->next->link = &identifier->next;
    sw_identifiers = identifier;
    sw_device.counts.identifiers++;
    if (channel)
        ((struct sw_event_channel *)channel)->identifiers++;
    return identifier;
}

struct sw_identifier *sw_new_requesting(struct sw_identifier *listener)
{
    struct sw_identifier *identifier =
        sw_new_identifier(listener->ibv.channel, listener->ibv.context, listener->ibv.ps,
                          listener->is_roce, listener->space);

    if (!identifier)
        return NULL;
    identifier->state = SW_CM_REQUESTED;
    identifier->has_tos = listener->has_tos;
    identifier->tos = listener->tos;
    return identifier;
}

struct sw_event *sw_new_request_event(struct sw_identifier *listener,
                                      struct sw_identifier *requesting)
{
    struct sw_event *event = sw_new_event(requesting, RDMA_CM_EVENT_CONNECT_REQUEST, 0);

    if (!event)
        return NULL;
    event->counted = listener;
    event->ibv.listen_id = &listener->ibv;
    return event;
}

/* Detach the identifier from its events, timer, port space and queue pair. */
static void unhook(struct sw_identifier *identifier)
{
    sw_cancel(&identifier->timer);
    identifier->space->forget(identifier);
    struct sw_queue_pair *pair = (struct sw_queue_pair *)identifier->ibv.qp;
    if (pair && pair->identifier == identifier)
        pair->identifier = NULL;
    drop_events(identifier);
}

static void release(struct sw_identifier *identifier)
{
    if (identifier->ibv.channel)
        ((struct sw_event_channel *)identifier->ibv.channel)->identifiers--;
    *identifier->link = identifier->next;
    if (identifier->next)
        identifier->next->link = identifier->link;
    sw_device.counts.identifiers--;
    free(identifier->last_event);
    free(identifier);
}

void sw_drop_identifier(struct sw_identifier *identifier)
{
    unhook(identifier);
    release(identifier);
}

void sw_identifiers_forked(void)
{
    for (struct sw_identifier *each = sw_identifiers; each; each = each->next)
        each->space->forked(each);
    sw_identifiers = NULL;
}

void sw_give_queue_pair(struct sw_identifier *identifier, struct sw_queue_pair *pair)
{
    pair->identifier = identifier;
    pair->reports = &identifier->space->reports;
    sw_gid_of(&identifier->ibv.route.addr.src_addr, &pair->source);
}

void sw_lose_queue_pair(struct sw_identifier *identifier)
{
    identifier->ibv.qp = NULL;
}

/* -- the calls of rdma_cma.h ------------------------------------------------------------------- */

struct sw_progress *sw_cm_progress(const struct sw_identifier *identifier)
{
    struct rdma_event_channel *channel = identifier->ibv.channel;

    return channel ? &channel_of(channel)->notifier.progress : NULL;
}

void sw_cm_lend(const struct sw_identifier *identifier)
{
    struct rdma_event_channel *channel = identifier->ibv.channel;

    if (channel)
        sw_lend(&channel_of(channel)->notifier);
}

static struct rdma_event_channel *create_event_channel(void)
{
    struct sw_event_channel *channel = calloc(1, sizeof(*channel));

    if (!channel)
        return NULL;
    int error = sw_open_notifier(&channel->notifier);
    if (error) {
        free(channel);
        errno = error;
        return NULL;
    }
    channel->ibv.fd = channel->notifier.fd;
    sw_lock();
    sw_device.counts.event_channels++;
    sw_unlock();
    return &channel->ibv;
}

static void move_to(struct rdma_cm_id *id, struct rdma_event_channel *channel)
{
    if (id->channel)
        channel_of(id->channel)->identifiers--;
    id->channel = channel;
    if (channel)
        channel_of(channel)->identifiers++;
}

/*
 * Move an identifier with its events: all of them are always in the list of its own channel. With a
 * CONNECT_REQUEST moves the identifier that the program has not seen, which can have events, too.
 */
static void move_with_events(struct sw_identifier *identifier, struct rdma_event_channel *channel)
{
    struct rdma_event_channel *old = identifier->ibv.channel;
    struct sw_event *event;

    move_to(&identifier->ibv, channel);
    while (old && old != channel && (event = take_one_of(channel_of(old), identifier))) {
        append(channel_of(channel), event);
        if (event->ibv.event == RDMA_CM_EVENT_CONNECT_REQUEST)
            move_with_events(sw_identifier_of(event->ibv.id), channel);
    }
}

static struct sw_identifier *any_on(const struct rdma_event_channel *channel)
{
    struct sw_identifier *each = sw_identifiers;

    while (each && each->ibv.channel != channel)
        each = each->next;
    return each;
}

static void destroy_event_channel(struct rdma_event_channel *raw)
{
    struct sw_event_channel *channel = channel_of(raw);
    struct sw_identifier *left;

    if (!raw)
        return;
    sw_lock();
    /* Identifiers that the program left on the channel get no more events. Each turn searches from
     * the start, because dropping a listener's requests also frees identifiers. */
    while (channel->identifiers && (left = any_on(raw))) {
        drop_events(left);
        move_to(&left->ibv, NULL);
    }
    sw_device.counts.event_channels--;
    sw_close_notifier(&channel->notifier);
    sw_unlock();
    free(channel);
}

static int get_cm_event(struct rdma_event_channel *raw, struct rdma_cm_event **out)
{
    struct sw_event_channel *channel = channel_of(raw);
    int error = raw && out ? 0 : EINVAL;

    sw_lock();
    while (!error && !channel->first)
        error = sw_await_event(&channel->notifier);
    if (!error) {
        struct sw_event *event = take_first(channel);
        sw_lend(&channel->notifier);
        event->counted->unacknowledged++;
        if (event->ibv.event == RDMA_CM_EVENT_CONNECT_REQUEST)
            event->counted->space->request_taken(event->counted);
        else if (event->ibv.event == RDMA_CM_EVENT_ESTABLISHED && event->counted->space->establish)
            (void)event->counted->space->establish(event->counted);
        *out = &event->ibv;
    }
    sw_unlock();
    if (error)
        errno = error;
    return error ? -1 : 0;
}

static int ack_cm_event(struct rdma_cm_event *raw)
{
    struct sw_event *event = event_of(raw);

    if (!raw) {
        errno = EINVAL;
        return -1;
    }
    sw_lock();
    event->counted->unacknowledged--;
    sw_changed();
    sw_unlock();
    free(event);
    return 0;
}

static int migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *raw)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    /* Without a channel rdma_migrate_id makes a synchronous identifier, which is not supported. */
    if (!id || !raw) {
        errno = EINVAL;
        return -1;
    }
    sw_lock();
    move_with_events(identifier, raw);
    while (identifier->unacknowledged)
        sw_wait();
    sw_unlock();
    return 0;
}

static int destroy_id(struct rdma_cm_id *id)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    unhook(identifier);
    identifier->state = SW_CM_DISCONNECTED;
    identifier->has_port = 0;
    while (identifier->unacknowledged)
        sw_wait();
    release(identifier);
    sw_unlock();
    return 0;
}

void **aiordma_software_slot(struct rdma_cm_id *id)
{
    return &sw_identifier_of(id)->slot;
}

void sw_fill_identifier(struct aiordma_provider *table)
{
    table->create_event_channel = create_event_channel;
    table->destroy_event_channel = destroy_event_channel;
    table->get_cm_event = get_cm_event;
    table->ack_cm_event = ack_cm_event;
    table->migrate_id = migrate_id;
    table->destroy_id = destroy_id;
}
