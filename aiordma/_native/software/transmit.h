/* Sending. */
#ifndef AIORDMA_SOFTWARE_TRANSMIT_H
#define AIORDMA_SOFTWARE_TRANSMIT_H

#include "stream.h"

/* Send as much as TCP takes. The queue pair can have failed then (stream->pair). */
void sw_transmit(struct sw_stream *stream);
/* Send answers to what has arrived, at once or with the next post. */
void sw_reply(struct sw_stream *stream);
/* Note a post, to learn whether the program answers the peer's messages. */
void sw_note_post(struct sw_sending *sending);
/* Note a message of the peer, for the same purpose. */
void sw_note_message(struct sw_sending *sending);
/* Send the held answers: the program has posted nothing to send them with. */
void sw_nothing_took_it(struct sw_held *held, int is_late);

#endif
