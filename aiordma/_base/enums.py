"""Enumerations of verbs and the connection manager, under their C names. All values come from the C
headers."""

from enum import IntEnum, IntFlag
from typing import Self

from aiordma._native import lib


class _OpenEnum(IntEnum):
    """An enumeration with values that newer devices may add: UNKNOWN_n instead of an error."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member


class Transport(_OpenEnum):
    """A device's transport protocol (`ibv_transport_type`)."""

    UNKNOWN = lib.IBV_TRANSPORT_UNKNOWN
    INFINIBAND = lib.IBV_TRANSPORT_IB
    """InfiniBand, and RoCE, which is its transport over Ethernet."""
    IWARP = lib.IBV_TRANSPORT_IWARP


class LinkLayer(_OpenEnum):
    """A port's link layer (`IBV_LINK_LAYER_...`)."""

    UNSPECIFIED = lib.IBV_LINK_LAYER_UNSPECIFIED
    INFINIBAND = lib.IBV_LINK_LAYER_INFINIBAND
    ETHERNET = lib.IBV_LINK_LAYER_ETHERNET


class AtomicCapability(_OpenEnum):
    """Scope in which a device's atomic operations are atomic (`ibv_atomic_cap`)."""

    NONE = lib.IBV_ATOMIC_NONE
    DEVICE = lib.IBV_ATOMIC_HCA
    GLOBAL = lib.IBV_ATOMIC_GLOB


class CompletionQueueFlag(IntFlag):
    """Flags for creating a completion queue (man ibv_create_cq_ex)."""

    SINGLE_THREADED = lib.IBV_CREATE_CQ_ATTR_SINGLE_THREADED
    """Only one thread at a time uses the queue, so the library takes no lock."""
    IGNORE_OVERRUN = lib.IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN
    """On an overrun, new completions overwrite the oldest without an error."""


class MemoryAdvice(IntEnum):
    """Advice about a part of a memory region with on-demand paging (man ibv_advise_mr)."""

    PREFETCH = lib.IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH
    """Page the part in, and map it for reading."""
    PREFETCH_WRITE = lib.IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE
    """The same for writing."""
    PREFETCH_NO_FAULT = lib.IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT
    """Map those pages only that are in memory."""


class GidType(_OpenEnum):
    """The protocol of an entry in a port's GID table (`ibv_gid_type`)."""

    INFINIBAND = lib.IBV_GID_TYPE_IB
    ROCE_V1 = lib.IBV_GID_TYPE_ROCE_V1
    ROCE_V2 = lib.IBV_GID_TYPE_ROCE_V2


class AsyncEventType(_OpenEnum):
    """Asynchronous events of a device (man ibv_get_async_event)."""

    CQ_ERR = lib.IBV_EVENT_CQ_ERR
    QP_FATAL = lib.IBV_EVENT_QP_FATAL
    QP_REQ_ERR = lib.IBV_EVENT_QP_REQ_ERR
    QP_ACCESS_ERR = lib.IBV_EVENT_QP_ACCESS_ERR
    COMM_EST = lib.IBV_EVENT_COMM_EST
    SQ_DRAINED = lib.IBV_EVENT_SQ_DRAINED
    PATH_MIG = lib.IBV_EVENT_PATH_MIG
    PATH_MIG_ERR = lib.IBV_EVENT_PATH_MIG_ERR
    DEVICE_FATAL = lib.IBV_EVENT_DEVICE_FATAL
    PORT_ACTIVE = lib.IBV_EVENT_PORT_ACTIVE
    PORT_ERR = lib.IBV_EVENT_PORT_ERR
    LID_CHANGE = lib.IBV_EVENT_LID_CHANGE
    PKEY_CHANGE = lib.IBV_EVENT_PKEY_CHANGE
    SM_CHANGE = lib.IBV_EVENT_SM_CHANGE
    SRQ_ERR = lib.IBV_EVENT_SRQ_ERR
    SRQ_LIMIT_REACHED = lib.IBV_EVENT_SRQ_LIMIT_REACHED
    QP_LAST_WQE_REACHED = lib.IBV_EVENT_QP_LAST_WQE_REACHED
    CLIENT_REREGISTER = lib.IBV_EVENT_CLIENT_REREGISTER
    GID_CHANGE = lib.IBV_EVENT_GID_CHANGE
    WQ_FATAL = lib.IBV_EVENT_WQ_FATAL


