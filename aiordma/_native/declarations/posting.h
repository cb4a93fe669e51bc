/*
 * Read twice: by the C compiler (through posting.h) and by cffi. Plain declarations only.
 *
 * Chains of work requests with every field that a request can have. The plain request of one
 * message, READ or WRITE has a shorter way in data_path.h.
 */

/* One request of a chain. Its sges follow those of the request before it. */
struct aiordma_send_request {
    uint64_t wr_id;
    uint32_t opcode;
    uint32_t send_flags;
    uint32_t sge_count;
    uint32_t immediate; /* host order: the immediate data, or the rkey to invalidate */
    uint64_t remote_address;
    uint32_t rkey; /* of the remote memory; for BIND_MW the window's new one */
    uint32_t remote_qpn;
    uint64_t compare_add;
    uint64_t swap;
    uint32_t remote_qkey;
    uint32_t bind_access;
    uint64_t bind_address;
    uint64_t bind_length;
    struct ibv_ah *address_handle;
    struct ibv_mw *window;
    struct ibv_mr *region; /* that the window is bound to */
};

struct aiordma_receive_request {
    uint64_t wr_id;
    uint32_t sge_count;
    uint32_t reserved;
};

/*
 * Post a chain. sges is an array of struct ibv_sge in native layout, those of all requests one
 * after the other. Returns 0 or a positive errno; *posted is how many the device took, which is
 * the index of the first one that it refused.
 */
int aiordma_post_send_chain(struct ibv_qp *queue_pair,
                            const struct aiordma_send_request *requests, uint32_t count,
                            const char *sges, size_t sges_size, uint32_t *posted);
int aiordma_post_recv_chain(struct ibv_qp *queue_pair,
                            const struct aiordma_receive_request *requests, uint32_t count,
                            const char *sges, size_t sges_size, uint32_t *posted);
int aiordma_post_srq_recv_chain(struct ibv_srq *queue,
                                const struct aiordma_receive_request *requests,
                                uint32_t count, const char *sges, size_t sges_size,
                                uint32_t *posted);

/* ibv_bind_mw, for windows of type 1. The new rkey is window->rkey. 0 or a positive errno. */
int aiordma_bind_window(struct ibv_qp *queue_pair, struct ibv_mw *window, uint64_t wr_id,
                        uint32_t send_flags, struct ibv_mr *region, uint64_t address,
                        uint64_t length, uint32_t access);
