"""What `DeviceAttributes` consists of, under the C names: masks of capabilities, and structs of
limits."""

from enum import IntFlag
from typing import NamedTuple

from aiordma._native import lib

__all__ = (
    "CompletionModerationCapabilities",
    "DeviceCapability",
    "OnDemandCapabilities",
    "OnDemandOperation",
    "OnDemandPaging",
    "PacketPacingCapabilities",
    "RawPacketCapability",
    "ReceiveHashCapabilities",
    "SegmentationCapabilities",
    "TagMatchingCapabilities",
)


class DeviceCapability(IntFlag):
    """Capabilities of a device (`device_cap_flags`; above 32 bits, `device_cap_flags_ex`)."""

    RESIZE_MAX_WR = lib.IBV_DEVICE_RESIZE_MAX_WR
    BAD_PKEY_CNTR = lib.IBV_DEVICE_BAD_PKEY_CNTR
    BAD_QKEY_CNTR = lib.IBV_DEVICE_BAD_QKEY_CNTR
    RAW_MULTI = lib.IBV_DEVICE_RAW_MULTI
    AUTO_PATH_MIG = lib.IBV_DEVICE_AUTO_PATH_MIG
    CHANGE_PHY_PORT = lib.IBV_DEVICE_CHANGE_PHY_PORT
    UD_AV_PORT_ENFORCE = lib.IBV_DEVICE_UD_AV_PORT_ENFORCE
    CURR_QP_STATE_MOD = lib.IBV_DEVICE_CURR_QP_STATE_MOD
    SHUTDOWN_PORT = lib.IBV_DEVICE_SHUTDOWN_PORT
    INIT_TYPE = lib.IBV_DEVICE_INIT_TYPE
    PORT_ACTIVE_EVENT = lib.IBV_DEVICE_PORT_ACTIVE_EVENT
    SYS_IMAGE_GUID = lib.IBV_DEVICE_SYS_IMAGE_GUID
    RC_RNR_NAK_GEN = lib.IBV_DEVICE_RC_RNR_NAK_GEN
    SRQ_RESIZE = lib.IBV_DEVICE_SRQ_RESIZE
    N_NOTIFY_CQ = lib.IBV_DEVICE_N_NOTIFY_CQ
    MEM_WINDOW = lib.IBV_DEVICE_MEM_WINDOW
    UD_IP_CSUM = lib.IBV_DEVICE_UD_IP_CSUM
    XRC = lib.IBV_DEVICE_XRC
    MEM_MGT_EXTENSIONS = lib.IBV_DEVICE_MEM_MGT_EXTENSIONS
    MEM_WINDOW_TYPE_2A = lib.IBV_DEVICE_MEM_WINDOW_TYPE_2A
    MEM_WINDOW_TYPE_2B = lib.IBV_DEVICE_MEM_WINDOW_TYPE_2B
    RC_IP_CSUM = lib.IBV_DEVICE_RC_IP_CSUM
    RAW_IP_CSUM = lib.IBV_DEVICE_RAW_IP_CSUM
    MANAGED_FLOW_STEERING = lib.IBV_DEVICE_MANAGED_FLOW_STEERING
    RAW_SCATTER_FCS = lib.IBV_DEVICE_RAW_SCATTER_FCS
    PCI_WRITE_END_PADDING = lib.IBV_DEVICE_PCI_WRITE_END_PADDING


class OnDemandPaging(IntFlag):
    """Whether a device supports on-demand paging of memory regions (`ibv_odp_general_caps`)."""

    SUPPORT = lib.IBV_ODP_SUPPORT
    SUPPORT_IMPLICIT = lib.IBV_ODP_SUPPORT_IMPLICIT


class OnDemandOperation(IntFlag):
    """Operations that support on-demand paging, by service (`ibv_odp_transport_cap_bits`)."""

    SEND = lib.IBV_ODP_SUPPORT_SEND
    RECV = lib.IBV_ODP_SUPPORT_RECV
    WRITE = lib.IBV_ODP_SUPPORT_WRITE
    READ = lib.IBV_ODP_SUPPORT_READ
    ATOMIC = lib.IBV_ODP_SUPPORT_ATOMIC
    SRQ_RECV = lib.IBV_ODP_SUPPORT_SRQ_RECV


class RawPacketCapability(IntFlag):
    """Capabilities of a device for raw packets (`ibv_raw_packet_caps`)."""

    CVLAN_STRIPPING = lib.IBV_RAW_PACKET_CAP_CVLAN_STRIPPING
    SCATTER_FCS = lib.IBV_RAW_PACKET_CAP_SCATTER_FCS
    IP_CSUM = lib.IBV_RAW_PACKET_CAP_IP_CSUM
    DELAY_DROP = lib.IBV_RAW_PACKET_CAP_DELAY_DROP


class OnDemandCapabilities(NamedTuple):
    """On-demand paging, in general and by service (`ibv_odp_caps`, `xrc_odp_caps`)."""

    general: OnDemandPaging
    rc: OnDemandOperation
    uc: OnDemandOperation
    ud: OnDemandOperation
    xrc: OnDemandOperation


class SegmentationCapabilities(NamedTuple):
    """TCP segmentation offload (`ibv_tso_caps`); `supported_qpts` is a mask of queue pair types."""

    max_tso: int
    supported_qpts: int


class ReceiveHashCapabilities(NamedTuple):
    """Receive-side scaling (`ibv_rss_caps`)."""

    supported_qpts: int
    max_rwq_indirection_tables: int
    max_rwq_indirection_table_size: int
    rx_hash_fields_mask: int
    rx_hash_function: int


class PacketPacingCapabilities(NamedTuple):
    """Rate limits, in kbit/s (`ibv_packet_pacing_caps`)."""

    qp_rate_limit_min: int
    qp_rate_limit_max: int
    supported_qpts: int


class TagMatchingCapabilities(NamedTuple):
    """Tag matching (`ibv_tm_caps`); not supported if max_num_tags is 0."""

    max_rndv_hdr_size: int
    max_num_tags: int
    flags: int
    max_ops: int
    max_sge: int


class CompletionModerationCapabilities(NamedTuple):
    """Moderation of completion events (`ibv_cq_moderation_caps`); the period in microseconds."""

    max_cq_count: int
    max_cq_period: int
