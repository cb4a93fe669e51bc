"""Programs run beside a test: no wait without a limit, no failure without what they wrote.

On the software device, a program runs as under `aiordma exec`, and as an ordinary user.
"""

import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import IO, TypeVar

import anyio
import pytest
from anyio.abc import Process, SocketListener, SocketStream
from anyio.streams.stapled import MultiListener

from aiordma import RdmaConnectionError
from aiordma.cli.exec import FOLDER
from aiordma.streams import Stream, connect_stream
from tests.conftest import DEVICE, LOOPS
from tests.devices import ADDRESS
from tests.internals import SOFTWARE
from tests.kernel_objects import has_port, kernel_listens
from tests.unit.sources import ROOT

Result = TypeVar("Result")

SECONDS = 100.0
"""For a program that has little to do; under emulation a Python process takes 3 s to start."""

RPING_ENDS = "rdma_get_cm_event: Bad file descriptor\n"
"""What rping of rdma-core 44 may write at its end, with status 255 for its own: one of its threads
closes the descriptor that another one reads (mended in rdma-core 59)."""

every_loop = pytest.mark.parametrize("anyio_backend", LOOPS, indirect=True)


PACKAGES = "rdmacm-utils ibverbs-utils perftest"
"""Those of Debian that have the C programs."""

AS_ORDINARY_USER = (
    ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups") if os.geteuid() == 0 else ()
)


@functools.cache
def _public_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="aiordma-")
    os.chmod(folder.name, 0o755)
    return folder


@functools.cache
def for_everyone(file: Path) -> Path:
    """Return a copy of a file that an ordinary user may read. The project may be root's."""
    copy = Path(_public_folder().name) / file.name
    shutil.copy(file, copy)
    return copy


def on_software() -> dict[str, str]:
    """The environment that `aiordma exec` makes, with copies of its libraries."""
    libraries = {for_everyone(file).parent for file in FOLDER.glob("*.so.1")}
    assert libraries, f"{FOLDER} has no libraries: make venv"
    return {**os.environ, "LD_LIBRARY_PATH": str(libraries.pop())}


class Program:
    """A running program, and what it has written so far, both streams together."""

    def __init__(
        self, command: tuple[str | int | Path, ...], process: Process, log: IO[bytes]
    ) -> None:
        self._command = " ".join(map(str, command))
        self._process = process
        self._log = log
        self._written = ""

    def __str__(self) -> str:
        status = self._process.returncode
        end = "still runs" if status is None else f"ended with status {status}"
        return f"`{self._command}` {end}, having written:\n{self.output}"

    @property
    def output(self) -> str:
        if not self._log.closed:
            # The program has the same file offset: with a seek it would write over its own words.
            size = os.fstat(self._log.fileno()).st_size
            self._written = os.pread(self._log.fileno(), size, 0).decode(errors="replace")
        return self._written

    async def listens(self, port: int, device: str = DEVICE) -> None:
        """Wait until a connection can be made to that port."""
        while not (has_port(port) if device == SOFTWARE else kernel_listens(device, port)):
            assert self._process.returncode is None, self
            await anyio.sleep(0.02)

    async def has_written(self, text: str, times: int = 1) -> None:
        """Wait until it has."""
        while True:
            if self.output.count(text) >= times:
                return
            assert self._process.returncode is None, self
            await anyio.sleep(0.02)

    def stop(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


@asynccontextmanager
async def connected_to_rsockets(port: int) -> AsyncIterator[Stream]:
    """Connect a stream to a C program. Its rsockets send a grant behind the handshake's answer at
    once, and siw then refuses the answer, if both are there when it looks (docs/devices.md): such
    a connect is tried again, up to four times."""
    for left in reversed(range(5 if DEVICE.startswith("siw") else 1)):
        try:
            stream = await connect_stream(ADDRESS, port)
            break
        except RdmaConnectionError as error:
            if not left or "connect error: Invalid argument" not in str(error):
                raise
    async with stream:
        yield stream


@asynccontextmanager
async def running(
    *command: str | int | Path,
    status: int | None = 0,
    last_words: str | None = None,
    within: float = SECONDS,
    as_nobody: bool = True,
) -> AsyncIterator[Program]:
    """Run a program beside the block, and wait for its end after it.

    Args:
        command: the program and its arguments.
        status: what it must end with; the negative number of a signal if that ends it; None where
            the program's own threads race for it.
        last_words: what excuses any other status, if it wrote this last: a fault of its own that
            comes after its work. The test then has to see to the work.
        within: seconds for the block and the program's end together.
        as_nobody: a program on the software device runs as an ordinary user. False: as this one,
            because RoCE's port is shared by the processes of one user.

    Raises:
        AssertionError: another status, or too late; it says what the program wrote. Any exception
            of the block gets that as a note.
    """
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"this machine has no {command[0]}: apt-get install {PACKAGES}")
    with tempfile.TemporaryFile() as log:
        # Line by line, so that a program that hangs has printed how far it came.
        # Our own programs use the device as they are, and may be where only root may read.
        is_exported = DEVICE == SOFTWARE and not Path(str(command[0])).is_relative_to(ROOT)
        words = [*AS_ORDINARY_USER] if is_exported and as_nobody else []
        words += ["stdbuf", "-oL", *map(str, command)]
        process = await anyio.open_process(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=on_software() if is_exported else None,
        )
        program = Program(command, process, log)
        try:
            with anyio.move_on_after(within) as scope:
                yield program
                await process.wait()
            assert not scope.cancelled_caught, f"{within:g} s are over"
            if last_words is None or not program.output.endswith(last_words):
                assert status in (None, process.returncode), f"the status is not {status}"
        except BaseException as error:
            error.add_note(str(program))
            raise
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.aclose()
            _ = program.output  # kept beyond the log's end


def only(listener: MultiListener[SocketStream]) -> SocketListener:
    """Return the socket of a listener on one address."""
    (socket,) = listener.listeners
    assert isinstance(socket, SocketListener)
    return socket


MOST_TIMES_AGAIN = 4
REFUSED = "RDMA_CM_EVENT_REJECTED"
"""perftest with -R: both ends connect twice, and now and then the client does so before the server
listens again."""
UNACKNOWLEDGED = "transport retry counter exceeded (12) for wr_id 2"
"""A pingpong's last SEND to rxe, which reports a message before it acknowledges it
(rxe_resp.c): the peer has all messages then, ends, and takes the acknowledgement along."""


async def again_if(said: str, run: Callable[[], Awaitable[Result]]) -> Result:
    """Run programs, and again if one has failed with these words, by a race of its own."""
    for _ in range(MOST_TIMES_AGAIN):
        try:
            return await run()
        except AssertionError as error:
            if said not in "".join([str(error), *getattr(error, "__notes__", ())]):
                raise
    return await run()


def running_rping(
    *arguments: str | int, status: int | None = 0
) -> AbstractAsyncContextManager[Program]:
    """Run the C program of that name; its output has to show that all rounds took place."""
    return running("rping", *arguments, status=status, last_words=RPING_ENDS)
