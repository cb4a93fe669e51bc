/*
 * Streams: what transmit.c, receive.c and connected.c share. A stream is one TCP connection of
 * one queue pair.
 */
#ifndef AIORDMA_SOFTWARE_STREAM_H
#define AIORDMA_SOFTWARE_STREAM_H

#include <sys/uio.h>

#include "blocks.h"
#include "frame.h"
#include "queue_pair.h"

/* What the two sides agreed on in the MPA handshake. */
struct sw_terms {
    int crc; /* CRC32C on every frame, both ways */
    int is_initiator;
    int must_hear_first; /* the accepting side sends nothing before a frame has come */
    int must_hear_soon;  /* ... or some time has passed: the peer announces nothing */
    int sends_ready;     /* the initiator sends a WRITE of no bytes first (RFC 6581 RTR) */
    int gives_word;      /* the peer answers READs of no bytes: it is one of our own kind */
    uint16_t inbound_depth, outbound_depth; /* READs and atomics outstanding: IRD, ORD */
    const void *already;                    /* bytes behind the handshake that have been read */
    size_t already_size;
};

/* A READ or an atomic that the peer asked for. Answered in the order of the questions. */
struct sw_answer {
    int is_atomic;
    struct sw_read_request read;
    struct sw_atomic_request atomic;
    uint32_t done;     /* of a READ: bytes put into frames */
    uint32_t sequence; /* the question's */
};

enum { SW_OUT_FRAMES = 16, SW_OUT_PARTS = 96, SW_OUT_BYTES = 262144 };

/* A frame that is composed, and not yet wholly TCP's. */
struct sw_out_frame {
    char header[SW_UNTAGGED_HEADER + SW_ATOMIC_REQUEST_SIZE]; /* and a payload of ours */
    char trailer[8];                                          /* padding and CRC */
    uint32_t size, left;  /* bytes in all, and those that TCP has not taken */
    struct sw_send *send; /* whose memory the payload is; NULL: an answer, or only ours */
    int ends;             /* the send is over with this frame */
    uint32_t offset, payload;
    uint32_t stag; /* of an answer's memory; payload bytes at address */
    uint64_t address;
    const char *memory; /* where that was when the frame was composed */
    int is_answer;
};

/* The sending half: what the peer is sent, and what it has asked for. */
struct sw_sending {
    struct sw_out_frame out[SW_OUT_FRAMES];
    uint32_t out_first, out_count; /* of a ring */
    struct iovec parts[SW_OUT_PARTS];
    int part_first, part_count;
    uint32_t out_bytes;
    struct sw_block *copies; /* of memory that may change or go before TCP has it: what is answered
                     with, where there is a CRC, which would not be its own, and mappings of files.
                     The last one first */
    int is_blocked;          /* TCP takes no more for now */
    int must_announce;       /* the initiator's first frame */
    uint32_t sequence[SW_QUEUES];
    uint32_t offset;           /* of the send that is under way: bytes put into frames */
    int sent_immediate;        /* its immediate data have gone before it */
    struct sw_answer *answers; /* a ring, which grows to terms.inbound_depth */
    uint32_t answer_size, answer_first, answer_count;
    int answers_next;     /* whose turn it is */
    struct sw_held held;  /* answers of no bytes, which the next post takes along */
    int is_unanswered;    /* a message has come since the last post */
    int chats;            /* how many were answered by a post, of late */
    uint32_t asked;       /* READs and atomics without their answer */
    int needs_word;       /* something was sent that no question follows yet */
    int has_word_due;     /* a question of ours is under way: a READ of no bytes, whose answer says
                         that all before it has arrived */
    uint32_t word_covers; /* ... which is what was posted before this counter */
    uint32_t word_sink;
    uint32_t number; /* the last one's sink, or number */
};

/* The receiving half: what the peer has sent, as far as it has not been carried out. */
struct sw_receiving {
    struct sw_block *in;   /* as it comes from TCP; NULL: nothing waits to be read */
    struct sw_block *kept; /* whole frames, behind a message that waits for its receive: a list */
    struct sw_block *kept_last;
    uint32_t kept_end; /* bytes of these; what has been read of the first one is among them */
    struct sw_receiving *next_keeper,
        **keeper_link;     /* of those that have any; link NULL: not one */
    struct sw_block *from; /* where the frame is read: kept, or in */
    int is_full;           /* no more is kept: TCP holds the peer back */
    int has_ended;         /* so did the peer, behind what waits */
    int has_left;          /* the same, or TCP says so; no request is answered any more */
    uint32_t expected[SW_QUEUES];
    struct sw_frame frame;
    int has_frame;
    char blamed[SW_UNTAGGED_HEADER + SW_READ_REQUEST_SIZE]; /* the frame's first bytes */
    uint32_t blamed_size;
    uint32_t placed;       /* of the frame's payload */
    uint32_t message_size; /* of the SEND that is arriving */
    uint32_t written;      /* of the WRITE that is, or the last one */
    int is_writing;
    int has_immediate; /* of the SEND that follows */
    uint32_t immediate;
};

