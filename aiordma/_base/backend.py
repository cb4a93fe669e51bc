"""The backend that the environment variable AIORDMA_BACKEND names: `c` (the default) is the engine
in C, `python` is the same in Python. `_requests/select` has their classes."""

import os

__all__ = ("BACKEND", "require_known_backend")

_NAMES = ("c", "python")

_GIVEN = os.environ.get("AIORDMA_BACKEND") or "c"

BACKEND: str = _GIVEN if _GIVEN in _NAMES else "c"
"""The name of the chosen backend. It is chosen at the import, because classes are made of it.
Another name chooses the default, until `require_known_backend` refuses it."""


def require_known_backend() -> None:
    """Check the name of the backend. The providers call this, without which nothing is posted.

    Raises:
        ValueError: AIORDMA_BACKEND was another name when the package was imported.
    """
    if _GIVEN not in _NAMES:
        raise ValueError(f"AIORDMA_BACKEND={_GIVEN}: give one of {', '.join(map(repr, _NAMES))}")