class Mtu(_OpenEnum):
    """Code of a path's maximum transfer unit. `bytes` is the MTU in bytes."""

    MTU_256 = lib.IBV_MTU_256
    MTU_512 = lib.IBV_MTU_512
    MTU_1024 = lib.IBV_MTU_1024
    MTU_2048 = lib.IBV_MTU_2048
    MTU_4096 = lib.IBV_MTU_4096

    @property
    def bytes(self) -> int:
        """The MTU in bytes: the largest payload of one packet."""
        return 128 << self


class PortState(_OpenEnum):
    """A port's logical state (`ibv_port_state`)."""

    NOP = lib.IBV_PORT_NOP
    DOWN = lib.IBV_PORT_DOWN
    INIT = lib.IBV_PORT_INIT
    ARMED = lib.IBV_PORT_ARMED
    ACTIVE = lib.IBV_PORT_ACTIVE
    ACTIVE_DEFER = lib.IBV_PORT_ACTIVE_DEFER


class Access(IntFlag):
    """Permitted access to a memory region (man ibv_reg_mr). Local reads are always permitted.

    RELAXED_ORDERING permits nothing. It allows the device to write incoming data to the region in
    any order, so that a later WRITE can reach memory before an earlier one. A completion still says
    that all earlier data is there.
    """

    LOCAL_WRITE = lib.IBV_ACCESS_LOCAL_WRITE
    REMOTE_WRITE = lib.IBV_ACCESS_REMOTE_WRITE
    REMOTE_READ = lib.IBV_ACCESS_REMOTE_READ
    REMOTE_ATOMIC = lib.IBV_ACCESS_REMOTE_ATOMIC
    MW_BIND = lib.IBV_ACCESS_MW_BIND
    ZERO_BASED = lib.IBV_ACCESS_ZERO_BASED
    ON_DEMAND = lib.IBV_ACCESS_ON_DEMAND
    HUGETLB = lib.IBV_ACCESS_HUGETLB
    RELAXED_ORDERING = lib.IBV_ACCESS_RELAXED_ORDERING


REMOTE_ACCESS: Access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
"""Everything that a peer can be permitted."""
REMOTE_WRITING: Access = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
"""What lets a peer change memory. It requires LOCAL_WRITE."""


def names_of(access: Access) -> str:
    """Return the names of the flags, for messages."""
    return " | ".join(f"Access.{flag.name}" for flag in Access if flag & access) or "no access"


class MemoryWindowType(IntEnum):
    """A memory window's type, which determines how it is bound (man ibv_alloc_mw)."""

    TYPE_1 = lib.IBV_MW_TYPE_1
    TYPE_2 = lib.IBV_MW_TYPE_2


class SharedReceiveAttribute(IntFlag):
    """Attributes that a modify of a shared receive queue sets (`ibv_srq_attr_mask`)."""

    MAX_WR = lib.IBV_SRQ_MAX_WR
    LIMIT = lib.IBV_SRQ_LIMIT


