"""Refusals state a limit of aiordma as one of aiordma, not of RDMA."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aiordma
from aiordma._endpoint.capabilities import (
    require_immediate,
    require_invalidate,
    require_windows,
)
from aiordma.verbs import AtomicCapability, QueuePairType

pytestmark = pytest.mark.natively


def endpoint_of(service: QueuePairType, max_mw: int) -> Any:
    attributes = SimpleNamespace(atomic_cap=AtomicCapability.NONE, max_mw=max_mw)
    context = SimpleNamespace(device_name="dev0")
    hub = SimpleNamespace(is_iwarp=True, attributes=attributes, context=context)
    pair, work = SimpleNamespace(service=service), SimpleNamespace(port=SimpleNamespace())
    return SimpleNamespace(pair=pair, work=work, hub=hub)


@pytest.mark.parametrize(
    ("require", "service", "max_mw", "text"),
    [
        (require_windows, QueuePairType.UC, 1, "aiordma binds them on RC queue pairs only"),
        (require_invalidate, QueuePairType.UC, 1, "aiordma posts it on RC queue pairs only"),
        (require_invalidate, QueuePairType.RC, 0, "aiordma posts it only on devices that have"),
        (require_immediate, QueuePairType.RC, 1, "aiordma posts immediate data on iWARP only with"),
    ],
)
def test_refusal_names_a_limit_of_aiordma(
    require: Callable[[Any], None], service: QueuePairType, max_mw: int, text: str
) -> None:
    with pytest.raises(aiordma.NotSupportedError, match=text):
        require(endpoint_of(service, max_mw))
