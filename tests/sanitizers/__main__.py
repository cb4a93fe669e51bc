"""Build our extensions under a sanitizer, prove that it bites, run the software device's tests.

    python -m tests.sanitizers address|thread [pytest arguments]

Everything is built below build/sanitize; the in-place extension stays as it is. A report of the
sanitizer fails the run, also one of a process that a test started, and also where the test itself
did not notice.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
OURS = ("/aiordma/_native/", "/tests/sanitizers/fault.c")
EXTENSIONS = ("_binding", "_engine")

# What is run, without the loops whose C is the same.
TESTS = (
    *("tests/unit", "tests/device", "tests/faults", "tests/attacks"),
    *("tests/simulation/test_simulation.py", "tests/simulation/test_verbs.py"),
)
LOOPS = ("uvloop", "trio")
# Tests of the repository itself, which run no C of ours; those that start compilers, which the
# sanitizers' runtimes would be loaded into; and those that have their own place before the C
# library, which is the sanitizers' here.
WITHOUT = (
    *("test_forked", "test_layers", "test_vm_", "test_public_surface", "test_verbs_page"),
    *("test_build", "test_wheel"),
    "test_software_addresses",
    "test_software_no_memory",
)

# Tests that limit or measure memory or processor time, which is mostly the sanitizer's own here.
MEASURED = (
    "tests/attacks/test_memory.py::test_process_without_memory_serves_others",
    "tests/attacks/test_memory.py::test_unanswered_reads_share_a_limit",
    "tests/attacks/test_memory.py::test_idle_connections_cost_little_memory",
    "tests/attacks/test_memory.py::test_memory_is_given_back_when_peers_leave",
    "tests/device/test_streams_programs.py::test_large_bodies_need_little_memory",
    "tests/device/test_thread_limits.py::test_real_memory_limit_still_closes_everything",
    "tests/unit/test_software_idle.py::test_idle_connection_costs_little_memory",
    "tests/unit/test_hot_path.py::test_polling_gives_way_on_a_busy_core",
)


# Those that have their own place before the C library, too.
PRELOADED = (
    "tests/unit/test_software_memory.py::test_large_memory_is_populated_in_steps",
    "tests/unit/test_software_dmabuf.py::test_pages_that_the_kernel_does_not_copy_are_accessed",
)

# Its process ends by a fault, which the sanitizers report as their own.
FAULTING = (
    "tests/simulation/test_simulation.py::"
    "test_a_fault_elsewhere_still_ends_a_process_that_guards_memory",
)

# They wait until freed memory is used again, which the sanitizers put off.
REUSED = (
    "tests/unit/test_completion_channel.py::test_address_of_a_closed_queue_names_the_new_one",
    "tests/device/test_registration_cache.py::test_array_at_the_same_address_is_registered_anew",
)


STATUS = (
    "tests/device/test_bench.py::test_gid_index_that_the_port_lacks_is_named",
    "tests/device/test_bench.py::test_row_without_a_server_reports_it",
    "tests/device/test_cli.py::test_doctor_reports_a_name_that_does_not_resolve",
    "tests/device/test_cli.py::test_doctor_tests_the_device",
    "tests/unit/test_cli_mistakes.py::test_mistake_has_a_reason_and_its_status",
    "tests/device/test_cli.py::test_ping_requires_rdma",
    "tests/device/test_cp.py::test_an_error_in_a_terminal_leaves_no_bar",
    "tests/device/test_cp.py::test_the_command_copies_a_file",
    "tests/unit/test_doctor.py::test_exit_status_and_json_agree",
    "tests/device/test_cli.py::test_ping_without_a_server_is_one_line",
    "tests/device/test_bench.py::test_interrupt_ends_it_without_a_report_of_requests",
    "tests/unit/test_trace.py::test_a_file_that_cannot_be_opened_is_named",
)


MISTAKE = "tests/unit/test_cli_mistakes.py::test_mistake_has_a_reason_and_its_status"
SHELLS = (
    "",
    "AIORDMA_DEVICE=rdma ",
    "AIORDMA_DEVICE=rxe77 ",
    "AIORDMA_CAPTURE=/missing/x ",
)
"""The benchmark's server is a process of tests.forked there, whose executable is a shell script."""


