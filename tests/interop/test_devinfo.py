"""`ibv_devinfo -v` asks the device by itself: each field that it prints is what we say."""

import socket
import subprocess
from enum import IntFlag

import pytest

from aiordma.verbs import (
    AtomicCapability,
    Context,
    Device,
    DeviceAttributes,
    GidEntry,
    GidType,
    LinkLayer,
    PortAttributes,
    Transport,
)
from tests.devices import DeviceUnderTest

Fields = dict[str, tuple[str, ...]]
"""By name: the value, and the names of flags in the lines below it."""


def printed(output: str) -> Fields:
    """Read the program's output. The port's fields are called "port ..."."""
    found: Fields = {}
    key, prefix = "", ""
    for line in filter(None, map(str.strip, output.splitlines())):
        name, colon, value = (part.strip() for part in line.partition(":"))
        if line.endswith(" not supported"):
            found[prefix + line.removesuffix(" not supported")] = ("not supported",)
        elif colon:
            key = prefix + name
            assert key not in found, f"{key} is printed twice"
            found[key] = (value,) if value else ()
            if name == "port":
                prefix = "port "
        else:
            found[key] += (line,)
    return found


def guid(number: int) -> str:
    digits = f"{number:016x}"
    return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


def flags(value: IntFlag) -> tuple[str, ...]:
    """The names in the order of their bits."""
    return tuple(str(member.name) for member in type(value) if member in value)


def of_device(context: Context) -> Fields:
    ours = context.query()
    transports = {Transport.INFINIBAND: "InfiniBand", Transport.IWARP: "iWARP"}
    atomics = {AtomicCapability.NONE: "NONE", AtomicCapability.DEVICE: "HCA"}
    values: dict[str, object] = {
        name: getattr(ours, name)
        for name in DeviceAttributes.__dataclass_fields__
        if type(getattr(ours, name)) is int
    }
    for tuple_name in ("tso_caps", "rss_caps", "packet_pacing_caps"):
        values.update(getattr(ours, tuple_name)._asdict())
    values |= {
        "hca_id": context.device_name,
        "transport": f"{transports[context.transport]} ({context.transport:d})",
        "fw_ver": ours.firmware,
        "node_guid": guid(ours.node_guid),
        "sys_image_guid": guid(ours.sys_image_guid),
        "vendor_id": f"0x{ours.vendor_id:04x}",
        "hw_ver": f"0x{ours.hw_ver:X}",
        "max_mr_size": f"0x{ours.max_mr_size:x}",
        "page_size_cap": f"0x{ours.page_size_cap:x}",
        "atomic_cap": f"ATOMIC_{atomics[ours.atomic_cap]} ({ours.atomic_cap:d})",
        "device_cap_flags_ex": f"0x{ours.device_cap_flags_ex:X}",
        "rx_hash_function": f"0x{ours.rss_caps.rx_hash_function:x}",
        "rx_hash_fields_mask": f"0x{ours.rss_caps.rx_hash_fields_mask:X}",
        "qp_rate_limit_min": f"{ours.packet_pacing_caps.qp_rate_limit_min}kbps",
        "qp_rate_limit_max": f"{ours.packet_pacing_caps.qp_rate_limit_max}kbps",
    }
    fields: Fields = {name: (str(value),) for name, value in values.items()}
    fields["device_cap_flags"] = (
        f"0x{ours.device_cap_flags:08x}",
        *flags(ours.device_cap_flags),
    )
    fields["general_odp_caps"] = tuple(f"ODP_{name}" for name in flags(ours.odp.general))
    for name in ("rc", "uc", "ud", "xrc"):
        operations = flags(getattr(ours.odp, name))
        fields[f"{name}_odp_caps"] = tuple(f"SUPPORT_{each}" for each in operations) or (
            "NO SUPPORT",
        )
    for name in ("tso_caps", "rss_caps", "packet_pacing_caps"):
        fields[name] = ()  # headings
    if not ours.completion_timestamp_mask:
        fields["completion_timestamp_mask"] = ("not supported",)
    if not ours.hca_core_clock:
        fields["core clock"] = ("not supported",)
    if not ours.tm_caps.max_num_tags:
        fields["tag matching"] = ("not supported",)
    return fields


WIDTHS = {1: "1", 2: "4", 4: "8", 8: "12", 16: "2"}
SPEEDS = {1: "2.5", 2: "5.0", 4: "10.0", 8: "10.0", 16: "14.0", 32: "25.0", 64: "50.0"}
LANES = {1: "1", 2: "2", 3: "4", 4: "8", 5: "15"}
PHYSICAL = {2: "POLLING", 3: "DISABLED", 5: "LINK_UP"}


def of_port(ours: PortAttributes) -> Fields:
    values: dict[str, object] = {
        name: getattr(ours, name) for name in PortAttributes.__dataclass_fields__
    }
    values |= {
        "state": f"PORT_{ours.state.name} ({ours.state:d})",
        "max_mtu": f"{ours.max_mtu.bytes} ({ours.max_mtu:d})",
        "active_mtu": f"{ours.active_mtu.bytes} ({ours.active_mtu:d})",
        "port_lid": ours.lid,
        "port_lmc": f"0x{ours.lmc:02x}",
        "link_layer": {LinkLayer.ETHERNET: "Ethernet"}.get(ours.link_layer, "InfiniBand"),
        "max_msg_sz": f"0x{ours.max_msg_sz:x}",
        "port_cap_flags": f"0x{ours.port_cap_flags:08x}",
        "port_cap_flags2": f"0x{ours.port_cap_flags2:04x}",
        "max_vl_num": f"{LANES.get(ours.max_vl_num, 'invalid value')} ({ours.max_vl_num})",
        "bad_pkey_cntr": f"0x{ours.bad_pkey_cntr:x}",
        "qkey_viol_cntr": f"0x{ours.qkey_viol_cntr:x}",
        "active_width": f"{WIDTHS[ours.active_width]}X ({ours.active_width})",
        "active_speed": f"{SPEEDS[ours.active_speed]} Gbps ({ours.active_speed})",
        "phys_state": f"{PHYSICAL.get(ours.phys_state, '?')} ({ours.phys_state})",
    }
    return {f"port {name}": (str(value),) for name, value in values.items()}


def of_gid(entry: GidEntry) -> tuple[str, tuple[str]]:
    kind = {GidType.ROCE_V1: ", RoCE v1", GidType.ROCE_V2: ", RoCE v2"}.get(entry.type, "")
    if entry.type is GidType.ROCE_V2:
        text = socket.inet_ntop(socket.AF_INET6, entry.gid)
    else:
        text = entry.gid.hex(":", 2)
    return f"port GID[{entry.index:3}]", (text + kind,)


@pytest.mark.filterwarnings("error")
def test_ibv_devinfo_prints_what_we_say(device: DeviceUnderTest) -> None:
    run = subprocess.run(
        ["ibv_devinfo", "-v", "-d", device.name],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    theirs = printed(run.stdout)
    with Device(device.name).open() as context:
        ours = of_device(context) | {"port": ("1",)} | of_port(context.query_port(1))
        ours |= dict(of_gid(entry) for entry in context.gid_table())
        assert Device(device.name).guid == context.query().node_guid
    assert len(theirs) > 70  # or this compares nothing
    assert theirs == {name: ours.get(name, ("we do not say",)) for name in theirs}
    if device.driver == "rxe":
        assert theirs["port GID[  1]"] == (f"::ffff:{device.address}, RoCE v2",)
