/* RC queue pairs: the start of a stream, and the transport of RC. */
#ifndef AIORDMA_SOFTWARE_CONNECTED_H
#define AIORDMA_SOFTWARE_CONNECTED_H

#include "stream.h"

extern const struct sw_transport sw_stream_transport;

/*
 * Give a connected, non-blocking TCP socket to a queue pair, which moves to RTS. From here the
 * stream owns the socket, also after a failure. If the queue pair has failed or fails later, the
 * peer sees the end of the stream.
 */
int sw_stream_begin(struct sw_queue_pair *pair, int fd, const struct sw_terms *terms);

#endif
