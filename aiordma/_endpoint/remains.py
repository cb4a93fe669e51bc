"""Destroys objects of the device that another thread may be destroying."""

import time
from collections.abc import Callable

from aiordma._base.errors import BusyError
from aiordma.verbs import Resource

__all__ = "destroy"

_TURN_SECONDS = 0.01
_TURNS = 2000
"""How often an attempt looks whether another thread's has ended. rxe can take 12 s."""


def destroy(raw: Resource, is_destroyed: Callable[[], bool] | None = None) -> None:
    """Destroy an object of the device, in a worker thread. If another thread is destroying it, wait
    for that. If the driver refuses there, ask it again here.

    Args:
        raw: the object.
        is_destroyed: whether the object does not exist any more; None: its own state decides.

    Raises:
        as `Resource.close`.
        BusyError: another thread has been destroying it for long.
    """
    for _ in range(_TURNS):
        raw.close()
        if raw._is_gone if is_destroyed is None else is_destroyed():
            return
        time.sleep(_TURN_SECONDS)
    raise BusyError("another thread has been destroying this object for long")