struct sw_stream {
    struct sw_watch watch;
    struct sw_member member;      /* of those whose packets the program's thread may read */
    struct sw_progress *progress; /* where it may be; NULL: its queues are of different channels */
    int merit;                    /* how many of its packets made completions of late */
    struct sw_timer timer;
    struct sw_timer rest;       /* runs while there is something to go on with, in another turn */
    struct sw_queue_pair *pair; /* NULL: over, only TCP has to be seen off */
    struct sw_terms terms;
    int fd;
    int has_heard;    /* a frame of the peer */
    uint64_t carried; /* bytes, both ways */
    int is_dead;      /* a fault's: it neither sends nor hears */
    int is_reset;     /* another one's: closing it resets the connection */
    struct sw_sending sending;
    struct sw_receiving receiving;

    /* the end */
    char terminate[SW_MOST_TERMINATE]; /* our last word, if something was wrong */
    uint32_t terminate_size;
    char last_word[128]; /* the frame of it, as it goes */
    uint32_t last_size, last_sent;
};

/* The first answer has gone out. */
static inline void sw_answer_is_sent(struct sw_sending *sending)
{
    sending->answer_count--;
    sending->answer_first = (sending->answer_first + 1) % sending->answer_size;
}

/* Whether a request ends when the peer says so, rather than when TCP has it. */
static inline int sw_awaits_word(const struct sw_stream *stream)
{
    return stream->terms.gives_word && stream->terms.outbound_depth;
}

/* The same of the peer's requests: they end when we say so. */
static inline int sw_gives_word(const struct sw_stream *stream)
{
    return stream->terms.gives_word && stream->terms.inbound_depth;
}

enum { SW_KEPT_SIZE = 4 << 20, SW_KEPT_FOR_ANSWERS = 64 << 20 };

enum sw_keeping { SW_KEPT, SW_NO_ROOM, SW_NO_MEMORY };

/*
 * Keep a whole frame for later, behind those that are kept. NO_ROOM: the stream has as much as it
 * may have, or all streams together have. One that waits for an answer is not told that: it may
 * come behind what there is no room for. The stream that keeps most ends instead, if that is more
 * than one that waits for nothing may keep, or this one does: NO_MEMORY.
 */
enum sw_keeping sw_keep(struct sw_stream *stream, const char *frame, uint32_t size);
/* Give back the first block of what is kept, once it has been read. */
void sw_kept_is_read(struct sw_receiving *receiving);
/* Whether there is room again where there was none: something has been asked since. */
int sw_finds_room(const struct sw_stream *stream);
/* What is kept is the parent's. */
void sw_streams_forked(void);
/*
 * Borrow a block. Where there is no memory, a stream that keeps more than this one ends. NULL: none
 * does.
 */
struct sw_block *sw_stream_block(const struct sw_receiving *receiving);
/* There is no memory for what the connection needs, so it ends. */
void sw_stream_starved(struct sw_stream *stream);

/* Wait for what there is to wait for. */
void sw_stream_rewatch(struct sw_stream *stream);
/* Its turn is over: the engine goes on with it soon. */
void sw_stream_rest(struct sw_stream *stream);
/* A fault (faults.h) may break a stream here. Whether it did. */
int sw_stream_carried(struct sw_stream *stream, size_t bytes);
/* The same, before a post goes out: DEAD_PEER, or DROP_AFTER_REQUESTS. */
int sw_stream_is_struck(struct sw_stream *stream);
/* The end: what TCP has taken is still delivered. The queue pair is in ERR, or goes away. */
void sw_stream_end(struct sw_queue_pair *pair);
/* Free it: one that has not begun, or has been seen off. Its socket stays as it is. */
void sw_stream_discard(struct sw_stream *stream);
/* TCP failed, or ended (error 0): so does the queue pair. */
void sw_stream_broken(struct sw_stream *stream, int error);
/*
 * Once the peer has left, requests that wait for it fail, and so does the queue pair, also where
 * the peer has given up its messages that are held back. Whether that was so.
 */
int sw_stream_is_hopeless(struct sw_stream *stream);
/* The peer did what it must not: it is told so, and the queue pair fails. */
void sw_stream_refused(struct sw_stream *stream, struct sw_reason reason);
/* The program's own request cannot be carried out. */
void sw_stream_failed_send(struct sw_stream *stream, struct sw_send *send,
                           enum ibv_wc_status status);
/*
 * The oldest READ or atomic without its answer, and its counter in the ring; NULL: there is none,
 * or a word is due first.
 */
struct sw_send *sw_first_asked(struct sw_stream *stream, uint32_t *counter);
/* The oldest request that has gone out and has not ended; NULL. */
struct sw_send *sw_first_unended(struct sw_stream *stream);

#endif
