"""Build the fuzzers with clang's libFuzzer, address and undefined-behaviour sanitizers; run them.
Those of rsockets' protocol and of a stream's calls, which are in Python, use libFuzzer by Atheris;
the engine below them is compiled with the same sanitizers, and explored as Python's code is.

    python -m tests.fuzz [RUNS]

RUNS inputs in all, shared out among the targets as SHARES says. What was learned is kept below
build/fuzz and used by the next run. An input that fails is kept there too, and named.
"""

import os
import re
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import seeds
from tests.vm import packages

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
NATIVE = ROOT / "aiordma" / "_native"
SOFTWARE = NATIVE / "software"
BUILD = ROOT / "build" / "fuzz"
ENGINE = BUILD / "engine"

# The last two are in Python, and so slower: some dozens of inputs per second. One of them runs an
# event loop.
SHARES = {
    "stream": 400,
    "handshake": 200,
    "datagrams": 200,
    "packets": 200,
    "conversations": 200,
    "codecs": 200,
    "rsocket": 5,
    "calls": 1,
}
LONGEST = {
    "stream": 600,
    "handshake": 600,
    "datagrams": 1200,
    "packets": 600,
    "conversations": 600,
    "codecs": 4200,
    "rsocket": 800,
    "calls": 400,
}
IN_PYTHON = ("rsocket", "calls")
SECONDS_OF_ONE_INPUT = 10  # milliseconds are usual
COMMON = ("world.c", "manager.c", "engine.c", "sockets.c", "peer.c")
FLAGS = (
    *("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-D_GNU_SOURCE", "-fno-omit-frame-pointer"),
    # Turns of a few frames, so that inputs of ordinary length take several.
    *("-DSW_SHORT_TURN=1024u", "-DSW_LONG_TURN=2048u"),
)
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# What the engine does wrong ends Python, which has no runtime for undefined behaviour in it.
IN_PYTHONS_PROCESS = ("-fsanitize=address,undefined,fuzzer-no-link", "-fsanitize-trap=undefined")
# The device's, in whose place is engine.c: threads, and what each of them serves.
WITHOUT = ("engine.c", "progress.c", "simulation.c")
# The system's, in whose place the fuzzers have their own: engine.c, sockets.c.
REPLACED = (
    *("getrandom", "socket", "socketpair", "bind", "listen", "accept4", "connect", "close"),
    *("getsockname", "getpeername", "getsockopt", "setsockopt", "shutdown", "getrlimit"),
    *("getifaddrs", "freeifaddrs", "if_nametoindex", "readv", "recv", "recvmsg", "send", "sendmsg"),
)
OPTIONS = {
    # A stream's buffers are large: without a limit what was freed fills the memory.
    "ASAN_OPTIONS": "quarantine_size_mb=16:detect_leaks=1:detect_stack_use_after_return=0"
    ":malloc_context_size=20:handle_abort=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# Python and its libraries leave memory at their end. An object is an allocation of its own, so that
# it has its own red zones.
OPTIONS_IN_PYTHON = {
    "ASAN_OPTIONS": OPTIONS["ASAN_OPTIONS"].replace("detect_leaks=1", "detect_leaks=0"),
    "PYTHONMALLOC": "malloc",
    "PYTHONPATH": str(ROOT / "tests" / "sanitizers" / "inject"),
    "AIORDMA_SANITIZED": str(ENGINE),
}


@dataclass
class Running:
    name: str
    runs: int
    process: subprocess.Popen[bytes]
    log: Path
    started: float


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    chosen = sys.argv[2:] or list(SHARES)
    BUILD.mkdir(parents=True, exist_ok=True)
    packages.ensure(packages.FUZZ)
    build([name for name in chosen if name not in IN_PYTHON])
    if any(name in IN_PYTHON for name in chosen):
        build_engine()
    whole = sum(SHARES[name] for name in chosen)
    waiting = [(name, -(-runs * SHARES[name] // whole)) for name in chosen]
    running: list[Running] = []
    failed = 0
    done = 0
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(start(*waiting.pop(0)))
        time.sleep(0.2)
        for one in [one for one in running if one.process.poll() is not None]:
            running.remove(one)
            count = report(one)
            done += count
            failed += count < one.runs
    print(f"fuzz: {done} inputs, {failed} targets failed")
    return bool(failed)


def build(chosen: list[str]) -> None:
    """Compile what changed, and link every target."""
    if not chosen:
        return
    objects = BUILD / "objects"
    objects.mkdir(exist_ok=True)
    headers = [*SOFTWARE.glob("*.h"), *HERE.glob("*.h"), *SOFTWARE.parent.rglob("*.h")]
    newest = max(path.stat().st_mtime for path in headers)
    sources = [path for path in SOFTWARE.glob("*.c") if path.name not in WITHOUT]
    # fuzz- keeps our engine.c and stream.c apart from the device's.
    compiled = {source: objects / f"{source.stem}.o" for source in sorted(sources)}
    for name in (*COMMON, *(f"{name}.c" for name in chosen)):
        compiled[HERE / name] = objects / f"fuzz-{Path(name).stem}.o"
    includes = [f"-I{SOFTWARE.parent}", f"-I{HERE}"]
    for source, to in compiled.items():
        if not to.exists() or to.stat().st_mtime < max(newest, source.stat().st_mtime):
            watched = [*FLAGS, *how_to_watch(source), *includes]
            subprocess.run(["clang", *watched, "-c", source, "-o", to], check=True)
    shared = [to for source, to in compiled.items() if source.parent == SOFTWARE]
    shared += [compiled[HERE / name] for name in COMMON]
    wraps = [f"-Wl,--wrap={name}" for name in REPLACED]
    for name in chosen:
        parts = [*shared, compiled[HERE / f"{name}.c"]]
        flags = ["-fsanitize=fuzzer,address,undefined", *wraps]
        subprocess.run(["clang", *flags, *parts, "-lpthread", "-o", BUILD / name], check=True)


def build_engine() -> None:
    """Compile the engine for the targets in Python; the binding stays as it is."""
    ENGINE.mkdir(exist_ok=True)
    (binding,) = NATIVE.glob("_binding.*.so")
    link = ENGINE / binding.name
    link.unlink(missing_ok=True)
    link.symlink_to(binding)
    library = ENGINE / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = sorted((NATIVE / "engine").glob("*.c"))
    newest = max(path.stat().st_mtime for path in (*sources, *NATIVE.rglob("*.h")))
    if library.exists() and library.stat().st_mtime > newest:
        return
    flags = [*FLAGS, "-Wno-cast-function-type", "-Wno-missing-field-initializers"]
    flags += ["-shared", "-fPIC", "-fvisibility=hidden", *IN_PYTHONS_PROCESS]
    flags += [f"-I{NATIVE}", f"-I{sysconfig.get_path('include')}"]
    subprocess.run(["clang", *flags, *sources, "-o", library], check=True)


def environment_of(name: str) -> dict[str, str]:
    """Return what is set for a target."""
    if name not in IN_PYTHON:
        return os.environ | OPTIONS
    # Atheris brings libFuzzer and the address sanitizer in one library, for extensions in C.
    (runtime,) = Path(sysconfig.get_path("platlib")).glob("asan_with_fuzzer.so")
    return os.environ | OPTIONS_IN_PYTHON | {"LD_PRELOAD": str(runtime)}


def how_to_watch(source: Path) -> tuple[str, ...]:
    """What the fuzzer is to explore is the device and the targets; sums are tested elsewhere, and
    would be half of the time."""
    if source.name in ("crc32c.c", "crc_tables.c"):
        return ("-O2",)
    if source.name in COMMON and source.parent == HERE:
        return ("-O2", *SANITIZED)
    if source.name == "roce.c":  # its sum as well: comparisons are not traced here
        return (*SANITIZED, "-fsanitize-coverage=inline-8bit-counters,pc-table")
    return (*SANITIZED, "-fsanitize=fuzzer-no-link")


def start(name: str, runs: int) -> Running:
    corpus, made = BUILD / "corpus" / name, BUILD / "seeds" / name
    for folder in (corpus, made, BUILD / "found"):
        folder.mkdir(parents=True, exist_ok=True)
    for title, data in seeds.of(name).items():
        (made / title).write_bytes(data)
    log = BUILD / f"{name}.log"
    program = [sys.executable, "-m", f"tests.fuzz.{name}"] if name in IN_PYTHON else [BUILD / name]
    command = [
        *map(str, program),
        f"-runs={runs}",
        f"-max_len={LONGEST[name]}",
        f"-timeout={SECONDS_OF_ONE_INPUT}",
        f"-artifact_prefix={BUILD}/found/{name}-",
        *("-print_final_stats=1", "-rss_limit_mb=2048", "-entropic=0", "-use_value_profile=0"),
        *(str(corpus), str(made)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment_of(name), cwd=ROOT
        )
    return Running(name, runs, process, log, time.monotonic())


def report(one: Running) -> int:
    """Say how it ended; returns how many inputs were run, 0 if one of them failed."""
    text = one.log.read_text(errors="replace")
    seconds = time.monotonic() - one.started
    match = re.search(r"stat::number_of_executed_units: *(\d+)", text)
    count = int(match[1]) if match else 0
    covered = re.findall(r"cov: (\d+) ft: (\d+)", text)
    cover = f"{covered[-1][0]} edges" if covered else "nothing covered"
    rate = count / seconds if seconds else 0
    print(f"{one.name:10} {count:9} inputs {seconds:6.0f} s {rate:8.0f}/s  {cover}")
    if one.process.returncode == 0 and count >= one.runs:
        return count
    print(f"{one.name} failed with status {one.process.returncode}; the end of {one.log}:")
    print("\n".join(line for line in text.splitlines() if not line.startswith("#"))[-6000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
