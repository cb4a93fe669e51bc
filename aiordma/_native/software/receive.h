/* Receiving. */
#ifndef AIORDMA_SOFTWARE_RECEIVE_H
#define AIORDMA_SOFTWARE_RECEIVE_H

#include "stream.h"

/* What has come, and what waits in the buffer. The pair may have failed afterwards. */
void sw_receive(struct sw_stream *stream, uint32_t events);
void sw_process(struct sw_stream *stream);

#endif
