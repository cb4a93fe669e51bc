"""The wheel in virtual environments of its own, without a compiler: with and without rdma-core,
with and without the extra of the command.

`make wheel` sets AIORDMA_WHEEL to the file in dist/; then pip also installs what it depends on.
Without it the tests build a wheel, and borrow the dependencies of the tests' environment.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiordma
from tests.kernel_objects import has_port
from tests.unit.sources import ROOT

SECONDS = 500
"""For what compiles or installs, also on a machine that does much else."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 100)]

HIDE = Path(__file__).with_name("without_rdma_core.sh")

ECHO = """
import asyncio, sys, aiordma

async def main():
    async with aiordma.listen("127.0.0.1", 0, device="software") as listener:
        async def serve():
            async with await listener.accept() as connection:
                await connection.send(await connection.receive())
        task = asyncio.create_task(serve())
        async with aiordma.connect("127.0.0.1", listener.port) as connection:
            await connection.send(b"hello")
            print(connection.device_name, await connection.receive())
        await task

asyncio.run(main())
print(aiordma.__version__, aiordma.__file__)
"""

REAL_DEVICE = """
import aiordma
try:
    aiordma.verbs.Device("rxe0").open()
except aiordma.NoDeviceError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("AIORDMA_WHEEL"):
        return Path(given).resolve()
    made = tmp_path_factory.mktemp("wheel")
    command = ("setup.py", "-q", "bdist_wheel", "--dist-dir", made, "--bdist-dir", made / "b")
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=SECONDS)
    (built,) = made.glob("*.whl")
    return built


def environment(wheel: Path, folder: Path, extras: str, without: tuple[str, ...] = ()) -> Path:
    """Make an environment that has the wheel; return its Python.

    Args:
        extras: of the wheel, for pip.
        without: packages that the extras do not install, and that must not be borrowed.
    """
    ours = [sys.executable, "-m"]
    subprocess.run([*ours, "venv", "--without-pip", folder], check=True, timeout=SECONDS)
    interpreter = folder / "bin/python"
    borrows = "AIORDMA_WHEEL" not in os.environ
    options = ["--no-deps", "--no-index"] if borrows else []
    packages = [wheel] if borrows else [f"{wheel}[{extras}]", "pytest"]
    pip = [*ours, "pip", "--python", str(interpreter), "install", "-q", *options]
    without_compiler = {**os.environ, "CC": "no-compiler"}
    subprocess.run([*pip, *map(str, packages)], check=True, timeout=SECONDS, env=without_compiler)
    if borrows:
        (site,) = (folder / "lib").glob("python*/site-packages")
        hide = "".join(f"; sys.modules[{name!r}] = None" for name in without)
        (site / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport sys{hide}\n")
    return interpreter


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel without the command's packages."""
    return environment(wheel, tmp_path_factory.mktemp("bare"), "trio", ("typer", "rich"))


@pytest.fixture(scope="module")
def command(wheel: Path) -> Iterator[Path]:
    """The command `aiordma` of an environment that has the wheel with the extra cli."""
    # Not a folder of pytest's: only the user who runs it may enter that.
    with tempfile.TemporaryDirectory(prefix="aiordma-") as folder:
        os.chmod(folder, 0o755)
        yield environment(wheel, Path(folder), "cli").with_name("aiordma")


