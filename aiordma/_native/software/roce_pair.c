/* RC and UC queue pairs over RoCE: their life, and what arrives for them. */
#include "roce_pair.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "datagram.h"
#include "roce_requester.h"
#include "roce_responder.h"

/* All packets of a burst have been read. */
static void burst_is_over(struct sw_due *due)
{
    struct sw_packets *packets = SW_CONTAINER(due, struct sw_packets, due);
    struct sw_queue_pair *pair = packets->pair;

    sw_responder_answers(packets);
    if (pair->ibv.state == IBV_QPS_RTS || pair->ibv.state == IBV_QPS_SQD)
        sw_request(packets);
}

static int open_pair(struct sw_queue_pair *pair)
{
    struct sw_packets *packets = calloc(1, sizeof(*packets));

    if (!packets)
        return ENOMEM;
    int error = sw_roce_port_join(&pair->ibv.qp_num);
    if (error) {
        free(packets);
        return error;
    }
    packets->pair = pair;
    packets->is_reliable = pair->ibv.qp_type == IBV_QPT_RC;
    packets->due.run = burst_is_over;
    pair->packets = packets;
    return 0;
}

static void end(struct sw_queue_pair *pair)
{
    struct sw_packets *packets = pair->packets;

    sw_roce_port_forget(&packets->due);
    sw_roce_port_flush();
    sw_requester_end(packets);
    sw_responder_end(packets);
}

static void close_pair(struct sw_queue_pair *pair)
{
    end(pair);
    free(pair->packets);
    pair->packets = NULL;
    sw_roce_port_leave();
}

static int enter(struct sw_queue_pair *pair, enum ibv_qp_state to, const struct ibv_qp_attr *attr)
{
    struct sw_packets *packets = pair->packets;
    int error = 0;

    if (to == IBV_QPS_RTR) {
        packets->mtu = 128u << attr->path_mtu;
        error = sw_find_route(&attr->ah_attr, &packets->route);
        if (!error)
            error = sw_responder_begin(packets, attr);
    } else if (to == IBV_QPS_RTS && pair->ibv.state == IBV_QPS_RTR) {
        sw_requester_begin(packets, attr);
    }
    return error;
}

static void transmit(struct sw_queue_pair *pair)
{
    sw_request_posted(pair->packets);
}

static void do_nothing(struct sw_queue_pair *pair)
{
    (void)pair;
}

/* Whether it comes from the peer. Anyone on the network can pretend that: see docs/security.md. */
static int is_peers(const struct sw_packets *packets, const struct sw_roce_path *path)
{
    const struct sw_roce_path *ours = &packets->route.path;

    return !memcmp(&path->source, &ours->destination, sizeof(path->source)) &&
           !memcmp(&path->destination, &ours->source, sizeof(path->destination));
}

static void arrived(struct sw_queue_pair *pair, const struct sw_udp_route *route,
                    const struct sw_roce_packet *packet, size_t size)
{
    struct sw_packets *packets = pair->packets;
    const unsigned int parts = sw_roce_parts((uint8_t)packet->opcode);
    const int is_sending = pair->ibv.state == IBV_QPS_RTS || pair->ibv.state == IBV_QPS_SQD;

    (void)size;
    if (parts & SW_HAS_DETH || !packets->is_reliable != (packet->opcode >= SW_UC) ||
        (!is_sending && pair->ibv.state != IBV_QPS_RTR) || !is_peers(packets, &route->path))
        return;
    if (!(parts & SW_IS_ANSWER))
        sw_respond(packets, packet);
    else if (is_sending)
        sw_answered(packets, packet);
}

const struct sw_transport sw_roce_transport = {
    .open = open_pair,
    .close = close_pair,
    .transmit = transmit,
    .resume = do_nothing, /* the peer sends again what found no receive */
    .end = end,
    .enter = enter,
    .arrived = arrived,
};