class WorkCompletionStatus(IntEnum):
    """The status of a work completion (man ibv_poll_cq)."""

    SUCCESS = lib.IBV_WC_SUCCESS
    LOC_LEN_ERR = lib.IBV_WC_LOC_LEN_ERR
    LOC_QP_OP_ERR = lib.IBV_WC_LOC_QP_OP_ERR
    LOC_EEC_OP_ERR = lib.IBV_WC_LOC_EEC_OP_ERR
    LOC_PROT_ERR = lib.IBV_WC_LOC_PROT_ERR
    WR_FLUSH_ERR = lib.IBV_WC_WR_FLUSH_ERR
    MW_BIND_ERR = lib.IBV_WC_MW_BIND_ERR
    BAD_RESP_ERR = lib.IBV_WC_BAD_RESP_ERR
    LOC_ACCESS_ERR = lib.IBV_WC_LOC_ACCESS_ERR
    REM_INV_REQ_ERR = lib.IBV_WC_REM_INV_REQ_ERR
    REM_ACCESS_ERR = lib.IBV_WC_REM_ACCESS_ERR
    REM_OP_ERR = lib.IBV_WC_REM_OP_ERR
    RETRY_EXC_ERR = lib.IBV_WC_RETRY_EXC_ERR
    RNR_RETRY_EXC_ERR = lib.IBV_WC_RNR_RETRY_EXC_ERR
    LOC_RDD_VIOL_ERR = lib.IBV_WC_LOC_RDD_VIOL_ERR
    REM_INV_RD_REQ_ERR = lib.IBV_WC_REM_INV_RD_REQ_ERR
    REM_ABORT_ERR = lib.IBV_WC_REM_ABORT_ERR
    INV_EECN_ERR = lib.IBV_WC_INV_EECN_ERR
    INV_EEC_STATE_ERR = lib.IBV_WC_INV_EEC_STATE_ERR
    FATAL_ERR = lib.IBV_WC_FATAL_ERR
    RESP_TIMEOUT_ERR = lib.IBV_WC_RESP_TIMEOUT_ERR
    GENERAL_ERR = lib.IBV_WC_GENERAL_ERR
    TM_ERR = lib.IBV_WC_TM_ERR
    TM_RNDV_INCOMPLETE = lib.IBV_WC_TM_RNDV_INCOMPLETE


class WorkCompletionOpcode(_OpenEnum):
    """The operation that completed (man ibv_poll_cq); valid only on success."""

    SEND = lib.IBV_WC_SEND
    RDMA_WRITE = lib.IBV_WC_RDMA_WRITE
    RDMA_READ = lib.IBV_WC_RDMA_READ
    COMP_SWAP = lib.IBV_WC_COMP_SWAP
    FETCH_ADD = lib.IBV_WC_FETCH_ADD
    BIND_MW = lib.IBV_WC_BIND_MW
    LOCAL_INV = lib.IBV_WC_LOCAL_INV
    RECV = lib.IBV_WC_RECV
    RECV_RDMA_WITH_IMM = lib.IBV_WC_RECV_RDMA_WITH_IMM


class WorkCompletionFlag(IntFlag):
    """Optional fields that a work completion has (man ibv_poll_cq)."""

    GRH = lib.IBV_WC_GRH
    WITH_IMM = lib.IBV_WC_WITH_IMM
    WITH_INV = lib.IBV_WC_WITH_INV


class WorkRequestOpcode(IntEnum):
    """The operation of a request on the send queue (man ibv_post_send)."""

    RDMA_WRITE = lib.IBV_WR_RDMA_WRITE
    RDMA_WRITE_WITH_IMM = lib.IBV_WR_RDMA_WRITE_WITH_IMM
    SEND = lib.IBV_WR_SEND
    SEND_WITH_IMM = lib.IBV_WR_SEND_WITH_IMM
    RDMA_READ = lib.IBV_WR_RDMA_READ
    ATOMIC_CMP_AND_SWP = lib.IBV_WR_ATOMIC_CMP_AND_SWP
    ATOMIC_FETCH_AND_ADD = lib.IBV_WR_ATOMIC_FETCH_AND_ADD
    LOCAL_INV = lib.IBV_WR_LOCAL_INV
    BIND_MW = lib.IBV_WR_BIND_MW
    SEND_WITH_INV = lib.IBV_WR_SEND_WITH_INV


class SendFlag(IntFlag):
    """Flags of a request on the send queue (man ibv_post_send)."""

    FENCE = lib.IBV_SEND_FENCE
    SIGNALED = lib.IBV_SEND_SIGNALED
    SOLICITED = lib.IBV_SEND_SOLICITED
    INLINE = lib.IBV_SEND_INLINE


class QueuePairType(IntEnum):
    """A queue pair's service (man ibv_create_qp)."""

    RC = lib.IBV_QPT_RC
    UC = lib.IBV_QPT_UC
    UD = lib.IBV_QPT_UD


