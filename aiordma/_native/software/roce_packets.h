/*
 * RC and UC queue pairs over RoCE, for roce_responder.c, roce_requester.c and roce_pair.c. Each is a
 * requester, which sends its requests as packets and waits for acknowledgements, and a responder,
 * which carries out the peer's (InfiniBand specification, volume 1, 9.7 and 9.8).
 */
#ifndef AIORDMA_SOFTWARE_ROCE_PACKETS_H
#define AIORDMA_SOFTWARE_ROCE_PACKETS_H

#include "queue_pair.h"
#include "roce_port.h"

/* A READ or an atomic of the peer, and what answers it. Kept for a peer that repeats its request. */
struct sw_roce_answer {
    int is_atomic;
    uint32_t psn, packets; /* its first packet, and how many there are */
    uint32_t sent;         /* of them */
    uint64_t address;
    uint32_t rkey, length;
    uint64_t original; /* of an atomic, which is carried out once */
};

struct sw_responder {
    uint32_t psn;         /* the next one */
    uint32_t messages;    /* that were carried out: MSN */
    unsigned int message; /* SW_IS_SEND or SW_IS_WRITE: one is arriving; 0: none */
    uint32_t arrived;     /* bytes of it */
    uint64_t address;     /* of a WRITE */
    uint32_t rkey, length;
    int has_complained; /* that this PSN is missing */
    /* A ring: the last answer_size requests. Counters: the next one gets the slot of answer_end. */
    struct sw_roce_answer *answers;
    uint32_t answer_size, answer_next, answer_end; /* [answer_next, answer_end) are not sent */
    int is_due;                                    /* an acknowledgement, after all answers */
    uint8_t due;                                   /* its syndrome */
    int is_ending;        /* ... and then the queue pair fails: nothing more is carried out */
    struct sw_timer rest; /* the other answers: each turn sends some */
};

struct sw_requester {
    uint32_t psn;    /* of the next new packet */
    uint32_t oldest; /* that is not covered by an acknowledgement */
    uint32_t packet; /* of the request at next_send: those before it are sent */
    uint32_t asked; /* READs and atomics that wait for their answer, as the responder counts them */
    uint32_t window; /* packets between `oldest` and the next to send, at most */
    uint32_t gained; /* packets since the window grew */
    int has_lost;
    int has_gone_back; /* to `oldest`: not again before an answer or the timer */
    int has_progress;  /* since the timer was set */
    uint32_t tries, unready_tries;
    struct sw_timer retry; /* the peer does not answer */
    struct sw_timer pause; /* the peer is not ready, or the turn is over */
};

struct sw_packets {
    struct sw_queue_pair *pair;
    struct sw_udp_route route; /* to the peer */
    uint32_t mtu;
    int is_reliable; /* RC */
    struct sw_due due;
    struct sw_requester requester;
    struct sw_responder responder;
};

/* PSNs have 24 bits. */
static inline uint32_t sw_psn(uint32_t number)
{
    return number & 0xffffff;
}

/* How many packets later one PSN is than another; negative: earlier. */
static inline int32_t sw_psn_after(uint32_t one, uint32_t other)
{
    return (int32_t)((one - other) << 8) >> 8;
}

/* Packets of a message. */
static inline uint32_t sw_packet_count(const struct sw_packets *packets, uint32_t length)
{
    return length ? (uint32_t)(((uint64_t)length + packets->mtu - 1) / packets->mtu) : 1;
}

/* Bytes of a message's packet. */
static inline uint32_t sw_packet_size(const struct sw_packets *packets, uint32_t length,
                                      uint32_t packet)
{
    uint32_t left = length - packet * packets->mtu;

    return left < packets->mtu ? left : packets->mtu;
}

/*
 * Begin a packet to the peer: write its headers. Returns the place of the payload. Then add it, with
 * packet->size bytes of payload; sw_roce_port_flush sends what was added.
 */
uint8_t *sw_packet_begin(const struct sw_packets *packets, struct sw_roce_packet *packet);
void sw_packet_add(struct sw_packets *packets, const uint8_t *payload, uint32_t size);

#endif
