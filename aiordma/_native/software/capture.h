/*
 * A capture of the device's traffic, as a pcapng file: see ../declarations/software.h. All functions
 * are called with the lock held.
 */
#ifndef AIORDMA_SOFTWARE_CAPTURE_H
#define AIORDMA_SOFTWARE_CAPTURE_H

#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "roce.h"

/* Whether a capture is being written. */
extern int sw_is_capturing;

/* Write the first `size` bytes of the parts, which a TCP socket has just sent or received. */
void sw_capture_parts(int fd, int is_sent, const struct iovec *parts, int count, size_t size);
/* Write a packet that a UDP socket has just sent or received. */
void sw_capture_packet(const struct sw_udp_route *route, uint16_t port, int is_sent,
                       const void *packet, size_t size);
/* In a fork's child: the file is the parent's. */
void sw_capture_forked(void);

static inline void sw_sent(int fd, const struct iovec *parts, int count, ssize_t size)
{
    if (sw_is_capturing && size > 0)
        sw_capture_parts(fd, 1, parts, count, (size_t)size);
}

static inline void sw_received(int fd, const struct iovec *parts, int count, ssize_t size)
{
    if (sw_is_capturing && size > 0)
        sw_capture_parts(fd, 0, parts, count, (size_t)size);
}

static inline void sw_sent_bytes(int fd, const void *bytes, ssize_t size)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes,
                         .iov_len = size > 0 ? (size_t)size : 0};
    sw_sent(fd, &part, 1, size);
}

static inline void sw_received_bytes(int fd, const void *bytes, ssize_t size)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes,
                         .iov_len = size > 0 ? (size_t)size : 0};
    sw_received(fd, &part, 1, size);
}

#endif
