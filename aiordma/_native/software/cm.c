/*
 * The connection manager's calls: they create identifiers, give them queue pairs and options, and
 * connect them. As in the kernel, a call checks the identifier's state. The identifier's port space
 * then carries the call out.
 */
#include "cm.h"

#include <string.h>

#include "cm_addresses.h"
#include "cm_datagram.h"
#include "cm_listen.h"
#include "cm_roce.h"

enum { DEFAULT_BACKLOG = 1024, DEFAULT_RETRIES = 7, MOST_TIMEOUT_EXPONENT = 31 };

/* The calls of other modules. They take the lock themselves. */
static const struct aiordma_provider *calls;

/* -- identifiers --------------------------------------------------------------------------- */

static int make_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                   enum rdma_port_space port_space, int is_roce)
{
    const struct sw_port_space *connected = is_roce ? &sw_roce_space : &sw_stream_space;

    /* Without a channel rdma_create_id makes a synchronous identifier, which is not supported. */
    if (!channel || !id || (port_space != RDMA_PS_TCP && port_space != RDMA_PS_UDP))
        return sw_result(EINVAL);
    sw_lock();
    struct sw_identifier *identifier =
        sw_new_identifier(channel, context, port_space, is_roce,
                          port_space == RDMA_PS_TCP ? connected : &sw_datagram_space);
    sw_unlock();
    if (!identifier)
        return sw_result(ENOMEM);
    *id = &identifier->ibv;
    return 0;
}

static int create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                     enum rdma_port_space port_space)
{
    return make_id(channel, id, context, port_space, 0);
}

static int create_roce_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                          enum rdma_port_space port_space)
{
    return make_id(channel, id, context, port_space, 1);
}

/* -- queue pairs --------------------------------------------------------------------------- */

static void free_queues(struct rdma_cm_id *id)
{
    if (id->send_cq)
        calls->destroy_cq(id->send_cq);
    if (id->recv_cq)
        calls->destroy_cq(id->recv_cq);
    if (id->send_cq_channel)
        calls->destroy_comp_channel(id->send_cq_channel);
    if (id->recv_cq_channel)
        calls->destroy_comp_channel(id->recv_cq_channel);
    id->send_cq = id->recv_cq = NULL;
    id->send_cq_channel = id->recv_cq_channel = NULL;
}

/* Create the completion queues that the program did not pass, unarmed, as rdma_create_qp does. */
static int make_queues(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
    if (!attr->send_cq) {
        id->send_cq_channel = calls->create_comp_channel(id->verbs);
        if (id->send_cq_channel)
            id->send_cq = calls->create_cq(id->verbs, (int)attr->cap.max_send_wr + 1, id,
                                           id->send_cq_channel, 0);
        attr->send_cq = id->send_cq;
    }
    if (attr->send_cq && !attr->recv_cq) {
        id->recv_cq_channel = calls->create_comp_channel(id->verbs);
        if (id->recv_cq_channel)
            id->recv_cq = calls->create_cq(id->verbs, (int)attr->cap.max_recv_wr + 1, id,
                                           id->recv_cq_channel, 0);
        attr->recv_cq = id->recv_cq;
    }
    if (attr->send_cq && attr->recv_cq)
        return 0;
    int error = errno;
    free_queues(id);
    return error;
}

static void fill_init(struct ibv_qp_attr *attr, int *mask, int is_datagram)
{
    attr->qp_state = IBV_QPS_INIT;
    attr->pkey_index = 0;
    attr->port_num = 1;
    *mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    if (is_datagram) {
        attr->qkey = RDMA_UDP_QKEY;
        *mask |= IBV_QP_QKEY;
    } else {
        attr->qp_access_flags =
            IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        *mask |= IBV_QP_ACCESS_FLAGS;
    }
}

static int move_on(struct ibv_qp *queue_pair)
{
    struct ibv_qp_attr attr = {0};
    int is_datagram = queue_pair->qp_type == IBV_QPT_UD, mask;

    fill_init(&attr, &mask, is_datagram);
    int error = calls->modify_qp(queue_pair, &attr, mask);
    if (!is_datagram || error)
        return error;
    attr.qp_state = IBV_QPS_RTR;
    error = calls->modify_qp(queue_pair, &attr, IBV_QP_STATE);
    if (error)
        return error;
    attr.qp_state = IBV_QPS_RTS;
    return calls->modify_qp(queue_pair, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

static int cm_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
    if (!id || !attr || id->qp || !id->verbs || attr->qp_type != id->qp_type)
        return sw_result(EINVAL);
    if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd) {
        attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
        attr->pd = id->pd;
    }
    if (!attr->pd || attr->pd->context != id->verbs)
        return sw_result(EINVAL);
    int error = make_queues(id, attr);
    if (error)
        return sw_result(error);
    struct ibv_qp *queue_pair = sw_device.operations.create_qp_ex(id->verbs, attr);
    error = queue_pair ? move_on(queue_pair) : errno;
    if (error) {
        if (queue_pair)
            calls->destroy_qp(queue_pair);
        free_queues(id);
        return sw_result(error);
    }
    sw_lock();
    id->qp = queue_pair;
    id->pd = attr->pd;
    sw_give_queue_pair(sw_identifier_of(id), (struct sw_queue_pair *)queue_pair);
    sw_unlock();
    return 0;
}

