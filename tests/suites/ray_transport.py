"""Ray's own tests of its transports of tensors, over ours:
python -m tests.suites.ray_transport [--write].

A copy of each file runs, in which only the transport is replaced, as SUBSTITUTES says. Nothing of
them is kept in this repository.
"""

import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from typing import Any

import ray

from tests.ray import test_transport
from tests.suites.common import (
    BUILD,
    PACKAGES,
    by_hand,
    fetch_commit,
    run_copy,
    summary,
    write_page,
)

__all__ = ("main",)

SOURCES = BUILD / "ray"
FOLDER = "python/ray/tests/rdt"
REPOSITORY = "https://github.com/ray-project/ray"
REVISION = f"refs/tags/ray-{version('ray')}"
TENSORDICT = ("tensordict", "pyvers")
"""What the tests of torch's tensors import."""
ROUNDS = 5

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


def run(name: str) -> list[dict[str, str]]:
    """Run a copy of a file."""
    return run_copy(
        SOURCES / FOLDER / name,
        SUBSTITUTES[name],
        "in_suite.ray_transport",
        AIORDMA_SUITE_DATA_TYPE="numpy.ndarray" if name == OF_NUMPY else "torch.Tensor",
        RAY_worker_niceness="0",
    )


def rates() -> str:
    """Return how fast a reader gets an array by our transport, and by Ray's object store."""
    ray.init(num_cpus=4, include_dashboard=False)
    # Ray's workers do not find the tests' modules.
    ray.cloudpickle.register_pickle_by_value(test_transport)  # type: ignore[no-untyped-call]
    kind: Any = ray.remote(test_transport.Actor)
    source, reader = kind.remote(), kind.remote()
    took: dict[str, list[float]] = {"kept": [], "stored": []}
    for _ in range(ROUNDS + 1):
        for name, found in took.items():
            began = time.monotonic()
            test_transport.get(reader.sum.remote(getattr(source, name).remote()))
            found.append(time.monotonic() - began)
    ray.shutdown()
    length = test_transport.BYTES
    ours, theirs = (length / median(found[1:]) / 1e6 for found in took.values())
    return (
        f"A reader got {length >> 20} MiB and summed them at {ours:.0f} MB/s, and at {theirs:.0f} "
        f"from Ray's object store: the medians of {ROUNDS} rounds, in turn."
    )


def main() -> int:
    """Run the tests, print the results, and write them into the page if that is wanted."""
    try:
        fetch()
    except subprocess.CalledProcessError as error:
        print(f"Ray's tests were not fetched, and do not run: {error}", file=sys.stderr)
        return 1
    names = [each for each in SUBSTITUTES if each == OF_NUMPY or find_spec("torch")]
    rows = {name: run(name) for name in names}
    text, known = summary(f"With Ray {version('ray')}{by_hand(SOURCES)}:", rows, REASONS)
    text += f"\n\n{rates()}"
    print(text)
    if "--write" in sys.argv and len(names) == len(SUBSTITUTES):
        write_page("arrays", text)
    return int(not known)


if __name__ == "__main__":
    sys.exit(main())
