/* Detection of dead peers. */
#ifndef AIORDMA_SOFTWARE_CM_SILENCE_H
#define AIORDMA_SOFTWARE_CM_SILENCE_H

#include "queue_pair.h"

/* How long the peer of a connected queue pair has been silent. */
struct sw_silence {
    struct sw_silence *next;
    struct sw_queue_pair *pair;
    uint64_t patience, since; /* milliseconds; since is 0 if the peer is not silent */
    uint64_t quiet;           /* the stream's carried bytes when all were acknowledged */
    int asks;                 /* keep-alive is enabled */
};

/* Start checking a queue pair's peer. If the peer is dead, the stream breaks. */
void sw_look_for_silence(struct sw_silence *silence, struct sw_queue_pair *pair,
                         uint8_t ack_timeout, uint8_t retry_count);
/* Stop checking, before either of them is freed. Do nothing if it was not started. */
void sw_stop_looking(struct sw_silence *silence);
void sw_silence_forked(void);
extern const struct sw_state sw_silence_state;

#endif
