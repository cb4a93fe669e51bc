/* Sending. */
#ifndef AIORDMA_SOFTWARE_TRANSMIT_H
#define AIORDMA_SOFTWARE_TRANSMIT_H

#include "stream.h"

/* Send as much as TCP takes. The pair may have failed afterwards (stream->pair). */
void sw_transmit(struct sw_stream *stream);

#endif