static int cm_create_qp(struct rdma_cm_id *id, struct ibv_pd *domain, struct ibv_qp_init_attr *attr)
{
    struct ibv_qp_init_attr_ex extended = {0};

    if (!attr)
        return sw_result(EINVAL);
    memcpy(&extended, attr, sizeof(*attr)); /* the same members come first */
    extended.comp_mask = IBV_QP_INIT_ATTR_PD;
    extended.pd = domain;
    int result = cm_create_qp_ex(id, &extended);
    memcpy(attr, &extended, sizeof(*attr));
    return result;
}

static void cm_destroy_qp(struct rdma_cm_id *id)
{
    if (!id || !id->qp)
        return;
    calls->destroy_qp(id->qp); /* calls sw_lose_queue_pair */
    free_queues(id);
}

static int init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
    if (!id || !attr || !mask || !id->verbs)
        return sw_result(EINVAL);
    int is_datagram = id->qp_type == IBV_QPT_UD;
    enum ibv_qp_state state = attr->qp_state;
    if (state != IBV_QPS_INIT && state != IBV_QPS_RTR && state != IBV_QPS_RTS)
        return sw_result(EINVAL);
    memset(attr, 0, sizeof(*attr));
    attr->qp_state = state;
    /* Of iWARP, nothing: the connection itself moves its queue pair to RTS, as in the kernel. */
    *mask = 0;
    if (state == IBV_QPS_INIT)
        fill_init(attr, mask, is_datagram);
    else if (is_datagram)
        *mask = IBV_QP_STATE | (state == IBV_QPS_RTS ? IBV_QP_SQ_PSN : 0);
    else if (sw_identifier_of(id)->space->describe) {
        sw_lock();
        *mask = sw_identifier_of(id)->space->describe(sw_identifier_of(id), attr);
        sw_unlock();
    }
    return 0;
}

/* -- connections: checked here, carried out by the port space ------------------------------ */

/* Store the parameters of connect or accept, or the defaults if there are none. */
static int keep_parameters(struct sw_identifier *identifier,
                           const struct rdma_conn_param *parameters)
{
    static const struct rdma_conn_param defaults = {
        .responder_resources = RDMA_MAX_RESP_RES,
        .initiator_depth = RDMA_MAX_INIT_DEPTH,
        .retry_count = DEFAULT_RETRIES,
        .rnr_retry_count = DEFAULT_RETRIES,
    };

    if (!parameters && !identifier->ibv.qp)
        return EINVAL;
    if (!parameters)
        parameters = &defaults;
    if (sw_is_connected(identifier) && ((parameters->responder_resources != RDMA_MAX_RESP_RES &&
                                         parameters->responder_resources > SW_MOST_DEPTH) ||
                                        (parameters->initiator_depth != RDMA_MAX_INIT_DEPTH &&
                                         parameters->initiator_depth > SW_MOST_DEPTH)))
        return EINVAL;
    identifier->parameters = *parameters;
    if (!parameters->private_data)
        identifier->parameters.private_data_len = 0;
    else
        memcpy(identifier->private_data, parameters->private_data, parameters->private_data_len);
    identifier->parameters.private_data = identifier->private_data;
    return 0;
}

static int cm_connect(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    int error = identifier->state == SW_CM_ROUTE_RESOLVED ? 0 : EINVAL;
    if (!error)
        error = keep_parameters(identifier, parameters);
    if (!error) {
        identifier->state = SW_CM_CONNECTING;
        error = identifier->space->connect(identifier);
        if (error)
            identifier->state = SW_CM_ROUTE_RESOLVED;
    }
    sw_unlock();
    return sw_result(error);
}

static int cm_listen(struct rdma_cm_id *id, int backlog)
{
    struct sw_identifier *identifier = sw_identifier_of(id);
    struct sockaddr_in any = {.sin_family = AF_INET};
    int error = 0;

    if (!id)
        return sw_result(EINVAL);
    if (backlog <= 0 || backlog > DEFAULT_BACKLOG)
        backlog = DEFAULT_BACKLOG;
    sw_lock();
    if (identifier->state == SW_CM_IDLE)
        error = sw_bind_to(identifier, (struct sockaddr *)&any);
    if (!error && identifier->state != SW_CM_BOUND)
        error = EINVAL;
    if (!error)
        error = sw_check_port(identifier, 0);
    if (!error)
        error = identifier->space->listen(identifier, backlog);
    if (!error)
        identifier->state = SW_CM_LISTENING;
    sw_unlock();
    return sw_result(error);
}

static int cm_accept(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    int error = identifier->state == SW_CM_REQUESTED ? 0 : EINVAL;
    if (!error)
        error = keep_parameters(identifier, parameters);
    if (!error)
        error = identifier->space->accept(identifier);
    sw_unlock();
    return sw_result(error);
}

