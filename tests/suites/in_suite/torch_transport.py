"""What torch's tests of its transports get of ours."""

import importlib
from typing import Any

__all__ = ("TestCase", "connected_pair")

TestCase: Any = importlib.import_module("torch.testing._internal.common_utils").TestCase


def connected_pair() -> tuple[Any, Any]:
    api: Any = importlib.import_module("torch.distributed._transport")
    first, second = (api.new_transport("aiordma", "cpu", host="127.0.0.1") for _ in range(2))
    first.connect(second.bind())
    second.connect(first.bind())
    return first, second
