/* RC queue pairs: how a stream begins, and what a queue pair's transport is to it. */
#ifndef AIORDMA_SOFTWARE_CONNECTED_H
#define AIORDMA_SOFTWARE_CONNECTED_H

#include "stream.h"

extern const struct sw_transport sw_stream_transport;

/*
 * Give a connected, non-blocking TCP socket to a queue pair, which goes to RTS. The stream owns
 * the socket from here, also on failure. If the pair has failed or will, the peer is told by the
 * end of the stream.
 */
int sw_stream_begin(struct sw_queue_pair *pair, int fd, const struct sw_terms *terms);

#endif