@dataclass(frozen=True)
class Sanitizer:
    name: str
    flags: tuple[str, ...]
    runtimes: tuple[str, ...]
    options: dict[str, str]
    instrumented: str
    """A symbol that every instrumented object wants."""
    without: tuple[str, ...]
    """Tests that it cannot follow: how their names begin."""
    faults: dict[str, tuple[int, str]]
    """By function of fault.c: what it is called with, and how the report calls it."""


ADDRESS = Sanitizer(
    "address",
    ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    ("libasan.so", "libubsan.so"),
    {
        # Leaks are reported and then judged here (`leaks`): those of the interpreter, which leaves
        # its own at exit, are not ours.
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:exitcode=99:strict_string_checks=1"
        ":detect_stack_use_after_return=1:malloc_context_size=30:fast_unwind_on_malloc=1",
        "LSAN_OPTIONS": "exitcode=0:report_objects=0:print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        # A Python object is an allocation of its own, with its own red zones.
        "PYTHONMALLOC": "malloc",
    },
    "__asan_init",
    (
        # They assert a process's exit status that is not 0. gcc 12's leak sanitizer crashes in its
        # own tracer at such a process's exit ("Tracer caught signal 11"), and the status is its own
        # then: 0, by LSAN_OPTIONS.
        *STATUS,
        *FAULTING,
        *REUSED,
    ),
    {
        "overrun": (16, "heap-buffer-overflow"),
        "use_after_free": (16, "heap-use-after-free"),
        "overflow": (5, "signed integer overflow"),
        "misaligned": (1, "misaligned address"),
        "leak": (100, "Direct leak of 100 byte"),
    },
)
THREAD = Sanitizer(
    "thread",
    ("-fsanitize=thread",),
    ("libtsan.so",),
    {
        # Not what the interpreter and other libraries do among themselves, which were not compiled
        # with it; their locks count. A fork's child goes on: tests fork on purpose.
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=99:die_after_fork=0"
        ":second_deadlock_stack=1:history_size=4",
    },
    "__tsan_init",
    (
        # A fork's child that starts a thread can end gcc 12's runtime: "dup thread with used id".
        "tests/device/test_fork.py::test_pools_of_processes_work_beside_live_connections[fork]",
        "tests/unit/test_async_events.py::test_child_joins_though_a_thread_joined_at_the_fork",
        "tests/unit/test_capture.py::test_each_process_has_a_file_by_its_number",
        "tests/unit/test_statistics.py::test_a_forked_child_begins_with_counters_of_its_own",
        "tests/unit/test_trace.py::test_a_forked_child_writes_to_a_file_of_its_own",
        "tests/device/test_fork.py::test_a_child_opens_anew",
        "tests/device/test_fork.py::test_multiprocessing_starts_children_that_work[fork]",
        # They run a shell, and Debian 12's can crash at its start with the runtime in it.
        "tests/device/test_dead_peers.py::test_a_black_hole_ends_every_connection",
        "tests/device/test_dead_peers.py::test_reconnecting_outlives_a_black_hole",
        "tests/unit/test_software_silence.py::test_silence_is_noticed_without_confirmations",
        "tests/device/test_cli.py::test_bash_completes_at_the_tab",
        # gcc 12's runtime ends every process that has no standard output.
        "tests/device/test_cli.py::test_command_without_a_standard_output_succeeds",
        *(f"{MISTAKE}[{beginning}bench local" for beginning in SHELLS),
        # The runtime has a thread of its own, which wakes all the time.
        "tests/unit/test_software_progress.py::test_idle_connection_wakes_no_thread",
        "tests/unit/test_software_identifiers.py::test_idle_connection_stops_the_dead_peer_check",
        *FAULTING,
        *REUSED,
    ),
    {"race": (0, "data race")},
)
SANITIZERS = {sanitizer.name: sanitizer for sanitizer in (ADDRESS, THREAD)}


def main() -> int:
    name, *arguments = sys.argv[1:]
    sanitizer = SANITIZERS[name]
    folder = ROOT / "build" / "sanitize" / name
    reports = folder / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    environment = environment_of(sanitizer, build(sanitizer, folder), reports)
    check_that_it_bites(sanitizer, folder, environment)
    clear(reports)
    chosen = " and ".join(f"not {name}" for name in LOOPS)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", chosen]
    words += ["-n", "2", "--dist", "loadfile", "--max-worker-restart=0", *arguments]
    words += [f"--ignore-glob=*{name}*" for name in WITHOUT]
    words += [f"--deselect={name}" for name in (*MEASURED, *PRELOADED, *sanitizer.without)]
    if not any(word.startswith("tests/") for word in arguments):
        words += TESTS
    status = subprocess.run(unrandomized(words), cwd=ROOT, env=environment).returncode
    found = findings(reports)
    for text in found:
        print(text)
    print(f"sanitize {name}: pytest's status {status}, {len(found)} reports")
    return status or bool(found)


