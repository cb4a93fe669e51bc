"""The pytest plugin: fixtures for services over RDMA, on machines without RDMA hardware.

pytest loads it by itself where aiordma is installed; `-p no:aiordma` leaves it out. See
docs/testing.md.
"""

import fcntl
import functools
import gc
import inspect
import os
import socket
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, cast

import anyio
import pytest

from aiordma._base.errors import VerbsCallError
from aiordma._base.origin import unclosed_since
from aiordma._base.provider import SOFTWARE
from aiordma._connection.connection import Connection
from aiordma._connection.listener import Listener
from aiordma._runtime.reactor import current_reactors
from aiordma.streams import Stream
from aiordma.testing.faults import Faults, end_left, entered
from aiordma.testing.leaks import software_objects
from aiordma.testing.pairs import Fabric, connected_pair, fabric, serving_listener, stream_pair
from aiordma.testing.simulation import simulated
from aiordma.verbs import Device
from aiordma.verbs.identifier import EventChannel, Identifier

__all__ = (
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_runtest_call",
    "pytest_unconfigure",
    "rdma_address",
    "rdma_device",
    "rdma_fabric",
    "rdma_faults",
    "rdma_listener",
    "rdma_pair",
    "rdma_stream_pair",
)

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""man 7 netdevice: the address of an interface."""
VARIABLE = "AIORDMA_DEVICE"
COUNTED = {
    "queue_pairs": "queue pairs of connections",
    "identifiers": "connections or listeners",
    "shared_receives": "shared receive queues",
    "windows": "memory windows",
    "address_handles": "address handles",
}
"""What a test has to close. The rest belongs to the event loop, or to one of these."""
CLOSING_SECONDS = 5.0
"""How long what was closed may take to go away in the background."""
AGAIN_SECONDS = 0.1
"""The same in a test that has leaked: hypothesis runs it again and again, to simplify it."""

_before: pytest.StashKey[str | None] = pytest.StashKey()


# -- options --------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --rdma, --rdma-address and the setting rdma_leak_check."""
    group = parser.getgroup("aiordma", "RDMA (aiordma)")
    group.addoption(
        "--rdma",
        metavar="DEVICE",
        default=SOFTWARE,
        help="the RDMA device of the tests: software (default: on every machine, without RDMA "
        "hardware), or a device's name such as rxe0",
    )
    group.addoption(
        "--rdma-address",
        metavar="ADDRESS",
        default=None,
        help="the address at which the rdma_* fixtures listen and connect (default: 127.0.0.1 on "
        "the software device, else the device's first IPv4 address)",
    )
    parser.addini(
        "rdma_leak_check",
        "fail a test that leaves RDMA connections or listeners open (on other devices than "
        "software: only one that drops them), or faults armed",
        type="bool",
        default=True,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the chosen device the one that the tested program takes, too."""
    config.addinivalue_line(
        "markers",
        "rdma_leaks(reason): the test leaves RDMA connections open, or faults armed, and says why",
    )
    config.stash[_before] = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = config.getoption("--rdma")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the environment."""
    before = config.stash.get(_before, None)
    if before is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = before


def pytest_report_header(config: pytest.Config) -> str:
    """Return the line that says on which device the tests run."""
    return f"rdma: {config.getoption('--rdma')}"


# -- where ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rdma_device(pytestconfig: pytest.Config) -> str:
    """The name of the device (`--rdma`)."""
    return str(pytestconfig.getoption("--rdma"))


@pytest.fixture(scope="session")
def rdma_address(pytestconfig: pytest.Config, rdma_device: str) -> str:
    """An address of the device: `--rdma-address`, or one that is found."""
    given = pytestconfig.getoption("--rdma-address")
    if given:
        return str(given)
    if rdma_device == SOFTWARE:
        return LOOPBACK
    with Device(rdma_device).open() as context:
        found = [entry.address for entry in context.gid_table() if "." in entry.address]
    found = found or [each for each in _local_addresses() if _device_at(each) == rdma_device]
    if not found:
        pytest.fail(
            f"{rdma_device} has no IPv4 address: give one with --rdma-address", pytrace=False
        )
    return found[0]


# The GID of an iWARP device is its hardware address: the connection manager knows its addresses.


def _local_addresses() -> list[str]:
    """Return an IPv4 address of each network interface, without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [each for each in found if not each.startswith("127.")]


def _device_at(address: str) -> str | None:
    """Return the name of the RDMA device that has an address; None: there is none."""
    with suppress(VerbsCallError), EventChannel() as channel, Identifier(channel) as identifier:
        identifier.bind(address, 0)
        if identifier.device_key:
            with identifier.context() as context:
                return context.device_name
    return None


# -- endpoints ------------------------------------------------------------------------------------

# Each fixture is a function that returns an asynchronous context manager, and not the object: so
# they work in the same way with pytest-asyncio, with anyio's plugin and with trio, and what is
# opened in a test's task is closed in it.


@pytest.fixture
def rdma_pair(
    rdma_address: str, rdma_device: str
) -> Callable[..., AbstractAsyncContextManager[tuple[Connection, Connection]]]:
    """`async with rdma_pair() as (client, server)`: a connected pair, with options as of
    `aiordma.connect`."""
    return partial(connected_pair, rdma_address, rdma_device)


@pytest.fixture
def rdma_stream_pair(
    rdma_address: str, rdma_device: str
) -> Callable[..., AbstractAsyncContextManager[tuple[Stream, Stream]]]:
    """`async with rdma_stream_pair() as (client, server)`: two ends of a byte stream."""
    return partial(stream_pair, rdma_address, rdma_device)


@pytest.fixture
def rdma_listener(
    rdma_address: str, rdma_device: str
) -> Callable[..., AbstractAsyncContextManager[Listener]]:
    """`async with rdma_listener(handler) as listener`: the handler serves at
    (rdma_address, listener.port)."""
    return partial(serving_listener, address=rdma_address, device=rdma_device)


@pytest.fixture
def rdma_fabric(
    rdma_address: str, rdma_device: str
) -> Callable[..., AbstractAsyncContextManager[Fabric]]:
    """`async with rdma_fabric(4) as fabric`: endpoints that are all connected; `fabric[i, j]` is
    the end of `i` of its connection with `j`."""
    return partial(fabric, address=rdma_address, device=rdma_device)


@pytest.fixture
def rdma_simulated() -> Callable[..., None]:
    """`rdma_simulated(scenario, seeds=100)`: run a scenario once for each seed, as
    `aiordma.testing.simulated` does. It gets a `Simulation`, and its hosts have devices of their
    own. For a test that is a plain function."""

    def run(scenario: Callable[..., Any], seeds: int = 100, *, limit: float = 86400.0) -> None:
        simulated(seeds, limit=limit)(scenario)()

    return run


@pytest.fixture
def rdma_faults(request: pytest.FixtureRequest, rdma_device: str) -> Iterator[Faults]:
    """Faults of the software device (`aiordma.testing.Faults`), ended with the test. The seed comes
    from the test's name, so that each run has the same faults. Skips on other devices."""
    if rdma_device != SOFTWARE:
        pytest.skip(f"{rdma_device} has no fault injection: the software device has")
    with Faults(seed=zlib.crc32(request.node.nodeid.encode())) as faults:
        yield faults


# -- leaks ----------------------------------------------------------------------------------------


# Checked inside the test's event loop, because the end of a loop closes what it had.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each asynchronous test fail that leaves connections or listeners open."""
    if not config.getini("rdma_leak_check"):
        return
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("rdma_leaks"):
            continue
        if inspect.iscoroutinefunction(item.obj):
            item.obj = _checked(item.obj)
        else:
            _check_examples(item.obj)


def _check_examples(test: Any) -> None:
    """Check each example of an asynchronous test of hypothesis, whose plugins run its inner
    test."""
    handle = getattr(test, "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    # Parametrized tests are several items with the same inner test.
    if inspect.iscoroutinefunction(inner) and not hasattr(inner, "_is_leak_checked"):
        checked: Any = _checked(inner)
        checked._is_leak_checked = True
        cast(Any, handle).inner_test = checked


@pytest.hookimpl(hookwrapper=True)  # `wrapper` needs pytest 8
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let each test fail that leaves faults armed, and end them: the next tests are not theirs."""
    if not item.config.getini("rdma_leak_check") or item.get_closest_marker("rdma_leaks"):
        yield
        return
    before = entered()
    outcome: Any = yield
    left = end_left(before)
    if left and outcome.excinfo is None:
        failure = pytest.fail.Exception(
            f"the test has left faults armed: {', '.join(left)}. Use aiordma.testing.Faults in a "
            "`with` block, or the fixture rdma_faults, or mark the test with "
            "@pytest.mark.rdma_leaks('why')",
            pytrace=False,
        )
        outcome.force_exception(failure)


def _checked(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    limit = CLOSING_SECONDS

    @functools.wraps(test)
    async def checked(*arguments: Any, **keywords: Any) -> None:
        nonlocal limit
        if not _has_loop():
            await test(*arguments, **keywords)
            return
        before, known = _counts(), set(_open_objects())
        with unclosed_since() as dropped:
            await test(*arguments, **keywords)
            left = await _left(before, known, limit)
        if left:
            limit = AGAIN_SECONDS
        if left or dropped:
            pytest.fail(
                f"the test has left open: {', '.join(left + dropped)}. Close them (`async with`); "
                "or, if a fixture closes them after the test, mark the test with "
                "@pytest.mark.rdma_leaks('why')",
                pytrace=False,
            )

    return checked


def _has_loop() -> bool:
    """Return whether a loop runs that aiordma works in. Other plugins of pytest bring others: tests
    there open nothing that is checked, and a wait of anyio's would fail them."""
    try:
        anyio.get_cancelled_exc_class()
    except (RuntimeError, ImportError):  # no loop that sniffio knows; one that anyio does not
        return False
    return True


def _open_objects() -> dict[int, str]:
    """Return the names of what is open on the running loop; "" for what is being closed."""
    closables = (each for reactor in current_reactors() for each in reactor.closables)
    return {id(each): each.left_open() for each in closables}


def _counts() -> dict[str, int]:
    found = software_objects()
    return {name: found[name] for name in COUNTED}


async def _left(before: dict[str, int], known: set[int], limit: float) -> list[str]:
    """Name what is there beyond the counts before, and what is open and was not known, once the
    background has had its time."""
    deadline, pause = time.monotonic() + limit, 0.01
    while True:
        now = _counts()
        left = [
            f"{now[name] - before[name]} {COUNTED[name]}"
            for name in sorted(now)
            if now[name] > before[name]
        ]
        left += [text for key, text in _open_objects().items() if text and key not in known]
        if not left or time.monotonic() > deadline:
            return left
        gc.collect()
        await anyio.sleep(pause)
        pause = min(pause * 1.5, 0.5)  # a collection of a large program takes long
