/*
 * Streams, for transmit.c, receive.c, delivery.c and connected.c. A stream is one TCP connection of
 * one queue pair.
 */
#ifndef AIORDMA_SOFTWARE_STREAM_H
#define AIORDMA_SOFTWARE_STREAM_H

#include <sys/uio.h>

#include "blocks.h"
#include "frame.h"
#include "queue_pair.h"

/* The terms that the two sides agreed on in the MPA handshake. */
struct sw_terms {
    int crc; /* CRC32C on every frame, in both directions */
    int is_initiator;
    int must_hear_first; /* the accepting side sends nothing before the peer's first frame */
    int must_hear_soon;  /* ... for some time only: the peer does not announce itself */
    int sends_ready;     /* the initiator sends a WRITE of no bytes first (RFC 6581, RTR) */
    int gives_word;      /* the peer answers READs of no bytes (a word): it is a software device */
    uint16_t inbound_depth, outbound_depth; /* outstanding READs and atomics: IRD, ORD */
    struct sw_progress
        *manager;        /* has the socket until the peer's first frame, which makes an event
                                    of the connection manager; NULL: that of the completion queues */
    const void *already; /* bytes after the handshake that have been read */
    size_t already_size;
};

/* A READ or an atomic of the peer. They are answered in order. */
struct sw_answer {
    int is_atomic;
    struct sw_read_request read;
    struct sw_atomic_request atomic;
    uint32_t done;     /* of a READ: bytes put into frames */
    uint32_t sequence; /* of the peer's request */
};

/* SW_OUT_BYTES: a message of 256 KiB, as byte streams send, and its immediate data are one call. */
enum { SW_OUT_FRAMES = 16, SW_OUT_PARTS = 96, SW_OUT_BYTES = 272 << 10 };

/* A composed frame that TCP has not taken completely. */
struct sw_out_frame {
    char header[SW_UNTAGGED_HEADER + SW_ATOMIC_REQUEST_SIZE]; /* and a payload of the device */
    char trailer[8];                                          /* padding and CRC */
    uint32_t size, left;  /* all bytes; bytes that TCP has not taken */
    struct sw_send *send; /* its memory is the payload; NULL: an answer, or no such payload */
    int ends;             /* this is the last frame of the send */
    uint32_t offset, payload;
    uint32_t stag; /* of an answer's memory: payload bytes at address */
    uint64_t address;
    const char *memory; /* its place when the frame was composed */
    int is_answer;
};

/* The sending half: frames for the peer, and the peer's requests to answer. */
struct sw_sending {
    struct sw_out_frame out[SW_OUT_FRAMES];
    uint32_t out_first, out_count; /* a ring */
    struct iovec parts[SW_OUT_PARTS];
    int part_first, part_count;
    uint32_t out_bytes;
    struct sw_block *copies; /* copies of memory that can change or disappear before TCP has it: of
                                answers with a CRC, which would not match, and of mapped files. The
                                last block first */
    int is_blocked;          /* TCP takes no more for now */
    int must_announce;       /* the initiator has to send its first frame */
    uint32_t sequence[SW_QUEUES];
    uint32_t offset;           /* of the send in progress: bytes put into frames */
    int sent_immediate;        /* SEND: immediate data are sent; WRITE: only they are left */
    struct sw_answer *answers; /* a ring, which grows up to terms.inbound_depth */
    uint32_t answer_size, answer_first, answer_count;
    int answers_next;     /* it is the turn of answers, not of requests */
    struct sw_held held;  /* answers of no bytes, held for the next post */
    int is_unanswered;    /* a message has arrived since the last post */
    int chats;            /* recent messages that were answered by a post */
    uint32_t asked;       /* READs and atomics that wait for an answer */
    uint32_t first_asked; /* ... the counter of the oldest of them, if there is one */
    int needs_word;       /* requests have been sent that no READ covers yet */
    int has_word_due;     /* a READ of no bytes is outstanding. Its answer confirms everything that
                             was sent before it */
    uint32_t word_covers; /* ... which is all requests before this counter */
    uint32_t word_sink;
    uint32_t number; /* of the last sink or atomic */
};

/* The receiving half: frames of the peer that have not been carried out yet. */
struct sw_receiving {
    struct sw_block *in;   /* bytes from TCP; NULL: none wait */
    struct sw_block *kept; /* a list of whole frames, after a message that waits for its receive */
    struct sw_block *kept_last;
    uint32_t kept_blocks, excess_blocks; /* in kept; those of them that are beyond the half of the
                                            common limit that all streams may use */
    struct sw_receiving *next_keeper, **keeper_link; /* in the list of streams that keep frames */
    struct sw_block *from;                           /* the frame is read from kept or from in */
    int is_full;                                     /* no more is kept: TCP holds the peer back */
    int has_ended; /* the peer ended it, after the waiting frames */
    int has_left;  /* the same, or TCP reports it; the peer answers no more requests */
    uint32_t expected[SW_QUEUES];
    struct sw_frame frame;
    int has_frame;
    char blamed[SW_UNTAGGED_HEADER + SW_READ_REQUEST_SIZE]; /* its first bytes, for a TERMINATE */
    uint32_t blamed_size;
    uint32_t direct;       /* payload that was read directly to its place, up to a limit */
    uint32_t placed;       /* bytes of the frame's payload that are placed */
    uint32_t message_size; /* bytes of the SEND that is arriving */
    uint32_t written;      /* bytes of the WRITE that is arriving, or of the last one */
    int is_writing;
    int is_scrambled;  /* the last bytes of the frame are placed, in a simulation */
    int has_immediate; /* for the next SEND */
    uint32_t immediate;
};

