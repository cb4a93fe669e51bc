"""The rate of an array between two of Ray's actors, by our transport (kept) and by Ray's object
store (stored): `python -m tests.bench.ray_rate`."""

import time
from typing import Any

import ray

from tests.ray import test_transport
from tests.ray.test_transport import BYTES, Actor, get


def main() -> None:
    """Print the rate of each, twice."""
    ray.init(num_cpus=4, include_dashboard=False)
    # Ray's workers do not find the tests' modules.
    ray.cloudpickle.register_pickle_by_value(test_transport)  # type: ignore[no-untyped-call]
    kind: Any = ray.remote(Actor)
    source, reader = kind.remote(), kind.remote()
    for name in ("kept", "stored") * 2:
        began = time.monotonic()
        get(reader.sum.remote(getattr(source, name).remote()))
        print(f"{name}: {BYTES / (time.monotonic() - began) / 1e6:.0f} MB/s")
    ray.shutdown()


if __name__ == "__main__":
    main()
