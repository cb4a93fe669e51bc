"""Arrays between Ray's actors, by our transport. `make suites` runs it: Ray is large."""

import importlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

import aiordma.integrations.ray as transport

transport.register()  # before the classes of actors
HAS_TORCH = importlib.util.find_spec("torch") is not None
OF_TORCH = "AIORDMA_TORCH" if HAS_TORCH else transport.NAME  # Ray checks the name of a method's
if HAS_TORCH:
    torch: Any = importlib.import_module("torch")
    transport.register(torch.Tensor, OF_TORCH)

BYTES = 512 << 20
SECONDS = 120


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False)
    # Ray's workers do not find the tests' modules.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    yield
    ray.shutdown()


class Actor:
    """A source, and a reader."""

    def __init__(self) -> None:
        self.array = np.arange(BYTES // 8)

    @ray.method(tensor_transport=transport.NAME)
    def echo(self, array: Any) -> Any:
        return array

    @ray.method(tensor_transport=transport.NAME)
    def kept(self) -> Any:
        return self.array

    def stored(self) -> Any:
        return self.array

    def sum(self, array: Any) -> int:
        return int(array.sum())

    def pass_on(self, source: Any, reader: Any, array: Any) -> Any:
        transport.register()  # Ray does it some time after the actor is made
        return get(reader.sum.remote(source.echo.remote(array)))

    def pid(self) -> int:
        return os.getpid()

    def registered(self) -> int:
        from ray.experimental.rdt.util import get_tensor_transport_manager

        found: Any = get_tensor_transport_manager(transport.NAME)
        return len(found._service._registered)


@pytest.fixture
def actors() -> list[Any]:
    kind: Any = ray.remote(Actor)
    return [kind.remote() for _ in range(2)]


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=SECONDS)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what Ray does in the background."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize(
    "array",
    [np.array([1, 2, 3]), np.arange(12).reshape(3, 4), np.array(7), np.zeros(0)],
    ids=["small", "of two dimensions", "of one number", "empty"],
)
def test_a_reader_gets_the_source_s_array(array: Any, actors: list[Any]) -> None:
    source, reader = actors
    assert get(reader.sum.remote(source.echo.remote(array))) == array.sum()
    found = get(source.echo.remote(array))  # read by this process
    assert found.shape == array.shape
    assert (found == array).all()


def test_registering_again_does_nothing() -> None:
    transport.register()
    with pytest.raises(ValueError, match="already registered"):
        transport.register(list)


def test_an_actor_passes_arrays_between_others(actors: list[Any]) -> None:
    kind: Any = ray.remote(Actor)
    assert get(kind.remote().pass_on.remote(*actors, np.arange(4))) == 6


def test_an_array_in_another_order_is_refused(actors: list[Any]) -> None:
    source, _ = actors
    with pytest.raises(Exception, match="not contiguous in C's order"):
        get(source.echo.remote(np.arange(6).reshape(2, 3).T))


def test_an_array_is_registered_once_and_as_long_as_it_is_referred_to(actors: list[Any]) -> None:
    source, reader = actors
    references = [source.kept.remote() for _ in range(2)]
    right = BYTES // 8 * (BYTES // 8 - 1) // 2
    for reference in references * 2:
        assert get(reader.sum.remote(reference)) == right
    assert get(source.registered.remote()) == 1
    references.clear()
    del reference
    until(lambda: get(source.registered.remote()) == 0)


def test_a_reader_outlives_a_source_that_is_killed_in_the_middle(actors: list[Any]) -> None:
    source, reader = actors
    pid, reference = get(source.pid.remote()), source.kept.remote()
    get(reader.sum.remote(np.ones(1)))
    ray.wait([reference])
    time.sleep(1)
    result = reader.sum.remote(reference)
    time.sleep(0.15)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        ray.exceptions.RayError, match=r"RayDirectTransportError.*The source actor may have died"
    ):
        get(result)
    assert get(reader.sum.remote(np.ones(3))) == 3


class TensorActor:
    """A source of tensors, and a reader."""

    @ray.method(tensor_transport=OF_TORCH)
    def numbers(self, dtype: str) -> Any:
        """Make them here: torch does not unpickle those of float8."""
        return torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))

    def doubled(self, tensor: Any) -> Any:
        return (tensor.float() * 2).tolist()


@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64"])
def test_a_reader_gets_the_source_s_tensor(dtype: str) -> None:
    kind: Any = ray.remote(TensorActor)
    source, reader = [kind.remote() for _ in range(2)]
    reference = source.numbers.remote(dtype)
    assert get(reader.doubled.remote(reference)) == [[0, 2, 4], [6, 8, 10]]
    found = get(reference)  # read by this process
    assert (found.dtype, found.tolist()) == (getattr(torch, dtype), [[0, 1, 2], [3, 4, 5]])
