/*
 * The data path of a byte stream: rsockets' protocol without Python code. streams/protocol.py
 * describes it, and has the handshake. tests/fuzz/model_path.py is the oracle of this file.
 *
 * Python's Rsocket (streams/rsocket.py) makes the path, and is its owner, to which errors are
 * reported. What a peer sends is checked here, and nothing is written outside of the memory that the
 * peer lent.
 *
 * Making a request can run the program's code (the garbage collector). So requests are made first.
 * Then the state is read again, changed, and the device gets them, with no such code in between.
 */
#include "stream_path.h"
#include "request.h"
#include "request_type.h"
#include "wait.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdatomic.h>

static PyObject *write_name, *word_name, *send_name, *recv_name, *violated_name, *refused_name,
    *wrong_arrival_name, *grow_name, *release_name;

int engine_stream_names(void)
{
    return engine_intern(&write_name, "RDMA_WRITE") ||
           engine_intern(&word_name, "RDMA_WRITE_WITH_IMM") || engine_intern(&send_name, "SEND") ||
           engine_intern(&recv_name, "RECV") || engine_intern(&violated_name, "violated") ||
           engine_intern(&refused_name, "refused") ||
           engine_intern(&wrong_arrival_name, "wrong_arrival") ||
           engine_intern(&grow_name, "grow") || engine_intern(&release_name, "release");
}

/* -- places in our memory: the ring, words received, grants to send, words to send ----------- */

static char *sending_at(const StreamPath *path, Py_ssize_t offset)
{
    return (char *)path->ours_view.buf + offset;
}

static Py_ssize_t words_at(const StreamPath *path)
{
    return path->ring_bytes;
}

static Py_ssize_t grants_at(const StreamPath *path)
{
    return words_at(path) + (Py_ssize_t)WORD_BYTES * path->credits;
}

Py_ssize_t engine_stream_sent_words(const StreamPath *path)
{
    return grants_at(path) + GRANT_BYTES * CONTROL_SLOTS;
}

static struct ibv_sge our_sge(const StreamPath *path, Py_ssize_t offset, Py_ssize_t length)
{
    return (struct ibv_sge){path->ours->address + (uint64_t)offset, (uint32_t)length,
                            path->ours->lkey};
}

/* -- calling Python -------------------------------------------------------------------------- */

/* Call a function that may run twice. Call it again if an interrupt ends it half way. */
static void call(PyObject *function)
{
    if (!function || function == Py_None)
        return;
    Py_INCREF(function);
    PyObject *result = engine_call_alone(function, NULL, 0);
    if (!result)
        engine_log("a callback of a stream failed", function);
    Py_XDECREF(result);
    Py_DECREF(function);
}

static void call_readable(StreamPath *path)
{
    PyObject *reader = Py_XNewRef(path->reader);

    if (reader && engine_wake(reader))
        engine_log("waking the task that receives from a stream failed", reader);
    Py_XDECREF(reader);
    call(path->on_readable);
}

void engine_stream_wake(StreamPath *path)
{
    call_readable(path);
    call(path->on_writable);
}

int engine_stream_is_drained(const StreamPath *path)
{
    return !path->in_flight && path->control == NO_CONTROL && path->control_slots == CONTROL_SLOTS;
}

void engine_stream_end(StreamPath *path)
{
    call(path->on_drained);
    engine_stream_wake(path);
}

static void call_if_drained(StreamPath *path)
{
    if (engine_stream_is_drained(path))
        call(path->on_drained);
}

/* Tell the owner something that ends the stream. Takes the reference to the argument. The method
   may run twice. */
static void tell(StreamPath *path, PyObject *method, PyObject *argument)
{
    PyObject *owner = path->owner == Py_None ? NULL : Py_XNewRef(path->owner), *result = NULL;
    PyObject *arguments[] = {owner, argument};

    path->failed = 1;
    if (owner && argument)
        result = engine_call_method_alone(method, arguments, 2);
    if (owner && !result)
        engine_log("ending a stream failed", owner);
    Py_XDECREF(result);
    Py_XDECREF(argument);
    Py_XDECREF(owner);
}

