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
    uint32_t immediate; /* in host order: the immediate data, or the invalidated rkey */
    uint32_t qp_num;
    uint32_t src_qp;
    uint32_t wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
    uint16_t reserved;
};

/* Poll one queue until it is empty or the batch is full. The number of completions, or -errno. */
int aiordma_poll(struct ibv_cq *queue, struct aiordma_completion *batch, int capacity);

/* ibv_req_notify_cq, which is inline. Returns 0 or a positive errno. */
int aiordma_request_notification(struct ibv_cq *queue, int solicited_only);

/* The functions of the data path, for the engine, which is another extension. */
struct aiordma_data_path;
const struct aiordma_data_path *aiordma_data_path(void);

/* ibv_query_port, by the extended operation if the device has it. 0 or a positive errno. */
int aiordma_query_port(const struct aiordma_provider *provider, struct ibv_context *context,
                       uint8_t port_num, struct ibv_port_attr *attr);

/* A CM event, copied out of librdmacm's memory. */
struct aiordma_cm_event {
    uintptr_t id;
    uintptr_t listen_id; /* 0 except for a connection request */
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
    uint32_t qkey; /* only in the UDP port space, like address */
    struct ibv_ah_attr address;
    uint8_t private_data[256];
};

/*
 * Take the next event of a non-blocking channel, copy it, and acknowledge it at once, because an
 * unacknowledged event blocks rdma_destroy_id. 1: an event; 0: none; -errno.
 */
int aiordma_next_cm_event(const struct aiordma_provider *provider,
                          struct rdma_event_channel *channel, struct aiordma_cm_event *copy);

/* The inline address accessors of rdma_cma.h. */
const char *aiordma_local_address(struct rdma_cm_id *id);
const char *aiordma_peer_address(struct rdma_cm_id *id);
