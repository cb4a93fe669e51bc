/* Completion queues and their channels. */
#ifndef AIORDMA_SOFTWARE_COMPLETION_H
#define AIORDMA_SOFTWARE_COMPLETION_H

#include "context.h"
#include "progress.h"

struct sw_channel {
    struct ibv_comp_channel ibv; /* fd: an epoll, of signal and of the sockets that are lent */
    int signal;                  /* an eventfd, readable while an event waits */
    int is_signalled;
    int is_looking; /* who looks takes the first event itself */
    struct sw_progress progress;
    struct sw_queue *first, *last; /* with events waiting */
};

struct sw_queue {
    struct ibv_cq_ex ibv; /* begins as struct ibv_cq does */
    struct ibv_wc *ring;
    uint32_t size, head, count;
    enum { SW_UNARMED, SW_ARMED_SOLICITED, SW_ARMED } armed;
    int ignores_overrun, is_overrun;
    uint32_t users;   /* queue pairs */
    uint32_t waiting; /* events on its channel that nobody has taken */
    uint32_t taken;   /* of comp_events_completed's kind */
    struct sw_subject subject;
    struct sw_queue *next;        /* on the channel */
    struct ibv_wc current;        /* that ibv_start_poll or ibv_next_poll has taken */
    struct sw_progress own;       /* without a channel */
    struct sw_progress *progress; /* the channel's, or its own */
    /* Faults (completion.c). */
    struct sw_late *late;
    struct sw_timer late_event;
    int was_woken;
};

/*
 * Add a completion. solicited: a message that asks for it; an error always wakes. A full queue
 * loses it, and dies with IBV_EVENT_CQ_ERR.
 */
void sw_complete(struct ibv_cq *queue, const struct ibv_wc *completion, int solicited);
void sw_raise_queue(struct ibv_cq *queue, enum ibv_event_type type);
/* What a destroyed queue pair left in it is taken out, as man ibv_destroy_qp allows. */
void sw_forget_completions(struct ibv_cq *queue, uint32_t qp_num);
/* Where both of a queue pair's queues belong to; NULL: to different ones. */
struct sw_progress *sw_progress_of(const struct ibv_qp *queue_pair);

void sw_fill_completion(struct aiordma_provider *table, struct verbs_context *operations);

#endif
