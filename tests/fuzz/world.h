/* What the fuzzers share: the device with an engine that they drive, and a reader of inputs. */
#ifndef AIORDMA_FUZZ_WORLD_H
#define AIORDMA_FUZZ_WORLD_H

#include "software/context.h"
#include "software/engine.h"

#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

/* -- engine.c -- */

/* Serve sockets until none has anything to say. */
void serve(void);
/* Time goes by: timers expire. */
void pass(uint32_t milliseconds);
/* The numbers that the device draws begin from the first again. */
void begin_anew(void);
/* Something that must not happen did. */
void fail(const char *reason) __attribute__((noreturn));

#define PROMISE(truth) ((truth) ? (void)0 : fail(#truth))

/* -- sockets.c: sockets that are only memory, in place of the kernel's -- */

/* What epoll would say of one. */
uint32_t socket_events(int fd);
/* How many bytes lie in one at most, before its sender is told to wait. */
void set_socket_room(size_t room);
/* How many file descriptors there are for peers: one means that every other accept finds one. */
enum descriptors { MANY_DESCRIPTORS, FEW_DESCRIPTORS, ONE_DESCRIPTOR, NO_DESCRIPTORS };
void set_descriptors(enum descriptors how_many);
/* Connect to whoever listens on the port: a socket, or -1. */
int dial(uint16_t port);
/* The other end of the oldest socket that the device connected; -1: there is none. */
int answer_call(void);
/* A packet for the socket that is bound to this port, or to any if 0; as much as a poll shows. */
int throw_packet(uint16_t port, uint16_t from_port, const void *bytes, size_t size);
/* The last packet that the device sent: its size, 0 if there is none. */
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
/* No socket, identifier or queue pair of the device's. */
void promise_nothing_is_left(void);

/* An input, read from its begin; zeros behind its end. */
struct input {
    const uint8_t *at;
    size_t left;
};

uint32_t take(struct input *input, int bytes); /* 1, 2 or 4 of them */
/* Up to that many bytes, where they stand; *size says how many. */
const uint8_t *take_bytes(struct input *input, size_t *size);

/* What a fuzzer is made of: an input is a list of acts, between a beginning and an end. */
struct target {
    void (*set_up)(void); /* once */
    void (*begin)(struct input *input);
    void (*act)(struct input *input);
    void (*end)(struct input *input);
};
int run_target(const struct target *target, const uint8_t *bytes, size_t size);

#endif
