/* The responder: the peer's requests are carried out and answered. */
#ifndef AIORDMA_SOFTWARE_ROCE_RESPONDER_H
#define AIORDMA_SOFTWARE_ROCE_RESPONDER_H

#include "roce_packets.h"

/* Begin, in RTR. ENOMEM. */
int sw_responder_begin(struct sw_packets *packets, const struct ibv_qp_attr *attr);
void sw_responder_end(struct sw_packets *packets);
/* A request has arrived. The queue pair can have failed then. */
void sw_respond(struct sw_packets *packets, const struct sw_roce_packet *packet);
/* Send the answers that are due, as many as a turn allows. */
void sw_responder_answers(struct sw_packets *packets);

#endif
