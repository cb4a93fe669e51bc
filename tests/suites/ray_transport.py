"""Ray's own tests of its transports of tensors, over ours:
python -m tests.suites.ray_transport [--write].

A copy of each file runs, in which only the transport is replaced, as SUBSTITUTES says. Nothing of
them is kept in this repository.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

from tests.suites.common import BUILD, ROOT, fetch_commit, reason, write_page
from tests.suites.runner import PACKAGES

__all__ = ("main",)

SOURCES = BUILD / "ray"
FOLDER = "python/ray/tests/rdt"
REPOSITORY = "https://github.com/ray-project/ray"
REVISION = f"refs/tags/ray-{version('ray')}"
TENSORDICT = ("tensordict", "pyvers")
"""What the tests of torch's tensors import."""
SECONDS = 3600
EACH = 120
"""Seconds for one test."""

SUBSTITUTES: dict[str, tuple[tuple[str, str], ...]] = {
    "test_rdt_custom.py": (),  # in_suite/ray_transport.py registers ours under its name
    "test_rdt_gloo.py": (
        ("gloo", "aiordma"),
        ("GLOO", "AIORDMA"),
        (
            "from ray.experimental.collective import create_collective_group",
            "from in_suite.ray_transport import create_collective_group",
        ),
    ),
    "test_rdt_nixl.py": (
        ('"nixl"', '"aiordma"'),
        ('"NIXL"', '"AIORDMA"'),
        ('"cuda"', '"cpu"'),
        ('"nixlBackendError"', '"aiordma."'),  # whose error is named
    ),
}
"""What is replaced in each file."""
OF_NUMPY = "test_rdt_custom.py"

TWO_SIDED = "needs groups of actors, or a source that sends: ours has one side"
PRIVATE = "needs NIXL itself (its registrations, its memory pool), or Gloo's metadata"
STREAMS = "needs streams of CUDA"
APPROX = "fails over Gloo, too: pytest's `approx` takes no list of tensors"
DIED = "expects ActorDiedError; the reader gets RayDirectTransportError, as over NIXL"
REASONS = {
    "*test_p2p_errors_before_group_creation": TWO_SIDED,
    "*test_send_fails": TWO_SIDED,
    "*test_recv_actor_dies": TWO_SIDED,
    "*test_send_actor_dies_before_sending": DIED,
    "*gloo*test_intra_rdt_tensor_transfer": APPROX,
    "*test_trigger_out_of_band_tensor_transfer": PRIVATE,
    "*test_set_tensor_transport_metadata_before_ref_registered": PRIVATE,
    "*test_put_gc*": PRIVATE,
    "*test_storage_level_overlapping_views_reference_count*": PRIVATE,
    "*test_register_deregister_nixl_memory*": PRIVATE,
    "*test_nixl_memory_pool*": PRIVATE,
    "*test_set_nixl_cuda_stream*": STREAMS,
}
"""For patterns of test names: why they fail."""


def fetch() -> None:
    """Fetch the tests into build/suites/ray, and what they import.

    Raises:
        subprocess.CalledProcessError: they cannot be fetched.
    """
    if not (SOURCES / FOLDER).exists():
        fetch_commit(SOURCES, REPOSITORY, REVISION, FOLDER)
    if find_spec("torch") and not (PACKAGES / TENSORDICT[0]).exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps"]
        subprocess.run([*pip, "--target", PACKAGES, *TENSORDICT], check=True)


def run(name: str) -> Iterator[dict[str, str]]:
    """Run a file's tests; return the lines of in_suite/report.py."""
    folder = SOURCES / "over_aiordma"
    folder.mkdir(exist_ok=True)
    text = (SOURCES / FOLDER / name).read_text()
    for old, new in SUBSTITUTES[name]:
        text = text.replace(old, new)
    (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = folder / f"{name}.jsonl"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suites", PACKAGES))),
        "AIORDMA_DEVICE": "software",
        "AIORDMA_SUITE_REPORT": str(report),
        "AIORDMA_SUITE_DATA_TYPE": "numpy.ndarray" if name == OF_NUMPY else "torch.Tensor",
        "RAY_worker_niceness": "0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "-o", "addopts="]
    command += ["-p", "in_suite.report", "-p", "in_suite.ray_transport", name]
    command += [f"-pno:{each}" for each in ("cacheprovider", "xdist", "aiordma")]
    command += ["--timeout", str(EACH), "--timeout-method", "signal", "--tb=short"]
    with open(report.with_suffix(".log"), "w") as log:
        subprocess.run(
            command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=SECONDS
        )
    found = {row["test"]: row for row in map(json.loads, report.read_text().splitlines())}
    yield from found.values()


def summary(rows: dict[str, list[dict[str, str]]]) -> str:
    """Return the results, in Markdown."""
    lines = [
        f"With Ray {version('ray')}:",
        "",
        "| tests | passed | failed | skipped themselves |",
        "|---|---|---|---|",
    ]
    for name, of in rows.items():
        count = Counter(row["outcome"] for row in of)
        numbers = (count[each] for each in ("passed", "failed", "skipped"))
        lines.append(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
    failed = {
        (row["test"].partition("[")[0], reason(REASONS, row["test"]))
        for of in rows.values()
        for row in of
        if row["outcome"] == "failed"
    }
    lines += ["", "| why they fail | test functions |", "|---|---|"]
    counted = Counter(why for _, why in failed)
    lines += [f"| {why} | {count} |" for why, count in counted.most_common()]
    return "\n".join(lines)


def main() -> int:
    """Run the tests, print the results, and write them into the page if that is wanted."""
    try:
        fetch()
    except subprocess.CalledProcessError as error:
        print(f"Ray's tests were not fetched, and do not run: {error}", file=sys.stderr)
        return 1
    names = [each for each in SUBSTITUTES if each == OF_NUMPY or find_spec("torch")]
    rows = {name: [*run(name)] for name in names}
    unknown = [
        row
        for of in rows.values()
        for row in of
        if row["outcome"] not in ("passed", "skipped") and reason(REASONS, row["test"]) is None
    ]
    for row in unknown:
        print(f"{row['test']}: {row['outcome']}: {row['why']}", file=sys.stderr)
    text = summary(rows)
    print(text)
    if "--write" in sys.argv and len(names) == len(SUBSTITUTES):
        write_page("arrays", text)
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