static void refused(StreamPath *path, int error, int is_receive)
{
    PyObject *arguments = Py_BuildValue("(iO)", error, is_receive ? Py_True : Py_False);
    tell(path, refused_name, arguments);
}

enum { OFTEN = 4 };

/* Ask the owner for a larger ring, once, if this one was full several times. */
static void ask_to_grow(StreamPath *path, enum direction direction)
{
    if (!path->grows || path->asked[direction] || path->filled[direction] < OFTEN || path->failed)
        return;
    path->asked[direction] = 1;
    PyObject *owner = path->owner == Py_None ? NULL : Py_XNewRef(path->owner), *result = NULL;
    PyObject *arguments[] = {owner, direction == OUTWARDS ? Py_True : Py_False};
    if (owner)
        result = engine_call_method_alone(grow_name, arguments, 2);
    if (owner && !result)
        engine_log("a larger ring for a stream failed", owner);
    Py_XDECREF(result);
    Py_XDECREF(owner);
}

/* The peer did what no correct peer does: end the stream. Takes the reference to the text. */
static void violated(StreamPath *path, PyObject *text)
{
    tell(path, violated_name, text);
}

/* -- posting --------------------------------------------------------------------------------- */

/* Not engine_usable: what arrives posts before the program does in a later run of its loop. */
static int is_usable(const StreamPath *path, int is_receive)
{
    const Port *port = path->port;
    return port->queue_pair && (is_receive ? port->can_receive : port->ready) &&
           engine_is_in_thread(port);
}

/* Make requests that hold a region, with their slots. Returns an errno. */
static int make(StreamPath *path, RegionBase *region, int count, int is_receive, Request **made)
{
    Port *port = path->port;
    Slots *slots = is_receive ? port->receives : port->sends;

    for (int i = 0; i < count; i++) {
        Request *request = NULL;
        if (engine_take_slot(slots)) {
            request = engine_request(port, recv_name, 0, (PyObject *)region, NULL, is_receive);
            if (!request)
                engine_give_slot(slots);
        }
        if (!request) {
            PyErr_Clear();
            while (i--) {
                engine_take_back(made[i]);
                Py_DECREF(made[i]);
            }
            return ENOMEM;
        }
        request->retrieved = 1; /* its error is the endpoint's cause, which reports it */
        made[i] = request;
    }
    return 0;
}

static void abandon(Request **made, int count)
{
    for (int i = 0; i < count; i++) {
        engine_take_back(made[i]);
        Py_DECREF(made[i]);
    }
}

static const struct engine_poster stream_calls;

/* Enter a request before the device gets it. Returns its wr_id; 0: there is no memory. */
static uint64_t enter(StreamPath *path, Request *request, PyObject *operation, Py_ssize_t length,
                      enum kind kind, Py_ssize_t ring_bytes)
{
    Py_SETREF(request->operation, Py_NewRef(operation));
    request->length = length;
    request->poster = Py_NewRef(path);
    request->calls = &stream_calls;
    request->stream_kind = (char)kind;
    request->stream_bytes = ring_bytes;
    uint64_t wr_id = engine_put_in_flight(path->port, request);
    if (!wr_id)
        PyErr_Clear();
    return wr_id;
}

/* A message: bytes for the peer's memory, perhaps none, and an immediate. */
struct message {
    enum kind kind;
    RegionBase *region;
    struct ibv_sge source; /* of length 0: no bytes */
    uint64_t target;
    uint32_t rkey, immediate;
    Py_ssize_t ring_bytes; /* of the sending ring, which the completion gives back */
};

static int requests_of(const StreamPath *path, enum kind kind)
{
    return path->uses_words && kind != SENT_CONTROL ? REQUESTS : 1;
}

