"""The time after which a silent peer ends a connection, by service and transport."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import ConnectionOptions
from aiordma._endpoint.pair import Pair
from aiordma.verbs import QueuePairType
from tests.internals import retry_seconds

pytestmark = pytest.mark.natively


@pytest.mark.parametrize(
    ("service", "is_iwarp", "retries", "seconds"),
    [
        (QueuePairType.RC, False, (6, 16), retry_seconds(6, 16)),
        (QueuePairType.RC, False, (6, 0), math.inf),
        (QueuePairType.RC, True, (6, 0), 900.0),
        (QueuePairType.UC, False, (6, 16), math.inf),
    ],
)
def test_peer_timeout_is_that_of_the_service(
    service: QueuePairType, is_iwarp: bool, retries: tuple[int, int], seconds: float
) -> None:
    hub: Any = SimpleNamespace(is_iwarp=is_iwarp)
    pair = Pair(hub, ConnectionOptions())
    pair.service, pair.retries = service, retries
    assert pair.peer_timeout == seconds
