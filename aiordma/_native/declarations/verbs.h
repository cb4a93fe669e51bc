/*
 * Read twice: by the C compiler (through rdma_core.h) and by cffi. Plain declarations only.
 *
 * The part of libibverbs' ABI that this package uses. Layouts and values are those of rdma-core.
 * tests/unit/test_layout.py compares them with the installed <infiniband/verbs.h>. A member named
 * unused... stands for one or several members that this package does not use.
 */
struct ibv_context;
struct ibv_cq;
struct ibv_cq_ex;
struct ibv_cq_init_attr_ex;
struct ibv_device_attr_ex;
struct ibv_modify_cq_attr;
struct ibv_mw_bind;
struct ibv_pd;
struct ibv_poll_cq_attr;
struct ibv_port_attr;
struct ibv_qp;
struct ibv_qp_init_attr_ex;
struct ibv_query_device_ex_input;
struct ibv_recv_wr;
struct ibv_send_wr;
struct ibv_sge;
struct ibv_srq;
struct ibv_values_ex;
struct ibv_wc;
struct ibv_wq;

union ibv_gid {
    uint8_t raw[16];
    struct {
        uint64_t subnet_prefix; /* big-endian */
        uint64_t interface_id;  /* big-endian */
    } global;
};

enum ibv_gid_type { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 };
struct ibv_gid_entry {
    union ibv_gid gid;
    uint32_t gid_index;
    uint32_t port_num;
    uint32_t gid_type;
    uint32_t ndev_ifindex;
};

enum ibv_node_type { IBV_NODE_UNKNOWN = -1, IBV_NODE_CA = 1, IBV_NODE_RNIC = 4 };
enum ibv_transport_type { IBV_TRANSPORT_UNKNOWN = -1, IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP };
enum ibv_atomic_cap { IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB };
enum ibv_mtu { IBV_MTU_256 = 1, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 };
enum ibv_port_state {
    IBV_PORT_NOP,
    IBV_PORT_DOWN,
    IBV_PORT_INIT,
    IBV_PORT_ARMED,
    IBV_PORT_ACTIVE,
    IBV_PORT_ACTIVE_DEFER
};
#define IBV_LINK_LAYER_UNSPECIFIED 0
#define IBV_LINK_LAYER_INFINIBAND 1
#define IBV_LINK_LAYER_ETHERNET 2

struct ibv_device {
    void *unused_operations[2];
    enum ibv_node_type node_type;
    enum ibv_transport_type transport_type;
    char name[64];
    char dev_name[64];
    char dev_path[256];
    char ibdev_path[256];
};
enum ibv_mw_type { IBV_MW_TYPE_1 = 1, IBV_MW_TYPE_2 };
enum ib_uverbs_advise_mr_advice {
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT
};
#define IB_UVERBS_ADVISE_MR_FLAG_FLUSH 1

/* The driver's functions. The data path calls them; tests replace them. */
struct ibv_context_ops {
    void *unused_device[7];
    struct ibv_mw *(*alloc_mw)(struct ibv_pd *domain, enum ibv_mw_type type);
    int (*bind_mw)(struct ibv_qp *queue_pair, struct ibv_mw *window, struct ibv_mw_bind *bind);
    int (*dealloc_mw)(struct ibv_mw *window);
    void *unused_create_cq;
    int (*poll_cq)(struct ibv_cq *queue, int most, struct ibv_wc *found);
    int (*req_notify_cq)(struct ibv_cq *queue, int solicited_only);
    void *unused_cq[7];
    int (*post_srq_recv)(struct ibv_srq *queue, struct ibv_recv_wr *first,
                         struct ibv_recv_wr **refused);
    void *unused_qp[4];
    int (*post_send)(struct ibv_qp *queue_pair, struct ibv_send_wr *first,
                     struct ibv_send_wr **refused);
    int (*post_recv)(struct ibv_qp *queue_pair, struct ibv_recv_wr *first,
                     struct ibv_recv_wr **refused);
    void *unused_ah[5];
};
struct ibv_context {
    struct ibv_device *device;
    struct ibv_context_ops ops;
    int cmd_fd;
    int async_fd;
    int num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat; /* all bits set: the context is the last member of a verbs_context */
};
/*
 * What extends a context. It grows at its beginning: sz is the size that the installed library
 * allocated, and a member before that does not exist (see verbs_context_with in rdma_core.h).
 */
