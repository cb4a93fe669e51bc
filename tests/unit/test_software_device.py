"""The software device itself: its list, limits, addresses, contexts; and forks, as C sees them."""

import errno
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import aiordma
from aiordma.verbs import AtomicCapability, Device, GidType, LinkLayer, Mtu, PortState
from tests.internals import ffi, lib, software
from tests.network import run_alone
from tests.unit.software_device import (
    failed,
    make_queue,
    minus_one,
    nothing_left,
    opened,
    opened_domain,
)
from tests.unit.sources import ROOT

TABLE_LENGTH = 256


@pytest.fixture
def context() -> Iterator[Any]:
    with nothing_left(), opened() as made:
        yield made


def test_its_table_has_two_devices() -> None:
    count = ffi.new("int *")
    listed = software().get_device_list(count)
    assert count[0] == 2
    assert not listed[2]
    names = [ffi.string(software().get_device_name(listed[i])) for i in range(2)]
    assert names == [b"software", b"software_roce"]
    software().free_device_list(listed)
    with nothing_left(), opened() as one, opened() as other:
        assert one != other
    assert failed(software().open_device(ffi.NULL)) == errno.EINVAL


def test_the_guid_is_the_machines_and_locally_administered() -> None:
    guid = Device("software").guid
    assert guid >> 56 & 3 == 2
    out = subprocess.run(
        [sys.executable, "-c", "import aiordma; print(aiordma.verbs.Device('software').guid)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(out.stdout) == guid
    with Device("software").open() as context:
        assert context.query().node_guid == context.query().sys_image_guid == guid


def test_what_it_says_it_can_is_what_it_holds_to() -> None:
    with Device("software").open() as context:
        device = context.query()
        assert device.firmware == aiordma.__version__
        assert context.transport is aiordma.verbs.Transport.IWARP
        assert device.atomic_cap is AtomicCapability.DEVICE
        assert device.num_comp_vectors == device.phys_port_cnt == device.max_pkeys == 1
        for name in ("max_qp", "max_cq", "max_mr", "max_mw", "max_ah", "max_srq", "max_mcast_grp"):
            assert getattr(device, name) > 0, name
        with pytest.raises(ValueError, match="entries"):
            aiordma.verbs.CompletionQueue(context, device.max_cqe + 1)
        aiordma.verbs.CompletionQueue(context, device.max_cqe).close()


def test_its_port_is_an_active_one_of_ethernet() -> None:
    with Device("software").open() as context:
        port = context.query_port(1)
        assert port.state is PortState.ACTIVE
        assert port.link_layer is LinkLayer.ETHERNET
        assert port.active_mtu is port.max_mtu is Mtu.MTU_4096
        assert (port.gid_tbl_len, port.pkey_tbl_len) == (TABLE_LENGTH, 1)
        assert port.max_msg_sz == 1 << 30
        for number in (0, 2, 255):
            with pytest.raises(aiordma.VerbsCallError):
                context.query_port(number)


def test_the_older_query_of_a_port_leaves_alone_what_it_does_not_know(context: Any) -> None:
    attr = ffi.new("struct ibv_port_attr *")
    attr.port_cap_flags2 = 0xABCD
    compatible = ffi.cast("struct _compat_ibv_port_attr *", attr)
    assert software().query_port(context, 1, compatible) == 0
    assert attr.gid_tbl_len == TABLE_LENGTH
    assert attr.link_layer == lib.IBV_LINK_LAYER_ETHERNET
    assert attr.port_cap_flags2 == 0xABCD
    assert software().query_port(context, 2, compatible) == errno.EINVAL


def test_keys_of_partitions(context: Any) -> None:
    key = ffi.new("uint16_t *")
    assert software().query_pkey(context, 1, 0, key) == 0
    assert key[0] == 0xFFFF
    for port, index in ((1, 1), (1, -1), (2, 0)):
        assert minus_one(software().query_pkey(context, port, index, key)) == errno.EINVAL


# -- addresses ------------------------------------------------------------------------------------


def test_the_addresses_of_the_interfaces_are_the_gid_table() -> None:
    with Device("software").open() as context:
        table = context.gid_table()
        assert len({entry.gid for entry in table}) == len(table)
        (local,) = [entry for entry in table if entry.address == "127.0.0.1"]
        assert socket.if_indextoname(local.interface_index) == "lo"
        for entry in table:
            assert entry.type is GidType.ROCE_V2
            assert context.query_gid_entry(1, entry.index) == entry
            assert context.query_gid(1, entry.index) == entry.gid
            ipaddress.ip_address(entry.address)


def test_an_empty_entry_is_no_data_and_one_beyond_the_table_is_invalid(context: Any) -> None:
    entry, gid = ffi.new("struct ibv_gid_entry *"), ffi.new("union ibv_gid *")
    size = ffi.sizeof("struct ibv_gid_entry")
    last = TABLE_LENGTH - 1
    query = software().query_gid_ex
    assert query(context, 1, last, entry, 0, size) == errno.ENODATA
    assert software().query_gid(context, 1, last, gid) == 0
    assert bytes(gid.raw) == bytes(16)
    assert query(context, 1, TABLE_LENGTH, entry, 0, size) == errno.EINVAL
    assert query(context, 2, 0, entry, 0, size) == errno.EINVAL
    assert query(context, 1, 0, entry, 1, size) == errno.EINVAL
    assert query(context, 1, 0, entry, 0, 0) == errno.EINVAL
    for port, index in ((1, TABLE_LENGTH), (1, -1), (0, 0)):
        assert minus_one(software().query_gid(context, port, index, gid)) == errno.EINVAL


def test_entries_are_as_long_as_the_program_knows_them(context: Any) -> None:
    size = ffi.sizeof("struct ibv_gid_entry")
    plain = ffi.new("struct ibv_gid_entry[]", TABLE_LENGTH)
    count = software().query_gid_table(context, plain, TABLE_LENGTH, 0, size)
    assert count >= 1
    for entry_size in (16, size - 4, size + 12):
        room = ffi.new("char[]", b"\xee" * (count * entry_size))
        entries = ffi.cast("struct ibv_gid_entry *", room)
        assert software().query_gid_table(context, entries, count, 0, entry_size) == count
        for i in range(count):
            given = ffi.buffer(room)[i * entry_size : (i + 1) * entry_size]
            known = ffi.buffer(plain)[i * size : (i + 1) * size][:entry_size]
            assert given == known.ljust(entry_size, b"\0")
    table = software().query_gid_table
    assert table(context, plain, 0, 0, size) == -errno.EINVAL
    assert table(context, plain, TABLE_LENGTH, 1, size) == -errno.EINVAL
    assert table(context, plain, TABLE_LENGTH, 0, 0) == -errno.EINVAL
    if count > 1:
        assert table(context, plain, count - 1, 0, size) == -errno.EINVAL


# -- contexts -------------------------------------------------------------------------------------


def test_the_connection_managers_contexts_are_everybodys() -> None:
    count = ffi.new("int *")
    first = software().get_devices(count)
    again = software().get_devices(ffi.NULL)
    assert count[0] == 2
    for i in range(2):
        assert first[i] == again[i]
        assert software().close_device(first[i]) == errno.EBUSY
    assert not first[2]
    software().free_devices(first)
    software().free_devices(again)


def test_a_context_is_closed_after_what_was_made_of_it() -> None:
    with nothing_left(), opened() as context:
        queue = make_queue(context)
        assert software().close_device(context) == errno.EBUSY
        assert software().destroy_cq(queue) == 0
        channel = software().create_comp_channel(context)
        assert software().close_device(context) == errno.EBUSY
        assert software().destroy_comp_channel(channel) == 0


def test_nothing_is_refused_not_followed() -> None:
    null, table = ffi.NULL, software()
    for constructor in (table.alloc_pd, table.create_comp_channel):
        assert failed(constructor(null)) == errno.EINVAL
    assert failed(table.create_cq(null, 1, null, null, 0)) == errno.EINVAL
    assert failed(table.create_srq(null, null)) == errno.EINVAL
    assert failed(table.create_qp(null, null)) == errno.EINVAL
    assert failed(table.reg_mr(null, null, 1, 0)) == errno.EINVAL
    for destroy in (
        table.close_device,
        table.dealloc_pd,
        table.dereg_mr,
        table.destroy_comp_channel,
        table.destroy_cq,
        table.destroy_srq,
        table.destroy_qp,
    ):
        assert destroy(null) == errno.EINVAL
    assert minus_one(table.get_async_event(null, null)) == errno.EINVAL
    assert minus_one(table.get_cq_event(null, null, null)) == errno.EINVAL
    table.ack_cq_events(null, 1)
    table.ack_async_event(null)


# -- forks ----------------------------------------------------------------------------------------

# In a process of its own, since a fork of pytest's has all its threads' locks.
FORKED = """
import os
from aiordma._native import ffi, lib
from aiordma._base.provider import software
from tests.unit.software_device import *

table = software()

def sockets():
    names = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    links = {os.readlink(name) for name in names if os.path.islink(name)}
    return {link for link in links if link.startswith("socket:")}

with opened_domain() as (context, domain):
    channel = table.create_comp_channel(context)
    queue = make_queue(context, 16, channel)
    pair = make_pair(domain, queue, queue)
    memory = ffi.new("char[]", 64)
    region = table.reg_mr(domain, memory, 64, lib.IBV_ACCESS_LOCAL_WRITE)
    window = lib.aiordma_alloc_window(domain, 2)
    cm_channel = table.create_event_channel()
    cm_id = ffi.new("struct rdma_cm_id **")
    assert table.create_id(cm_channel, cm_id, ffi.NULL, lib.RDMA_PS_TCP) == 0
    address = ffi.from_buffer(b"\2" + bytes(15))  # AF_INET, any
    before = sockets()
    assert table.bind_addr(cm_id[0], ffi.cast("struct sockaddr *", address)) == 0
    (bound,) = sockets() - before
    aside = Aside(lambda: take_event(channel))  # a thread that waits, and is not in the child
    assert aside.blocks()
    child = os.fork()
    if child == 0:
        assert bound not in sockets()
        # Afresh: its own objects work, and nothing of the parent's is counted.
        with nothing_left(), opened_domain() as (mine, my_domain):
            mine_queue = make_queue(mine)
            mine_pair = make_pair(my_domain, mine_queue, mine_queue)
            fail(mine_pair)
            post_receives(mine_pair, range(3))
            assert polled(mine_queue) == [0, 1, 2]
            assert table.destroy_qp(mine_pair) == 0
            assert table.destroy_cq(mine_queue) == 0
        # And again, one further down.
        grandchild = os.fork()
        if grandchild == 0:
            with nothing_left(), opened_domain():
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 7
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    # The parent's are as they were.
    fail(pair)
    assert lib.aiordma_request_notification(queue, 0) == 0
    post_receives(pair, range(2))
    assert aside.end() == queue
    table.ack_cq_events(queue, 1)
    assert polled(queue) == [0, 1]
    assert table.destroy_id(cm_id[0]) == 0
    table.destroy_event_channel(cm_channel)
    assert lib.aiordma_dealloc_window(window) == 0
    assert table.dereg_mr(region) == table.destroy_qp(pair) == table.destroy_cq(queue) == 0
    assert table.destroy_comp_channel(channel) == 0
print("as it should be")
"""


def test_a_forked_child_has_a_device_of_its_own() -> None:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (out.stdout, out.returncode) == ("as it should be\n", 0), out.stderr


def test_a_program_that_forks_before_its_first_use_has_a_device_in_both() -> None:
    program = (
        "import os, aiordma\n"
        "child = os.fork()\n"
        "aiordma.verbs.Device('software').open().close()\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_a_domain_is_of_its_context() -> None:
    with nothing_left(), opened_domain() as (_, domain), opened() as other:
        queue = make_queue(other)
        init = ffi.new("struct ibv_qp_init_attr *")
        init.send_cq = init.recv_cq = queue
        init.qp_type = lib.IBV_QPT_RC
        assert failed(software().create_qp(domain, init)) == errno.EINVAL
        assert software().destroy_cq(queue) == 0


# In a network of its own, whose one interface is its to take up and down.
NEWS = """
import select
from aiordma.verbs import AsyncEvent, AsyncEventType, Device
from tests.network import ip

def index(context, address):
    found = [entry.index for entry in context.gid_table() if entry.address == address]
    return found[0] if found else None

def changes(context):
    assert select.select([context.async_fd], [], [], 10)[0]
    seen = list(iter(context.take_async_event, None))
    assert set(seen) == {AsyncEvent(AsyncEventType.GID_CHANGE, port=1)}, seen

with Device("software").open() as context, Device("software").open() as other:
    assert context.gid_table() == []
    assert context.take_async_event() is None
    ip("link set lo up")
    changes(context)
    changes(other)
    assert index(context, "127.0.0.1") == 0
    # An address that goes leaves a hole, which the next one fills.
    ip("address add 10.9.9.1/32 dev lo")
    hole = index(context, "10.9.9.1")
    ip("address add 172.16.9.2/32 dev lo")
    second = index(context, "172.16.9.2")
    ip("address delete 10.9.9.1/32 dev lo")
    assert (index(context, "10.9.9.1"), index(context, "172.16.9.2")) == (None, second)
    ip("address add 192.168.9.3/32 dev lo")
    assert (index(context, "192.168.9.3"), index(context, "172.16.9.2")) == (hole, second)
    ip("link set lo down", "address flush dev lo")
    changes(context)
    changes(other)
    assert context.gid_table() == []
print("as it should be")
"""


def test_address_change_raises_event_on_every_context() -> None:
    assert run_alone(NEWS) == "as it should be\n"
