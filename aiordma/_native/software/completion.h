/* Completion queues and their channels. */
#ifndef AIORDMA_SOFTWARE_COMPLETION_H
#define AIORDMA_SOFTWARE_COMPLETION_H

#include "context.h"
#include "engine.h"

struct sw_channel {
    struct ibv_comp_channel ibv; /* fd: an eventfd, readable while an event waits */
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
    struct sw_queue *next;  /* on the channel */
    struct ibv_wc current;  /* that ibv_start_poll or ibv_next_poll has taken */
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

void sw_fill_completion(struct aiordma_provider *table, struct verbs_context *operations);

#endif