/* Fill the last request of a message, which carries the immediate: or the word. */
static void fill_last(StreamPath *path, const struct message *message, struct ibv_send_wr *work,
                      struct ibv_sge *word)
{
    if (!path->uses_words) {
        work->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        work->imm_data = htonl(message->immediate);
        work->wr.rdma.remote_addr = message->target;
        work->wr.rdma.rkey = message->rkey;
        return;
    }
    Py_ssize_t at = engine_stream_sent_words(path) + WORD_BYTES * path->next_sent_word;
    path->next_sent_word = (path->next_sent_word + 1) % path->depth;
    memcpy(sending_at(path, at), &message->immediate, WORD_BYTES);
    *word = our_sge(path, at, WORD_BYTES);
    work->opcode = IBV_WR_SEND;
    work->sg_list = word;
    work->num_sge = 1;
    /* Inline where it can be: siw can fail to read it later (docs/devices.md, "Short messages on siw"). */
    if (path->port->max_inline >= WORD_BYTES)
        work->send_flags |= IBV_SEND_INLINE;
}

/* Post a message with the requests that were made for it, and drop them. Returns whether the device
   has accepted it. If not, the stream has ended. */
static int post(StreamPath *path, const struct message *message, Request **made)
{
    Port *port = path->port;
    int count = requests_of(path, message->kind), taken = 0, error = 0;
    struct ibv_send_wr works[REQUESTS], *refused_work = NULL;
    struct ibv_sge source = message->source, word;

    memset(works, 0, sizeof(works));
    for (int i = 0; i < count; i++)
        works[i].send_flags = IBV_SEND_SIGNALED;
    /* On iWARP in one call of the device: the data alone would wake the peer for nothing. */
    if (count > 1) {
        works[0].opcode = IBV_WR_RDMA_WRITE;
        works[0].wr.rdma.remote_addr = message->target;
        works[0].wr.rdma.rkey = message->rkey;
        works[0].next = &works[1];
    }
    if (source.length) {
        works[0].sg_list = &source;
        works[0].num_sge = 1;
    }
    fill_last(path, message, &works[count - 1], &word);
    PyObject *last = path->uses_words ? send_name : word_name;
    for (int i = 0; !error && i < count; i++) {
        int is_last = i == count - 1;
        works[i].wr_id = enter(path, made[i], is_last ? last : write_name, source.length,
                               is_last ? message->kind : FIRST_PART, message->ring_bytes);
        error = works[i].wr_id ? 0 : ENOMEM;
    }
    if (!error) {
        port->drain->crossings++;
        error = engine_path->post_sends(port->queue_pair, works, &refused_work);
        while (taken < count && (error <= 0 || &works[taken] != refused_work))
            taken++;
    }
    for (int i = taken; i < count; i++)
        engine_take_back(made[i]);
    for (int i = 0; i < count; i++)
        Py_DECREF(made[i]);
    if (error < 0)
        engine_doorbell_failed(port, -error);
    if (taken)
        engine_watch_over(port->drain);
    if (error > 0)
        refused(path, error, 0);
    return error <= 0;
}

void engine_stream_post_receive(StreamPath *path, uint32_t number)
{
    Port *port = path->port;
    Request *request;

    if (!is_usable(path, 1))
        return; /* the connection has ended, which is reported to the owner */
    int error = make(path, path->ours, 1, 1, &request);
    if (error) {
        refused(path, error, 1);
        return;
    }
    if (!is_usable(path, 1)) {
        abandon(&request, 1);
        return;
    }
    struct ibv_sge place =
        our_sge(path, words_at(path) + (Py_ssize_t)WORD_BYTES * number, WORD_BYTES);
    struct ibv_recv_wr work = {.sg_list = &place, .num_sge = 1}, *refused_work = NULL;
    work.wr_id = enter(path, request, recv_name, WORD_BYTES, ARRIVAL, 0);
    if (work.wr_id) {
        port->drain->crossings++;
        error = abs(engine_path->post_receives(port->queue_pair, NULL, &work, &refused_work));
    } else {
        error = ENOMEM;
    }
    if (error)
        engine_take_back(request);
    Py_DECREF(request);
    if (error)
        refused(path, error, 1);
    else
        engine_watch_over(port->drain);
}

/* -- what we may send -------------------------------------------------------------------------- */

static Py_ssize_t least(Py_ssize_t one, Py_ssize_t other)
{
    return one < other ? one : other;
}

