/*
 * RoCE's UDP port, 4791, which all processes of a user share, and the queue pairs behind it.
 *
 * The upper 8 bits of a queue pair's number are the slot of its process. The kernel gives a packet to
 * the process that it belongs to, as long as it numbers the processes as their slots. If another
 * process gets it, that one passes it on.
 */
#ifndef AIORDMA_SOFTWARE_ROCE_PORT_H
#define AIORDMA_SOFTWARE_ROCE_PORT_H

#include "queue_pair.h"

/* Something to do once for all packets of a burst. */
struct sw_due {
    void (*run)(struct sw_due *due);
    struct sw_due *next, **link; /* link NULL: it is not due */
};

/*
 * Open the port for one more queue pair, and find a number for it. EADDRINUSE: the kernel's RoCE
 * devices have the port, or another user's processes.
 */
int sw_roce_port_join(uint32_t *number);
/* The queue pair no longer uses it. */
void sw_roce_port_leave(void);
/*
 * Packets to the same port of another host are composed in one place, for one call of the kernel:
 * write one to sw_roce_port_room(), of SW_ROCE_MOST bytes, then add it. sw_roce_port_flush sends
 * what was added. Without it, nothing is sent. A packet that cannot be sent is lost, as any can be.
 */
uint8_t *sw_roce_port_room(void);
void sw_roce_port_add(struct sw_udp_route *route, uint32_t size); /* headers and payload */
void sw_roce_port_flush(void);

/* Run it at the end of this burst, or do nothing if it is due already. Never forget a freed one. */
void sw_roce_port_after(struct sw_due *due);
void sw_roce_port_forget(struct sw_due *due); /* does nothing if it is not due */

void sw_roce_port_forked(void);
extern const struct sw_state sw_roce_port_state;

#endif