struct verbs_context {
    int (*query_port)(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr,
                      size_t size);
    int (*advise_mr)(struct ibv_pd *domain, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
                     struct ibv_sge *sg_list, uint32_t num_sge);
    void *unused_memory[15];
    int (*modify_cq)(struct ibv_cq *queue, struct ibv_modify_cq_attr *attr);
    void *unused_queues[6];
    int (*query_rt_values)(struct ibv_context *context, struct ibv_values_ex *values);
    struct ibv_cq_ex *(*create_cq_ex)(struct ibv_context *context,
                                      struct ibv_cq_init_attr_ex *attr);
    void *unused_private;
    int (*query_device_ex)(struct ibv_context *context,
                           const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t size);
    void *unused_flow[5];
    struct ibv_qp *(*create_qp_ex)(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
    void *unused_first[4];
    uint64_t unused_mask;
    size_t sz;
    struct ibv_context context;
};

struct ibv_device_attr {
    char fw_ver[64];
    uint64_t node_guid;      /* big-endian */
    uint64_t sys_image_guid; /* big-endian */
    uint64_t max_mr_size;
    uint64_t page_size_cap;
    uint32_t vendor_id;
    uint32_t vendor_part_id;
    uint32_t hw_ver;
    int max_qp;
    int max_qp_wr;
    unsigned int device_cap_flags;
    int max_sge;
    int max_sge_rd;
    int max_cq;
    int max_cqe;
    int max_mr;
    int max_pd;
    int max_qp_rd_atom;
    int max_ee_rd_atom;
    int max_res_rd_atom;
    int max_qp_init_rd_atom;
    int max_ee_init_rd_atom;
    enum ibv_atomic_cap atomic_cap;
    int max_ee;
    int max_rdd;
    int max_mw;
    int max_raw_ipv6_qp;
    int max_raw_ethy_qp;
    int max_mcast_grp;
    int max_mcast_qp_attach;
    int max_total_mcast_qp_attach;
    int max_ah;
    int max_fmr;
    int max_map_per_fmr;
    int max_srq;
    int max_srq_wr;
    int max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay;
    uint8_t phys_port_cnt;
};

enum ibv_device_cap_flags {
    IBV_DEVICE_RESIZE_MAX_WR = 0x1,
    IBV_DEVICE_BAD_PKEY_CNTR = 0x2,
    IBV_DEVICE_BAD_QKEY_CNTR = 0x4,
    IBV_DEVICE_RAW_MULTI = 0x8,
    IBV_DEVICE_AUTO_PATH_MIG = 0x10,
    IBV_DEVICE_CHANGE_PHY_PORT = 0x20,
    IBV_DEVICE_UD_AV_PORT_ENFORCE = 0x40,
    IBV_DEVICE_CURR_QP_STATE_MOD = 0x80,
    IBV_DEVICE_SHUTDOWN_PORT = 0x100,
    IBV_DEVICE_INIT_TYPE = 0x200,
    IBV_DEVICE_PORT_ACTIVE_EVENT = 0x400,
    IBV_DEVICE_SYS_IMAGE_GUID = 0x800,
    IBV_DEVICE_RC_RNR_NAK_GEN = 0x1000,
    IBV_DEVICE_SRQ_RESIZE = 0x2000,
    IBV_DEVICE_N_NOTIFY_CQ = 0x4000,
    IBV_DEVICE_MEM_WINDOW = 0x20000,
    IBV_DEVICE_UD_IP_CSUM = 0x40000,
    IBV_DEVICE_XRC = 0x100000,
    IBV_DEVICE_MEM_MGT_EXTENSIONS = 0x200000,
    IBV_DEVICE_MEM_WINDOW_TYPE_2A = 0x800000,
    IBV_DEVICE_MEM_WINDOW_TYPE_2B = 0x1000000,
    IBV_DEVICE_RC_IP_CSUM = 0x2000000,
    IBV_DEVICE_RAW_IP_CSUM = 0x4000000,
    IBV_DEVICE_MANAGED_FLOW_STEERING = 0x20000000
};
#define IBV_DEVICE_RAW_SCATTER_FCS 0x400000000
#define IBV_DEVICE_PCI_WRITE_END_PADDING 0x1000000000
enum ibv_odp_general_caps { IBV_ODP_SUPPORT = 0x1, IBV_ODP_SUPPORT_IMPLICIT = 0x2 };
enum ibv_odp_transport_cap_bits {
    IBV_ODP_SUPPORT_SEND = 0x1,
    IBV_ODP_SUPPORT_RECV = 0x2,
    IBV_ODP_SUPPORT_WRITE = 0x4,
    IBV_ODP_SUPPORT_READ = 0x8,
    IBV_ODP_SUPPORT_ATOMIC = 0x10,
    IBV_ODP_SUPPORT_SRQ_RECV = 0x20
};
enum ibv_raw_packet_caps {
    IBV_RAW_PACKET_CAP_CVLAN_STRIPPING = 0x1,
    IBV_RAW_PACKET_CAP_SCATTER_FCS = 0x2,
    IBV_RAW_PACKET_CAP_IP_CSUM = 0x4,
    IBV_RAW_PACKET_CAP_DELAY_DROP = 0x8
};
struct ibv_tso_caps {
    uint32_t max_tso;
    uint32_t supported_qpts;
};
struct ibv_rss_caps {
    uint32_t supported_qpts;
    uint32_t max_rwq_indirection_tables;
    uint32_t max_rwq_indirection_table_size;
    uint64_t rx_hash_fields_mask;
    uint8_t rx_hash_function;
};
struct ibv_packet_pacing_caps {
    uint32_t qp_rate_limit_min;
    uint32_t qp_rate_limit_max;
    uint32_t supported_qpts;
};
struct ibv_tm_caps {
    uint32_t max_rndv_hdr_size;
    uint32_t max_num_tags;
    uint32_t flags;
    uint32_t max_ops;
    uint32_t max_sge;
};
struct ibv_cq_moderation_caps {
    uint16_t max_cq_count;
    uint16_t max_cq_period;
};
struct ibv_odp_caps {
    uint64_t general_caps;
    struct {
        uint32_t rc_odp_caps;
        uint32_t uc_odp_caps;
        uint32_t ud_odp_caps;
    } per_transport_caps;
};
struct ibv_pci_atomic_caps {
    uint16_t fetch_add;
    uint16_t swap;
    uint16_t compare_swap;
};
struct ibv_query_device_ex_input {
    uint32_t comp_mask;
};
struct ibv_device_attr_ex {
    struct ibv_device_attr orig_attr;
    uint32_t comp_mask;
    struct ibv_odp_caps odp_caps;
    uint64_t completion_timestamp_mask;
    uint64_t hca_core_clock;
    uint64_t device_cap_flags_ex;
    struct ibv_tso_caps tso_caps;
    struct ibv_rss_caps rss_caps;
    uint32_t max_wq_type_rq;
    struct ibv_packet_pacing_caps packet_pacing_caps;
    uint32_t raw_packet_caps;
    struct ibv_tm_caps tm_caps;
    struct ibv_cq_moderation_caps cq_mod_caps;
    uint64_t max_dm_size;
    struct ibv_pci_atomic_caps pci_atomic_caps;
    uint32_t xrc_odp_caps;
    uint32_t phys_port_cnt_ex;
};

enum ibv_event_type {
    IBV_EVENT_CQ_ERR,
    IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_REQ_ERR,
    IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_COMM_EST,
    IBV_EVENT_SQ_DRAINED,
    IBV_EVENT_PATH_MIG,
    IBV_EVENT_PATH_MIG_ERR,
    IBV_EVENT_DEVICE_FATAL,
    IBV_EVENT_PORT_ACTIVE,
    IBV_EVENT_PORT_ERR,
    IBV_EVENT_LID_CHANGE,
    IBV_EVENT_PKEY_CHANGE,
    IBV_EVENT_SM_CHANGE,
    IBV_EVENT_SRQ_ERR,
    IBV_EVENT_SRQ_LIMIT_REACHED,
    IBV_EVENT_QP_LAST_WQE_REACHED,
    IBV_EVENT_CLIENT_REREGISTER,
    IBV_EVENT_GID_CHANGE,
    IBV_EVENT_WQ_FATAL
};
struct ibv_async_event {
    union {
        struct ibv_cq *cq;
        struct ibv_qp *qp;
        struct ibv_srq *srq;
        struct ibv_wq *wq;
        int port_num;
    } element;
    enum ibv_event_type event_type;
};

enum ibv_port_cap_flags { IBV_PORT_CM_SUP = 0x10000, IBV_PORT_IP_BASED_GIDS = 0x4000000 };
/* What ibv_query_port of libibverbs takes: a port's attributes without the last two. */
struct _compat_ibv_port_attr;
struct ibv_port_attr {
    enum ibv_port_state state;
    enum ibv_mtu max_mtu;
    enum ibv_mtu active_mtu;
    int gid_tbl_len;
    uint32_t port_cap_flags;
    uint32_t max_msg_sz;
    uint32_t bad_pkey_cntr;
    uint32_t qkey_viol_cntr;
    uint16_t pkey_tbl_len;
    uint16_t lid;
    uint16_t sm_lid;
    uint8_t lmc;
    uint8_t max_vl_num;
    uint8_t sm_sl;
    uint8_t subnet_timeout;
    uint8_t init_type_reply;
    uint8_t active_width;
    uint8_t active_speed;
    uint8_t phys_state;
    uint8_t link_layer;
    uint8_t flags;
    uint16_t port_cap_flags2;
};

enum ibv_access_flags {
    IBV_ACCESS_LOCAL_WRITE = 0x1,
    IBV_ACCESS_REMOTE_WRITE = 0x2,
    IBV_ACCESS_REMOTE_READ = 0x4,
    IBV_ACCESS_REMOTE_ATOMIC = 0x8,
    IBV_ACCESS_MW_BIND = 0x10,
    IBV_ACCESS_ZERO_BASED = 0x20,
    IBV_ACCESS_ON_DEMAND = 0x40,
    IBV_ACCESS_HUGETLB = 0x80,
    IBV_ACCESS_RELAXED_ORDERING = 0x100000
};

struct ibv_pd {
    struct ibv_context *context;
    uint32_t handle;
};
struct ibv_mr {
    struct ibv_context *context;
    struct ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
    uint32_t rkey;
};
enum ibv_rereg_mr_flags {
    IBV_REREG_MR_CHANGE_TRANSLATION = 0x1,
    IBV_REREG_MR_CHANGE_PD = 0x2,
    IBV_REREG_MR_CHANGE_ACCESS = 0x4
};
#define IBV_REREG_MR_FLAGS_SUPPORTED 7
enum ibv_rereg_mr_err_code {
    IBV_REREG_MR_ERR_INPUT = -1,
    IBV_REREG_MR_ERR_DONT_FORK_NEW = -2,
    IBV_REREG_MR_ERR_DO_FORK_OLD = -3,
    IBV_REREG_MR_ERR_CMD = -4,
    IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW = -5
};
#define IBV_ACCESS_OPTIONAL_RANGE 0x3ff00000
struct ibv_mw {
    struct ibv_context *context;
    struct ibv_pd *pd;
    uint32_t rkey;
    uint32_t handle;
    enum ibv_mw_type type;
};
struct ibv_mw_bind_info {
    struct ibv_mr *mr;
    uint64_t addr;
    uint64_t length;
    unsigned int mw_access_flags;
};
struct ibv_mw_bind {
    uint64_t wr_id;
    unsigned int send_flags;
    struct ibv_mw_bind_info bind_info;
};
enum ibv_create_cq_attr_flags {
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 0x1,
    IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 0x2
};
struct ibv_comp_channel {
    struct ibv_context *context;
    int fd;
    int refcnt;
};
struct ibv_cq {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed;
    uint32_t async_events_completed;
};
#define IBV_WC_STANDARD_FLAGS 0x7f
#define IBV_WC_EX_WITH_COMPLETION_TIMESTAMP 0x80
#define IBV_CQ_INIT_ATTR_MASK_FLAGS 1
struct ibv_cq_init_attr_ex {
    uint32_t cqe;
    void *cq_context;
    struct ibv_comp_channel *channel;
    uint32_t comp_vector;
    uint64_t wc_flags;
    uint32_t comp_mask;
    uint32_t flags;
    struct ibv_pd *parent_domain;
};
struct ibv_moderate_cq {
    uint16_t cq_count;
    uint16_t cq_period; /* microseconds */
};
#define IBV_CQ_ATTR_MODERATE 1
struct ibv_modify_cq_attr {
    uint32_t attr_mask;
    struct ibv_moderate_cq moderate;
};
/* raw_clock has the type struct timespec, whose tv_nsec is the number of ticks of the clock. */
#define IBV_VALUES_MASK_RAW_CLOCK 1
struct ibv_values_ex {
    uint32_t comp_mask;
    struct {
        int64_t tv_sec;
        int64_t tv_nsec;
    } raw_clock;
};

enum ibv_wc_status {
    IBV_WC_SUCCESS,
    IBV_WC_LOC_LEN_ERR,
    IBV_WC_LOC_QP_OP_ERR,
    IBV_WC_LOC_EEC_OP_ERR,
    IBV_WC_LOC_PROT_ERR,
    IBV_WC_WR_FLUSH_ERR,
    IBV_WC_MW_BIND_ERR,
    IBV_WC_BAD_RESP_ERR,
    IBV_WC_LOC_ACCESS_ERR,
    IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_ACCESS_ERR,
    IBV_WC_REM_OP_ERR,
    IBV_WC_RETRY_EXC_ERR,
    IBV_WC_RNR_RETRY_EXC_ERR,
    IBV_WC_LOC_RDD_VIOL_ERR,
    IBV_WC_REM_INV_RD_REQ_ERR,
    IBV_WC_REM_ABORT_ERR,
    IBV_WC_INV_EECN_ERR,
    IBV_WC_INV_EEC_STATE_ERR,
    IBV_WC_FATAL_ERR,
    IBV_WC_RESP_TIMEOUT_ERR,
    IBV_WC_GENERAL_ERR,
    IBV_WC_TM_ERR,
    IBV_WC_TM_RNDV_INCOMPLETE
};
enum ibv_wc_opcode {
    IBV_WC_SEND = 0x0,
    IBV_WC_RDMA_WRITE = 0x1,
    IBV_WC_RDMA_READ = 0x2,
    IBV_WC_COMP_SWAP = 0x3,
    IBV_WC_FETCH_ADD = 0x4,
    IBV_WC_BIND_MW = 0x5,
    IBV_WC_LOCAL_INV = 0x6,
    IBV_WC_RECV = 0x80,
    IBV_WC_RECV_RDMA_WITH_IMM = 0x81
};
enum ibv_wc_flags { IBV_WC_GRH = 0x1, IBV_WC_WITH_IMM = 0x2, IBV_WC_WITH_INV = 0x8 };

enum ibv_wr_opcode {
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM,
    IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_LOCAL_INV,
    IBV_WR_BIND_MW,
    IBV_WR_SEND_WITH_INV
};
enum ibv_send_flags {
    IBV_SEND_FENCE = 0x1,
    IBV_SEND_SIGNALED = 0x2,
    IBV_SEND_SOLICITED = 0x4,
    IBV_SEND_INLINE = 0x8,
    IBV_SEND_IP_CSUM = 0x10
};

enum ibv_qp_type { IBV_QPT_RC = 2, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_SEND = 9, IBV_QPT_XRC_RECV };
enum ibv_qp_state {
    IBV_QPS_RESET,
    IBV_QPS_INIT,
    IBV_QPS_RTR,
    IBV_QPS_RTS,
    IBV_QPS_SQD,
    IBV_QPS_SQE,
    IBV_QPS_ERR
};
enum ibv_qp_attr_mask {
    IBV_QP_STATE = 0x1,
    IBV_QP_CUR_STATE = 0x2,
    IBV_QP_EN_SQD_ASYNC_NOTIFY = 0x4,
    IBV_QP_ACCESS_FLAGS = 0x8,
    IBV_QP_PKEY_INDEX = 0x10,
    IBV_QP_PORT = 0x20,
    IBV_QP_QKEY = 0x40,
    IBV_QP_AV = 0x80,
    IBV_QP_PATH_MTU = 0x100,
    IBV_QP_TIMEOUT = 0x200,
    IBV_QP_RETRY_CNT = 0x400,
    IBV_QP_RNR_RETRY = 0x800,
    IBV_QP_RQ_PSN = 0x1000,
    IBV_QP_MAX_QP_RD_ATOMIC = 0x2000,
    IBV_QP_ALT_PATH = 0x4000,
    IBV_QP_MIN_RNR_TIMER = 0x8000,
    IBV_QP_SQ_PSN = 0x10000,
    IBV_QP_MAX_DEST_RD_ATOMIC = 0x20000,
    IBV_QP_PATH_MIG_STATE = 0x40000,
    IBV_QP_CAP = 0x80000,
    IBV_QP_DEST_QPN = 0x100000
};

struct ibv_qp_cap {
    uint32_t max_send_wr;
    uint32_t max_recv_wr;
    uint32_t max_send_sge;
    uint32_t max_recv_sge;
    uint32_t max_inline_data;
};
struct ibv_srq_attr {
    uint32_t max_wr;
    uint32_t max_sge;
    uint32_t srq_limit;
};
struct ibv_srq_init_attr {
    void *srq_context;
    struct ibv_srq_attr attr;
};
enum ibv_srq_attr_mask { IBV_SRQ_MAX_WR = 0x1, IBV_SRQ_LIMIT = 0x2 };
struct ibv_srq {
    struct ibv_context *context;
    void *srq_context;
    struct ibv_pd *pd;
    uint32_t handle;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};
struct ibv_qp_init_attr {
    void *qp_context;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp_cap cap;
    enum ibv_qp_type qp_type;
    int sq_sig_all;
};
enum ibv_qp_init_attr_mask {
    IBV_QP_INIT_ATTR_PD = 0x1,
    IBV_QP_INIT_ATTR_CREATE_FLAGS = 0x4,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 0x40
};
enum ibv_qp_create_send_ops_flags {
    IBV_QP_EX_WITH_RDMA_WRITE = 0x1,
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 0x2,
    IBV_QP_EX_WITH_SEND = 0x4,
    IBV_QP_EX_WITH_SEND_WITH_IMM = 0x8,
    IBV_QP_EX_WITH_RDMA_READ = 0x10,
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 0x20,
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 0x40,
    IBV_QP_EX_WITH_LOCAL_INV = 0x80,
    IBV_QP_EX_WITH_BIND_MW = 0x100,
    IBV_QP_EX_WITH_SEND_WITH_INV = 0x200
};
/* An ibv_qp_init_attr, then what comp_mask says. */
struct ibv_qp_init_attr_ex {
    void *qp_context;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp_cap cap;
    enum ibv_qp_type qp_type;
    int sq_sig_all;
    uint32_t comp_mask;
    struct ibv_pd *pd;
    void *unused_xrcd;
    uint32_t create_flags;
    uint16_t unused_tso_header;
    uint64_t unused_table[4];
    uint32_t unused_source_qpn;
    uint64_t send_ops_flags;
};
struct ibv_qp {
    struct ibv_context *context;
    void *qp_context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    uint32_t handle;
    uint32_t qp_num;
    enum ibv_qp_state state;
    enum ibv_qp_type qp_type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};

struct ibv_global_route {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
};
struct ibv_ah_attr {
    struct ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl;
    uint8_t src_path_bits;
    uint8_t static_rate;
    uint8_t is_global;
    uint8_t port_num;
};
struct ibv_ah {
    struct ibv_context *context;
    struct ibv_pd *pd;
    uint32_t handle;
};
struct ibv_wc {
    uint64_t wr_id;
    enum ibv_wc_status status;
    enum ibv_wc_opcode opcode;
    uint32_t vendor_err;
    uint32_t byte_len;
    union {
        uint32_t imm_data; /* big-endian */
        uint32_t invalidated_rkey;
    };
    uint32_t qp_num;
    uint32_t src_qp;
    unsigned int wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
};
struct ibv_poll_cq_attr {
    uint32_t comp_mask;
};
/* An extended queue: a plain one, then its current completion and the functions that read it. */
struct ibv_cq_ex {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed;
    uint32_t async_events_completed;
    uint32_t comp_mask;
    enum ibv_wc_status status;
    uint64_t wr_id;
    int (*start_poll)(struct ibv_cq_ex *queue, struct ibv_poll_cq_attr *attr);
    int (*next_poll)(struct ibv_cq_ex *queue);
    void (*end_poll)(struct ibv_cq_ex *queue);
    enum ibv_wc_opcode (*read_opcode)(struct ibv_cq_ex *queue);
    uint32_t (*read_vendor_err)(struct ibv_cq_ex *queue);
    uint32_t (*read_byte_len)(struct ibv_cq_ex *queue);
    uint32_t (*read_imm_data)(struct ibv_cq_ex *queue); /* big-endian */
    uint32_t (*read_qp_num)(struct ibv_cq_ex *queue);
    uint32_t (*read_src_qp)(struct ibv_cq_ex *queue);
    unsigned int (*read_wc_flags)(struct ibv_cq_ex *queue);
    uint32_t (*read_slid)(struct ibv_cq_ex *queue);
    uint8_t (*read_sl)(struct ibv_cq_ex *queue);
    uint8_t (*read_dlid_path_bits)(struct ibv_cq_ex *queue);
    uint64_t (*read_completion_ts)(struct ibv_cq_ex *queue);
    void *unused_readers[4];
};
struct ibv_sge {
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
};
struct ibv_send_wr {
    uint64_t wr_id;
    struct ibv_send_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
    enum ibv_wr_opcode opcode;
    unsigned int send_flags;
    union {
        uint32_t imm_data; /* big-endian */
        uint32_t invalidate_rkey;
    };
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        struct {
            uint64_t remote_addr;
            uint64_t compare_add;
            uint64_t swap;
            uint32_t rkey;
        } atomic;
        struct {
            struct ibv_ah *ah;
            uint32_t remote_qpn;
            uint32_t remote_qkey;
        } ud;
    } wr;
    uint32_t unused_srqn;
    union {
        struct {
            struct ibv_mw *mw;
            uint32_t rkey;
            struct ibv_mw_bind_info bind_info;
        } bind_mw;
        void *unused_tso[2];
    };
};
struct ibv_recv_wr {
    uint64_t wr_id;
    struct ibv_recv_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
};
struct ibv_grh {
    uint32_t version_tclass_flow;
    uint16_t paylen;
    uint8_t next_hdr;
    uint8_t hop_limit;
    union ibv_gid sgid;
    union ibv_gid dgid;
};
enum ibv_mig_state { IBV_MIG_MIGRATED, IBV_MIG_REARM, IBV_MIG_ARMED };
struct ibv_ece {
    uint32_t vendor_id;
    uint32_t options;
    uint32_t comp_mask;
};
struct ibv_qp_attr {
    enum ibv_qp_state qp_state;
    enum ibv_qp_state cur_qp_state;
    enum ibv_mtu path_mtu;
    enum ibv_mig_state path_mig_state;
    uint32_t qkey;
    uint32_t rq_psn;
    uint32_t sq_psn;
    uint32_t dest_qp_num;
    unsigned int qp_access_flags;
    struct ibv_qp_cap cap;
    struct ibv_ah_attr ah_attr;
    struct ibv_ah_attr alt_ah_attr;
    uint16_t pkey_index;
    uint16_t alt_pkey_index;
    uint8_t en_sqd_async_notify;
    uint8_t sq_draining;
    uint8_t max_rd_atomic;
    uint8_t max_dest_rd_atomic;
    uint8_t min_rnr_timer;
    uint8_t port_num;
    uint8_t timeout;
    uint8_t retry_cnt;
    uint8_t rnr_retry;
    uint8_t alt_port_num;
    uint8_t alt_timeout;
    uint32_t rate_limit;
};

