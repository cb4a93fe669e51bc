"""`aiordma cp` on the device: files that arrive whole, or not at all."""

import errno
import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiordma.cli import cp as command
from aiordma.cli.copying import FileReceiver, send_file
from aiordma.cli.rcopy import (
    HEADER_BYTES,
    Command,
    Header,
    RcopyError,
    open_message,
    write_message,
)
from aiordma.streams import Stream, StreamListener, connect_stream, listen_stream
from tests.device.players import one_loop
from tests.devices import ADDRESS, DEVICE
from tests.docs.programs import ROOT, serving
from tests.forked import python
from tests.internals import NOT_ACCEPTED
from tests.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device, pytest.mark.slow]

COMMAND = ("-c", "from aiordma.cli.main import main; main()", "cp")
OWN_PORT = str(free_port())


class Server:
    """A receiver that serves one client; `error` is how that ended."""

    def __init__(self, directory: Path) -> None:
        self.received: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.receiver = FileReceiver(directory, self.note)

    def note(self, path: Path, size: int) -> None:
        self.received.append((path.name, size))

    async def serve(self, listener: StreamListener) -> None:
        async with await listener.accept() as stream:
            try:
                await self.receiver.serve(stream)
            except Exception as error:
                self.error = error


@asynccontextmanager
async def connected(directory: Path) -> AsyncIterator[tuple[Stream, Server]]:
    """Yield a client's stream. The server has ended when the block is left."""
    server = Server(directory)
    with anyio.fail_after(20):
        async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
            group.start_soon(server.serve, listener)
            async with connect_stream(ADDRESS, listener.port) as stream:
                yield stream, server


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def status_of(stream: Stream, command: Command) -> int:
    data = b""
    while len(data) < HEADER_BYTES:
        data += await stream.receive(HEADER_BYTES - len(data))
    return Header.unpack(data).status(command)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("size", [0, 1, 3_000_001])
