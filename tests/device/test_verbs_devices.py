"""What devices and their ports say of themselves, and the sizes that follow from it."""

import socket

import pytest

import aiordma
from aiordma.verbs import Capacity, CompletionQueue, Device, GidType, QueuePair
from tests.devices import DeviceUnderTest


def test_device_reports_its_attributes(device: DeviceUnderTest) -> None:
    assert device.name in Device.names()
    with Device(device.name).open() as context:
        attributes = context.query()
        assert context.device_name == device.name
        assert attributes.phys_port_cnt == 1
        assert attributes.max_cqe > 0
        assert attributes.max_qp_wr > 0
        port = context.query_port()
        assert port.state.name == "ACTIVE"
        assert port.active_mtu.bytes in (256, 512, 1024, 2048, 4096)
        assert len(context.query_gid()) == 16
        with pytest.raises(aiordma.VerbsCallError, match="ibv_query_port"):
            context.query_port(7)
        with pytest.raises(aiordma.VerbsCallError, match="ibv_query_gid"):
            context.query_gid(1, 10_000)


INTERFACES = {"rxe": "dummy0", "software": "lo", "software_roce": "lo"}
"""What has the address under test; siw's only GID is no IP address."""


def test_the_gid_table_names_type_and_interface(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context:
        table = context.gid_table()
        assert table
        for entry in table:
            assert entry == context.query_gid_entry(entry.port, entry.index)
            assert entry.gid == context.query_gid(entry.port, entry.index)
            assert entry.port == 1
        if device.driver in INTERFACES:
            (own,) = [entry for entry in table if entry.address == device.address]
            assert own.type is GidType.ROCE_V2
            assert socket.if_indextoname(own.interface_index) == INTERFACES[device.driver]
        else:
            assert table[0].type is GidType.INFINIBAND
        with pytest.raises(aiordma.VerbsCallError, match="ibv_query_gid_ex"):
            context.query_gid_entry(1, 100_000)


def test_the_partition_key_of_a_port_is_a_number(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context:
        for index in range(context.query_port().pkey_tbl_len):
            assert context.query_pkey(1, index) == 0xFFFF  # full member of the default partition
        with pytest.raises(aiordma.VerbsCallError, match="ibv_query_pkey"):
            context.query_pkey(1, 1000)


def test_a_device_that_is_not_there_has_no_guid(device: DeviceUnderTest) -> None:
    with pytest.raises(aiordma.NoDeviceError, match=f"'mlx5_7'.*{device.name}"):
        _ = Device("mlx5_7").guid


def test_an_unknown_device_is_refused_with_those_there_are(device: DeviceUnderTest) -> None:
    with pytest.raises(aiordma.NoDeviceError, match=f"no RDMA device 'mlx5_7'.*{device.name}"):
        Device("mlx5_7").open()


def test_sizes_beyond_the_device_are_refused_with_its_limit(device: DeviceUnderTest) -> None:
    with (
        Device(device.name).open() as context,
        context.alloc_pd() as domain,
        CompletionQueue(context, 16) as queue,
    ):
        limit = context.query()
        for entries in (0, limit.max_cqe + 1):
            with pytest.raises(ValueError, match=rf"1\.\.{limit.max_cqe}"):
                CompletionQueue(context, entries)
        for name, most in (("max_send_wr", limit.max_qp_wr), ("max_recv_sge", limit.max_sge)):
            with pytest.raises(ValueError, match=rf"{name}={most + 1}: .* has 0\.\.{most}"):
                QueuePair.create(domain, queue, queue, capacity=Capacity(**{name: most + 1}))
        pair = QueuePair.create(domain, queue, queue, capacity=Capacity(5, 6, 2, 3, 32))
        assert pair.capacity.max_send_wr >= 5
        assert pair.capacity.max_recv_wr >= 6
        assert pair.capacity.max_send_sge >= 2
        assert pair.capacity.max_recv_sge >= 3
