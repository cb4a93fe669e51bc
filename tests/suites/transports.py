"""UCX, libfabric, Mooncake, rdma4py and roce-sim, which connect queue pairs by hand, on
software_roce: python -m tests.suites.transports [--write].

All but roce-sim's peer run as under `aiordma exec`. Nothing of them is kept in this repository.
"""

import json
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiordma.cli.exec import FOLDER
from aiordma.verbs import Device
from tests.ports import free_port
from tests.suites.common import BUILD, ROOT, fetch_commit, write_page
from tests.vm import packages

__all__ = ("main",)

MARK = "<!-- written by make suites up to rdma-core's own tests -->\n"
NEXT = "## rdma-core's own tests\n"
DEVICE = "software_roce"
SECONDS = 60

PYTHON_PACKAGES = (
    *("mooncake-transfer-engine-non-cuda", "ibverbs", "numpy", "pytest"),
    *("scapy==2.5.0", "grpcio", "grpcio-tools", "pyyaml", "cffi", "anyio"),  # of roce-sim, and ours
)
SOURCES = {
    "rdma4py": ("d4l3k/rdma4py", "441f23986bbb15484a5ea00231a87dd251c148ec"),
    "roce-sim": ("datenlord/roce-sim", "120df9e70351388b279d6b05eb3cc7f0dd6ebfa1"),
}
"""On GitHub. The package of rdma4py on PyPI has no tests."""
SPACE = "aiordma-roce-sim"
OURS, THEIRS, THEIR_PORT = "10.47.91.1", "10.47.91.2", "9123"

CHARACTER_DEVICE = Path("/dev/infiniband") / DEVICE
"""UCX looks for it, and does not open it."""

UCX_TESTS = (
    "tag_lat -s 8 -n 500",
    "tag_bw -s 65536 -n 500",
    "tag_bw -s 4194304 -n 20",
    "ucp_am_bw -s 65536 -n 500",
    "stream_bw -s 65536 -n 500",
    "ucp_put_lat -s 8 -n 500",
    "ucp_put_bw -s 65536 -n 500",
    "ucp_get -s 65536 -n 500",
    "ucp_fadd -s 8 -n 500",
    "ucp_cswap -s 8 -n 500",
)
LIBFABRIC_ENDPOINTS = ("msg", "rdm", "dgram")


@dataclass(frozen=True)
class Outcome:
    program: str
    what: str
    passed: int
    failed: int
    skipped: int = 0


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(FOLDER), "AIORDMA_DEVICE": DEVICE, **more}


def together(server: list[str], client: list[str], **settings: str) -> bool:
    """Run a program's two ends. Returns whether both succeeded; what failed has been printed."""
    with subprocess.Popen(
        server, env=environment(**settings), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as serving:
        try:
            time.sleep(1)
            done = subprocess.run(
                client, env=environment(**settings), capture_output=True, timeout=SECONDS
            )
            said, _ = serving.communicate(timeout=SECONDS)
            if done.returncode == 0 and serving.returncode == 0:
                return True
            print(*client, done.stdout + done.stderr, said, sep="\n", file=sys.stderr)
        except subprocess.TimeoutExpired as error:
            print(error, file=sys.stderr)
        finally:
            serving.kill()
    return False


def count(program: str, what: str, results: list[bool]) -> Outcome:
    return Outcome(program, what, sum(results), len(results) - sum(results))


# -- what each of them runs ---------------------------------------------------------------------


@contextmanager
def character_device() -> Iterator[None]:
    """Make what UCX looks for."""
    if CHARACTER_DEVICE.exists():
        yield
        return
    had_folder = CHARACTER_DEVICE.parent.exists()
    CHARACTER_DEVICE.parent.mkdir(exist_ok=True)
    CHARACTER_DEVICE.symlink_to("/dev/null")
    try:
        yield
    finally:
        CHARACTER_DEVICE.unlink()
        if not had_folder:
            CHARACTER_DEVICE.parent.rmdir()


def ipv6_index() -> int:
    """Return the index of a GID that is no IPv4 address: UCX 1.13 drops datagrams to IPv4."""
    with Device(DEVICE).open() as context:
        return next(i for i in range(256) if any(context.query_gid(1, i)[:10]))


def ucx() -> Iterator[Outcome]:
    packages.ensure(("ucx-utils",))
    settings = {"UCX_NET_DEVICES": f"{DEVICE}:1", "UCX_IB_GID_INDEX": str(ipv6_index())}
    with character_device():
        for transport in ("rc_v", "ud_v"):
            results = []
            for test in UCX_TESTS:
                program = ["ucx_perftest", "-p", str(free_port())]
                words = ["127.0.0.1", "-w", "5", "-t", *test.split()]
                one = {**settings, "UCX_TLS": transport}
                results.append(together(program, [*program, *words], **one))
            yield count("ucx_perftest", f"UCX_TLS={transport}", results)


def libfabric() -> Iterator[Outcome]:
    packages.ensure(("libfabric-bin",))
    results = []
    for kind in LIBFABRIC_ENDPOINTS:
        program = ["fi_pingpong", "-p", "verbs", "-e", kind, "-c", "-I", "100"]
        port = str(free_port())
        server, client = [*program, "-B", port], [*program, "-P", port, "127.0.0.1"]
        results.append(together(server, client))
    yield count("fi_pingpong -p verbs", f"-e {', '.join(LIBFABRIC_ENDPOINTS)}", results)


def interpreter() -> str:
    """Make a virtual environment with the Python packages; return its interpreter."""
    folder = BUILD / "transports"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *PYTHON_PACKAGES], check=True)
        (folder / "ready").touch()
    return str(python)


