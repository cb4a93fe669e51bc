/* TCP of simulated hosts: see the .c file. Functions of sockets are as the C library's. */
#ifndef AIORDMA_SOFTWARE_SIMULATED_TCP_H
#define AIORDMA_SOFTWARE_SIMULATED_TCP_H

#include <netinet/tcp.h>

#include "descriptors.h"

uint32_t sw_tcp_events(struct sw_object *object);
void sw_tcp_connect(struct sw_object *object);
int sw_tcp_listen(int fd, int backlog);
int sw_tcp_accept4(int fd, struct sockaddr *address, socklen_t *size, int flags);
int sw_tcp_shutdown(int fd, int how);
int sw_tcp_close(struct sw_object *object);
ssize_t sw_tcp_send(struct sw_object *object, const struct iovec *parts, size_t count);
ssize_t sw_tcp_receive(struct sw_object *object, const struct iovec *parts, int count, int flags);
void sw_tcp_tell(const struct sw_object *object, struct tcp_info *info);

#endif
