"""What C's structs say arrives in the field of the same name: with numbers of no device."""

import dataclasses
import itertools
from typing import Any

import pytest

from aiordma.verbs import DeviceAttributes, GidEntry, GidType, PortAttributes, PortState
from aiordma.verbs.attributes import guid_of, read_device, read_gid, read_port
from tests.internals import ffi

NUMBERS = ("int", "unsigned int", "uint8_t", "uint16_t", "uint32_t", "uint64_t")


def fill(raw: Any, struct: Any, counter: Any) -> None:
    """Write another number into each field, those of the structs inside too."""
    for name, field in struct.fields:
        if field.type.kind == "struct":
            fill(getattr(raw, name), field.type, counter)
        elif field.type.kind == "enum" or field.type.cname in NUMBERS:
            setattr(raw, name, next(counter))


def number(value: object) -> object:
    return int(value) if isinstance(value, int) else value


def test_each_field_of_a_device_is_cs() -> None:
    raw = ffi.new("struct ibv_device_attr_ex *")
    fill(raw, ffi.typeof("struct ibv_device_attr_ex"), itertools.count(1))
    raw.orig_attr.fw_ver = b"1.2.3"
    ours = read_device(raw, 17)
    assert (ours.firmware, ours.num_comp_vectors) == ("1.2.3", 17)
    assert ours.node_guid == guid_of(raw.orig_attr.node_guid)
    assert ours.sys_image_guid == guid_of(raw.orig_attr.sys_image_guid)
    assert ours.odp == (
        raw.odp_caps.general_caps,
        raw.odp_caps.per_transport_caps.rc_odp_caps,
        raw.odp_caps.per_transport_caps.uc_odp_caps,
        raw.odp_caps.per_transport_caps.ud_odp_caps,
        raw.xrc_odp_caps,
    )
    elsewhere = {"firmware", "num_comp_vectors", "node_guid", "sys_image_guid", "odp"}
    for field in dataclasses.fields(DeviceAttributes):
        if field.name in elsewhere:
            continue
        value: Any = getattr(ours, field.name)
        theirs = getattr(raw if hasattr(raw, field.name) else raw.orig_attr, field.name)
        if hasattr(value, "_asdict"):
            assert value._asdict() == {name: getattr(theirs, name) for name in value._fields}
            assert 0 not in value
        else:
            assert number(value) == theirs != 0, field.name


def test_each_field_of_a_port_is_cs() -> None:
    raw = ffi.new("struct ibv_port_attr *")
    fill(raw, ffi.typeof("struct ibv_port_attr"), itertools.count(1))
    ours = read_port(raw)
    for field in dataclasses.fields(PortAttributes):
        assert number(getattr(ours, field.name)) == getattr(raw, field.name) != 0, field.name
    assert isinstance(ours.state, PortState)


@pytest.mark.parametrize(
    ("gid", "address"),
    [
        ("00000000000000000000ffff0a010101", "10.1.1.1"),
        ("fe800000000000007073c1fffea3abf9", "fe80::7073:c1ff:fea3:abf9"),
    ],
)
def test_a_gid_is_an_address(gid: str, address: str) -> None:
    raw = ffi.new("struct ibv_gid_entry *")
    raw.gid.raw = bytes.fromhex(gid)
    raw.gid_index, raw.port_num, raw.gid_type, raw.ndev_ifindex = 3, 2, GidType.ROCE_V2, 9
    entry = read_gid(raw)
    assert entry == GidEntry(bytes.fromhex(gid), 3, 2, GidType.ROCE_V2, 9)
    assert entry.address == address


def test_a_guid_is_the_number_that_other_tools_print() -> None:
    raw = ffi.new("uint64_t *")
    ffi.buffer(raw)[:] = bytes.fromhex("7073c1fffea3abf9")  # as it lies in memory: big-endian
    assert f"{guid_of(raw[0]):016x}" == "7073c1fffea3abf9"
