"""The Linux kernel's 9P client, which mounts a folder from examples/ninep.py over RDMA."""

import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

import aiordma
from examples import ninep
from tests.devices import ADDRESS, DEVICE
from tests.interop.programs import running

pytestmark = [pytest.mark.anyio, pytest.mark.capability("kernel")]

CLIENT_DEPTH = 16
ATTEMPTS = 3
IS_IWARP = DEVICE.startswith("siw")
GIVEN_UP = Path("/sys/class/infiniband", DEVICE, "ports/1/hw_counters/retry_exceeded_err")

Use = Callable[[Path, Path], Awaitable[None]]
"""Works on a folder, and on where it is mounted."""


@pytest.fixture(scope="module", autouse=True)
def kernel_client() -> None:
    """Load the client, which the test bed's kernel has as modules."""
    for module in ("9p", "9pnet_rdma"):
        loaded = subprocess.run(["modprobe", module], capture_output=True, text=True)
        if loaded.returncode:
            pytest.skip(f"this kernel lacks the module {module}: {loaded.stderr.strip()}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    folder = tmp_path / "mount"
    folder.mkdir()
    return folder


@asynccontextmanager
async def mounted(root: Path, mount: Path) -> AsyncIterator[list[int]]:
    """Serve `root`, and mount it; yields where the number of requests will be found."""
    counts: list[int] = []

    async def serve(listener: aiordma.Listener) -> None:
        counts.append(await ninep.serve_client(await listener.request(), root))

    async with (
        aiordma.listen(ADDRESS, 0) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(serve, listener)
        chosen = {
            "trans": "rdma",
            "version": "9p2000.L",
            "port": listener.port,
            "sq": CLIENT_DEPTH,
            "rq": CLIENT_DEPTH,
        }
        listed = ",".join(f"{name}={value}" for name, value in chosen.items())
        await mount_from(listener, "mount", "-t", "9p", "-o", listed, ADDRESS, str(mount))
        before = given_up()
        try:
            yield counts
        finally:
            force = ["-f", "-l"] if given_up() != before else []
            with anyio.CancelScope(shield=True):
                async with running("umount", *force, str(mount)):
                    pass


async def mount_from(listener: aiordma.Listener, *command: str) -> None:
    """Mount by the kernel's client, which on iWARP finds its local port taken now and then.

    The kernel's connection manager chooses the port, without a look at the ports that TCP's sockets
    have, and siw takes it for a TCP socket of its own. The client does not try another one: the
    mount ends with ENOTCONN, and nothing has reached the listener.
    """
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            async with running(*command):
                pass
            return
        except AssertionError as error:
            is_port_taken = "Transport endpoint is not connected" in "".join(error.__notes__)
            has_reached = listener.statistics().connection_requests > 0
            if not (is_port_taken and IS_IWARP and attempts_left) or has_reached:
                raise


def given_up() -> int:
    """How many requests the device has failed for want of an acknowledgement; siw has no such."""
    return int(GIVEN_UP.read_text()) if GIVEN_UP.exists() else 0


async def used_while_mounted(root: Path, mount: Path, use: Use) -> int:
    """Serve a folder, mount it, use it; returns the number of requests.

    The kernel's client asks for no retries (retry_count 0): on a machine whose cores are busy, one
    acknowledgement that is late breaks its queue pair. It does not disconnect then, and what waits
    for an answer waits for ever; no server can change that. The device counts it: the next attempt
    begins with a new folder and a new mount.
    """
    for attempt in range(ATTEMPTS):
        before = given_up()
        folder = root / str(attempt)
        folder.mkdir()
        async with mounted(folder, mount) as counts, anyio.create_task_group() as group:
            group.start_soon(cancel_if_given_up, group.cancel_scope, before)
            await use(folder, mount)
            group.cancel_scope.cancel()
        if given_up() == before:
            return counts[0]
    pytest.skip(f"this machine is too busy: the kernel's 9P client gave up {ATTEMPTS} times")


async def cancel_if_given_up(scope: anyio.CancelScope, before: int) -> None:
    """Look at the device's counter until it says so."""
    while given_up() == before:
        await anyio.sleep(0.5)
    scope.cancel()


async def run(*command: str | int | Path) -> str:
    """Run a program that works on the mounted folder; returns what it wrote."""
    async with running(*(str(word) for word in command), within=240) as program:
        pass
    return program.output


async def test_the_kernel_lists_reads_and_writes(root: Path, mount: Path) -> None:
    data = bytes(range(256)) * 4096

    async def use(root: Path, mount: Path) -> None:
        (root / "ours").write_bytes(data)
        (root / "folder").mkdir()
        assert (await run("ls", mount)).split() == ["folder", "ours"]
        await run("cmp", mount / "ours", root / "ours")
        await run("cp", mount / "ours", mount / "folder" / "theirs")
        assert (root / "folder" / "theirs").read_bytes() == data
        await run("mv", mount / "folder" / "theirs", mount / "moved")
        await run("truncate", "-s", "100000", mount / "moved")
        assert (root / "moved").read_bytes() == data[:100000]
        await run("rm", "-r", mount / "folder", mount / "ours")
        assert os.listdir(root) == ["moved"]

    assert await used_while_mounted(root, mount, use) > 2 * len(data) / ninep.MESSAGE_SIZE


async def test_thousands_of_requests_of_the_kernel(root: Path, mount: Path) -> None:
    # Each block is a request, as the client keeps no cache; four copies at a time.
    script = 'for n in 1 2 3 4; do dd if="$0/source" of="$0/$n" bs=1000 status=none & done; wait'

    async def use(root: Path, mount: Path) -> None:
        (root / "source").write_bytes(bytes(range(250)) * 1000)
        await run("sh", "-c", script, mount)
        for name in "1234":
            await run("cmp", root / "source", root / name)

    assert await used_while_mounted(root, mount, use) > 2000


async def test_the_kernel_mounts_again_and_again(root: Path, mount: Path) -> None:
    async def use(root: Path, mount: Path) -> None:
        (root / "file").write_text("here")
        assert await run("cat", mount / "file") == "here"

    for number in range(4):
        folder = root / f"mount {number}"
        folder.mkdir()
        assert await used_while_mounted(folder, mount, use) > 0