/* How many bytes the next message may have; 0 without a credit or a grant. */
static Py_ssize_t room(const StreamPath *path)
{
    if (!path->grant_count || path->sent == path->send_limit)
        return 0;
    return path->grants[0].length - path->used;
}

/* Count a message of so many bytes, at most `room`, and set where to write it. */
static void take(StreamPath *path, struct message *message)
{
    struct grant *grant = &path->grants[0];
    message->target = grant->address + path->used;
    message->rkey = grant->rkey;
    path->sent++;
    path->used += message->source.length;
    if (path->used < grant->length)
        return;
    path->grants[0] = path->grants[1];
    path->grant_count--;
    path->used = 0;
}

/* Returns whether the grant is one that a correct peer gives. */
static int add_grant(StreamPath *path, const struct grant *grant)
{
    if (path->grant_count == TABLE_ENTRIES) {
        violated(path, PyUnicode_FromFormat("the peer granted memory a third time, although %d "
                                            "grants are unused",
                                            TABLE_ENTRIES));
        return 0;
    }
    path->grants[path->grant_count++] = *grant;
    return 1;
}

static int set_limit(StreamPath *path, uint32_t value)
{
    uint64_t ahead = (value - path->sent) & SEQUENCE_MASK;
    if (ahead > path->peer_credits || path->sent + ahead < path->send_limit) {
        violated(path, PyUnicode_FromFormat(
                           "the peer permits messages up to number %u, where %u were sent, and it "
                           "announced %u credits",
                           value & SEQUENCE_MASK, (unsigned int)(path->sent & SEQUENCE_MASK),
                           path->peer_credits));
        return 0;
    }
    path->send_limit = path->sent + ahead;
    return 1;
}

/* -- what the peer may send -------------------------------------------------------------------- */

/* Count a message with data that has arrived. Returns whether the peer was allowed to send it. */
static int add(StreamPath *path, uint32_t length)
{
    Py_ssize_t granted = path->granted_count ? path->granted[0] : 0;

    if (path->arrived == path->receive_limit) {
        violated(path, PyUnicode_FromFormat("the peer sent a message beyond its %u credits",
                                            path->credits));
        return 0;
    }
    if (!length || (Py_ssize_t)length > granted) {
        violated(path, PyUnicode_FromFormat(
                           "the peer says that it wrote %u bytes, and could write 1..%zd", length,
                           granted));
        return 0;
    }
    path->granted[0] -= length;
    if (!path->granted[0]) {
        path->granted[0] = path->granted[1];
        path->granted_count--;
    }
    path->arrived++;
    path->messages[(path->first_message + path->message_count++) % path->credits] = length;
    path->readable += length;
    return 1;
}

/* Whether a half of the ring may be granted. */
static int has_half(const StreamPath *path)
{
    return path->free >= path->lend.bytes / 2 && path->granted_count < TABLE_ENTRIES;
}

static int is_update_due(const StreamPath *path)
{
    return has_half(path) || path->consumed >= path->next_update;
}

/* How many bytes lie side by side where reading goes on. */
static Py_ssize_t span(const StreamPath *path)
{
    Py_ssize_t behind = path->in.bytes - path->start;
    return path->left && path->left < behind ? path->left : behind;
}

/* Count bytes that were read, at most `readable` and `span`. */
static void consume(StreamPath *path, Py_ssize_t length)
{
    path->start = (path->start + length) % path->in.bytes;
    path->readable -= length;
    if (!path->left) {
        path->free += length;
    } else if (!(path->left -= length)) {
        path->in = path->lend;
        path->start = 0;
    }
    while (length) {
        uint32_t *first = &path->messages[path->first_message];
        if (*first > length) {
            *first -= (uint32_t)length;
            return;
        }
        length -= *first;
        path->first_message = (path->first_message + 1) % path->credits;
        path->message_count--;
        path->consumed++;
    }
}

static uint64_t swapped(uint64_t value, int bytes, int swaps)
{
    if (!swaps)
        return value;
    return bytes == 8 ? __builtin_bswap64(value) : __builtin_bswap32((uint32_t)value);
}

