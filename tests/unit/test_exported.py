"""The libraries that export the software device have what rdma-core's have: symbols and versions,
texts and rates, identifiers that block, and work requests built by calls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiordma.cli.exec import FOLDER
from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
NOT_EXPORTED = {
    "ibv_copy_ah_attr_from_kern",  # these convert what the kernel's driver returns
    "ibv_copy_path_rec_from_kern",
    "ibv_copy_path_rec_to_kern",
    "ibv_copy_qp_attr_from_kern",
}
NEWER = {"ibv_register_driver", "ibv_cmd_create_cq_ex2", "ibv_wr_opcode_str"}
"""What other versions of rdma-core have: those of Debian 13 need the latter two."""
SECONDS = 60


def installed(library: str) -> Path:
    """Return rdma-core's library of that name."""
    shown = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    found = re.search(rf"^\s*{re.escape(library)} .*=> (\S+)$", shown, re.MULTILINE)
    if found is None:
        pytest.skip(f"this machine has no {library}: apt-get install libibverbs1 librdmacm1")
    return Path(found[1])


def exported(library: Path) -> set[str]:
    """Return the symbols with their default versions, as name@version."""
    command = ("readelf", "-W", "--dyn-syms", str(library))
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [line.split()[7] for line in shown.splitlines() if len(line.split()) > 7]
    return {name.replace("@@", "@") for name in names if "@@" in name and "@@@" not in name}


def run(command: list[str | Path], libraries: Path | None = FOLDER) -> str:
    """Return what a command prints: with our libraries in front, or with rdma-core's."""
    ours = {
        "LD_LIBRARY_PATH": str(libraries),
        "PATH": "/usr/bin:/bin",
        # gcc 12's reports its own destructor of a thread that was cancelled.
        "ASAN_OPTIONS": "use_sigaltstack=0",
    }
    done = subprocess.run(
        command,
        env=ours if libraries else None,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_symbol_of_rdma_core_has_its_version(library: str) -> None:
    theirs = {each for each in exported(installed(library)) if not each.startswith("IBVERBS")}
    missing = theirs - exported(FOLDER / library)
    assert {each.partition("@")[0] for each in missing} <= NOT_EXPORTED
    assert len(theirs) > 60


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_of_our_own_is_exported(library: str) -> None:
    theirs = {each.partition("@")[0] for each in exported(installed(library))}
    ours = {each.partition("@")[0] for each in exported(FOLDER / library)} - theirs - NEWER
    assert {each for each in ours if not each.startswith("AIORDMA")} == {
        each for each in ours if each.startswith("aiordma_exported_")
    }


TEXTS = """
import ctypes, sys
verbs, cm = map(ctypes.CDLL, sys.argv[1:])
for call in ("wc_status_str", "event_type_str", "port_state_str"):
    function = getattr(verbs, f"ibv_{call}")
    function.restype = ctypes.c_char_p
    print(call, [function(number) for number in range(-1, 30)])
verbs.ibv_node_type_str.restype = cm.rdma_event_str.restype = ctypes.c_char_p
print([verbs.ibv_node_type_str(number) for number in (1, 4)])
print([cm.rdma_event_str(number) for number in range(16)])
for call in ("ibv_rate_to_mult", "ibv_rate_to_mbps"):
    print(call, [getattr(verbs, call)(number) for number in range(30)])
for number in range(-1, 500):
    print(number, verbs.mult_to_ibv_rate(number))
for rate in range(26):
    print(rate, verbs.mbps_to_ibv_rate(verbs.ibv_rate_to_mbps(rate)))
"""


def test_texts_and_rates_are_those_of_rdma_core() -> None:
    theirs = [installed(library) for library in LIBRARIES]
    ours = [FOLDER / library for library in LIBRARIES]
    python = [sys.executable, "-c", TEXTS]
    assert run([*python, *map(str, ours)]) == run([*python, *map(str, theirs)], libraries=None)


NATIVE = ROOT / "aiordma/_native"
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")
SANITIZER = os.environ.get("AIORDMA_SANITIZER_FLAGS", "").split()
IN_LIBRDMACM = ("cm_calls", "rsockets", "synchronous")


def compile_c(*arguments: str | Path) -> None:
    """Compile for the sanitizer that runs, if any. Its runtime is preloaded for Python only."""
    without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ["gcc", *FLAGS, *SANITIZER, *map(str, arguments)]
    done = subprocess.run(command, env=without, capture_output=True, text=True)
    if "rdma_cma.h: No such file" in done.stderr:
        pytest.skip("needs rdma-core's headers: apt-get install libibverbs-dev librdmacm-dev")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the libraries: the built ones, or such that are compiled for the sanitizer."""
    if not SANITIZER:
        return FOLDER
    folder = tmp_path_factory.mktemp("libraries")
    exports = set((NATIVE / "exported").glob("*.c"))
    of_cm = {NATIVE / "exported" / f"{name}.c" for name in IN_LIBRDMACM}
    device = (NATIVE / "software").glob("*.c")
    for library, sources in (
        ("libibverbs", [*(exports - of_cm), *device]),
        ("librdmacm", [*of_cm, folder / "libibverbs.so.1"]),
    ):
        script = f"-Wl,--version-script={NATIVE}/exported/{library}.map"
        options = ("-shared", "-fPIC", "-fvisibility=hidden", f"-I{NATIVE}", script)
        name = f"{library}.so.1"
        compile_c(*options, f"-Wl,-soname,{name}", "-o", folder / name, *sources, "-lpthread")
    return folder


@pytest.mark.parametrize("program", ["endpoints", "built_requests", "cancelled"])
def test_program(program: str, libraries: Path, tmp_path: Path) -> None:
    binary = tmp_path / program
    compile_c(
        ROOT / "tests/native" / f"{program}.c", "-o", binary, "-lrdmacm", "-libverbs", "-lpthread"
    )
    assert run([binary], libraries) == ""


BOTH = """
import ctypes, sys
count = ctypes.c_int(-1)
for library in sys.argv[1:]:
    verbs = ctypes.CDLL(library)
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    verbs.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    if devices:
        verbs.ibv_free_device_list(devices)
print(count.value)
"""


def test_opening_the_real_library_by_its_path_does_no_harm() -> None:
    real = installed("libibverbs.so.1")
    assert run([sys.executable, "-c", BOTH, "libibverbs.so.1", str(real), "libibverbs.so.1"]) == (
        "2\n"  # software and software_roce
    )


CLOSED = """
import _ctypes, contextlib, ctypes, socket, struct
cm = ctypes.CDLL("librdmacm.so.1")
cm.rdma_create_event_channel.restype = ctypes.c_void_p
channel, identifier = ctypes.c_void_p(cm.rdma_create_event_channel()), ctypes.c_void_p()
assert not cm.rdma_create_id(channel, ctypes.byref(identifier), None, 0x106)
address = struct.pack("=H2s4s8x", socket.AF_INET, bytes(2), socket.inet_aton("127.0.0.1"))
assert not cm.rdma_bind_addr(identifier, address)
assert not cm.rdma_listen(identifier, 1)
port = socket.ntohs(cm.rdma_get_src_port(identifier) & 0xFFFF)
_ctypes.dlclose(cm._handle)
with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
    peer.sendall(bytes(64))
    with contextlib.suppress(ConnectionResetError):
        assert peer.recv(1) == b""  # the engine's thread refuses what is not MPA
"""


def test_library_that_a_program_closes_stays() -> None:
    assert run([sys.executable, "-c", CLOSED]) == ""