async def test_a_file_arrives_with_its_mode(size: int, served: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    source.chmod(0o4640)
    seen: list[tuple[int, int]] = []
    async with connected(served) as (stream, server):
        sent = await send_file(stream, source, "target", lambda *now: seen.append(now))
    assert server.error is None
    assert server.received == [("target", size)]
    assert sent == size
    assert [each[0] for each in seen][-1:] == [size][: len(seen)]
    assert (served / "target").read_bytes() == source.read_bytes()
    assert (served / "target").stat().st_mode & 0o7777 == 0o640


@one_loop
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("../out", PermissionError),
        ("/etc/passwd", PermissionError),
        ("link/out", PermissionError),
        ("nowhere/out", FileNotFoundError),
        (".", IsADirectoryError),
        ("x" * 300, OSError),
    ],
)
async def test_a_bad_path_is_refused(
    path: str, error: type[OSError], served: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    (served / "link").symlink_to(tmp_path)
    async with connected(served) as (stream, server):
        with pytest.raises(error, match="the server's reply"):
            await send_file(stream, source, path)
    assert isinstance(server.error, error)
    assert names_in(served) == ["link"]
    assert not (tmp_path / "out").exists()


@one_loop
async def test_a_file_that_is_not_sent_whole_is_removed(served: Path) -> None:
    (served / "target").write_text("before")
    async with connected(served) as (stream, server):
        await stream.send(open_message("target", 0o644))
        assert await status_of(stream, Command.OPEN) == 0
        await stream.send(write_message(1 << 62) + bytes(5000))
    assert isinstance(server.error, anyio.EndOfStream)
    assert (served / "target").read_text() == "before"
    assert names_in(served) == ["target"]


@one_loop
async def test_a_file_whose_name_is_taken_meanwhile_is_removed(served: Path) -> None:
    async with connected(served) as (stream, server):
        await stream.send(open_message("target", 0o644))
        assert await status_of(stream, Command.OPEN) == 0
        (served / "target").mkdir()
        await stream.send(write_message(4) + b"data")
        assert await status_of(stream, Command.WRITE) == errno.EISDIR
    assert isinstance(server.error, IsADirectoryError)
    assert names_in(served) == ["target"]


@one_loop
@pytest.mark.parametrize(
    ("message", "number", "error"),
    [
        (write_message(4), 22, OSError),
        (Header(9).pack(), 22, OSError),
        (Header(Command.OPEN, True).pack(), 22, OSError),
        (open_message("a", 0o644) + open_message("b", 0o644), 16, OSError),
        (bytes([1]) + bytes(15), None, RcopyError),
        (Header(Command.OPEN, length=24).pack() + b"no end!!", None, RcopyError),
    ],
)
async def test_a_bad_client_is_refused(
    message: bytes, number: int | None, error: type[Exception], served: Path
) -> None:
    async with connected(served) as (stream, server):
        await stream.send(message)
        answers = b""
        async for data in stream:
            answers += data
    assert isinstance(server.error, error)
    if number is None:
        assert answers == b""
    else:
        last = Header.unpack(answers[-HEADER_BYTES:])
        assert (last.is_reply, last.data) == (True, number)
    assert names_in(served) == []


@one_loop
async def test_the_reason_of_a_server_that_gives_up_is_raised(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(5_000_000))

    async def refuse(listener: StreamListener) -> None:
        async with await listener.accept() as stream:
            await stream.receive(HEADER_BYTES + 8)
            await stream.send(Header(Command.OPEN).reply(0))
            await stream.receive(100)
            await stream.send(Header(Command.WRITE).reply(28))

    with anyio.fail_after(20):
        async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
            group.start_soon(refuse, listener)
            async with connect_stream(ADDRESS, listener.port) as stream:
                with pytest.raises(OSError, match="No space left on device"):
                    await send_file(stream, source, "target")


def cp(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(), *COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_the_command_copies_a_file(served: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(100_000))
    command = [*python(), *COMMAND, "--serve", str(served), "--bind", ADDRESS, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().rpartition(":")[2].strip()
            done = cp(str(source), ADDRESS, "--port", port)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("100000 bytes in ")
            assert (served / "source").read_bytes() == source.read_bytes()
            missing = cp(str(tmp_path / "missing"), ADDRESS, "--port", port)
            assert missing.returncode == 1
            assert missing.stderr.startswith("aiordma cp: [Errno 2] No such file")
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130


async def cp_beside_the_loop(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await anyio.to_thread.run_sync(cp, *arguments)


def gave_up(done: subprocess.CompletedProcess[str], port: str, limit: float) -> bool:
    """Whether the command ended because nobody accepted within what the steps before had left of
    the limit."""
    target = re.escape(f"connect to {ADDRESS}:{port}")
    reason = r"waiting for the peer to accept took longer than (\S+) s"
    if DEVICE in ("software", "siw0"):  # which speak iWARP
        reason += re.escape(NOT_ACCEPTED)
    found = re.fullmatch(f"aiordma cp: {target}: {reason}\n", done.stderr)
    assert found is not None, done.stderr
    return done.returncode == 1 and done.stdout == "" and 0 < float(found[1]) <= limit


@one_loop
async def test_timeout_ends_the_wait_for_an_accept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    async with listen_stream(ADDRESS) as listener:
        port = str(listener.port)
        done = await cp_beside_the_loop(str(source), ADDRESS, "--port", port, "--timeout", "4")
    assert gave_up(done, port, 4)


@pytest.mark.natively
@pytest.mark.capability("iwarp")
def test_timeout_ends_the_wait_for_a_server_that_says_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    with socket.create_server((ADDRESS, 0)) as server:  # TCP accepts, and no program does
        port = str(server.getsockname()[1])
        done = cp(str(source), ADDRESS, "--port", port, "--timeout", "4")
    assert gave_up(done, port, 4)


@pytest.mark.natively
@pytest.mark.parametrize(
    ("timeout", "status", "text"),
    [
        ("0.0009", 2, "--timeout"),
        ("nan", 2, "--timeout"),
        ("0.001", 1, "took longer than "),
        ("1e300", 0, ""),
    ],
)
def test_timeout_at_the_ends_of_its_range(
    timeout: str, status: int, text: str, served: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"data")
    with socket.create_server((ADDRESS, 0)) as silent:
        port = str(silent.getsockname()[1])
        if status:
            done = cp(str(source), ADDRESS, "--port", port, "--timeout", timeout)
        else:
            with serving(*COMMAND, "--serve", str(served), "--bind", ADDRESS, "--port", OWN_PORT):
                done = cp(str(source), ADDRESS, "--port", OWN_PORT, "--timeout", timeout)
            assert (served / "source").read_bytes() == b"data"
    assert done.returncode == status, done.stderr
    assert text in done.stderr


@one_loop
@pytest.mark.natively
async def test_timeout_does_not_end_a_copy_that_stalls(served: Path, tmp_path: Path) -> None:
    """It bounds the connecting only."""
    seconds = 2.0
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3_000_000))  # more than is in flight
    server = Server(served)

    class Stalling(FileReceiver):
        async def _fill(self, *arguments: Any) -> None:
            await anyio.sleep(1.5 * seconds)  # a part of the file is here
            await super()._fill(*arguments)

    server.receiver = Stalling(served, server.note)
    with anyio.fail_after(60):
        async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
            group.start_soon(server.serve, listener)
            done = await cp_beside_the_loop(
                str(source), ADDRESS, "--port", str(listener.port), "--timeout", str(seconds)
            )
    assert done.returncode == 0, done.stderr
    assert server.error is None
    assert (served / "source").read_bytes() == source.read_bytes()


@pytest.mark.natively
def test_a_name_that_cannot_be_printed_ends_no_server(
    served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    source = tmp_path / "source"
    source.write_bytes(b"data")
    server = (*COMMAND, "--serve", str(served), "--bind", ADDRESS, "--port", OWN_PORT)
    with serving(*server):
        for name in ("h\u00e9", "\x1b[31m", "last"):
            done = cp(str(source), f"{ADDRESS}:{name}", "--port", OWN_PORT)
            assert done.returncode == 0, done.stderr
    assert names_in(served) == ["\x1b[31m", "h\u00e9", "last"]


def in_terminal(*arguments: str) -> tuple[int, str]:
    """Run the command with a pseudo-terminal as standard error; return its status, and what it
    wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    environment = os.environ | {"TERM": "xterm"}
    command = [*python(), *COMMAND, *arguments]
    written = b""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # EIO: the terminal's other side was closed
            while data := os.read(ours, 1 << 16):
                written += data
    os.close(ours)
    return process.returncode, written.decode()


@pytest.mark.natively
def test_the_progress_is_shown_in_a_terminal(served: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(400_000_000)
    server = (*COMMAND, "--serve", str(served), "--bind", ADDRESS, "--port", OWN_PORT)
    with serving(*server):
        status, written = in_terminal(str(source), ADDRESS, "--port", OWN_PORT)
    assert status == 0, written
    assert (served / "source").stat().st_size == 400_000_000
    shares = [int(number) for number in re.findall(r"(\d+)%", written)]
    assert shares == sorted(shares)
    assert len(set(shares)) > 2
    assert shares[-1] == 100
    assert "400.0/400.0 MB" in written
    assert re.search(r"\d+\.\d MB/s", written)
    shown = written.rpartition("400.0/400.0 MB")[2]
    assert "\x1b[2K" in shown  # the end erases the bar


@pytest.mark.natively
def test_an_error_in_a_terminal_leaves_no_bar(served: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(100))
    server = (*COMMAND, "--serve", str(served), "--bind", ADDRESS, "--port", OWN_PORT)
    with serving(*server):
        status, written = in_terminal(str(source), f"{ADDRESS}:../out", "--port", OWN_PORT)
    assert status == 1
    assert "\x1b[2Kaiordma cp: " in written.splitlines()[-1]
    assert "(the server's reply)" in written


def test_file_is_stored_also_if_nobody_reads_the_servers_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of the log would be sent to the client, as one of its file."""
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w") as log:  # of the close
        monkeypatch.setattr(sys, "stdout", log)
        try:
            command._received(Path("stored"), 5)
        except OSError as error:
            pytest.fail(f"it raised {error!r}")


@contextmanager
def serving_without_stderr(served: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a server whose standard error is on a full disk."""
    command = [*python(), *COMMAND, "--serve", str(served), "--bind", ADDRESS, "--port", "0"]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True
        ) as server,
    ):
        try:
            yield server
        finally:
            server.kill()


def names(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


@one_loop
async def test_server_outlives_a_full_disk_and_removes_parts_at_sigterm(
    served: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(b"whole")
    with serving_without_stderr(served) as server:
        assert server.stdout is not None
        port = server.stdout.readline().rpartition(":")[2].strip()
        async with await connect_stream(ADDRESS, int(port)) as stream:
            await stream.send(open_message("cut", 0o644) + write_message(1000))
        # The server could not say that the client ended the stream inside a file.
        done = await cp_beside_the_loop(str(tmp_path / "source"), ADDRESS, "--port", port)
        assert done.returncode == 0, done.stderr
        async with await connect_stream(ADDRESS, int(port)) as stream:
            await stream.send(open_message("cut", 0o644) + write_message(1000) + bytes(10))
            with anyio.fail_after(20):
                while len(names(served)) == 1:
                    await anyio.sleep(0.01)
            server.terminate()
            assert await anyio.to_thread.run_sync(server.wait, 30) == 0
    assert names(served) == ["source"]
