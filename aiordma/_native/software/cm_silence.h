/* Dead peers of connections. */
#ifndef AIORDMA_SOFTWARE_CM_SILENCE_H
#define AIORDMA_SOFTWARE_CM_SILENCE_H

#include "queue_pair.h"

/* What is known of a connected queue pair's peer. */
struct sw_silence {
    struct sw_silence *next;
    struct sw_queue_pair *pair;
    uint64_t patience, since; /* milliseconds; the latter 0: it has been heard */
    int asks;                 /* TCP does */
};

/* From now on a peer that is dead is noticed, and breaks the stream. */
void sw_look_for_silence(struct sw_silence *silence, struct sw_queue_pair *pair,
                         uint8_t ack_timeout, uint8_t retry_count);
/* Before either goes; nothing if it was not looked for. */
void sw_stop_looking(struct sw_silence *silence);
void sw_silence_forked(void);

#endif
