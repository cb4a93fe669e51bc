/* Functions for all fuzzers: the device with an engine that they drive, and a reader of inputs. */
#ifndef AIORDMA_FUZZ_WORLD_H
#define AIORDMA_FUZZ_WORLD_H

#include "software/context.h"
#include "software/engine.h"

#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

/* -- engine.c -- */

/* Serve ready sockets, expire due timers, release held objects (sw_hold), until there are none. */
void serve(void);
/* Advance the clock, and expire the timers that are then due. */
void pass(uint32_t milliseconds);
/* Restart the device's series of random numbers. */
void begin_anew(void);
/* Report a failed check, and abort. */
void fail(const char *reason) __attribute__((noreturn));

#define PROMISE(truth) ((truth) ? (void)0 : fail(#truth))

/* -- sockets.c: sockets in memory, in place of the kernel's -- */

/* The events that epoll would report for a socket. */
uint32_t socket_events(int fd);
/* Set how many bytes a socket holds, before a send to it returns EAGAIN. */
void set_socket_room(size_t room);
/*
 * Set how many file descriptors accept() finds. FEW_DESCRIPTORS sets a low limit (RLIMIT_NOFILE).
 * With ONE_DESCRIPTOR, every second call fails.
 */
enum descriptors { MANY_DESCRIPTORS, FEW_DESCRIPTORS, ONE_DESCRIPTOR, NO_DESCRIPTORS };
void set_descriptors(enum descriptors how_many);
/* Connect to the listener of a port. Returns a socket, or -1. */
int dial(uint16_t port);
/* Take the peer's end of the oldest connection that the device made; -1: there is none. */
int answer_call(void);
/* Give a packet to the UDP sockets of a port (0: to all of them). Returns whether one took it. */
int throw_packet(uint16_t port, uint16_t from_port, const void *bytes, size_t size);
/* Take the last packet that the device sent. Returns its size, 0 if there is none. */
size_t catch_packet(void *bytes, size_t room, uint16_t *port, uint16_t *from_port);
uint32_t open_sockets(void);

/* -- world.c -- */

struct world {
    const struct aiordma_provider *table;
    struct ibv_context *context;
};

/* The device, opened once. */
struct world *the_world(void);

struct sockaddr_in loopback(uint16_t port);
/* Check that the device has no socket, identifier or queue pair. */
void promise_nothing_is_left(void);

/* An input, read from its beginning. After its end, reads return zeros. */
struct input {
    const uint8_t *at;
    size_t left;
};

uint32_t take(struct input *input, int bytes); /* 1, 2 or 4 of them */
/* Take up to *size bytes, without a copy. Sets *size to their number. */
const uint8_t *take_bytes(struct input *input, size_t *size);

/* The functions of a fuzzer. An input is a list of acts, between a beginning and an end. */
struct target {
    void (*set_up)(void); /* once */
    void (*begin)(struct input *input);
    void (*act)(struct input *input);
    void (*end)(struct input *input);
};
int run_target(const struct target *target, const uint8_t *bytes, size_t size);

#endif