class QueuePairState(IntEnum):
    """A queue pair's state (man ibv_modify_qp)."""

    RESET = lib.IBV_QPS_RESET
    INIT = lib.IBV_QPS_INIT
    RTR = lib.IBV_QPS_RTR
    RTS = lib.IBV_QPS_RTS
    SQD = lib.IBV_QPS_SQD
    SQE = lib.IBV_QPS_SQE
    ERR = lib.IBV_QPS_ERR


class QueuePairAttribute(IntFlag):
    """Attributes that a modify sets or a query returns (`ibv_qp_attr_mask`)."""

    STATE = lib.IBV_QP_STATE
    CUR_STATE = lib.IBV_QP_CUR_STATE
    EN_SQD_ASYNC_NOTIFY = lib.IBV_QP_EN_SQD_ASYNC_NOTIFY
    ACCESS_FLAGS = lib.IBV_QP_ACCESS_FLAGS
    PKEY_INDEX = lib.IBV_QP_PKEY_INDEX
    PORT = lib.IBV_QP_PORT
    QKEY = lib.IBV_QP_QKEY
    AV = lib.IBV_QP_AV
    PATH_MTU = lib.IBV_QP_PATH_MTU
    TIMEOUT = lib.IBV_QP_TIMEOUT
    RETRY_CNT = lib.IBV_QP_RETRY_CNT
    RNR_RETRY = lib.IBV_QP_RNR_RETRY
    RQ_PSN = lib.IBV_QP_RQ_PSN
    MAX_QP_RD_ATOMIC = lib.IBV_QP_MAX_QP_RD_ATOMIC
    ALT_PATH = lib.IBV_QP_ALT_PATH
    MIN_RNR_TIMER = lib.IBV_QP_MIN_RNR_TIMER
    SQ_PSN = lib.IBV_QP_SQ_PSN
    MAX_DEST_RD_ATOMIC = lib.IBV_QP_MAX_DEST_RD_ATOMIC
    PATH_MIG_STATE = lib.IBV_QP_PATH_MIG_STATE
    CAP = lib.IBV_QP_CAP
    DEST_QPN = lib.IBV_QP_DEST_QPN


class PortSpace(IntEnum):
    """A CM identifier's port space (man rdma_create_id)."""

    IPOIB = lib.RDMA_PS_IPOIB
    TCP = lib.RDMA_PS_TCP
    UDP = lib.RDMA_PS_UDP
    IB = lib.RDMA_PS_IB


class CmEventType(IntEnum):
    """Events of the connection manager (man rdma_get_cm_event)."""

    ADDR_RESOLVED = lib.RDMA_CM_EVENT_ADDR_RESOLVED
    ADDR_ERROR = lib.RDMA_CM_EVENT_ADDR_ERROR
    ROUTE_RESOLVED = lib.RDMA_CM_EVENT_ROUTE_RESOLVED
    ROUTE_ERROR = lib.RDMA_CM_EVENT_ROUTE_ERROR
    CONNECT_REQUEST = lib.RDMA_CM_EVENT_CONNECT_REQUEST
    CONNECT_RESPONSE = lib.RDMA_CM_EVENT_CONNECT_RESPONSE
    CONNECT_ERROR = lib.RDMA_CM_EVENT_CONNECT_ERROR
    UNREACHABLE = lib.RDMA_CM_EVENT_UNREACHABLE
    REJECTED = lib.RDMA_CM_EVENT_REJECTED
    ESTABLISHED = lib.RDMA_CM_EVENT_ESTABLISHED
    DISCONNECTED = lib.RDMA_CM_EVENT_DISCONNECTED
    DEVICE_REMOVAL = lib.RDMA_CM_EVENT_DEVICE_REMOVAL
    MULTICAST_JOIN = lib.RDMA_CM_EVENT_MULTICAST_JOIN
    MULTICAST_ERROR = lib.RDMA_CM_EVENT_MULTICAST_ERROR
    ADDR_CHANGE = lib.RDMA_CM_EVENT_ADDR_CHANGE
    TIMEWAIT_EXIT = lib.RDMA_CM_EVENT_TIMEWAIT_EXIT

    @property
    def label(self) -> str:
        """The event's name in lower case, for messages."""
        return self.name.lower().replace("_", " ")
