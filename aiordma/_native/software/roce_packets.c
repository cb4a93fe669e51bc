/* Packets to the peer of a queue pair: see roce_packets.h. */
#include "roce_packets.h"

uint8_t *sw_packet_begin(const struct sw_packets *packets, struct sw_roce_packet *packet)
{
    uint8_t *bytes = sw_roce_port_room();

    packet->destination_qpn = packets->pair->attributes.dest_qp_num;
    if (!packets->is_reliable)
        packet->opcode |= SW_UC;
    return bytes + sw_roce_headers(bytes, packet);
}

void sw_packet_add(struct sw_packets *packets, const uint8_t *payload, uint32_t size)
{
    sw_add_work(SW_FRAME_WORK + size);
    sw_roce_port_add(&packets->route, (uint32_t)(payload - sw_roce_port_room()) + size);
}
