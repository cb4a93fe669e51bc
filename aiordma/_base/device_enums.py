"""Enumerations of device capabilities, under their C names. All others are in `enums`."""

from enum import IntFlag

from aiordma._native import lib

__all__ = ("DeviceCapability", "OnDemandOperation", "OnDemandPaging", "RawPacketCapability")


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
