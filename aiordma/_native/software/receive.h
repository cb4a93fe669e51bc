/* Receiving. */
#ifndef AIORDMA_SOFTWARE_RECEIVE_H
#define AIORDMA_SOFTWARE_RECEIVE_H

#include "stream.h"

/* Read and process arrived bytes; process buffered ones. The queue pair can have failed then. */
void sw_receive(struct sw_stream *stream, uint32_t events);
void sw_process(struct sw_stream *stream);

#endif
