/* The requester: requests of the send queue become packets, until they are acknowledged. */
#ifndef AIORDMA_SOFTWARE_ROCE_REQUESTER_H
#define AIORDMA_SOFTWARE_ROCE_REQUESTER_H

#include "roce_packets.h"

void sw_requester_begin(struct sw_packets *packets, const struct ibv_qp_attr *attr); /* in RTS */
void sw_requester_end(struct sw_packets *packets);
/* Send as much as the window allows. The queue pair can have failed then. */
void sw_request(struct sw_packets *packets);
/* The same for what the program has just posted: packets can wait for those of its next posts. */
void sw_request_posted(struct sw_packets *packets);
/* An answer has arrived. The queue pair can have failed then. */
void sw_answered(struct sw_packets *packets, const struct sw_roce_packet *packet);

#endif
