/* What a frame that arrives does. The frame is `receiving.frame` of its stream. */
#ifndef AIORDMA_SOFTWARE_DELIVERY_H
#define AIORDMA_SOFTWARE_DELIVERY_H

#include "stream.h"

/* Fail the queue pair, and tell the peer why. Returns -1. */
int sw_refuse_frame(struct sw_stream *stream, struct sw_reason reason);

/* Check a frame whose header has arrived. 1: continue; 0: it is held back; -1: it was refused. */
int sw_begin_frame(struct sw_stream *stream);

/* Whether its payload goes to memory of the program, piece by piece. */
int sw_has_payload(enum sw_operation operation);

/*
 * Find the places of the frame's remaining payload, at most size bytes. to has space for
 * SW_MOST_PARTS. They are looked up for each piece of a frame, because memory can be deregistered
 * in between. Returns their number, or -1: refused, and the queue pair has failed.
 */
int sw_locate_payload(struct sw_stream *stream, uint32_t size, struct sw_piece *to);

/* Copy payload from the buffer to its place. 0, or -1: refused. */
int sw_place_payload(struct sw_stream *stream);

/*
 * In a simulation, the last bytes of a WRITE can be in memory before the others: no standard orders
 * them. A whole frame waits, and its last bytes are placed. Returns whether the others come later.
 */
int sw_place_last_bytes(struct sw_stream *stream);

/* Count payload that is in its place. */
void sw_count_payload(struct sw_stream *stream, uint32_t size);

/* The payload cannot be placed: fail the queue pair. Returns -1. */
int sw_fail_payload(struct sw_stream *stream, enum sw_refusal refusal);

/* Carry out a frame that has arrived as a whole. 0, or -1: the queue pair has failed. */
int sw_end_frame(struct sw_stream *stream, const char *payload);

#endif
