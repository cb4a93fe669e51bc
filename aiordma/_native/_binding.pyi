# Written by `python -m tests.binding_stub` from the compiled binding: what Python uses of cffi, and
# the functions and constants of declarations/.

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, final, overload

from typing_extensions import Buffer

@final
class CData:
    """A C value: a pointer, a structure, an array, a number. Its fields are attributes."""

    def __getattr__(self, field: str, /) -> Any: ...
    def __setattr__(self, field: str, value: Any, /) -> None: ...
    def __getitem__(self, index: int | slice, /) -> Any: ...
    def __setitem__(self, index: int | slice, value: Any, /) -> None: ...
    def __add__(self, count: int, /) -> CData: ...
    def __sub__(self, other: int | CData, /) -> Any: ...
    def __call__(self, *arguments: Any) -> Any: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __int__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __hash__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class CType:
    @property
    def cname(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def fields(self) -> list[tuple[str, Any]]: ...
    @property
    def relements(self) -> dict[str, int]: ...
    @property
    def args(self) -> tuple[CType, ...]: ...
    @property
    def result(self) -> CType: ...
    @property
    def item(self) -> CType: ...

@final
class CBuffer:
    """A C value's bytes, not copied."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> bytes: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __setitem__(self, index: int | slice, value: bytes, /) -> None: ...

@final
class FFI:
    NULL: CData
    errno: int
    error: type[Exception]
    def addressof(self, cdata: CData, /, *fields: str | int) -> CData: ...
    def new(self, cdecl: str | CType, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str | CType, value: int | CData) -> CData: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def buffer(self, cdata: CData, size: int = ...) -> CBuffer: ...
    @overload
    def from_buffer(self, python_buffer: Buffer, /) -> CData: ...
    @overload
    def from_buffer(
        self, cdecl: str, python_buffer: Buffer, /, require_writable: bool = ...
    ) -> CData: ...
    def gc(self, cdata: CData, destructor: Callable[[CData], object]) -> CData: ...
    def sizeof(self, cdecl: str | CType | CData) -> int: ...
    def typeof(self, cdecl: str | Callable[..., Any] | CData) -> CType: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...
    @overload
    def callback(self, cdecl: str | CType) -> Callable[[Callable[..., Any]], CData]: ...
    @overload
    def callback(
        self, cdecl: str | CType, python_callable: Callable[..., Any], error: Any = ...
    ) -> CData: ...

@final
class Lib:
    def aiordma_address_of_sender(
        self,
        provider: CData,
        context: CData,
        port_num: int,
        completion: CData,
        grh: CData | bytes,
        attr: CData,
        /,
    ) -> int: ...
    def aiordma_advise_mr(
        self, domain: CData, advice: int, flags: int, sges: CData | bytes, count: int, /
    ) -> int: ...
    def aiordma_alloc_window(self, domain: CData, type_: int, /) -> CData: ...
    def aiordma_bind_window(
        self,
        queue_pair: CData,
        window: CData,
        wr_id: int,
        send_flags: int,
        region: CData,
        address: int,
        length: int,
        access: int,
        /,
    ) -> int: ...
    def aiordma_create_cq_ex(
        self,
        context: CData,
        entries: int,
        channel: CData,
        vector: int,
        flags: int,
        wc_flags: int,
        /,
    ) -> CData: ...
    def aiordma_data_path(self) -> CData: ...
    def aiordma_dealloc_window(self, window: CData, /) -> int: ...
    def aiordma_local_address(self, id_: CData, /) -> CData: ...
    def aiordma_moderate_cq(self, queue: CData, count: int, period: int, /) -> int: ...
    def aiordma_next_async_event(self, provider: CData, context: CData, copy: CData, /) -> int: ...
    def aiordma_next_cm_event(self, provider: CData, channel: CData, copy: CData, /) -> int: ...
    def aiordma_outwait_receiving(self) -> int: ...
    def aiordma_peer_address(self, id_: CData, /) -> CData: ...
    def aiordma_poll(self, queue: CData, batch: CData, capacity: int, /) -> int: ...
    def aiordma_poll_timestamped(
        self, queue: CData, batch: CData, timestamps: CData, most: int, /
    ) -> int: ...
    def aiordma_post_recv_chain(
        self,
        queue_pair: CData,
        shared: CData,
        requests: CData | bytes,
        count: int,
        sges: CData | bytes,
        sges_size: int,
        posted: CData,
        /,
    ) -> int: ...
    def aiordma_post_send_chain(
        self,
        queue_pair: CData,
        requests: CData | bytes,
        count: int,
        sges: CData | bytes,
        sges_size: int,
        posted: CData,
        /,
    ) -> int: ...
    def aiordma_query_device(self, provider: CData, context: CData, attr: CData, /) -> int: ...
    def aiordma_query_port(
        self, provider: CData, context: CData, port_num: int, attr: CData, /
    ) -> int: ...
    def aiordma_rdma_core(self, message: CData | bytes, size: int, /) -> CData: ...
    def aiordma_read_clock(self, context: CData, ticks: CData, /) -> int: ...
    def aiordma_request_notification(self, queue: CData, solicited_only: int, /) -> int: ...
    def aiordma_software(self) -> CData: ...
    def aiordma_software_add_fault(self, fault: CData, /) -> int: ...
    def aiordma_software_capture(self, path: CData | bytes, most: int, /) -> int: ...
    def aiordma_software_counts(self, counts: CData, /) -> None: ...
    def aiordma_software_fault_struck(self, number: int, /) -> int: ...
    def aiordma_software_limit_held(self, bytes_: int, /) -> None: ...
    def aiordma_software_memory(self, memory: CData, /) -> None: ...
    def aiordma_software_raise(self, event: int, pointer: CData | bytes, /) -> int: ...
    def aiordma_software_remove_fault(self, number: int, /) -> None: ...
    def aiordma_software_seed_faults(self, seed: int, /) -> None: ...
    AIORDMA_FAULT_COMPLETION_DELAYED: int
    AIORDMA_FAULT_CONNECT_DELAYED: int
    AIORDMA_FAULT_CONNECT_REFUSED: int
    AIORDMA_FAULT_CORRUPTED: int
    AIORDMA_FAULT_CRC_WANTED: int
    AIORDMA_FAULT_DEAD_PEER: int
    AIORDMA_FAULT_DROP_AFTER_BYTES: int
    AIORDMA_FAULT_DROP_AFTER_REQUESTS: int
    AIORDMA_FAULT_EVENT_DELAYED: int
    AIORDMA_FAULT_KINDS: int
    AIORDMA_FAULT_NOT_READY: int
    AIORDMA_FAULT_POST_REFUSED: int
    AIORDMA_FAULT_SPURIOUS_EVENT: int
    IBV_ACCESS_HUGETLB: int
    IBV_ACCESS_LOCAL_WRITE: int
    IBV_ACCESS_MW_BIND: int
    IBV_ACCESS_ON_DEMAND: int
    IBV_ACCESS_OPTIONAL_RANGE: int
    IBV_ACCESS_RELAXED_ORDERING: int
    IBV_ACCESS_REMOTE_ATOMIC: int
    IBV_ACCESS_REMOTE_READ: int
    IBV_ACCESS_REMOTE_WRITE: int
    IBV_ACCESS_ZERO_BASED: int
    IBV_ATOMIC_GLOB: int
    IBV_ATOMIC_HCA: int
    IBV_ATOMIC_NONE: int
    IBV_CQ_ATTR_MODERATE: int
    IBV_CQ_INIT_ATTR_MASK_FLAGS: int
    IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN: int
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED: int
    IBV_DEVICE_AUTO_PATH_MIG: int
    IBV_DEVICE_BAD_PKEY_CNTR: int
    IBV_DEVICE_BAD_QKEY_CNTR: int
    IBV_DEVICE_CHANGE_PHY_PORT: int
    IBV_DEVICE_CURR_QP_STATE_MOD: int
    IBV_DEVICE_INIT_TYPE: int
    IBV_DEVICE_MANAGED_FLOW_STEERING: int
    IBV_DEVICE_MEM_MGT_EXTENSIONS: int
    IBV_DEVICE_MEM_WINDOW: int
    IBV_DEVICE_MEM_WINDOW_TYPE_2A: int
    IBV_DEVICE_MEM_WINDOW_TYPE_2B: int
    IBV_DEVICE_N_NOTIFY_CQ: int
    IBV_DEVICE_PCI_WRITE_END_PADDING: int
    IBV_DEVICE_PORT_ACTIVE_EVENT: int
    IBV_DEVICE_RAW_IP_CSUM: int
    IBV_DEVICE_RAW_MULTI: int
    IBV_DEVICE_RAW_SCATTER_FCS: int
    IBV_DEVICE_RC_IP_CSUM: int
    IBV_DEVICE_RC_RNR_NAK_GEN: int
    IBV_DEVICE_RESIZE_MAX_WR: int
    IBV_DEVICE_SHUTDOWN_PORT: int
    IBV_DEVICE_SRQ_RESIZE: int
    IBV_DEVICE_SYS_IMAGE_GUID: int
    IBV_DEVICE_UD_AV_PORT_ENFORCE: int
    IBV_DEVICE_UD_IP_CSUM: int
    IBV_DEVICE_XRC: int
    IBV_EVENT_CLIENT_REREGISTER: int
    IBV_EVENT_COMM_EST: int
    IBV_EVENT_CQ_ERR: int
    IBV_EVENT_DEVICE_FATAL: int
    IBV_EVENT_GID_CHANGE: int
    IBV_EVENT_LID_CHANGE: int
    IBV_EVENT_PATH_MIG: int
    IBV_EVENT_PATH_MIG_ERR: int
    IBV_EVENT_PKEY_CHANGE: int
    IBV_EVENT_PORT_ACTIVE: int
    IBV_EVENT_PORT_ERR: int
    IBV_EVENT_QP_ACCESS_ERR: int
    IBV_EVENT_QP_FATAL: int
    IBV_EVENT_QP_LAST_WQE_REACHED: int
    IBV_EVENT_QP_REQ_ERR: int
    IBV_EVENT_SM_CHANGE: int
    IBV_EVENT_SQ_DRAINED: int
    IBV_EVENT_SRQ_ERR: int
    IBV_EVENT_SRQ_LIMIT_REACHED: int
    IBV_EVENT_WQ_FATAL: int
    IBV_GID_TYPE_IB: int
    IBV_GID_TYPE_ROCE_V1: int
    IBV_GID_TYPE_ROCE_V2: int
    IBV_LINK_LAYER_ETHERNET: int
    IBV_LINK_LAYER_INFINIBAND: int
    IBV_LINK_LAYER_UNSPECIFIED: int
    IBV_MIG_ARMED: int
    IBV_MIG_MIGRATED: int
    IBV_MIG_REARM: int
    IBV_MTU_1024: int
    IBV_MTU_2048: int
    IBV_MTU_256: int
    IBV_MTU_4096: int
    IBV_MTU_512: int
    IBV_MW_TYPE_1: int
    IBV_MW_TYPE_2: int
    IBV_NODE_CA: int
    IBV_NODE_RNIC: int
    IBV_NODE_UNKNOWN: int
    IBV_ODP_SUPPORT: int
    IBV_ODP_SUPPORT_ATOMIC: int
    IBV_ODP_SUPPORT_IMPLICIT: int
    IBV_ODP_SUPPORT_READ: int
    IBV_ODP_SUPPORT_RECV: int
    IBV_ODP_SUPPORT_SEND: int
    IBV_ODP_SUPPORT_SRQ_RECV: int
    IBV_ODP_SUPPORT_WRITE: int
    IBV_PORT_ACTIVE: int
    IBV_PORT_ACTIVE_DEFER: int
    IBV_PORT_ARMED: int
    IBV_PORT_CM_SUP: int
    IBV_PORT_DOWN: int
    IBV_PORT_INIT: int
    IBV_PORT_IP_BASED_GIDS: int
    IBV_PORT_NOP: int
    IBV_QPS_ERR: int
    IBV_QPS_INIT: int
    IBV_QPS_RESET: int
    IBV_QPS_RTR: int
    IBV_QPS_RTS: int
    IBV_QPS_SQD: int
    IBV_QPS_SQE: int
    IBV_QPT_RC: int
    IBV_QPT_UC: int
    IBV_QPT_UD: int
    IBV_QPT_XRC_RECV: int
    IBV_QPT_XRC_SEND: int
    IBV_QP_ACCESS_FLAGS: int
    IBV_QP_ALT_PATH: int
    IBV_QP_AV: int
    IBV_QP_CAP: int
    IBV_QP_CUR_STATE: int
    IBV_QP_DEST_QPN: int
    IBV_QP_EN_SQD_ASYNC_NOTIFY: int
    IBV_QP_MAX_DEST_RD_ATOMIC: int
    IBV_QP_MAX_QP_RD_ATOMIC: int
    IBV_QP_MIN_RNR_TIMER: int
    IBV_QP_PATH_MIG_STATE: int
    IBV_QP_PATH_MTU: int
    IBV_QP_PKEY_INDEX: int
    IBV_QP_PORT: int
    IBV_QP_QKEY: int
    IBV_QP_RETRY_CNT: int
    IBV_QP_RNR_RETRY: int
    IBV_QP_RQ_PSN: int
    IBV_QP_SQ_PSN: int
    IBV_QP_STATE: int
    IBV_QP_TIMEOUT: int
    IBV_RAW_PACKET_CAP_CVLAN_STRIPPING: int
    IBV_RAW_PACKET_CAP_DELAY_DROP: int
    IBV_RAW_PACKET_CAP_IP_CSUM: int
    IBV_RAW_PACKET_CAP_SCATTER_FCS: int
    IBV_REREG_MR_CHANGE_ACCESS: int
    IBV_REREG_MR_CHANGE_PD: int
    IBV_REREG_MR_CHANGE_TRANSLATION: int
    IBV_REREG_MR_ERR_CMD: int
    IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW: int
    IBV_REREG_MR_ERR_DONT_FORK_NEW: int
    IBV_REREG_MR_ERR_DO_FORK_OLD: int
    IBV_REREG_MR_ERR_INPUT: int
    IBV_REREG_MR_FLAGS_SUPPORTED: int
    IBV_SEND_FENCE: int
    IBV_SEND_INLINE: int
    IBV_SEND_IP_CSUM: int
    IBV_SEND_SIGNALED: int
    IBV_SEND_SOLICITED: int
    IBV_SRQ_LIMIT: int
    IBV_SRQ_MAX_WR: int
    IBV_TRANSPORT_IB: int
    IBV_TRANSPORT_IWARP: int
    IBV_TRANSPORT_UNKNOWN: int
    IBV_VALUES_MASK_RAW_CLOCK: int
    IBV_WC_BAD_RESP_ERR: int
    IBV_WC_BIND_MW: int
    IBV_WC_COMP_SWAP: int
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP: int
    IBV_WC_FATAL_ERR: int
    IBV_WC_FETCH_ADD: int
    IBV_WC_GENERAL_ERR: int
    IBV_WC_GRH: int
    IBV_WC_INV_EECN_ERR: int
    IBV_WC_INV_EEC_STATE_ERR: int
    IBV_WC_LOCAL_INV: int
    IBV_WC_LOC_ACCESS_ERR: int
    IBV_WC_LOC_EEC_OP_ERR: int
    IBV_WC_LOC_LEN_ERR: int
    IBV_WC_LOC_PROT_ERR: int
    IBV_WC_LOC_QP_OP_ERR: int
    IBV_WC_LOC_RDD_VIOL_ERR: int
    IBV_WC_MW_BIND_ERR: int
    IBV_WC_RDMA_READ: int
    IBV_WC_RDMA_WRITE: int
    IBV_WC_RECV: int
    IBV_WC_RECV_RDMA_WITH_IMM: int
    IBV_WC_REM_ABORT_ERR: int
    IBV_WC_REM_ACCESS_ERR: int
    IBV_WC_REM_INV_RD_REQ_ERR: int
    IBV_WC_REM_INV_REQ_ERR: int
    IBV_WC_REM_OP_ERR: int
    IBV_WC_RESP_TIMEOUT_ERR: int
    IBV_WC_RETRY_EXC_ERR: int
    IBV_WC_RNR_RETRY_EXC_ERR: int
    IBV_WC_SEND: int
    IBV_WC_STANDARD_FLAGS: int
    IBV_WC_SUCCESS: int
    IBV_WC_TM_ERR: int
    IBV_WC_TM_RNDV_INCOMPLETE: int
    IBV_WC_WITH_IMM: int
    IBV_WC_WITH_INV: int
    IBV_WC_WR_FLUSH_ERR: int
    IBV_WR_ATOMIC_CMP_AND_SWP: int
    IBV_WR_ATOMIC_FETCH_AND_ADD: int
    IBV_WR_BIND_MW: int
    IBV_WR_LOCAL_INV: int
    IBV_WR_RDMA_READ: int
    IBV_WR_RDMA_WRITE: int
    IBV_WR_RDMA_WRITE_WITH_IMM: int
    IBV_WR_SEND: int
    IBV_WR_SEND_WITH_IMM: int
    IBV_WR_SEND_WITH_INV: int
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH: int
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT: int
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE: int
    IB_UVERBS_ADVISE_MR_FLAG_FLUSH: int
    RAI_FAMILY: int
    RAI_NOROUTE: int
    RAI_NUMERICHOST: int
    RAI_PASSIVE: int
    RDMA_CM_EVENT_ADDR_CHANGE: int
    RDMA_CM_EVENT_ADDR_ERROR: int
    RDMA_CM_EVENT_ADDR_RESOLVED: int
    RDMA_CM_EVENT_CONNECT_ERROR: int
    RDMA_CM_EVENT_CONNECT_REQUEST: int
    RDMA_CM_EVENT_CONNECT_RESPONSE: int
    RDMA_CM_EVENT_DEVICE_REMOVAL: int
    RDMA_CM_EVENT_DISCONNECTED: int
    RDMA_CM_EVENT_ESTABLISHED: int
    RDMA_CM_EVENT_MULTICAST_ERROR: int
    RDMA_CM_EVENT_MULTICAST_JOIN: int
    RDMA_CM_EVENT_REJECTED: int
    RDMA_CM_EVENT_ROUTE_ERROR: int
    RDMA_CM_EVENT_ROUTE_RESOLVED: int
    RDMA_CM_EVENT_TIMEWAIT_EXIT: int
    RDMA_CM_EVENT_UNREACHABLE: int
    RDMA_CM_JOIN_MC_ATTR_ADDRESS: int
    RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS: int
    RDMA_MAX_INIT_DEPTH: int
    RDMA_MAX_RESP_RES: int
    RDMA_MC_JOIN_FLAG_FULLMEMBER: int
    RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER: int
    RDMA_OPTION_ID: int
    RDMA_OPTION_ID_ACK_TIMEOUT: int
    RDMA_OPTION_ID_AFONLY: int
    RDMA_OPTION_ID_REUSEADDR: int
    RDMA_OPTION_ID_TOS: int
    RDMA_PS_IB: int
    RDMA_PS_IPOIB: int
    RDMA_PS_TCP: int
    RDMA_PS_UDP: int
    RDMA_UDP_QKEY: int

ffi: FFI
lib: Lib