/* Write the next grant into a slot of our memory, count it as given, and make it a message. */
static void fill_grant(StreamPath *path, struct message *message)
{
    Py_ssize_t half = path->lend.bytes / 2,
               at = grants_at(path) + (Py_ssize_t)GRANT_BYTES * path->next_grant_slot;
    uint64_t address =
        swapped(path->lend.address + (uint64_t)path->next_grant, 8, path->swaps_grants);
    uint32_t rkey = (uint32_t)swapped(path->lend.key, 4, path->swaps_grants),
             length = (uint32_t)swapped((uint64_t)half, 4, path->swaps_grants);

    memcpy(sending_at(path, at), &address, sizeof(address));
    memcpy(sending_at(path, at + 8), &rkey, sizeof(rkey));
    memcpy(sending_at(path, at + 12), &length, sizeof(length));
    path->next_grant_slot = (path->next_grant_slot + 1) % CONTROL_SLOTS;
    message->source = our_sge(path, at, GRANT_BYTES);
    message->target = path->peer_table + (uint64_t)GRANT_BYTES * path->next_peer_entry;
    message->rkey = path->peer_table_rkey;
    path->next_peer_entry = (path->next_peer_entry + 1) % path->peer_entries;
    path->free -= half;
    path->next_grant = (path->next_grant + half) % path->lend.bytes;
    path->filled[INWARDS] += !path->granted_count;
    path->granted[path->granted_count++] = half;
}

int engine_stream_is_over(const StreamPath *path)
{
    return path->failed || !path->port->ready;
}

static int may_update(const StreamPath *path)
{
    return path->started && path->may_send && !path->peer_disconnected &&
           !engine_stream_is_over(path) && path->control_slots >= path->slots_of_data &&
           is_update_due(path);
}

/* Post new credits, and perhaps a grant, if they are due, and a slot is free. */
static void send_update(StreamPath *path)
{
    Request *made[REQUESTS];

    if (!may_update(path))
        return;
    int has_grant = has_half(path);
    struct message message = {.kind = has_grant ? SENT_GRANT : SENT_CONTROL, .region = path->ours};
    int count = requests_of(path, message.kind),
        error = is_usable(path, 0) ? make(path, path->ours, count, 0, made) : -1;
    if (error) {
        refused(path, error > 0 ? error : 0, 0);
        return;
    }
    /* Making the requests can run the program's code. */
    if (!may_update(path) || !is_usable(path, 0) || has_grant != has_half(path)) {
        abandon(made, count);
        return;
    }
    path->next_update = path->consumed + path->credits / 2;
    path->receive_limit = path->consumed + path->credits;
    message.immediate = (uint32_t)GRANT << VALUE_BITS |
                        ((uint32_t)(path->consumed & SEQUENCE_MASK) + path->credits);
    if (has_grant)
        fill_grant(path, &message);
    path->control_slots -= has_grant ? path->slots_of_data : 1;
    post(path, &message, made);
}

static void send_control(StreamPath *path)
{
    Request *made[REQUESTS];

    if (path->control == NO_CONTROL || !path->may_send || engine_stream_is_over(path) ||
        !path->control_slots)
        return;
    int error = is_usable(path, 0) ? make(path, path->ours, 1, 0, made) : -1;
    if (error) {
        refused(path, error > 0 ? error : 0, 0);
        return;
    }
    if (path->control == NO_CONTROL || !path->control_slots || engine_stream_is_over(path) ||
        !is_usable(path, 0)) {
        abandon(made, 1);
        return;
    }
    struct message message = {
        .kind = SENT_CONTROL,
        .region = path->ours,
        .immediate = (uint32_t)CONTROL << VALUE_BITS | (uint32_t)path->control,
    };
    path->control = NO_CONTROL;
    path->control_slots--;
    post(path, &message, made);
}

void engine_stream_send_pending(StreamPath *path)
{
    send_update(path);
    send_control(path);
}

/* -- reading --------------------------------------------------------------------------------- */

/* Copy bytes that have arrived, at most `readable`. */
static void take_out(StreamPath *path, char *to, Py_ssize_t length)
{
    while (length) {
        Py_ssize_t here = least(length, span(path));
        memcpy(to, path->in.memory + path->start, (size_t)here);
        consume(path, here);
        to += here;
        length -= here;
    }
}

