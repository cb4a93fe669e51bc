/*
 * Read twice: by the C compiler (through provider.h) and by cffi. Plain declarations only.
 *
 * Every verbs and rdma_cm call that is not inline in the public headers has a slot here. It is
 * named like the function without its ibv_ or rdma_ prefix (rdma_ functions whose name would be
 * used twice have the prefix cm_). An empty slot means that the installed library lacks the
 * function.
 */
struct aiordma_provider {
    /* libibverbs */
    struct ibv_device **(*get_device_list)(int *num_devices);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *device);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *context);
    int (*query_device)(struct ibv_context *context, struct ibv_device_attr *attr);
    int (*query_port)(struct ibv_context *context, uint8_t port_num,
                      struct _compat_ibv_port_attr *attr);
    int (*query_gid)(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid);
    int (*query_gid_ex)(struct ibv_context *context, uint32_t port_num, uint32_t index,
                        struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size);
    ssize_t (*query_gid_table)(struct ibv_context *context, struct ibv_gid_entry *entries,
                               size_t most, uint32_t flags, size_t entry_size);
    int (*query_pkey)(struct ibv_context *context, uint8_t port_num, int index, uint16_t *pkey);
    uint64_t (*get_device_guid)(struct ibv_device *device); /* big-endian */
    int (*get_async_event)(struct ibv_context *context, struct ibv_async_event *event);
    void (*ack_async_event)(struct ibv_async_event *event);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
    int (*dealloc_pd)(struct ibv_pd *domain);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *domain, void *address, size_t length, int access);
    struct ibv_mr *(*reg_mr_iova)(struct ibv_pd *domain, void *address, size_t length,
                                  uint64_t iova, int access);
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *domain, void *address, size_t length,
                                   uint64_t iova, unsigned int access);
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *domain, uint64_t offset, size_t length,
                                    uint64_t iova, int fd, int access);
    int (*rereg_mr)(struct ibv_mr *region, int flags, struct ibv_pd *domain, void *address,
                    size_t length, int access);
    int (*dereg_mr)(struct ibv_mr *region);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *context);
    int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
    struct ibv_cq *(*create_cq)(struct ibv_context *context, int entries, void *cq_context,
                                struct ibv_comp_channel *channel, int vector);
    int (*resize_cq)(struct ibv_cq *queue, int entries);
    int (*destroy_cq)(struct ibv_cq *queue);
    int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **queue, void **cq_context);
    void (*ack_cq_events)(struct ibv_cq *queue, unsigned int count);
    struct ibv_qp *(*create_qp)(struct ibv_pd *domain, struct ibv_qp_init_attr *attr);
    int (*modify_qp)(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask);
    int (*query_qp)(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask,
                    struct ibv_qp_init_attr *init_attr);
    int (*query_qp_data_in_order)(struct ibv_qp *queue_pair, enum ibv_wr_opcode opcode,
                                  uint32_t flags);
    int (*destroy_qp)(struct ibv_qp *queue_pair);
    struct ibv_srq *(*create_srq)(struct ibv_pd *domain, struct ibv_srq_init_attr *attr);
    int (*modify_srq)(struct ibv_srq *queue, struct ibv_srq_attr *attr, int mask);
    int (*query_srq)(struct ibv_srq *queue, struct ibv_srq_attr *attr);
    int (*destroy_srq)(struct ibv_srq *queue);
    struct ibv_ah *(*create_ah)(struct ibv_pd *domain, struct ibv_ah_attr *attr);
    int (*init_ah_from_wc)(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
                           struct ibv_grh *grh, struct ibv_ah_attr *attr);
    int (*destroy_ah)(struct ibv_ah *handle);
    int (*attach_mcast)(struct ibv_qp *queue_pair, const union ibv_gid *gid, uint16_t lid);
    int (*detach_mcast)(struct ibv_qp *queue_pair, const union ibv_gid *gid, uint16_t lid);

    /* librdmacm */
    struct rdma_event_channel *(*create_event_channel)(void);
    void (*destroy_event_channel)(struct rdma_event_channel *channel);
    int (*get_cm_event)(struct rdma_event_channel *channel, struct rdma_cm_event **event);
    int (*ack_cm_event)(struct rdma_cm_event *event);
    int (*create_id)(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
                     enum rdma_port_space port_space);
    int (*destroy_id)(struct rdma_cm_id *id);
    int (*bind_addr)(struct rdma_cm_id *id, struct sockaddr *address);
    int (*resolve_addr)(struct rdma_cm_id *id, struct sockaddr *source,
                        struct sockaddr *destination, int timeout_ms);
    int (*resolve_route)(struct rdma_cm_id *id, int timeout_ms);
    int (*cm_create_qp)(struct rdma_cm_id *id, struct ibv_pd *domain,
                        struct ibv_qp_init_attr *attr);
    int (*cm_create_qp_ex)(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr);
    void (*cm_destroy_qp)(struct rdma_cm_id *id);
    int (*connect)(struct rdma_cm_id *id, struct rdma_conn_param *parameters);
    int (*listen)(struct rdma_cm_id *id, int backlog);
    int (*accept)(struct rdma_cm_id *id, struct rdma_conn_param *parameters);
    int (*reject)(struct rdma_cm_id *id, const void *private_data, uint8_t length);
    int (*disconnect)(struct rdma_cm_id *id);
    int (*establish)(struct rdma_cm_id *id);
    int (*notify)(struct rdma_cm_id *id, enum ibv_event_type event);
    int (*migrate_id)(struct rdma_cm_id *id, struct rdma_event_channel *channel);
    int (*init_qp_attr)(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask);
    int (*join_multicast)(struct rdma_cm_id *id, struct sockaddr *group, void *context);
    int (*join_multicast_ex)(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr,
                             void *context);
    int (*leave_multicast)(struct rdma_cm_id *id, struct sockaddr *group);
    struct ibv_context **(*get_devices)(int *num_devices);
    void (*free_devices)(struct ibv_context **list);
    int (*cm_getaddrinfo)(const char *node, const char *service, const struct rdma_addrinfo *hints,
                          struct rdma_addrinfo **result);
    void (*cm_freeaddrinfo)(struct rdma_addrinfo *result);
    int (*set_local_ece)(struct rdma_cm_id *id, struct ibv_ece *ece);
    int (*get_remote_ece)(struct rdma_cm_id *id, struct ibv_ece *ece);
    int (*reject_ece)(struct rdma_cm_id *id, const void *private_data, uint8_t length);
    int (*set_option)(struct rdma_cm_id *id, int level, int name, void *value, size_t length);
};

/*
 * Open libibverbs and librdmacm by dlopen, once, and return the filled table. After a failure,
 * return NULL, with the reason in message.
 */
const struct aiordma_provider *aiordma_rdma_core(char *message, size_t size);
