/*
 * Read twice: by the C compiler (through data_path.h) and by cffi. Plain declarations only.
 */

/* One work completion as Python unpacks it (format "=QIIIIIIIIHHBBH", 48 bytes). */
struct aiordma_completion {
    uint64_t wr_id;
    uint32_t status;
    uint32_t opcode;
    uint32_t vendor_err;
    uint32_t byte_len;
    uint32_t immediate; /* host order: the immediate data, or the invalidated rkey */
    uint32_t qp_num;
    uint32_t src_qp;
    uint32_t wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
    uint16_t reserved;
};

/* One completion queue on a drained channel. */
struct aiordma_drained_queue {
    struct ibv_cq *queue;
    uint32_t events; /* taken from the channel in this drain, and acked */
    uint32_t armed;
};

/* Everything that one drain reads and writes. */
struct aiordma_drain {
    struct ibv_comp_channel *channel; /* non-blocking */
    struct aiordma_drained_queue *queues;
    uint32_t queue_count;
    uint32_t capacity; /* of batch */
    struct aiordma_completion *batch;
    uint32_t more;   /* out: the batch filled up; call again */
    uint32_t events; /* out: events taken from the channel */
};

/*
 * Take every event waiting on the channel, acknowledge them, arm each queue that is not armed,
 * then poll all queues until they are empty or the batch is full. In this order no completion
 * can fall between the last poll and the arming (ibv_req_notify_cq is one-shot).
 * Returns the number of completions, or -errno.
 */
int aiordma_drain(const struct aiordma_provider *provider, struct aiordma_drain *drain);

/* The same for one queue without a channel: poll only. Returns the count, or -errno. */
int aiordma_poll(struct ibv_cq *queue, struct aiordma_completion *batch, int capacity);

/* ibv_req_notify_cq, which is inline. Returns 0 or a positive errno. */
int aiordma_request_notification(struct ibv_cq *queue, int solicited_only);

/*
 * Post one work request. sges is an array of struct ibv_sge in native layout (format "=QII"
 * each). immediate is in host order; SEND_WITH_INV has the rkey there. Returns 0 or a positive
 * errno, as ibv_post_send does; or a negative one: the device has it, and could not be told.
 */
int aiordma_post_send(struct ibv_qp *queue_pair, uint64_t wr_id, uint32_t opcode,
                      uint32_t send_flags, const char *sges, int sge_count,
                      uint64_t remote_address, uint32_t rkey, uint32_t immediate);
int aiordma_post_recv(struct ibv_qp *queue_pair, uint64_t wr_id, const char *sges,
                      int sge_count);

/* ibv_query_port through the newer entry where the device has it. 0 or a positive errno. */
int aiordma_query_port(const struct aiordma_provider *provider, struct ibv_context *context,
                       uint8_t port_num, struct ibv_port_attr *attr);

/* A CM event, copied out of librdmacm's memory. */
struct aiordma_cm_event {
    uintptr_t id;
    uintptr_t listen_id; /* 0 unless a connection request */
    int event;
    int status;
    uint8_t private_data_length;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t flow_control;
    uint8_t retry_count;
    uint8_t rnr_retry_count;
    uint8_t srq;
    uint32_t qp_num;
    uint32_t qkey; /* UDP port space only, as the way to the peer is */
    struct ibv_ah_attr address;
    uint8_t private_data[256];
};

/*
 * Take the next event of a non-blocking channel, copy it, acknowledge it at once (an
 * unacknowledged event blocks rdma_destroy_id). 1: an event; 0: none waiting; -errno.
 */
int aiordma_next_cm_event(const struct aiordma_provider *provider,
                          struct rdma_event_channel *channel, struct aiordma_cm_event *copy);

/* The inline address accessors of rdma_cma.h. */
const char *aiordma_local_address(struct rdma_cm_id *id);
const char *aiordma_peer_address(struct rdma_cm_id *id);
