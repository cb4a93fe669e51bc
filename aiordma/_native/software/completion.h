/* Completion queues and their channels. */
#ifndef AIORDMA_SOFTWARE_COMPLETION_H
#define AIORDMA_SOFTWARE_COMPLETION_H

#include "context.h"
#include "progress.h"

struct sw_channel {
    struct ibv_comp_channel ibv; /* fd: the notifier's */
    struct sw_notifier notifier;
    struct sw_queue *first, *last; /* queues with events */
    struct sw_queue *queues;       /* all */
};

struct sw_queue {
    struct ibv_cq_ex ibv; /* begins as struct ibv_cq does */
    struct ibv_wc *ring;
    uint64_t *times; /* of each completion in the ring; NULL: the queue has no timestamps */
    uint32_t size, head, count;
    enum { SW_UNARMED, SW_ARMED_SOLICITED, SW_ARMED } armed;
    int ignores_overrun, is_overrun;
    uint32_t users;   /* queue pairs */
    uint32_t waiting; /* events on the channel that the program has not taken */
    uint32_t taken;   /* events that the program took, to compare with comp_events_completed */
    struct sw_subject subject;
    struct sw_queue *next;    /* in the channel's list of those with events */
    struct sw_queue *sibling; /* in the channel's list of all */
    struct ibv_wc current;    /* taken by ibv_start_poll or ibv_next_poll */
    uint64_t current_time;
    uint32_t polls_in_vain;       /* in a row; counted without the lock */
    struct sw_progress own;       /* used without a channel */
    struct sw_progress *progress; /* the channel's, or its own */
    struct sw_queue *receives; /* whose progress its polls serve, too; also read without the lock */
    /* Faults (completion.c). */
    struct sw_late *late;
    struct sw_timer late_event;
    int was_woken;
};

/*
 * Add a completion. solicited: its message requested an event. An error always counts as solicited.
 * A full queue loses the completion, raises IBV_EVENT_CQ_ERR and takes no more. If it ignores
 * overruns, it loses the oldest completion instead.
 */
void sw_complete(struct ibv_cq *queue, const struct ibv_wc *completion, int solicited);
void sw_raise_queue(struct ibv_cq *queue, enum ibv_event_type type);
/* Remove a destroyed queue pair's completions from the queue, as man ibv_destroy_qp allows. */
void sw_forget_completions(struct ibv_cq *queue, uint32_t qp_num);
/*
 * The progress of a queue pair: that of both queues, or, of two queues without channels, that of the
 * receives. NULL: the queues have different channels.
 */
struct sw_progress *sw_progress_of(const struct ibv_qp *queue_pair);
/* A queue pair has been made, or is destroyed: whose polls serve its progress. */
void sw_serve_by_sends(const struct ibv_qp *queue_pair, int is_made);

void sw_fill_completion(struct aiordma_provider *table, struct verbs_context *operations);

#endif