struct ibv_data_buf {
    void *addr;
    size_t length;
};
/* A queue pair, and the functions that build its work requests (man ibv_wr_post). */
struct ibv_qp_ex {
    struct ibv_qp qp_base;
    uint64_t comp_mask;
    uint64_t wr_id;
    unsigned int wr_flags;
    void (*wr_atomic_cmp_swp)(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr,
                              uint64_t compare, uint64_t swap);
    void (*wr_atomic_fetch_add)(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr,
                                uint64_t add);
    void (*wr_bind_mw)(struct ibv_qp_ex *queue_pair, struct ibv_mw *window, uint32_t rkey,
                       const struct ibv_mw_bind_info *bind);
    void (*wr_local_inv)(struct ibv_qp_ex *queue_pair, uint32_t invalidate_rkey);
    void (*wr_rdma_read)(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr);
    void (*wr_rdma_write)(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr);
    void (*wr_rdma_write_imm)(struct ibv_qp_ex *queue_pair, uint32_t rkey, uint64_t remote_addr,
                              uint32_t imm_data);
    void (*wr_send)(struct ibv_qp_ex *queue_pair);
    void (*wr_send_imm)(struct ibv_qp_ex *queue_pair, uint32_t imm_data);
    void (*wr_send_inv)(struct ibv_qp_ex *queue_pair, uint32_t invalidate_rkey);
    void *unused_send_tso;
    void (*wr_set_ud_addr)(struct ibv_qp_ex *queue_pair, struct ibv_ah *ah, uint32_t remote_qpn,
                           uint32_t remote_qkey);
    void *unused_set_xrc;
    void (*wr_set_inline_data)(struct ibv_qp_ex *queue_pair, void *address, size_t length);
    void (*wr_set_inline_data_list)(struct ibv_qp_ex *queue_pair, size_t count,
                                    const struct ibv_data_buf *buffers);
    void (*wr_set_sge)(struct ibv_qp_ex *queue_pair, uint32_t lkey, uint64_t address,
                       uint32_t length);
    void (*wr_set_sge_list)(struct ibv_qp_ex *queue_pair, size_t count,
                            const struct ibv_sge *parts);
    void (*wr_start)(struct ibv_qp_ex *queue_pair);
    int (*wr_complete)(struct ibv_qp_ex *queue_pair);
    void (*wr_abort)(struct ibv_qp_ex *queue_pair);
    void *unused_atomic_write;
};
