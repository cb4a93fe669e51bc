"""A pytest plugin for Ray's tests of its transports: ours, and Ray's fixtures without the rest of
its conftest.py.

Environment: AIORDMA_SUITE_DATA_TYPE (what the tests transfer: "numpy.ndarray" or "torch.Tensor").
"""

import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.experimental.rdt.util

import aiordma.integrations.ray as transport

__all__ = ("create_collective_group",)

OF_TORCH = os.environ["AIORDMA_SUITE_DATA_TYPE"] == "torch.Tensor"


def create_collective_group(*_: Any, **__: Any) -> None:
    """Take the place of Ray's: only two-sided transports need groups of actors."""


def register_for_torch() -> None:
    """Make ours known as Ray's own are: from the start of each process, and not by Ray's tasks in
    actors, which tests block. What tests ask NIXL's, ours answers: how many tensors it holds."""
    transport.register(importlib.import_module("torch").Tensor)
    patched: Any = ray.experimental.rdt.util
    patched.has_custom_transports = False
    kind: Any = patched.transport_manager_info[transport.NAME].transport_manager_class
    kind._get_num_managed_meta_nixl = lambda manager: len(manager._service._registered)


def pytest_configure() -> None:
    if OF_TORCH:
        register_for_torch()
        return

    def register(name: str, devices: list[str], kind: type[Any], data_type: type[Any]) -> None:
        transport.register(data_type, name)

    patched: Any = ray.experimental
    patched.register_tensor_transport = register


@pytest.fixture
def ray_start_regular(request: pytest.FixtureRequest) -> Iterator[None]:
    hook = {"worker_process_setup_hook": register_for_torch} if OF_TORCH else None
    options: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "runtime_env": hook}
    ray.init(**options, **getattr(request, "param", {}))
    yield
    ray.shutdown()


@pytest.fixture
def propagate_logs() -> Iterator[None]:
    logger = logging.getLogger("ray")
    logger.propagate = True
    yield
    logger.propagate = False