struct sw_stream {
    struct sw_watch watch;
    struct sw_member member;      /* lets the program's thread read its packets */
    struct sw_progress *progress; /* to join; NULL: the two queues have different ones */
    int merit;                    /* rises with packets that made completions, falls with others */
    struct sw_timer timer;
    struct sw_timer rest;       /* runs while another turn has work to do */
    struct sw_queue_pair *pair; /* NULL: it is over, and only TCP's end remains */
    struct sw_terms terms;
    int fd;
    int has_heard;    /* a frame of the peer has arrived */
    uint64_t carried; /* bytes, in both directions */
    int is_dead;      /* by a fault: it neither sends nor receives */
    int is_reset;     /* by a fault: closing it resets the connection */
    int is_read_out; /* TCP's end has been read, and the caller releases the stream if it is over */
    struct sw_sending sending;
    struct sw_receiving receiving;

    /* the end */
    char terminate[SW_MOST_TERMINATE]; /* the payload of a TERMINATE, after an error */
    uint32_t terminate_size;
    char last_word[128]; /* its frame, while it is being sent */
    uint32_t last_size, last_sent;
};

/* Remove the first answer, because it has been sent. */
static inline void sw_answer_is_sent(struct sw_sending *sending)
{
    sending->answer_count--;
    sending->answer_first = (sending->answer_first + 1) % sending->answer_size;
}

/* Whether a request completes when the peer confirms it, and not when TCP has it. */
static inline int sw_awaits_word(const struct sw_stream *stream)
{
    return stream->terms.gives_word && stream->terms.outbound_depth;
}

/* Whether the peer's requests complete when this side confirms them. */
static inline int sw_gives_word(const struct sw_stream *stream)
{
    return stream->terms.gives_word && stream->terms.inbound_depth;
}

enum { SW_KEPT_SIZE = 4 << 20, SW_KEPT_FOR_ANSWERS = 64 << 20 };

enum sw_keeping { SW_KEPT, SW_NO_ROOM, SW_NO_MEMORY };

/*
 * Keep a whole frame for later, after the frames that are already kept. NO_ROOM: the stream keeps
 * as much as it may; or it waits for no answer, and all streams together keep half of what they
 * may. If it waits for an answer, holding it back could last for ever: the answer can come after
 * the frames that are held back. So at the common limit, the stream that keeps most ends, if it
 * keeps more than this one, and more than SW_KEPT_SIZE or anything beyond that half. Otherwise this
 * one has to end: NO_MEMORY. All sizes are those of whole blocks.
 */
enum sw_keeping sw_keep(struct sw_stream *stream, const char *frame, uint32_t size);
/* Return the first kept block if it has been read. */
void sw_kept_is_read(struct sw_receiving *receiving);
/* Whether a full stream may keep more: it waits for an answer now, or others keep less. */
int sw_finds_room(const struct sw_stream *stream);
/* In a fork's child: the kept frames are the parent's. */
void sw_streams_forked(void);
extern const struct sw_state sw_streams_state;
/* Borrow a block. Without memory, streams that keep more than this one end. NULL: no memory. */
struct sw_block *sw_stream_block(const struct sw_receiving *receiving);
/* End a connection for lack of memory. */
void sw_stream_starved(struct sw_stream *stream);

/* Watch the events that the stream waits for. */
void sw_stream_rewatch(struct sw_stream *stream);
/* Its turn is over: the engine continues in another one. */
void sw_stream_rest(struct sw_stream *stream);
/* Count carried bytes. A fault (faults.h) can break the stream here. Returns whether it did. */
int sw_stream_carried(struct sw_stream *stream, size_t bytes);
/* The same before a post is transmitted: DEAD_PEER, or DROP_AFTER_REQUESTS. */
int sw_stream_is_struck(struct sw_stream *stream);
/* Whether what has been received ends within a frame or a message. */
int sw_stream_is_cut(const struct sw_stream *stream);
/* End the stream. TCP still delivers what it has taken. The queue pair is in ERR or RESET. */
void sw_stream_end(struct sw_queue_pair *pair);
/* Free a stream that has not begun, or is over. Its socket stays open. */
void sw_stream_discard(struct sw_stream *stream);
/* Close the socket of a stream that is over, and free the stream. */
void sw_stream_release(struct sw_stream *stream);
/*
 * TCP failed, or ended (error 0): the queue pair fails. The event of the end has the error: the
 * peer's program ended the connection only if it is 0.
 */
void sw_stream_broken(struct sw_stream *stream, int error);
/*
 * After the peer has left: fail the queue pair if it has requests, or if the peer has given up its
 * messages that are held back. Returns whether it failed.
 */
int sw_stream_is_hopeless(struct sw_stream *stream);
/* The peer broke the protocol: send a TERMINATE with the reason, and fail the queue pair. */
void sw_stream_refused(struct sw_stream *stream, struct sw_reason reason);
/* A request of the program cannot be carried out: fail it and the queue pair. */
void sw_stream_failed_send(struct sw_stream *stream, struct sw_send *send,
                           enum ibv_wc_status status);
/*
 * Find the oldest READ or atomic that waits for its answer, and its counter in the ring. NULL:
 * there is none, or the READ of no bytes is answered first.
 */
struct sw_send *sw_first_asked(struct sw_stream *stream, uint32_t *counter);
/* A request has been sent that waits for its answer, or the oldest of them has been answered. */
void sw_is_asked(struct sw_stream *stream, uint32_t counter);
void sw_is_answered(struct sw_stream *stream);
/* Find the oldest request that has been sent and has not ended, or NULL. */
struct sw_send *sw_first_unended(struct sw_stream *stream);

#endif