void engine_stream_lend(StreamPath *path, const struct ring *ring)
{
    path->left = path->readable;
    for (int i = 0; i < path->granted_count; i++)
        path->left += path->granted[i];
    path->lend = *ring;
    path->free = ring->bytes;
    path->next_grant = 0;
    if (!path->left) {
        path->in = *ring;
        path->start = 0;
    }
    send_update(path);
}

PyObject *engine_stream_read(StreamPath *path, Py_ssize_t limit)
{
    Py_ssize_t length = limit < path->readable ? limit : path->readable;
    PyObject *data = PyBytes_FromStringAndSize(NULL, length < 0 ? 0 : length);
    if (!data || length <= 0)
        return data;
    take_out(path, PyBytes_AS_STRING(data), length);
    send_update(path);
    ask_to_grow(path, INWARDS);
    return data;
}

Py_ssize_t engine_stream_read_into(StreamPath *path, const Py_buffer *target)
{
    Py_ssize_t length = target->len < path->readable ? target->len : path->readable;
    if (!length)
        return 0;
    take_out(path, target->buf, length);
    send_update(path);
    ask_to_grow(path, INWARDS);
    return length;
}

/* A view of bytes that have arrived and lie side by side, at most `limit`, at least one. It keeps the
   ring's memory, not its bytes. */
static PyObject *view_of(const StreamPath *path, Py_ssize_t limit)
{
    const Py_buffer *ring =
        path->in.region == path->lent ? &path->lent_view : &path->grown_views[INWARDS];
    Py_ssize_t first = path->in.memory - (char *)ring->buf + path->start,
               length = least(least(limit, path->readable), span(path));
    PyObject *whole = PyMemoryView_FromObject(ring->obj);
    PyObject *view = whole ? PySequence_GetSlice(whole, first, first + length) : NULL;

    Py_XDECREF(whole);
    return view;
}

Py_ssize_t engine_stream_feed(StreamPath *path, PyObject *receive, Py_ssize_t limit)
{
    PyObject *view = view_of(path, limit);
    if (!view)
        return -1;
    Py_ssize_t length = PyObject_Length(view);
    PyObject *result = PyObject_CallOneArg(receive, view);
    PyObject *released = result ? PyObject_CallMethodNoArgs(view, release_name) : NULL;
    int has_failed = !released;

    Py_DECREF(view);
    Py_XDECREF(result);
    Py_XDECREF(released);
    consume(path, least(length, least(path->readable, span(path)))); /* it may have read some */
    if (has_failed)
        return -1;
    send_update(path);
    ask_to_grow(path, INWARDS);
    return length;
}

/* -- writing --------------------------------------------------------------------------------- */

Py_ssize_t engine_stream_writable(const StreamPath *path)
{
    if (!path->started || !path->may_send || path->write_closed || engine_stream_is_over(path) ||
        path->data_slots < path->slots_of_data)
        return 0;
    Py_ssize_t most = room(path);
    return most < path->transfer ? most : path->transfer;
}

Py_ssize_t engine_stream_ring_room(const StreamPath *path)
{
    return least(path->ring_free, path->out.bytes - path->ring_next);
}

void engine_stream_send_from(StreamPath *path, const struct ring *ring)
{
    path->out_left = path->out.bytes - path->ring_free;
    path->out = *ring;
    path->ring_free = ring->bytes;
    path->ring_next = 0;
}

Py_ssize_t engine_stream_write(StreamPath *path, const char *bytes, RegionBase *region,
                               struct ibv_sge source, Py_ssize_t total, Py_ssize_t fewest)
{
    Request *made[REQUESTS];
    int count = requests_of(path, SENT_DATA);

