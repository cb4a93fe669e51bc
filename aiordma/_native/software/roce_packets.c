/* Packets to the peer of a queue pair: see roce_packets.h. */
#include "roce_packets.h"

#include <errno.h>

#include "faults.h"

uint32_t sw_packet_headers(const struct sw_packets *packets, uint8_t *bytes,
                           struct sw_roce_packet *packet)
{
    packet->destination_qpn = packets->pair->attributes.dest_qp_num;
    if (!packets->is_reliable)
        packet->opcode |= SW_UC;
    return sw_roce_headers(bytes, packet);
}

/* EAGAIN: the socket is full. With any other error, the packet is lost, as any packet can be. */
int sw_packet_send(struct sw_packets *packets, uint8_t *bytes, uint32_t size)
{
    int error = sw_roce_port_send(&packets->route, bytes, size);

    return error == EAGAIN || error == ENOBUFS ? EAGAIN : 0;
}
