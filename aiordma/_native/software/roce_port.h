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
/* Send a packet to the same port of another host. Sets the ports in the route. */
int sw_roce_port_send(struct sw_udp_route *route, uint8_t *bytes, uint32_t size);

/* Run it at the end of this burst, or do nothing if it is due already. Never forget a freed one. */
void sw_roce_port_after(struct sw_due *due);
void sw_roce_port_forget(struct sw_due *due); /* does nothing if it is not due */

void sw_roce_port_forked(void);
extern const struct sw_state sw_roce_port_state;

#endif