    if (!engine_stream_writable(path))
        return 0;
    if (!region && path->ring_free < least(engine_stream_writable(path), total)) {
        path->filled[OUTWARDS]++;
        ask_to_grow(path, OUTWARDS);
    }
    struct message message = {.kind = SENT_DATA, .region = region ? region : path->out.region};
    if (!region && !engine_stream_ring_room(path))
        return 0;
    int error = is_usable(path, 0) ? make(path, message.region, count, 0, made) : -1;
    if (error) {
        refused(path, error > 0 ? error : 0, 0);
        return -1;
    }
    Py_ssize_t length = least(engine_stream_writable(path), total);
    if (!region)
        length = least(length, engine_stream_ring_room(path));
    if (length < fewest || !is_usable(path, 0) || !message.region->usable ||
        (!region && message.region != path->out.region)) {
        abandon(made, count);
        return 0;
    }
    if (region) {
        message.source = source;
        message.source.length = (uint32_t)length;
    } else {
        const struct ring *out = &path->out;
        memcpy(out->memory + path->ring_next, bytes, (size_t)length);
        message.source =
            (struct ibv_sge){out->address + (uint64_t)path->ring_next, (uint32_t)length, out->key};
        message.ring_bytes = length;
        path->ring_next = (path->ring_next + length) % out->bytes;
        path->ring_free -= length;
    }
    message.immediate = (uint32_t)DATA << VALUE_BITS | (uint32_t)length;
    take(path, &message);
    path->data_slots -= path->slots_of_data;
    path->in_flight++;
    return post(path, &message, made) ? length : -1;
}

/* -- completions ------------------------------------------------------------------------------ */

static void data_sent(StreamPath *path, Py_ssize_t ring_bytes, int has_succeeded)
{
    path->in_flight--;
    if (path->out_left)
        path->out_left -= ring_bytes; /* they complete in order */
    else
        path->ring_free += ring_bytes;
    path->data_slots += path->slots_of_data;
    if (!has_succeeded) {
        path->lost_data = 1;
        return; /* the connection has ended, or is about to, which is reported to the owner */
    }
    call_if_drained(path);
    call(path->on_writable);
}

static void control_done(StreamPath *path, Py_ssize_t slots, int has_succeeded)
{
    path->control_slots += slots;
    if (!has_succeeded)
        return; /* as above */
    engine_stream_send_pending(path);
    call_if_drained(path);
}

static void take_data(StreamPath *path, uint32_t value, int64_t written)
{
    if (path->at_eof) {
        violated(path, PyUnicode_FromString("the peer sent data after the end of its data"));
    } else if (written != UNKNOWN && written != value) {
        violated(path, PyUnicode_FromFormat("the peer says that it wrote %u bytes: %lld", value,
                                            (long long)written));
    } else if (add(path, value)) {
        send_update(path); /* the first time, this grants the second half of the ring */
        call_readable(path);
    }
}

static int take_grant(StreamPath *path)
{
    char *entry =
        (char *)path->lent_view.buf + path->ring_bytes + (Py_ssize_t)GRANT_BYTES * path->next_entry;
    struct grant grant;

    memcpy(&grant, entry, GRANT_BYTES); /* once, because the peer can write to it at any time */
    atomic_signal_fence(memory_order_seq_cst); /* the compiler must not read it again */
    if (!grant.length)
        return 1;
    if (grant.address + grant.length < grant.address) {
        PyObject *address = PyLong_FromUnsignedLongLong(grant.address);
        PyObject *hex = address ? PyNumber_ToBase(address, 16) : NULL;
        violated(path, hex ? PyUnicode_FromFormat("the peer describes memory at %U of %u bytes, "
                                                  "which ends beyond 2**64",
                                                  hex, grant.length)
                           : NULL);
        Py_XDECREF(address);
        Py_XDECREF(hex);
        return 0;
    }
    memset(entry, 0, GRANT_BYTES);
    path->next_entry = (path->next_entry + 1) % TABLE_ENTRIES;
    return add_grant(path, &grant);
}

/* Returns whether a correct peer sends this. */
static int take_control(StreamPath *path, uint32_t operation, uint32_t value)
{
    if (operation == GRANT)
        return take_grant(path) && set_limit(path, value);
    if (operation == IOMAP) {
        violated(path, PyUnicode_FromString(
                           "the peer maps memory (riomap), which was not offered to it"));
        return 0;
    }
    if (value == DISCONNECT) {
        path->at_eof = path->peer_disconnected = 1;
    } else if (value == SHUTDOWN) {
        path->at_eof = 1;
        path->peer_disconnected |= path->write_closed;
    } else if (value != KEEPALIVE) {
        violated(path, PyUnicode_FromFormat("the peer sent control message %u, which is reserved",
                                            value));
        return 0;
    }
    return 1;
}

