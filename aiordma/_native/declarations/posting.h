/*
 * Read twice: by the C compiler (through data_path.h) and by cffi. Plain declarations only.
 *
 * Work requests with every field, one or several in a call.
 */

/* One request of a chain. Its sges follow those of the previous request. */
struct aiordma_send_request {
    uint64_t wr_id;
    uint32_t opcode;
    uint32_t send_flags;
    uint32_t sge_count;
    uint32_t immediate; /* in host order: the immediate data, or the rkey to invalidate */
    uint64_t remote_address;
    uint32_t rkey; /* of the remote memory; of BIND_MW: the window's new one */
    uint32_t remote_qpn;
    uint64_t compare_add;
    uint64_t swap;
    uint32_t remote_qkey;
    uint32_t bind_access;
    uint64_t bind_address;
    uint64_t bind_length;
    struct ibv_ah *address_handle;
    struct ibv_mw *window;
    struct ibv_mr *region; /* to bind the window to */
};

struct aiordma_receive_request {
    uint64_t wr_id;
    uint32_t sge_count;
    uint32_t reserved;
};

/*
 * Post a chain: an array of struct aiordma_send_request. sges: an array of struct ibv_sge in native
 * layout, with the sges of all requests in order. *posted: the number of accepted requests, which
 * is the index of the refused one. Returns 0, a positive errno if the device refused a request, or
 * a negative errno if it accepted all of them and the doorbell failed.
 */
int aiordma_post_send_chain(struct ibv_qp *queue_pair, const void *requests, uint32_t count,
                            const char *sges, size_t sges_size, uint32_t *posted);
/*
 * The same for receives (struct aiordma_receive_request), posted to a queue pair. If that is NULL,
 * they are posted to a shared receive queue.
 */
int aiordma_post_recv_chain(struct ibv_qp *queue_pair, struct ibv_srq *shared, const void *requests,
                            uint32_t count, const char *sges, size_t sges_size, uint32_t *posted);

/* ibv_bind_mw, for windows of type 1. The new rkey is window->rkey. 0 or a positive errno. */
int aiordma_bind_window(struct ibv_qp *queue_pair, struct ibv_mw *window, uint64_t wr_id,
                        uint32_t send_flags, struct ibv_mr *region, uint64_t address,
                        uint64_t length, uint32_t access);
