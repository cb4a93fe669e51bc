"""What is passed to the synchronous verbs objects: what will not do is refused by the parameter's
name, before C sees it, and nothing is made of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import pytest

import aiordma
from aiordma import MemoryRegion, RemoteMemory
from aiordma.verbs import (
    Capacity,
    CompletionQueue,
    ConnectionParameters,
    MemoryWindow,
    QueuePair,
    SendFlag,
    WorkRequestOpcode,
)
from tests.device.test_arguments import ACCESS, BUFFER, DATA, HUGE, TEXT, An, Whole, bad_values
from tests.devices import ADDRESS, DEVICE, kernel_objects


class World:
    """One object of each kind."""

    def __init__(self, stack: ExitStack) -> None:
        enter = stack.enter_context
        self.context = enter(aiordma.verbs.Device(DEVICE).open())
        self.domain = enter(self.context.alloc_pd())
        self.queue = enter(CompletionQueue(self.context, 8))
        self.region = enter(MemoryRegion(self.domain, bytearray(64)))
        self.pair = enter(
            QueuePair.create(self.domain, self.queue, self.queue, capacity=Capacity(4, 4, 1, 1))
        )
        self.shared = enter(aiordma.verbs.RawSharedReceiveQueue(self.domain, 4))
        self.channel = enter(aiordma.verbs.EventChannel(DEVICE))
        self.identifier = enter(aiordma.verbs.Identifier(self.channel))
        self.vector = aiordma.verbs.AddressVector(gid=bytes(16))
        self.enter = enter

    @cached_property
    def window(self) -> MemoryWindow:
        return self.enter(MemoryWindow(self.domain))

    @cached_property
    def handle(self) -> aiordma.verbs.AddressHandle:
        gid = self.context.query_gid(1, 0)
        return self.enter(
            aiordma.verbs.AddressHandle(self.domain, aiordma.verbs.AddressVector(gid=gid))
        )


Use = Callable[..., Any]
SEND = aiordma.verbs.SendWork("SEND", WorkRequestOpcode.SEND)
NUMBER = Whole(64)
# What is called; arguments that will do; what each parameter is.
CALLS: dict[str, tuple[Use, Callable[[World], dict[str, Any]], dict[str, object]]] = {
    "Device": (lambda w, name: aiordma.verbs.Device(name), lambda w: {}, {"name": TEXT}),
    "query_port": (
        lambda w, port: w.context.query_port(port),
        lambda w: {},
        {"port": Whole(8)},
    ),
    **{
        name: (
            lambda w, n=name, **k: getattr(w.context, n)(**k),
            lambda w: {"port": 1, "index": 0},
            {"port": Whole(8), "index": Whole(31, signed=True)},
        )
        for name in ("query_gid", "query_pkey")
    },
    "query_gid_entry": (
        lambda w, **k: w.context.query_gid_entry(**k),
        lambda w: {},
        {"port": Whole(8), "index": Whole(32)},
    ),
    "ProtectionDomain": (
        lambda w, context: aiordma.verbs.ProtectionDomain(context),
        lambda w: {},
        {"context": An},
    ),
    "CompletionChannel": (
        lambda w, context: aiordma.verbs.CompletionChannel(context),
        lambda w: {},
        {"context": An},
    ),
    "CompletionQueue": (
        lambda w, **k: CompletionQueue(**k),
        lambda w: {"context": w.context, "entries": 8},
        {"context": An, "entries": NUMBER, "channel": An, "comp_vector": Whole(31)},
    ),
    "resize": (lambda w, entries: w.queue.resize(entries), lambda w: {}, {"entries": NUMBER}),
    "poll": (lambda w, most: w.queue.poll(most), lambda w: {}, {"most": Whole(31)}),
    "MemoryRegion": (
        lambda w, **k: MemoryRegion(**k),
        lambda w: {"domain": w.domain, "buffer": bytearray(8)},
        {
            "domain": An,
            "buffer": BUFFER,
            "access": ACCESS,
            "iova": Whole(64, none=True),
        },
    ),
    "reregister": (
        lambda w, **k: w.region.reregister(**k),
        lambda w: {},
        {"domain": An, "access": ACCESS},
    ),
    "MemoryWindow": (
        lambda w, **k: MemoryWindow(**k),
        lambda w: {"domain": w.domain},
        {"domain": An, "kind": Whole(31)},
    ),
    "RawSharedReceiveQueue": (
        lambda w, **k: aiordma.verbs.RawSharedReceiveQueue(**k),
        lambda w: {"domain": w.domain, "max_wr": 4},
        {"domain": An, "max_wr": NUMBER, "max_sge": NUMBER},
    ),
    "modify a shared receive queue": (
        lambda w, **k: w.shared.modify(**k),
        lambda w: {},
        {"max_wr": Whole(32, none=True), "limit": Whole(32, none=True)},
    ),
    "create": (
        lambda w, **k: QueuePair.create(w.domain, w.queue, w.queue, **k),
        lambda w: {},
        {"service": Whole(31), "capacity": An, "shared_receive": An},
    ),
    "create on": (
        lambda w, **k: QueuePair.create(**k),
        lambda w: {"domain": w.domain, "send_queue": w.queue, "receive_queue": w.queue},
        {"domain": An, "send_queue": An, "receive_queue": An},
    ),
    "create with a capacity": (
        lambda w, **k: QueuePair.create(w.domain, w.queue, w.queue, capacity=Capacity(**k)),
        lambda w: {},
        dict.fromkeys(Capacity.__dataclass_fields__, NUMBER),
    ),
    "query": (
        lambda w, attributes: w.pair.query(attributes),
        lambda w: {},
        {"attributes": Whole(31)},
    ),
    "modify": (
        lambda w, **k: w.pair.modify(**k),
        lambda w: {},
        {
            "state": Whole(31, none=True),
            "address": An,
            "port": Whole(32),
            "timeout": Whole(8),
            "dest_qp_num": Whole(32),
        },
    ),
    "post_send": (
        lambda w, **k: w.pair.post_send(**k),
        lambda w: {"wr_id": 1, "parts": [w.region[:8]]},
        {
            "wr_id": Whole(64),
            "opcode": Whole(31),
            "flags": Whole(31),
            "remote": An,
            "immediate": Whole(32),
        },
    ),
    "post_recv": (
        lambda w, **k: w.pair.post_recv(**k),
        lambda w: {"wr_id": 1, "parts": [w.region[:8]]},
        {"wr_id": Whole(64)},
    ),
    "bind_window": (
        lambda w, **k: w.pair.bind_window(**k),
        lambda w: {"wr_id": 1, "window": w.window, "bound": w.region[:], "access": 0, "flags": 0},
        dict.fromkeys(("access", "flags"), Whole(32))
        | {"wr_id": Whole(64), "window": An, "bound": An},
    ),
    "rkey": (
        lambda w, window, rkey: setattr(window, "rkey", rkey),
        lambda w: {"window": w.window},
        {"rkey": Whole(32)},
    ),
    "create_queue_pair": (
        lambda w, **k: w.identifier.create_queue_pair(**k),
        lambda w: {
            "domain": w.domain,
            "send_queue": w.queue,
            "receive_queue": w.queue,
            "capacity": Capacity(4, 4, 1, 1),
        },
        dict.fromkeys(("domain", "send_queue", "receive_queue", "capacity", "shared_receive"), An)
        | {"service": Whole(31)},
    ),
    "set_option": (
        lambda w, **k: w.identifier.set_option(**k),
        lambda w: {"name": 0, "value": b"x"},
        {"name": Whole(31, signed=True), "value": DATA},
    ),
    "attach_multicast": (
        lambda w, **k: w.pair.attach_multicast(**k),
        lambda w: {"gid": bytes(16)},
        {"gid": DATA, "lid": Whole(16)},
    ),
    "AddressVector": (
        lambda w, **k: aiordma.verbs.AddressVector(**k),
        lambda w: {},
        {"gid": DATA, "port": Whole(8), "lid": Whole(16), "flow_label": Whole(20)}
        | {"src_path_bits": Whole(8), "static_rate": Whole(8)},
    ),
    "AddressHandle": (
        lambda w, **k: aiordma.verbs.AddressHandle(**k),
        lambda w: {"domain": w.domain, "vector": w.vector},
        {"domain": An, "vector": An},
    ),
    "DatagramPeer": (
        lambda w, **k: aiordma.DatagramPeer(**k),
        lambda w: {"address": w.vector, "qp_num": 1},
        {"address": An, "qp_num": Whole(24), "qkey": Whole(32)},
    ),
    "QueuePairAddress": (
        lambda w, **k: aiordma.QueuePairAddress(**k),
        lambda w: {"qp_num": 1, "psn": 1, "gid": bytes(16)},
        {"qp_num": Whole(24), "psn": Whole(24), "gid": DATA, "lid": Whole(16)},
    ),
    "Ece": (
        lambda w, **k: aiordma.verbs.Ece(**k),
        lambda w: {"vendor_id": 1, "options": 1},
        {"vendor_id": Whole(32), "options": Whole(32)},
    ),
    "ConnectionOptions": (
        lambda w, **k: aiordma.ConnectionOptions(**k),
        lambda w: {},
        {"receive_size": Whole(31), "tos": Whole(8, none=True)},
    ),
    "RemoteMemory": (
        lambda w, **k: RemoteMemory(**k),
        lambda w: {"address": 0, "length": 1, "rkey": 1},
        {"address": Whole(64), "length": Whole(64), "rkey": Whole(64)},
    ),
    "unpack": (lambda w, data: RemoteMemory.unpack(data), lambda w: {}, {"data": DATA}),
    "EventChannel": (
        lambda w, device: aiordma.verbs.EventChannel(device),
        lambda w: {},
        {"device": TEXT},
    ),
    "Identifier": (
        lambda w, **k: aiordma.verbs.Identifier(**k),
        lambda w: {"channel": w.channel},
        {"channel": An, "port_space": Whole(31)},
    ),
    "bind": (
        lambda w, **k: w.identifier.bind(**k),
        lambda w: {"host": ADDRESS, "port": 0},
        {"host": TEXT, "port": Whole(16)},
    ),
    "listen": (
        lambda w, backlog: w.identifier.listen(backlog),
        lambda w: {},
        {"backlog": Whole(31)},
    ),
    "resolve_address": (
        lambda w, **k: w.identifier.resolve_address(**k),
        lambda w: {"host": ADDRESS, "port": 1, "source": None, "timeout_ms": 1},
        {"host": TEXT, "port": Whole(16), "timeout_ms": Whole(31)},
    ),
    "resolve_route": (
        lambda w, timeout_ms: w.identifier.resolve_route(timeout_ms),
        lambda w: {},
        {"timeout_ms": Whole(31)},
    ),
    "connect": (
        lambda w, parameters: w.identifier.connect(parameters),
        lambda w: {},
        {"parameters": An},
    ),
    "connect with parameters": (
        lambda w, **k: w.identifier.connect(ConnectionParameters(**k)),
        lambda w: {},
        {
            "private_data": DATA,
            "responder_resources": Whole(8),
            "retry_count": Whole(3),
            "qp_num": Whole(24),
        },
    ),
    "reject": (
        lambda w, private_data: w.identifier.reject(private_data),
        lambda w: {},
        {"private_data": DATA},
    ),
    "set_tos": (lambda w, tos: w.identifier.set_tos(tos), lambda w: {}, {"tos": Whole(8)}),
    "init_qp_attr": (
        lambda w, state: w.identifier.init_qp_attr(state),
        lambda w: {},
        {"state": Whole(31)},
    ),
}
NEEDS = {
    "MemoryWindow": "memory_windows",
    "RawSharedReceiveQueue": "srq_query",
    "bind_window": "memory_windows",
    "rkey": "memory_windows",
}


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


@pytest.mark.promise("Invalid arguments raise before any C call")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.capability(NEEDS[name])] if name in NEEDS else [])
        for name in CALLS
    ],
)
def test_bad_values_are_refused_by_name(name: str, world: World) -> None:
    use, arguments, kinds = CALLS[name]
    arguments(world)  # makes a window that some of them are
    before = kernel_objects(DEVICE)
    for parameter, kind in kinds.items():
        for value, error in bad_values(kind):
            with pytest.raises(error) as caught:
                use(world, **{**arguments(world), parameter: value})
            text = str(caught.value)
            assert type(caught.value) is error, f"{parameter}={'huge' if value is HUGE else value}"
            assert parameter in text, text
            assert len(text) < 600
    assert kernel_objects(DEVICE) == before


@pytest.mark.parametrize("name", ["MemoryRegion", "reregister"])
def test_registering_names_the_function_that_was_called(name: str, world: World) -> None:
    use, arguments, kinds = CALLS[name]
    for parameter, kind in kinds.items():
        for value, error in bad_values(kind):
            with pytest.raises(error, match=rf"^{name}\(\): {parameter}\b"):
                use(world, **{**arguments(world), parameter: value})


def test_dmabuf_region_names_itself(world: World) -> None:
    bad: dict[str, dict[str, Any]] = {
        "fd": {"fd": -1},
        "access": {"access": "read"},
        "iova": {"iova": 1},
    }
    for parameter, change in bad.items():
        with pytest.raises((TypeError, ValueError), match=rf"^DmabufRegion\(\): {parameter}="):
            aiordma.verbs.DmabufRegion(world.domain, **{"fd": 0, "length": 1, **change})


def test_parts_are_registered_memory(world: World) -> None:
    refused: tuple[Any, ...] = ([b"x"], ["x"], [5], [None], [bytearray(8)])
    for parts in refused:
        with pytest.raises(TypeError, match=r"^post_send\(\): parts=.* slices of registered"):
            world.pair.post_send(1, parts)
        with pytest.raises(TypeError, match=r"^post_recv\(\): parts=.* slices of registered"):
            world.pair.post_recv(1, parts)
        with pytest.raises(TypeError, match=r"^post_srq_recv\(\): parts=.* slices of registered"):
            world.shared.post_srq_recv([(1, parts)])


def test_posts_that_not_every_driver_checks_are_refused(world: World) -> None:
    with (
        QueuePair.create(
            world.domain,
            world.queue,
            world.queue,
            capacity=Capacity(4, 4, 1, 1),
            shared_receive=world.shared,
        ) as pair,
        pytest.raises(ValueError, match=r"^post_recv\(\): .*post_srq_recv"),
    ):
        pair.post_recv(1, [world.region[:8]])
    bind = WorkRequestOpcode.BIND_MW
    for work in (
        aiordma.verbs.SendWork("BIND_MW", bind),
        aiordma.verbs.SendWork("BIND_MW", bind, bound=world.region[:8]),
    ):
        with pytest.raises(ValueError, match=r"^BIND_MW: a bind needs window= and bound="):
            world.pair.post_send_chain([work], [1], [SendFlag.SIGNALED])
    with pytest.raises(ValueError, match=r"^TSO\(\): opcode=10: expected a WorkRequestOpcode"):
        world.pair.post_send_chain([aiordma.verbs.SendWork("TSO", 10)], [1], [SendFlag.SIGNALED])


BITS = {
    **dict.fromkeys(("opcode", "count", "immediate", "remote_qpn", "remote_qkey"), 32),
    **dict.fromkeys(("rkey", "access"), 32),
    **dict.fromkeys(("compare_add", "swap"), 64),
}
"""Numbers of a SendWork, and how many bits they have."""


@pytest.mark.promise("Invalid arguments raise before any C call")
@pytest.mark.parametrize("name", BITS)
@pytest.mark.capability("memory_windows")
def test_chain_refuses_a_number_by_name(name: str, world: World) -> None:
    wrong: tuple[Any, ...] = ("text", 1.5, None, object())
    for value in (-1, 1 << BITS[name], HUGE, *wrong):
        error = TypeError if value in wrong else ValueError
        fields: dict[str, Any] = {"opcode": 2, "window": world.window, name: value}
        if name.startswith("remote_"):
            fields["address"] = world.handle
        with pytest.raises(error, match=rf"^SEND\(\): {name}="):
            world.pair.post_send_chain([aiordma.verbs.SendWork("SEND", **fields)], [1], [0])


@pytest.mark.parametrize("name", ["remote", "address", "window", "bound", "sges"])
def test_chain_refuses_an_object_by_name(name: str, world: World) -> None:
    for value in (5, "text", object()):
        field: dict[str, Any] = {name: value}
        work = aiordma.verbs.SendWork("SEND", WorkRequestOpcode.SEND, **field)
        with pytest.raises(TypeError, match=rf"^SEND\(\): {name}="):
            world.pair.post_send_chain([work], [1], [0])


def test_chain_refuses_lists_by_name(world: World) -> None:
    post: Any = world.pair.post_send_chain
    for value in (-1, 1 << 64, HUGE):
        with pytest.raises(ValueError, match=r"^SEND\(\): wr_id="):
            post([SEND], [value], [0])
        with pytest.raises(ValueError, match=r"^SEND\(\): flags="):
            post([SEND], [1], [value])
    for works in (5, ["x"], [None]):
        with pytest.raises(TypeError, match=r"^post_send_chain\(\): works="):
            post(works, [1], [0])
    with pytest.raises(TypeError, match=r"^post_send_chain\(\): wr_ids=5"):
        post([SEND], 5, [0])
    with pytest.raises(ValueError, match=r"^post_send_chain\(\): 0 wr_ids for 1 works"):
        post([SEND], [], [0])
    with pytest.raises(ValueError, match=r"^post_send_chain\(\): 1 flags for 2 works"):
        post([SEND, SEND], [1, 2], [0])


def test_options_of_an_identifier_are_truth_values(world: World) -> None:
    values: tuple[Any, ...] = (True, 1, -1, HUGE, "yes", [0], object())
    for value in values:
        world.identifier.set_reuse_address(value)
        world.queue.request_notification(solicited_only=value)


@pytest.mark.capability("memory_windows")
def test_closed_window_has_no_rkey(world: World) -> None:
    window = MemoryWindow(world.domain)
    window.rkey = window.next_rkey()
    window.close()
    with pytest.raises(aiordma.ClosedError):
        window.rkey = 5  # to memory that is freed


def test_unknown_attribute_error_suggests_nearest_name(world: World) -> None:
    with pytest.raises(TypeError, match=r"'retry_count' is no attribute: did you mean 'retry_cnt'"):
        world.pair.modify(retry_count=7)
