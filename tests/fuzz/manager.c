/* Functions for the fuzzers of the connection manager's two port spaces. */
#include "manager.h"

#include <arpa/inet.h>

uint16_t start_listening(struct rdma_event_channel *channel, enum rdma_port_space port_space,
                         struct rdma_cm_id **listener)
{
    const struct aiordma_provider *table = the_world()->table;
    struct sockaddr_in address = loopback(0);

    PROMISE(!table->create_id(channel, listener, NULL, port_space));
    PROMISE(!table->bind_addr(*listener, (struct sockaddr *)&address));
    PROMISE(!table->listen(*listener, 3));
    uint16_t port = ntohs((*listener)->route.addr.src_sin.sin_port);
    PROMISE(port);
    return port;
}

void take_all_events(struct rdma_event_channel *channel, void (*note)(struct rdma_cm_event *),
                     int (*is_kept)(const struct rdma_cm_id *))
{
    const struct aiordma_provider *table = the_world()->table;
    struct rdma_cm_event *event;

    while (((struct sw_event_channel *)(void *)channel)->first) {
        PROMISE(!table->get_cm_event(channel, &event));
        note(event);
        struct rdma_cm_id *surplus = NULL;
        if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST && !is_kept(event->id))
            surplus = event->id;
        PROMISE(!table->ack_cm_event(event));
        PROMISE(!surplus || !table->destroy_id(surplus));
    }
}