def ran(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that finds no compiler and no other program."""
    return subprocess.run(
        command, cwd=folder, env=nothing(folder), capture_output=True, text=True, timeout=60
    )


def nothing(folder: Path) -> dict[str, str]:
    """The variables of such a command."""
    return {"PATH": str(folder), "HOME": str(folder)}


def run(command: list[str | Path], folder: Path) -> str:
    """What such a command prints."""
    done = ran(command, folder)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def namespace() -> tuple[str, ...]:
    command = ("unshare", "--mount", "true")
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("hiding libraries needs root and a mount namespace (unshare --mount)")
    program = shutil.which("unshare")
    assert program
    return (program, "--mount", "/bin/sh", str(HIDE))


def test_wheel_echoes_on_the_software_device(python: Path, tmp_path: Path) -> None:
    lines = run([python, "-c", ECHO], tmp_path).splitlines()
    assert lines[0] == "software b'hello'"
    version, _, file = lines[1].partition(" ")
    assert version == aiordma.__version__
    assert Path(file).is_relative_to(python.parents[1])


@pytest.mark.parametrize("hidden", ["libibverbs", "librdmacm"])
def test_wheel_without_a_library_names_it(
    hidden: str, python: Path, namespace: tuple[str, ...], tmp_path: Path
) -> None:
    # The tools of the script that hides, but no compiler.
    (tmp_path / "over").mkdir()
    for name in ("mount", "mkdir", "find", "dirname", "awk", "ldconfig"):
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert found
        (tmp_path / name).symlink_to(found)
    hide = [*namespace, str(tmp_path / "over"), hidden]
    assert run([*hide, python, "-c", ECHO], tmp_path).startswith("software b'hello'\n")
    message = run([*hide, python, "-c", REAL_DEVICE], tmp_path)
    assert f"{hidden}.so.1: cannot open shared object file" in message
    assert "`apt-get install libibverbs1 librdmacm1 ibverbs-providers` on Debian" in message
    assert "`dnf install libibverbs librdmacm` on Fedora" in message


def test_extensions_link_only_the_c_library(python: Path) -> None:
    extensions = sorted((python.parents[1] / "lib").rglob("aiordma/_native/*.so"))
    assert len(extensions) == 2
    for extension in extensions:
        command = ("readelf", "-W", "--dynamic", extension)
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", shown))
        libraries = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
        assert "libc.so.6" in needed
        assert needed <= libraries


def test_exported_libraries_link_only_the_c_library_and_each_other(python: Path) -> None:
    libraries = sorted((python.parents[1] / "lib").rglob("aiordma/_native/exported/*"))
    assert [library.name for library in libraries] == ["libibverbs.so.1", "librdmacm.so.1"]
    for library, others in zip(libraries, (set(), {"libibverbs.so.1"}), strict=True):
        command = ("readelf", "-W", "--dynamic", library)
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", shown))
        assert needed <= {"libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"} | others
        assert others <= needed
        assert re.findall(r"\(SONAME\).*\[(.+)\]", shown) == [library.name]


SERVICE = """
async def double(connection):
    async for message in connection:
        await connection.send(message + message)
"""

# What docs/testing.md promises: a test of five lines, beside the project's own imports.
ITS_TEST = """
import aiordma, pytest
from service import double

@pytest.mark.anyio
async def test_double(rdma_listener, rdma_address):
    async with rdma_listener(double) as listener:
        async with aiordma.connect(rdma_address, listener.port) as connection:
            await connection.send(b"ab")
            assert await connection.receive() == b"abab"
"""


def test_a_project_of_its_own_tests_its_service_by_the_wheel(python: Path, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "test_service.py").write_text(ITS_TEST)
    command: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "2 passed" in run(command, tmp_path)  # on asyncio and on trio


def test_command_without_the_extra_says_what_to_install(python: Path, tmp_path: Path) -> None:
    done = ran([python.with_name("aiordma"), "doctor"], tmp_path)
    assert done.returncode == 2
    assert "pip install 'aiordma[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_command_copies_a_file_by_the_wheel(command: Path, tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    data = os.urandom(100_000)
    (tmp_path / "data.bin").write_bytes(data)
    serve: list[str | Path] = [
        command,
        "cp",
        "--serve",
        "incoming",
        "--bind",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        serve, cwd=tmp_path, env=nothing(tmp_path), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().rpartition(":")[2].strip()
            said = run([command, "cp", "data.bin", "127.0.0.1", "--port", port], tmp_path)
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130
    assert said.startswith("100000 bytes in ")
    assert (tmp_path / "incoming/data.bin").read_bytes() == data


def test_command_shows_the_software_device_by_the_wheel(command: Path, tmp_path: Path) -> None:
    assert "\nsoftware: " in "\n" + run([command, "info"], tmp_path)
    assert run([command, "--version"], tmp_path) == f"aiordma {aiordma.__version__}\n"


PERFTEST = "/usr/bin/ib_write_bw"


@pytest.mark.skipif(not os.path.exists(PERFTEST), reason="needs perftest: apt-get install perftest")
def test_c_program_runs_as_an_ordinary_user_by_the_wheel(command: Path, tmp_path: Path) -> None:
    # In an environment that borrows packages, they may be in a folder of root's.
    drops = os.geteuid() == 0 and "AIORDMA_WHEEL" in os.environ
    as_user = (
        ("/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups") if drops else ()
    )
    words = [*as_user, command, "exec", PERFTEST, "-R", "-n", "50", "-p", "18516", "-F"]
    with subprocess.Popen(
        words, env=nothing(tmp_path), cwd="/", stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            while not has_port(18516):
                assert server.poll() is None
            client = subprocess.run(
                [*words, "127.0.0.1"],
                env=nothing(tmp_path),
                cwd="/",
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert client.returncode == 0, client.stdout + client.stderr
            assert server.wait(30) == 0
        finally:
            server.kill()
    assert "Device         : software" in client.stdout
