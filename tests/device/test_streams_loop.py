"""The event loop whose connections and servers use RDMA, on the device under test."""

import asyncio
import gc
import io
import os
import re
import socket
import ssl
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import aiordma
from aiordma import streams
from aiordma.streams import client
from aiordma.streams import loop as loop_module
from tests.device.transports import Main, Recorder, echo, two
from tests.devices import ADDRESS
from tests.internals import NOT_ACCEPTED


@pytest.fixture
def file_of_a_megabyte(tmp_path: Path) -> Iterator[tuple[Any, bytes]]:
    data = os.urandom(1_000_000)
    (tmp_path / "data").write_bytes(data)
    with open(tmp_path / "data", "rb") as file:
        yield file, data


@pytest.mark.parametrize(
    ("hosts", "host", "expected"),
    [
        ("*", "192.0.2.1", True),
        ("*", None, True),
        ("192.0.2.0/24,node*", "192.0.2.7", True),
        ("192.0.2.0/24,node*", "198.51.100.1", False),
        ("192.0.2.0/24,node*", "Node7", True),
        ("192.0.2.0/24,node*", None, False),
        ("2001:db8::/32", "2001:db8::1%eth0", True),
        ("2001:db8:*,10.0.0.[1-3]", "2001:db8::1", True),
        ("2001:db8:*,10.0.0.[1-3]", "10.0.0.2", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        (" node[12] , my_host.", "node2", True),
        ([], "192.0.2.1", False),
    ],
)
def test_the_rule_names_hosts(hosts: Any, host: str | None, expected: bool) -> None:
    loop = streams.new_event_loop(hosts=hosts)
    assert loop.uses_rdma(host) is expected
    loop.close()


@pytest.mark.parametrize(
    "pattern",
    [
        *("127.0.0.0/33", "2001:db8::/129", "node/24"),
        *("10.0.0.300", "10.0.0", "1", "2001:db8::xyz"),
        *("[::1]", "[::1]:8000", "127.0.0.1:8000", "node*:8000", "127.0.0.1:*", "10.0.0.*:80*"),
        *("*.example.com:[12]*", "*:80??", "*:*", "http://node1:8000/", "node1 node2"),
    ],
)
def test_a_rule_that_no_host_can_match_is_refused(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"'{re.escape(pattern)}' matches no host: give names"
    for hosts in (f"node1,{pattern}", [pattern]):
        with pytest.raises(ValueError, match=rf"^new_event_loop\(\): hosts=.*{text}"):
            streams.new_event_loop(hosts=hosts)
    monkeypatch.setenv("AIORDMA_STREAM_HOSTS", pattern)
    with pytest.raises(ValueError, match=r"^AIORDMA_STREAM_HOSTS="):
        streams.new_event_loop()


@pytest.mark.parametrize("hosts", [5, b"127.0.0.1", [5], [b"127.0.0.1"]])
def test_a_rule_that_is_no_text_is_refused(hosts: Any) -> None:
    with pytest.raises(TypeError, match=r"new_event_loop\(\): hosts=.*expected names with"):
        streams.new_event_loop(hosts=hosts)


@pytest.fixture
def by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TCP serve loopback addresses: a device that AIORDMA_DEVICE names permits none."""
    monkeypatch.delenv("AIORDMA_DEVICE", raising=False)


def on_stream_loop(main: Main, hosts: str | None = None) -> None:
    with asyncio.Runner(loop_factory=partial(streams.new_event_loop, hosts=hosts)) as runner:
        runner.run(main())


def test_asyncios_own_functions_use_rdma() -> None:
    async def main() -> None:
        server = await asyncio.start_server(echo, ADDRESS, 0)
        assert isinstance(server, streams.StreamServer)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert isinstance(writer.transport, streams.StreamTransport)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    on_stream_loop(main)


@pytest.mark.parametrize(("hosts", "is_rdma"), [("*", True), ("192.0.2.1", False)])
def test_hosts_can_be_bytes(hosts: str, is_rdma: bool) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        host: Any = ADDRESS.encode()
        for given in (host, [host]):
            each: Any = await asyncio.start_server(echo, given, 0)
            assert isinstance(each, streams.StreamServer) is is_rdma
            port = each.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection(host, port)
            assert isinstance(writer.transport, streams.StreamTransport) is is_rdma
            writer.close()
            with unconnected() as client:
                await loop.sock_connect(client, (host, port))
            each.close()
        with pytest.raises(TypeError, match=r"host=5 .* expected a name or a numeric address"):
            await asyncio.open_connection(cast("Any", 5), 1)
        with pytest.raises(TypeError, match=r"host=5 .* expected a name or a numeric address"):
            await asyncio.start_server(echo, cast("Any", 5), 1)
        with pytest.raises(ValueError, match="Neither host/port nor sock"):
            await loop.create_server(Recorder)

    on_stream_loop(main, hosts)


@pytest.mark.parametrize("passed", [{}, {"close_timeout": 3.0}])
def test_stream_options_of_the_loop_apply_to_all_streams(passed: dict[str, Any]) -> None:
    made: list[Any] = []

    async def keep(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)

    async def main() -> None:
        server = await asyncio.start_server(keep, ADDRESS, 0, **passed)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), **passed)
        writer.write(b"?")
        while not made:
            await asyncio.sleep(0.001)
        for each in (writer, *made):
            assert each.transport._channel.close_timeout == passed.get("close_timeout", 2.0)
            assert each.transport.get_extra_info("connection").options.keepalive == 30.0
            each.close()
        server.close()
        await server.wait_closed()

    factory = partial(streams.new_event_loop, close_timeout=2.0, keepalive=30.0)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"close_timeout": -1}, r"^new_event_loop\(\): close_timeout=-1 "),
        ({"keepalive": 0}, r"^new_event_loop\(\): keepalive=0 "),
        ({"close_time": 1}, r"^new_event_loop\(\) has no parameter 'close_time': "),
    ],
)
def test_wrong_stream_options_of_the_loop_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        streams.new_event_loop(**options)


def test_other_hosts_use_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_STREAM_HOSTS", "192.0.2.0/24")

    async def main() -> None:
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert not isinstance(writer.transport, streams.StreamTransport)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()
            await writer.wait_closed()

    on_stream_loop(main)


CURE = "to reach it over TCP, list only other hosts in AIORDMA_STREAM_HOSTS, or in hosts="


@pytest.mark.natively
@pytest.mark.capability("iwarp")
@pytest.mark.parametrize("banner", [b"", b"220 ready\r\n"], ids=["waits", "speaks"])
@pytest.mark.parametrize("by_sock", [False, True])
def test_connect_to_tcp_server_says_how_to_use_tcp(banner: bytes, by_sock: bool) -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(banner)
        accepted.append(writer)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        listening, sock = socket.create_server((ADDRESS, 0)), socket.socket()
        address = listening.getsockname()
        sock.setblocking(False)
        with sock:
            async with await asyncio.start_server(serve, sock=listening):
                create = partial(loop.create_connection, asyncio.Protocol, timeout=1)
                if by_sock:
                    await loop.sock_connect(sock, address)
                    create = partial(create, sock=sock)
                else:
                    create = partial(create, *address)
                with pytest.raises(aiordma.RdmaConnectionError) as caught:
                    await create()
                for writer in accepted:
                    writer.close()
                    with suppress(ConnectionError):
                        await writer.wait_closed()
        assert "a plain TCP server" in str(caught.value)
        assert CURE in str(caught.value)

    on_stream_loop(main)


@pytest.mark.natively
def test_connect_of_socket_to_tcp_server_says_how_to_use_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sock_connect connects the stream itself on an RDMA device."""

    async def fail(*_: object) -> None:
        raise aiordma.ConnectTimeoutError(f"it took longer than 30 s{NOT_ACCEPTED}")

    monkeypatch.setattr(loop_module, "connect_for_socket", fail)

    async def main() -> None:
        with socket.socket() as sock:
            sock.setblocking(False)
            with pytest.raises(aiordma.ConnectTimeoutError, match=re.escape(CURE)):
                await asyncio.get_running_loop().sock_connect(sock, (ADDRESS, 1))

    on_stream_loop(main)


@pytest.mark.promise("A required transport is never replaced")
def test_tcp_sockets_are_refused_where_rdma_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_DEVICE", "rdma")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            with socket.create_connection(listening.getsockname()) as client:
                for refused in (
                    loop.create_server(asyncio.Protocol, sock=listening),
                    loop.create_connection(asyncio.Protocol, sock=client),
                ):
                    with pytest.raises(aiordma.DeviceRequirementError, match="AIORDMA_DEVICE=rdma"):
                        await refused
            monkeypatch.delenv("AIORDMA_DEVICE")
            (await loop.create_server(asyncio.Protocol, sock=listening)).close()

    on_stream_loop(main)


def test_a_socket_that_is_used_as_one_is_connected_as_one(by_auto: None) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as listening, socket.socket() as client:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            for each in (listening, client):
                each.setblocking(False)
            await loop.sock_connect(client, listening.getsockname())
            async with asyncio.TaskGroup() as group:
                accepting = group.create_task(loop.sock_accept(listening))
                await loop.sock_sendall(client, b"hello")
            accepted, _ = accepting.result()
            with accepted:
                assert await loop.sock_recv(accepted, 5) == b"hello"

    on_stream_loop(main)


def test_a_file_goes_through_a_socket_that_is_used_as_one(
    file_of_a_megabyte: tuple[Any, bytes], by_auto: None
) -> None:
    file, data = file_of_a_megabyte

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as listening, socket.socket() as client:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            for each in (listening, client):
                each.setblocking(False)
            async with asyncio.timeout(60):
                await loop.sock_connect(client, listening.getsockname())
                assert await loop.sock_sendfile(client, file, 0, 1000) == 1000
                accepted, _ = await loop.sock_accept(listening)
                with accepted:
                    assert await loop.sock_recv(accepted, 1000) == data[:1000]

    on_stream_loop(main)


@pytest.mark.parametrize("hosts", ["127.0.0.0/8", "127.0.0.1"])
def test_a_name_outside_the_rule_is_connected_by_tcp(hosts: str) -> None:
    """asyncio's own create_connection calls sock_connect, with an address that the rule names."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            for local in (None, ("127.0.0.3", 0)):
                _, writer = await asyncio.open_connection("localhost", port, local_addr=local)
                assert writer.get_extra_info("peername") == ("127.0.0.1", port)
                if local is not None:
                    assert writer.get_extra_info("sockname")[0] == local[0]
                writer.close()
                await writer.wait_closed()

    on_stream_loop(main, hosts)


@pytest.fixture
def _streams_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """sock_connect connects a stream, as on real devices, also on the software device."""
    monkeypatch.setattr(client, "_refuse_software", lambda _: None)


class Peers:
    """Accepts streams, greets each, and counts those that have ended."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun += 1
        writer.write(b"hello")
        with suppress(ConnectionError):
            await reader.read()
        self.ended += 1
        writer.close()

    async def until(self, begun: int, ended: int) -> None:
        async with asyncio.timeout(20):
            while (self.begun, self.ended) != (begun, ended):
                await asyncio.sleep(0.01)


def unconnected() -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    return sock


def test_sock_connect_fails_if_nothing_listens() -> None:
    """So aiohttp tries the other addresses of a name."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(echo, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        server.close()
        await server.wait_closed()
        with unconnected() as client, pytest.raises(ConnectionRefusedError):
            await loop.sock_connect(client, address)

    on_stream_loop(main)


@pytest.mark.usefixtures("_streams_for_sockets")
@pytest.mark.parametrize("passed", [{}, {"close_timeout": 3.0}])
def test_a_stream_takes_the_place_of_its_socket(passed: dict[str, Any]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        peers = Peers()
        async with await asyncio.start_server(peers.serve, ADDRESS, 0) as server:
            client = unconnected()
            await loop.sock_connect(client, server.sockets[0].getsockname())
            await peers.until(1, 0)
            with pytest.raises(OSError, match="already connected"):
                await loop.sock_connect(client, server.sockets[0].getsockname())
            with pytest.raises(ValueError, match="only meaningful with ssl"):
                await loop.create_connection(Recorder, sock=client, server_hostname="x")
            reader, writer = await asyncio.open_connection(sock=client, **passed)
            assert isinstance(writer.transport, streams.StreamTransport)
            channel = writer.transport._channel
            assert channel.close_timeout == passed.get("close_timeout", 5.0)
            assert client.fileno() == -1
            assert await reader.readexactly(5) == b"hello"
            writer.close()
            await writer.wait_closed()
            number = 2 if passed else 1  # one with the loop's options, and one with those passed
            await peers.until(number, number)

    on_stream_loop(main)


@pytest.mark.usefixtures("_streams_for_sockets")
@pytest.mark.parametrize("is_collected", [False, True])
def test_a_socket_that_is_not_used_closes_its_stream(is_collected: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        peers = Peers()
        async with await asyncio.start_server(peers.serve, ADDRESS, 0) as server:
            client = unconnected()
            await loop.sock_connect(client, server.sockets[0].getsockname())
            await peers.until(1, 0)
            client.close()
            if is_collected:
                del client
            await peers.until(1, 1)

    on_stream_loop(main)


@pytest.mark.usefixtures("_streams_for_sockets")
def test_a_socket_that_is_used_as_one_closes_its_stream() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        peers = Peers()
        async with await asyncio.start_server(peers.serve, ADDRESS, 0) as server:
            address = server.sockets[0].getsockname()
            with unconnected() as client:
                await loop.sock_connect(client, address)
                await peers.until(1, 0)
                with suppress(OSError):  # only the software device listens for TCP
                    await loop.sock_sendall(client, b"?")
                await peers.until(1, 1)

    on_stream_loop(main)


@pytest.mark.usefixtures("_streams_for_sockets")
def test_the_end_of_the_loop_closes_streams_of_sockets() -> None:
    kept: list[socket.socket] = []
    peers: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(Peers().serve, ADDRESS, 0)
        kept.append(unconnected())
        peers.append(server.sockets[0].getsockname())
        await loop.sock_connect(kept[0], peers[0])
        server.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_stream_loop(main)
        kept.pop().close()
        gc.collect()
    assert not [each for each in caught if f"to {peers[0]}" in str(each.message)]


@pytest.mark.usefixtures("_streams_for_sockets")
def test_a_cancelled_sock_connect_leaves_no_stream() -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        peers = Peers()
        async with await asyncio.start_server(peers.serve, ADDRESS, 0) as server:
            address = server.sockets[0].getsockname()
            for turns in range(20):
                with unconnected() as client:
                    connecting = loop.create_task(loop.sock_connect(client, address))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    connecting.cancel()
                    await asyncio.wait([connecting])
                    assert not connecting.cancelled() or not loop._replaced
            async with asyncio.timeout(20):
                while peers.begun != peers.ended:
                    await asyncio.sleep(0.01)

    on_stream_loop(main)


@pytest.mark.usefixtures("_streams_for_sockets")
def test_a_stream_has_the_address_of_its_bound_socket() -> None:
    check_a_socket_that_is_passed(True)


@pytest.mark.parametrize("is_bound", [False, True])
def test_a_socket_that_is_passed_becomes_a_stream_of_its_address(is_bound: bool) -> None:
    """As aiohttp passes it."""
    check_a_socket_that_is_passed(is_bound)


def check_a_socket_that_is_passed(is_bound: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(echo, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        client = socket.socket()
        client.setblocking(False)
        port = 0
        if is_bound:
            client.bind((ADDRESS, 0))
            port = client.getsockname()[1]
        await loop.sock_connect(client, address)
        transport, protocol = await loop.create_connection(Recorder, sock=client)
        assert isinstance(transport, streams.StreamTransport)
        assert client.fileno() == -1
        host, found = transport.get_extra_info("sockname")
        assert host == ADDRESS
        assert not is_bound or found == port
        transport.close()
        await protocol.lost.wait()
        server.close()
        await server.wait_closed()

    on_stream_loop(main)


def test_a_bound_socket_that_is_used_as_one_keeps_its_address(by_auto: None) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
            listening.setblocking(False)
            client.setblocking(False)
            client.bind(("127.0.0.5", 0))
            await loop.sock_connect(client, listening.getsockname())
            await loop.sock_sendall(client, b"hello")
            accepted, address = await loop.sock_accept(listening)
            with accepted:
                assert address == client.getsockname()

    on_stream_loop(main)


# -- loop.sendfile --------------------------------------------------------------------------------


class Sendfile:
    """What a program gets that sends a file by `loop.sendfile`, on the loop of `make_loop`.

    Attributes:
        received: the bytes that the peer gets.
        result: what the call returns, or raises.
        position: of the file, afterwards.
    """

    def __init__(
        self,
        make_loop: Callable[[], asyncio.AbstractEventLoop],
        file: Any,
        *arguments: Any,
        context: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
    ) -> None:
        self.received: bytes | None = None
        self.result: Any = None
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(self._run(file, arguments, context))
        self.position = file.tell()

    async def _run(
        self,
        file: Any,
        arguments: tuple[Any, ...],
        contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None,
    ) -> None:
        async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            loop = asyncio.get_running_loop()
            try:
                self.result = await loop.sendfile(writer.transport, file, *arguments)
            except Exception as error:
                self.result = type(error), str(error)
            writer.close()

        server_context, client_context = contexts or (None, None)
        server = await asyncio.start_server(send, ADDRESS, 0, ssl=server_context)
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, ssl=client_context)
        writer.write(b"?\n")
        self.received = await reader.read()
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("is_secured", [False, True])
@pytest.mark.parametrize("arguments", [(), (0,), (7,), (0, 5), (7, 50_000), (200_000,)])
@pytest.mark.parametrize("read_before", [0, 4, 100_000])
@pytest.mark.natively
def test_sendfile_sends_the_bytes_that_it_sends_over_tcp(
    tmp_path: Path,
    read_before: int,
    arguments: tuple[Any, ...],
    is_secured: bool,
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """Also if the program has read of the file before. Then its position is that after the last
    byte that was sent."""
    data = os.urandom(100_000)
    (tmp_path / "data").write_bytes(data)
    found = []
    for make_loop in (asyncio.SelectorEventLoop, streams.new_event_loop):
        with open(tmp_path / "data", "rb", buffering=0) as file:
            file.read(read_before)
            context = contexts if is_secured else None
            found.append(vars(Sendfile(make_loop, file, *arguments, context=context)))
    assert found[0] == found[1]
    if not is_secured and arguments in [(), (0,)]:
        assert found[0] == {"received": data, "result": 100_000, "position": 100_000}


@pytest.mark.parametrize("arguments", [(0, 0), (0, -1), (-1,), (0, "5"), (0.0,)])
@pytest.mark.natively
def test_sendfile_refuses_the_arguments_that_it_refuses_over_tcp(
    file_of_a_megabyte: tuple[Any, bytes], arguments: tuple[Any, ...]
) -> None:
    file, _data = file_of_a_megabyte
    loops = (asyncio.SelectorEventLoop, streams.new_event_loop)
    found = [vars(Sendfile(make_loop, file, *arguments)) for make_loop in loops]
    assert found[0] == found[1]
    assert found[0]["result"][0] in (TypeError, ValueError)


@pytest.mark.natively
def test_sendfile_leaves_the_position_of_a_buffered_file_behind_what_it_sent(
    file_of_a_megabyte: tuple[Any, bytes],
) -> None:
    file, data = file_of_a_megabyte
    assert file.read(4) == data[:4]
    sent = Sendfile(streams.new_event_loop, file, 10, 90)
    assert (sent.received, sent.position) == (data[10:100], 100)
    assert file.read(4) == data[100:104]


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.natively
def test_sendfile_of_what_is_no_file_is_asyncios(offset: int) -> None:
    found = []
    for make_loop in (asyncio.SelectorEventLoop, streams.new_event_loop):
        file = io.BytesIO(b"0123456789")
        file.seek(5)
        found.append(vars(Sendfile(make_loop, file, offset)))
    assert found[0] == found[1]


@pytest.mark.natively
def test_one_file_is_sent_to_several_peers_at_once(
    file_of_a_megabyte: tuple[Any, bytes],
) -> None:
    file, data = file_of_a_megabyte

    async def receive(port: int) -> bytes:
        reader, writer = await asyncio.open_connection(ADDRESS, port)
        received = await reader.read(-1)
        writer.close()
        return received

    async def main() -> None:
        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.get_running_loop().sendfile(writer.transport, file)
            writer.close()

        async with await asyncio.start_server(serve, ADDRESS, 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await asyncio.gather(*(receive(port) for _ in range(3))) == [data] * 3

    on_stream_loop(main)


class WithDescriptor:
    """All that asyncio needs of a file over TCP."""

    def __init__(self, file: Any) -> None:
        self.fileno = file.fileno


@pytest.mark.natively
def test_sendfile_needs_the_descriptor_only(file_of_a_megabyte: tuple[Any, bytes]) -> None:
    file, data = file_of_a_megabyte

    async def main() -> None:
        async with two() as (client, server):
            loop = asyncio.get_running_loop()
            only: Any = WithDescriptor(file)
            assert await loop.sendfile(client.transport, only, 10, 90) == 90
            await server.until(lambda: len(server.data) == 90)
            assert server.data == data[10:100]

    on_stream_loop(main)


@pytest.mark.natively
def test_sendfile_to_a_peer_that_has_gone_tells_by_the_position_what_was_sent(
    file_of_a_megabyte: tuple[Any, bytes],
) -> None:
    file, _data = file_of_a_megabyte
    file.seek(5)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with two(buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            sending = asyncio.create_task(loop.sendfile(client.transport, file))
            while not client.transport.get_write_buffer_size():
                await asyncio.sleep(0.001)
            server.transport.abort()
            with pytest.raises(ConnectionError):
                await sending
            assert 0 < file.tell() < 1_000_000

    on_stream_loop(main)