void engine_stream_handle(StreamPath *path, uint32_t immediate, int64_t written)
{
    uint32_t operation = immediate >> VALUE_BITS, value = immediate & ((1U << VALUE_BITS) - 1);
    int is_first = !path->may_send;

    path->may_send = 1;
    switch (operation) {
    case DATA:
        take_data(path, value, written);
        if (is_first && !path->failed) { /* what has waited for an arrival goes out */
            engine_stream_send_pending(path);
            call(path->on_writable);
        }
        return;
    case GRANT:
    case IOMAP:
    case CONTROL:
        if (take_control(path, operation, value)) {
            engine_stream_send_pending(path);
            engine_stream_wake(path);
        }
        return;
    default: {
        char hex[16];
        PyOS_snprintf(hex, sizeof(hex), "0x%08x", immediate);
        violated(path, PyUnicode_FromFormat("immediate data %s: rsockets reserves operation %u",
                                            hex, operation));
    }
    }
}

/* On RoCE and InfiniBand a message can arrive before the handshake's last step. */
static void keep(StreamPath *path, uint32_t value, int64_t written)
{
    Py_ssize_t most = 2 * (Py_ssize_t)path->credits;

    if (!path->early)
        path->early = PyMem_Calloc((size_t)most, sizeof(*path->early));
    if (!path->early) {
        refused(path, ENOMEM, 1);
    } else if (path->early_count == most) {
        violated(path, PyUnicode_FromFormat("the peer sent %zd messages before the connection was "
                                            "established, where it has %u credits",
                                            most + 1, path->credits));
    } else {
        path->early[path->early_count++] = (struct early){value, written};
    }
}

/* A receive has ended. */
static void arrived(StreamPath *path, const Request *request)
{
    const struct aiordma_completion *completion = &request->completion;
    uint32_t value = completion->immediate, number = path->next_word,
             expected = path->uses_words ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM;
    int64_t written = completion->byte_len;

    if (request->state != SUCCEEDED)
        return; /* the connection has ended, or is about to, which is reported to the owner */
    path->next_word = (number + 1) % path->credits; /* receives complete in order */
    if (path->failed)
        return;
    if (completion->opcode != expected || (path->uses_words && written != WORD_BYTES)) {
        tell(path, wrong_arrival_name, engine_completion(completion));
        return;
    }
    if (path->uses_words) {
        memcpy(&value, sending_at(path, words_at(path) + (Py_ssize_t)WORD_BYTES * number),
               WORD_BYTES);
        written = UNKNOWN;
    }
    engine_stream_post_receive(path, number);
    if (path->failed)
        return;
    if (path->begun)
        engine_stream_handle(path, value, written);
    else
        keep(path, value, written);
}

static void ended(Request *request)
{
    StreamPath *path = (StreamPath *)request->poster;
    int has_succeeded = request->state == SUCCEEDED;

    request->poster = NULL;
    switch ((enum kind)request->stream_kind) {
    case ARRIVAL:
        arrived(path, request);
        break;
    case SENT_DATA:
        data_sent(path, request->stream_bytes, has_succeeded);
        break;
    case SENT_CONTROL:
        control_done(path, 1, has_succeeded);
        break;
    case SENT_GRANT:
        control_done(path, path->slots_of_data, has_succeeded);
        break;
    case FIRST_PART:
        break;
    }
    Py_DECREF(path);
}

static int is_quiet(const Request *request, const struct aiordma_completion *completion)
{
    const StreamPath *path = (const StreamPath *)request->poster;

    if (request->stream_kind != ARRIVAL)
        return 1;
    /* Others can end the stream. */
    return !path->uses_words && completion->immediate >> VALUE_BITS == DATA;
}

static const struct engine_poster stream_calls = {.ended = ended, .is_quiet = is_quiet};