def fetched(name: str) -> Path:
    """Fetch a repository's revision, unless it is there. Return its folder."""
    folder = BUILD / name
    repository, revision = SOURCES[name]
    if not folder.exists():
        fetch_commit(folder, f"https://github.com/{repository}", revision)
    return folder


def mooncake() -> Iterator[Outcome]:
    topology = BUILD / "topology.json"
    topology.write_text(json.dumps({"cpu:0": [[DEVICE], []]}))
    program = [interpreter(), str(Path(__file__).parent / "in_suite" / "mooncake_peer.py")]
    given = environment(MC_CUSTOM_TOPO_JSON=str(topology))
    with subprocess.Popen(
        program, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdout is not None
        lines = iter(serving.stdout.readline, "")
        where = next(line.split() for line in lines if re.match(r"[\d.]+:\d+ \d+$", line))
        done = subprocess.run([*program, *where], env=given, timeout=SECONDS)
        serving.communicate(timeout=SECONDS)
    yield count(
        "Mooncake's transfer engine", "protocol rdma", [done.returncode == serving.returncode == 0]
    )


def rdma4py() -> Iterator[Outcome]:
    done = subprocess.run(
        [interpreter(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=fetched("rdma4py") / "ibverbs",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=10 * SECONDS,
    )
    found = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", done.stdout)}
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    failed = found.get("failed", 0) + found.get("errors", 0)
    yield Outcome("rdma4py", "its tests", found.get("passed", 0), failed, found.get("skipped", 0))


@contextmanager
def wire_to_roce_sim() -> Iterator[None]:
    """A network namespace for it: it wants the whole of RoCE's port."""
    ip = ["ip", "-n", SPACE]
    subprocess.run(["ip", "netns", "add", SPACE], check=True)
    try:
        for command in (
            ["ip", "link", "add", "aiordma-sim", "type", "veth", "peer", "eth0", "netns", SPACE],
            ["ip", "addr", "add", f"{OURS}/24", "dev", "aiordma-sim"],
            ["ip", "link", "set", "aiordma-sim", "up"],
            [*ip, "addr", "add", f"{THEIRS}/24", "dev", "eth0"],
            [*ip, "link", "set", "eth0", "up"],
        ):
            subprocess.run(command, check=True)
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", SPACE], check=True)


def scenario(sources: Path, name: str) -> bool:
    """Run one of roce-sim's scenarios. Its packets are remembered: each has its own processes."""
    programs = Path(__file__).parent / "in_suite"
    theirs = [interpreter(), str(programs / "roce_sim_side.py"), THEIRS, THEIR_PORT]
    ours = [interpreter(), str(programs / "roce_sim_case.py"), name, OURS, THEIRS, THEIR_PORT]
    with subprocess.Popen(
        ["ip", "netns", "exec", SPACE, *theirs],
        cwd=sources,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as serving:
        try:
            done = subprocess.run(
                ours,
                cwd=sources,
                env=environment(PYTHONPATH=str(ROOT)),
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        finally:
            serving.kill()
    if done.returncode:
        print(name, done.stderr, file=sys.stderr)
    return done.returncode == 0


def roce_sim() -> Iterator[Outcome]:
    sources = fetched("roce-sim") / "src"
    protocol = [str(each.relative_to(sources)) for each in sources.glob("proto/*.proto")]
    compiler = ["-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=."]
    subprocess.run([interpreter(), *compiler, *protocol], cwd=sources, check=True)
    with wire_to_roce_sim():
        for kind in ("success", "transport_layer_err"):
            names = sorted(str(each) for each in sources.glob(f"case/{kind}/**/*.yaml"))
            yield count("roce-sim", kind, [scenario(sources, name) for name in names])


JUDGES: tuple[Callable[[], Iterator[Outcome]], ...] = (
    *(ucx, libfabric, mooncake, rdma4py),
    roce_sim,
)


def main() -> int:
    """Run them all, print the results, and write them into the page if that is wanted."""
    BUILD.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    broken = 0
    for judge in JUDGES:
        try:
            outcomes += judge()
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{judge.__name__} did not run: {error}", file=sys.stderr)
            broken += 1
    lines = ["| program | what | passed | failed | skipped themselves |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.program} | {each.what} | {each.passed} | {each.failed} | {each.skipped} |"
        for each in outcomes
    ]
    text = "\n".join(lines)
    print(text)
    if "--write" in sys.argv and not broken:
        write_page("exec", text, MARK, NEXT)
    return int(broken > 0 or any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
