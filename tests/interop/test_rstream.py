"""rstream of rdma-core, which exchanges bytes over rsockets and verifies them: each as the server
of the other."""

import anyio
import pytest

from aiordma.streams import Stream, listen_stream
from tests.devices import ADDRESS
from tests.interop.programs import connected_to_rsockets, every_loop, running
from tests.ports import free_port

pytestmark = pytest.mark.anyio

SYNC = 16
"""Bytes that the client sends first, and the server sends back."""


def counting(start: int, length: int) -> bytes:
    """Bytes that count up, modulo 256."""
    return (bytes(range(256)) * (length // 256 + 2))[start % 256 :][:length]


class Pattern:
    """The bytes that rstream sends and expects with `-T v`: they count up over the whole stream."""

    def __init__(self) -> None:
        self._sent = self._received = 0

    async def send(self, stream: Stream, length: int) -> None:
        await stream.send(counting(self._sent, length))
        self._sent += length

    async def receive(self, stream: Stream, length: int) -> None:
        got = b""
        while len(got) < length:
            got += await stream.receive(length - len(got))
        assert got == counting(self._received, length)
        self._received += length


async def answer(stream: Stream, size: int, rounds: int, burst: int) -> None:
    """Do the work of rstream's server."""
    pattern = Pattern()
    await pattern.receive(stream, SYNC)
    await pattern.send(stream, SYNC)
    for _ in range(rounds):
        for _ in range(burst):
            await pattern.receive(stream, size)
        for _ in range(burst):
            await pattern.send(stream, size)
    with pytest.raises(anyio.EndOfStream):
        await stream.receive()


async def ask(stream: Stream, size: int, rounds: int, burst: int) -> None:
    """Do the work of its client."""
    pattern = Pattern()
    await pattern.send(stream, SYNC)
    await pattern.receive(stream, SYNC)
    for _ in range(rounds):
        for _ in range(burst):
            await pattern.send(stream, size)
        for _ in range(burst):
            await pattern.receive(stream, size)
    await stream.send_eof()


def work(size: int, rounds: int, burst: int, *more: str) -> tuple[str | int, ...]:
    options = ("-S", size, "-I", rounds, "-C", burst, "-T", "v")
    return *options, *more


async def serve_one_client(size: int, rounds: int, burst: int, *more: str) -> None:
    async with listen_stream(ADDRESS) as listener:
        target = ("-s", ADDRESS, "-p", listener.port)
        async with (
            running("rstream", *target, *work(size, rounds, burst, *more)),
            await listener.accept() as stream,
        ):
            await answer(stream, size, rounds, burst)


async def be_one_client(size: int, rounds: int, burst: int, *more: str) -> None:
    port = free_port()
    command = ("-b", ADDRESS, "-p", port)
    async with running("rstream", *command, *work(size, rounds, burst, *more)) as server:
        await server.listens(port)
        async with connected_to_rsockets(port) as stream:
            await ask(stream, size, rounds, burst)


@every_loop
async def test_a_c_client_exchanges_bytes_with_our_server() -> None:
    await serve_one_client(1000, 20, 4)


@every_loop
async def test_our_client_exchanges_bytes_with_a_c_server() -> None:
    await be_one_client(1000, 20, 4)


SIZES = [(1, 300, 1), (64, 100, 10), (4096, 20, 20), (65536, 3, 10), (1 << 20, 2, 1)]


@pytest.mark.parametrize(("size", "rounds", "burst"), SIZES)
async def test_sizes_sent_by_a_c_client(size: int, rounds: int, burst: int) -> None:
    await serve_one_client(size, rounds, burst)


@pytest.mark.parametrize(("size", "rounds", "burst"), SIZES)
async def test_sizes_sent_to_a_c_server(size: int, rounds: int, burst: int) -> None:
    await be_one_client(size, rounds, burst)


# The sizes that rstream uses without -S, -I and -C, in each direction in turn, then in bursts. Its
# own counts are 50 times these or more. With those, one run took the virtual machine 148 s on a
# quiet machine, and passed; most of it is 100,000 exchanges of 64 bytes.
DEFAULTS = [
    *[(64, 200, 1), (4096, 100, 1), (1 << 16, 10, 1), (1 << 20, 1, 1)],
    *[(64, 1, 300), (4096, 1, 100), (1 << 16, 1, 10), (1 << 20, 1, 2)],
]


@pytest.mark.one_kernel_device
@pytest.mark.parametrize(("size", "rounds", "burst"), DEFAULTS)
async def test_the_default_sizes_of_a_c_client(size: int, rounds: int, burst: int) -> None:
    await serve_one_client(size, rounds, burst)


@pytest.mark.one_kernel_device
@pytest.mark.parametrize(("size", "rounds", "burst"), DEFAULTS)
async def test_the_default_sizes_of_a_c_server(size: int, rounds: int, burst: int) -> None:
    await be_one_client(size, rounds, burst)


# rstream's other options; -T v is always there. Not here: -T f, which needs librspreload's own
# protocol over TCP on both sides; -f gid, which needs an address of InfiniBand's family at our
# side; and -i, which rstream ignores with -S, -I or -C.
OPTIONS = [
    ("-T", "a"),  # poll()
    ("-T", "b"),  # blocking calls
    ("-T", "n"),  # non-blocking calls
    ("-T", "r"),  # rdma_getaddrinfo
    ("-f", "ip"),
    ("-B", "5000"),  # bytes of its rings
]


@pytest.mark.one_kernel_device
@pytest.mark.parametrize("option", OPTIONS, ids="".join)
async def test_options_of_a_c_client(option: tuple[str, str]) -> None:
    await serve_one_client(3000, 5, 4, *option)


@pytest.mark.one_kernel_device
@pytest.mark.parametrize("option", OPTIONS, ids="".join)
async def test_options_of_a_c_server(option: tuple[str, str]) -> None:
    await be_one_client(3000, 5, 4, *option)


async def test_a_c_clients_keepalives_change_nothing() -> None:
    async with listen_stream(ADDRESS) as listener:
        target = ("-s", ADDRESS, "-p", listener.port)
        async with (
            running("rstream", *target, *work(1000, 2, 4, "-k", "1")),
            await listener.accept() as stream,
        ):
            await anyio.sleep(2.5)  # it sends one each second
            await answer(stream, 1000, 2, 4)


async def test_a_c_client_cannot_map_memory() -> None:
    async with listen_stream(ADDRESS) as listener:
        words = ("-s", ADDRESS, "-p", listener.port, "-S", 1000, "-I", 1, "-C", 1)
        async with running("riostream", *words, status=None) as client:
            async with await listener.accept() as stream:
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()
            await client.has_written("riomap: Cannot allocate memory")