static int cm_reject(struct rdma_cm_id *id, const void *private_data, uint8_t length)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    int error = identifier->state == SW_CM_REQUESTED ? 0 : EINVAL;
    if (!error) {
        identifier->parameters.private_data_len = private_data ? length : 0;
        if (private_data)
            memcpy(identifier->private_data, private_data, length);
        identifier->parameters.private_data = identifier->private_data;
        error = identifier->space->reject(identifier);
        identifier->state = SW_CM_DISCONNECTED; /* also if the peer is gone */
    }
    sw_unlock();
    return sw_result(error);
}

static int cm_disconnect(struct rdma_cm_id *id)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    int error = identifier->space->disconnect(identifier);
    sw_unlock();
    return sw_result(error);
}

/* rdma_establish replies to CONNECT_RESPONSE, an event that iWARP does not have. */
static int establish(struct rdma_cm_id *id)
{
    struct sw_identifier *identifier = sw_identifier_of(id);

    if (!id || !identifier->space->establish)
        return sw_result(EINVAL);
    sw_lock();
    int error = identifier->space->establish(identifier);
    sw_unlock();
    return sw_result(error);
}

/*
 * The stream itself reports the peer's first frame, as the kernel's iWARP devices do. Over RoCE, a
 * message can arrive before the peer's answer (RTU), or replace it.
 */
static int notify(struct rdma_cm_id *id, enum ibv_event_type event)
{
    struct sw_identifier *identifier = sw_identifier_of(id);
    int error = EINVAL;

    (void)event;
    if (!id)
        return sw_result(EINVAL);
    sw_lock();
    if (sw_is_connected(identifier) &&
        (identifier->state == SW_CM_ACCEPTING || identifier->state == SW_CM_CONNECTED)) {
        error = 0;
        if (identifier->space->notified)
            identifier->space->notified(identifier);
    }
    sw_unlock();
    return sw_result(error);
}

static int set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
    (void)ece;
    return sw_result(id ? EOPNOTSUPP : EINVAL);
}

static int reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t length)
{
    (void)private_data;
    (void)length;
    return sw_result(id ? EOPNOTSUPP : EINVAL);
}

/* -- options ------------------------------------------------------------------------------- */

static int set_identifiers_option(struct sw_identifier *identifier, int name, const void *value,
                                  size_t length)
{
    int number = 0;
    int is_byte = name == RDMA_OPTION_ID_TOS || name == RDMA_OPTION_ID_ACK_TIMEOUT;

    if (!is_byte && name != RDMA_OPTION_ID_REUSEADDR && name != RDMA_OPTION_ID_AFONLY)
        return ENOSYS;
    if (length != (is_byte ? sizeof(uint8_t) : sizeof(int)))
        return EINVAL;
    if (is_byte)
        number = *(const uint8_t *)value;
    else
        memcpy(&number, value, sizeof(number));
    switch (name) {
    case RDMA_OPTION_ID_TOS:
        identifier->tos = (uint8_t)number;
        identifier->has_tos = 1;
        return 0;
    case RDMA_OPTION_ID_ACK_TIMEOUT:
        if (!sw_is_connected(identifier) || number > MOST_TIMEOUT_EXPONENT)
            return EINVAL;
        identifier->ack_timeout = (uint8_t)number;
        identifier->has_ack_timeout = 1;
        return 0;
    case RDMA_OPTION_ID_REUSEADDR:
        if (identifier->state != SW_CM_IDLE && (!number || identifier->state == SW_CM_LISTENING))
            return EINVAL;
        identifier->reuse_address = !!number;
        return 0;
    default:
        /* The kernel allows this on a bound identifier, too, but a socket does not. */
        if (identifier->state != SW_CM_IDLE)
            return EINVAL;
        identifier->ipv6_only = !!number;
        identifier->has_ipv6_only = 1;
        return 0;
    }
}

static int set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t length)
{
    if (!id || !value)
        return sw_result(EINVAL);
    if (level != RDMA_OPTION_ID)
        return sw_result(ENOSYS);
    sw_lock();
    int error = set_identifiers_option(sw_identifier_of(id), name, value, length);
    sw_unlock();
    return sw_result(error);
}

void sw_fill_roce_cm(struct aiordma_provider *table)
{
    table->create_id = create_roce_id;
    sw_roce_port_serve(&sw_roce_services);
}

void sw_fill_cm(struct aiordma_provider *table)
{
    calls = table;
    table->create_id = create_id;
    table->cm_create_qp = cm_create_qp;
    table->cm_create_qp_ex = cm_create_qp_ex;
    table->cm_destroy_qp = cm_destroy_qp;
    table->connect = cm_connect;
    table->listen = cm_listen;
    table->accept = cm_accept;
    table->reject = cm_reject;
    table->disconnect = cm_disconnect;
    table->establish = establish;
    table->notify = notify;
    table->init_qp_attr = init_qp_attr;
    table->set_local_ece = set_local_ece;
    table->get_remote_ece = set_local_ece; /* ECE is not supported */
    table->reject_ece = reject_ece;
    table->set_option = set_option;
}
