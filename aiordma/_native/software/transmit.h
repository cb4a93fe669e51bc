/* Sending. */
#ifndef AIORDMA_SOFTWARE_TRANSMIT_H
#define AIORDMA_SOFTWARE_TRANSMIT_H

#include "stream.h"

/* Send as much as TCP takes. The pair may have failed afterwards (stream->pair). */
void sw_transmit(struct sw_stream *stream);
/* There is something to be sent in answer to what has come, at once or with the next post. */
void sw_reply(struct sw_stream *stream);
/* The program posts: whether messages of the peer are answered is learnt from that. */
void sw_note_post(struct sw_sending *sending);
/* The same of a message that has come. */
void sw_note_message(struct sw_sending *sending);
/* What was held back goes out: the program has posted nothing that took it along. */
void sw_nothing_took_it(struct sw_held *held, int is_late);

#endif
