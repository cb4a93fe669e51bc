/* The data path of a byte stream. */
#ifndef AIORDMA_ENGINE_STREAM_PATH_H
#define AIORDMA_ENGINE_STREAM_PATH_H

#include "port.h"

enum {
    WORD_BYTES = 4,
    GRANT_BYTES = 16,
    TABLE_ENTRIES = 2,
    CONTROL_SLOTS = 4,
    MOST_CREDITS = 0xFFFE,
    VALUE_BITS = 29,
    SEQUENCE_MASK = 0xFFFF,
    REQUESTS = 2, /* of one message: on iWARP the data and a word */
};

/* What an immediate says (its upper 3 bits), and the values of CONTROL. */
enum { DATA = 0, GRANT = 4, IOMAP = 6, CONTROL = 7 };
enum { DISCONNECT = 0, KEEPALIVE = 1, SHUTDOWN = 2, NO_CONTROL = -1 };

/* What a request of a stream is. */
enum kind { ARRIVAL, SENT_DATA, SENT_CONTROL, SENT_GRANT, FIRST_PART };

/* An arrival's `written`, where the device does not say how much was written. */
enum { UNKNOWN = -1 };

struct grant {
    uint64_t address;
    uint32_t rkey, length;
};

struct early {
    uint32_t value;
    int64_t written;
};

/* Memory that is used in a circle. */
struct ring {
    RegionBase *region; /* borrowed: the path's */
    char *memory;
    uint64_t address;
    uint32_t key; /* the rkey of a ring that the peer writes to; else the lkey */
    Py_ssize_t bytes;
};

/* Of a stream: the ring that the peer writes to, and that for sending. */
enum direction { INWARDS, OUTWARDS, DIRECTIONS };

typedef struct {
    PyObject_HEAD Port *port;
    RegionBase *lent, *ours;
    Py_buffer lent_view, ours_view; /* the memory stays when the regions are closed */
    PyObject *owner, *on_readable, *on_writable, *on_drained; /* set later; or NULL */
    PyObject *is_cancelled; /* whether the running task is cancelled; set later, or NULL */
    PyObject *reader;       /* the waiter of a receiving task, or NULL */
    Py_ssize_t ring_bytes;  /* of each of the two first rings, with which `lent` and `ours` begin */
    RegionBase *grown[DIRECTIONS]; /* the rings in place of these, or NULL; once for each */
    Py_buffer grown_views[DIRECTIONS];
    char grows, asked[DIRECTIONS];   /* the owner was asked for a larger ring */
    unsigned int filled[DIRECTIONS]; /* how often a ring was full */
    Py_ssize_t transfer;             /* the most bytes of one message */
    Py_ssize_t depth, data_slots, control_slots, slots_of_data;
    Py_ssize_t in_flight; /* messages with data */
    uint32_t credits, next_word;
    int control;                     /* to be sent when a slot is free; or NO_CONTROL */
    unsigned int at_once;            /* calls that did not wait */
    char receiving, sending, closed; /* of the stream: a task receives or sends; it was closed */
    char lacks_send; /* of the stream: a send was cancelled, and none has posted its data since */
    char uses_words, started, begun, may_send, write_closed, at_eof, peer_disconnected, failed,
        lost_data;

    struct early *early; /* what arrived before `begin` */
    Py_ssize_t early_count;

    /* Receiving: `in` is read, halves of `lend` are granted. They are the same, but for the `left`
       bytes of the first ring that are to be read after it was replaced. */
    struct ring in, lend;
    Py_ssize_t left;
    Py_ssize_t start, readable, free, next_grant;
    Py_ssize_t granted[TABLE_ENTRIES]; /* bytes that each grant has left */
    int granted_count;
    uint32_t *messages; /* a ring of `credits` entries: bytes that each has left to read */
    uint32_t first_message, message_count;
    uint64_t arrived, consumed, receive_limit, next_update;
    uint64_t peer_table;
    uint32_t peer_table_rkey, peer_entries, next_peer_entry;
    char swaps_grants; /* the peer's byte order is not ours */

    /* Sending. */
    struct grant grants[TABLE_ENTRIES];
    int grant_count, next_entry; /* of our table, that the peer fills next */
    uint32_t used;               /* bytes of the first grant */
    uint32_t peer_credits;
    uint64_t sent, send_limit;
    struct ring out;
    Py_ssize_t ring_next, ring_free; /* of that ring */
    Py_ssize_t out_left;             /* bytes in flight of the ring before it */
    int next_grant_slot;
    Py_ssize_t next_sent_word;
} StreamPath;

int engine_stream_names(void);

/* Call the callback of readable bytes, and that of room to write. */
void engine_stream_wake(StreamPath *path);
/* Call all callbacks: the stream has ended. */
void engine_stream_end(StreamPath *path);
/* Whether nothing that was sent is in flight, and nothing waits to be sent. */
int engine_stream_is_drained(const StreamPath *path);
/* Whether the stream has failed, or the connection is no longer ready. */
int engine_stream_is_over(const StreamPath *path);
/* Where the words to send begin in our memory. */
Py_ssize_t engine_stream_sent_words(const StreamPath *path);

/* Post the receive of a word. */
void engine_stream_post_receive(StreamPath *path, uint32_t number);
/* Do what a message of the peer's says. */
void engine_stream_handle(StreamPath *path, uint32_t immediate, int64_t written);
/* Post what has waited for one of the control slots, or for the beginning. */
void engine_stream_send_pending(StreamPath *path);

/* Return bytes that have arrived, at most `limit`; b"" if there are none. */
PyObject *engine_stream_read(StreamPath *path, Py_ssize_t limit);
/* Copy bytes that have arrived into the buffer; returns their number. */
Py_ssize_t engine_stream_read_into(StreamPath *path, const Py_buffer *target);
/* Call `receive` with a view of bytes that have arrived, at most `limit`, which ends with the call.
   There are such bytes. Returns their number; -1: an exception. */
Py_ssize_t engine_stream_feed(StreamPath *path, PyObject *receive, Py_ssize_t limit);

/* Lend halves of a larger ring from now on, or send from it. */
void engine_stream_lend(StreamPath *path, const struct ring *ring);
void engine_stream_send_from(StreamPath *path, const struct ring *ring);

/* How many bytes the next message may have now, if it is not copied. */
Py_ssize_t engine_stream_writable(const StreamPath *path);
/* How many bytes of the sending ring lie side by side. */
Py_ssize_t engine_stream_ring_room(const StreamPath *path);
/* Post a message with data: of registered memory, or (region NULL) of bytes that are copied.
   Returns its length, at least `fewest`; 0: there is no room; -1: the stream has ended. */
Py_ssize_t engine_stream_write(StreamPath *path, const char *bytes, RegionBase *region,
                               struct ibv_sge source, Py_ssize_t total, Py_ssize_t fewest);

#endif
