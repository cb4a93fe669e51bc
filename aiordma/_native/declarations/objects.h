/*
 * Read twice: by the C compiler (through objects.h) and by cffi. Plain declarations only.
 *
 * The inline functions of verbs.h that call a device's operations, and copies of events.
 */

/* An asynchronous event, copied and acknowledged. element: a port number or an address. */
struct aiordma_async_event {
    uint32_t event;
    uint32_t qp_num; /* of a queue pair's event; else 0 */
    uint64_t element;
};

/*
 * Take the next event of a context whose async_fd is non-blocking, and acknowledge it at once,
 * because an unacknowledged event blocks destroying its object. 1: an event; 0: none; -errno.
 */
int aiordma_next_async_event(const struct aiordma_provider *provider, struct ibv_context *context,
                             struct aiordma_async_event *copy);

/* ibv_query_device_ex. If the device does not have it, ibv_query_device. */
int aiordma_query_device(const struct aiordma_provider *provider, struct ibv_context *context,
                         struct ibv_device_attr_ex *attr);

/*
 * Fault in the pages of memory that the device may write to, in so many threads, at most 16. Does
 * nothing if the memory seems to be there. Errors are left to the call that registers it.
 */
void aiordma_populate(void *address, size_t length, uint32_t threads);

/* ibv_alloc_mw and ibv_dealloc_mw. NULL with errno set, and 0 or a positive errno. */
struct ibv_mw *aiordma_alloc_window(struct ibv_pd *domain, uint32_t type);
int aiordma_dealloc_window(struct ibv_mw *window);

/*
 * Wait until no CPU is inside the kernel code of a received packet that it had entered before
 * (membarrier, which waits for an RCU grace period). 0 or a positive errno.
 */
int aiordma_outwait_receiving(void);

/*
 * ibv_create_cq_ex. The result can be used as a plain queue. NULL with errno set. wc_flags: further
 * bits, such as IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.
 */
struct ibv_cq *aiordma_create_cq_ex(struct ibv_context *context, uint32_t entries,
                                    struct ibv_comp_channel *channel, uint32_t vector,
                                    uint32_t flags, uint64_t wc_flags);

/*
 * Take up to `most` completions of an extended queue that has timestamps, each with its timestamp.
 * Returns their number, or a negative errno. (ibv_poll_cq would lose the timestamps.)
 */
int aiordma_poll_timestamped(struct ibv_cq *queue, struct aiordma_completion *batch,
                             uint64_t *timestamps, int most);

/* ibv_modify_cq, to moderate events. 0 or a positive errno. */
int aiordma_moderate_cq(struct ibv_cq *queue, uint16_t count, uint16_t period);

/* ibv_advise_mr. sges: `count` of struct ibv_sge in native layout. 0 or a positive errno. */
int aiordma_advise_mr(struct ibv_pd *domain, uint32_t advice, uint32_t flags, const char *sges,
                      uint32_t count);

/* ibv_query_rt_values_ex: the clock of the timestamps. 0 or a positive errno. */
int aiordma_read_clock(struct ibv_context *context, uint64_t *ticks);

/*
 * ibv_init_ah_from_wc: the address vector of a completed datagram's sender. grh: the first 40 bytes
 * of the receive. 0 or a positive errno.
 */
int aiordma_address_of_sender(const struct aiordma_provider *provider, struct ibv_context *context,
                              uint8_t port_num, const struct aiordma_completion *completion,
                              const char *grh, struct ibv_ah_attr *attr);
