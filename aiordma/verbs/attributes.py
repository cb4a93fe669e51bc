"""Attributes of devices and ports, as `ibv_devinfo -v` prints them, and the entries of GID tables
(man ibv_query_device_ex, ibv_query_port, ibv_query_gid_ex)."""

from dataclasses import dataclass, fields
from ipaddress import IPv6Address
from typing import Any

from aiordma._base.enums import AtomicCapability, GidType, LinkLayer, Mtu, PortState
from aiordma._native import ffi
from aiordma.verbs.capabilities import (
    CompletionModerationCapabilities,
    DeviceCapability,
    OnDemandCapabilities,
    OnDemandOperation,
    OnDemandPaging,
    PacketPacingCapabilities,
    RawPacketCapability,
    ReceiveHashCapabilities,
    SegmentationCapabilities,
    TagMatchingCapabilities,
)

__all__ = (
    "DeviceAttributes",
    "GidEntry",
    "PortAttributes",
    "guid_of",
    "read_device",
    "read_gid",
    "read_port",
)


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """A device's identity and limits (man ibv_query_device_ex), under the C names.

    The exceptions: `firmware` is fw_ver, `odp` combines odp_caps and xrc_odp_caps, and
    `num_comp_vectors` comes from the context. GUIDs are in host order: `f"{node_guid:016x}"` gives
    the text that other tools print. hca_core_clock is in kHz, max_dm_size in bytes. A value that
    the device does not report is 0.
    """

    firmware: str
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: DeviceCapability
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_ee_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    max_ee_init_rd_atom: int
    atomic_cap: AtomicCapability
    max_ee: int
    max_rdd: int
    max_mw: int
    max_raw_ipv6_qp: int
    max_raw_ethy_qp: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_total_mcast_qp_attach: int
    max_ah: int
    max_fmr: int
    max_map_per_fmr: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int
    odp: OnDemandCapabilities
    completion_timestamp_mask: int
    hca_core_clock: int
    device_cap_flags_ex: DeviceCapability
    tso_caps: SegmentationCapabilities
    rss_caps: ReceiveHashCapabilities
    max_wq_type_rq: int
    packet_pacing_caps: PacketPacingCapabilities
    raw_packet_caps: RawPacketCapability
    tm_caps: TagMatchingCapabilities
    cq_mod_caps: CompletionModerationCapabilities
    max_dm_size: int
    num_comp_vectors: int


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """A port's attributes (man ibv_query_port), under the C names. active_width, active_speed and
    phys_state are codes of the InfiniBand specification, and the port_cap_flags are its masks."""

    state: PortState
    max_mtu: Mtu
    active_mtu: Mtu
    gid_tbl_len: int
    port_cap_flags: int
    max_msg_sz: int
    bad_pkey_cntr: int
    qkey_viol_cntr: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    lmc: int
    max_vl_num: int
    sm_sl: int
    subnet_timeout: int
    init_type_reply: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: LinkLayer
    flags: int
    port_cap_flags2: int


@dataclass(frozen=True, slots=True)
class GidEntry:
    """An entry of a port's GID table (man ibv_query_gid_ex).

    `gid` has 16 bytes; on RoCE, `address` is its IP address. `interface_index` is the index of the
    network interface (see `socket.if_indextoname`), or 0.
    """

    gid: bytes
    index: int
    port: int
    type: GidType
    interface_index: int

    @property
    def address(self) -> str:
        """The GID as an IP address: an IPv4 address if the GID is IPv4-mapped, else IPv6."""
        address = IPv6Address(self.gid)
        return str(address.ipv4_mapped or address)


def guid_of(raw: int) -> int:
    """Convert a GUID in network byte order to a number in host order."""
    return int.from_bytes(ffi.buffer(ffi.new("uint64_t *", raw))[:], "big")


def _plain(kind: Any, raw: Any, struct: str) -> dict[str, Any]:
    """Return the fields of a C struct that the dataclass has, too."""
    ours = {field.name for field in fields(kind)}
    return {name: getattr(raw, name) for name, _ in ffi.typeof(struct).fields if name in ours}


def _tuple(kind: Any, raw: Any) -> Any:
    return kind(*[getattr(raw, name) for name in kind._fields])


def read_device(raw: Any, num_comp_vectors: int) -> DeviceAttributes:
    """Read a struct ibv_device_attr_ex."""
    base, transports = raw.orig_attr, raw.odp_caps.per_transport_caps
    values = _plain(DeviceAttributes, base, "struct ibv_device_attr")
    values.update(_plain(DeviceAttributes, raw, "struct ibv_device_attr_ex"))
    values.update(
        firmware=ffi.string(base.fw_ver).decode(errors="replace"),
        node_guid=guid_of(base.node_guid),
        sys_image_guid=guid_of(base.sys_image_guid),
        device_cap_flags=DeviceCapability(base.device_cap_flags),
        atomic_cap=AtomicCapability(base.atomic_cap),
        odp=OnDemandCapabilities(
            OnDemandPaging(raw.odp_caps.general_caps),
            OnDemandOperation(transports.rc_odp_caps),
            OnDemandOperation(transports.uc_odp_caps),
            OnDemandOperation(transports.ud_odp_caps),
            OnDemandOperation(raw.xrc_odp_caps),
        ),
        device_cap_flags_ex=DeviceCapability(raw.device_cap_flags_ex),
        raw_packet_caps=RawPacketCapability(raw.raw_packet_caps),
        num_comp_vectors=num_comp_vectors,
    )
    for name, caps in (
        ("tso_caps", SegmentationCapabilities),
        ("rss_caps", ReceiveHashCapabilities),
        ("packet_pacing_caps", PacketPacingCapabilities),
        ("tm_caps", TagMatchingCapabilities),
        ("cq_mod_caps", CompletionModerationCapabilities),
    ):
        values[name] = _tuple(caps, getattr(raw, name))
    return DeviceAttributes(**values)


def read_port(raw: Any) -> PortAttributes:
    """Read a struct ibv_port_attr."""
    values = _plain(PortAttributes, raw, "struct ibv_port_attr")
    values.update(
        state=PortState(raw.state),
        max_mtu=Mtu(raw.max_mtu),
        active_mtu=Mtu(raw.active_mtu),
        link_layer=LinkLayer(raw.link_layer),
    )
    return PortAttributes(**values)


def read_gid(raw: Any) -> GidEntry:
    """Read a struct ibv_gid_entry."""
    return GidEntry(
        gid=bytes(raw.gid.raw),
        index=raw.gid_index,
        port=raw.port_num,
        type=GidType(raw.gid_type),
        interface_index=raw.ndev_ifindex,
    )