def build(sanitizer: Sanitizer, folder: Path) -> Path:
    """Compile our extensions; returns the folder that they are in."""
    flags = " ".join((*sanitizer.flags, "-g", "-O1", "-fno-omit-frame-pointer"))
    options = [f"--build-lib={folder}", f"--build-temp={folder}/temp"]
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--force", *options],
        cwd=ROOT,
        env=os.environ | {"CFLAGS": flags, "LDFLAGS": flags},
        check=True,
    )
    built = folder / "aiordma" / "_native"
    for name in EXTENSIONS:
        (library,) = built.glob(f"{name}.*.so")
        symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
        if sanitizer.instrumented not in symbols.stdout:
            raise SystemExit(f"{library} is not instrumented: no {sanitizer.instrumented} in it")
    return built


def environment_of(sanitizer: Sanitizer, built: Path, reports: Path) -> dict[str, str]:
    paths = [
        subprocess.run(
            ["gcc", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for runtime in sanitizer.runtimes
    ]
    options = dict(sanitizer.options)
    for variable in options:
        if variable.endswith("SAN_OPTIONS") and not variable.startswith("LSAN"):
            options[variable] += f":log_path={reports}/{sanitizer.name}"
    return os.environ | {
        **options,
        "LD_PRELOAD": " ".join(paths),
        "PYTHONPATH": str(HERE / "inject"),
        "AIORDMA_SANITIZED": str(built),
        "AIORDMA_SANITIZER_REPORTS": str(reports),
        "AIORDMA_SANITIZER_FLAGS": " ".join(sanitizer.flags),
        "AIORDMA_TEST_DEVICE": "software",
        # The programs are several times slower than they are.
        "AIORDMA_PATIENCE": os.environ.get("AIORDMA_PATIENCE", "140"),
    }


def unrandomized(words: list[str]) -> list[str]:
    """gcc 12's thread sanitizer cannot start where the kernel scatters mappings by over 28 bits."""
    return ["setarch", "-R", *words]


def check_that_it_bites(sanitizer: Sanitizer, folder: Path, environment: dict[str, str]) -> None:
    """Faults made on purpose are reported, and Python loads the instrumented extensions."""
    reports = folder / "reports"
    library = folder / "fault.so"
    flags = [*sanitizer.flags, "-g", "-O0", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["gcc", *flags, HERE / "fault.c", "-o", library], check=True)
    for function, (argument, title) in sanitizer.faults.items():
        clear(reports)
        code = f"import ctypes; ctypes.CDLL({str(library)!r}).{function}({argument})"
        python(code, environment)
        found = findings(reports)
        if len(found) != 1 or title not in found[0]:
            raise SystemExit(f"{function} of fault.c: not one report of {title}, but {found}")
    for name in EXTENSIONS:
        said = python(f"import aiordma._native.{name} as it; print(it.__file__)", environment)
        if not said.startswith(environment["AIORDMA_SANITIZED"]):
            raise SystemExit(f"Python loads another extension: {said}")


def python(code: str, environment: dict[str, str]) -> str:
    words = unrandomized([sys.executable, "-c", code])
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT)
    return ran.stdout or ran.stderr


def clear(reports: Path) -> None:
    for path in reports.iterdir():
        path.unlink()


def findings(reports: Path) -> list[str]:
    """What the sanitizer wrote, without the interpreter's own leaks."""
    found = []
    for path in sorted(reports.iterdir()):
        text = path.read_text(errors="replace")
        found += leaks(text) if "LeakSanitizer" in text else [text] if text.strip() else []
    return found


def leaks(text: str) -> list[str]:
    """Those of a leak report whose memory was allocated on behalf of our C."""
    blocks = re.split(r"\n(?=(?:Direct|Indirect) leak of )", text)
    found = [block for block in blocks[1:] if any(place in block for place in OURS)]
    # Anything before the leaks is a report of another kind.
    return ([blocks[0]] if "AddressSanitizer" in blocks[0].partition("=====")[0] else []) + found


if __name__ == "__main__":
    sys.exit(main())
