"""Private interfaces of CPython's asyncio, all that aiordma uses, as of Python 3.11 to 3.14.

tests/unit/test_private_interfaces.py fails where a version lacks one. The engine in C has one
more, `_Py_NewReference`, in engine/request.c.
"""

import asyncio
from asyncio import _get_running_loop
from asyncio.constants import _SendfileMode
from asyncio.sslproto import SSLProtocol
from asyncio.transports import _FlowControlMixin
from collections.abc import Sequence
from typing import Any

__all__ = (
    "FALLBACK",
    "FlowControlMixin",
    "LoopOfTurns",
    "SSLProtocol",
    "expect_unfinished",
    "is_nested",
    "running_asyncio_loop",
    "secured_transport",
)

FlowControlMixin = _FlowControlMixin
"""Pauses and resumes a protocol at the limits of a transport's write buffer."""

FALLBACK: Any = _SendfileMode.FALLBACK
"""`_sendfile_compatible` of a transport: `loop.sendfile` reads the file and writes its bytes."""

running_asyncio_loop = _get_running_loop
"""Return the running asyncio loop, or None."""


def expect_unfinished(task: asyncio.Task[Any]) -> None:
    """Let asyncio log nothing if the task is deleted before its end: it ends with its loop."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def is_nested(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether nest_asyncio 1.5 or 1.6 has patched the loop to run inside its own tasks."""
    return getattr(loop, "_nest_patched", False)


def secured_transport(protocol: SSLProtocol) -> Any:
    """Return the transport that a program has above TLS; None: the handshake has not ended."""
    return protocol._app_transport


class LoopOfTurns(asyncio.BaseEventLoop):
    """asyncio's loop without descriptors and threads of its own. Subclasses know what is ready, and
    the time. `turn` runs one turn."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._clock_resolution = 0.0  # no timer is due before its time

    def take_ready(self) -> Sequence[tuple[int, int]]:
        """Return the descriptors that are ready, with their events."""
        raise NotImplementedError

    def serve(self, ready: Sequence[tuple[int, int]]) -> None:
        """Schedule the callbacks of descriptors that are ready."""
        raise NotImplementedError

    def turn(self) -> None:
        """Run the callbacks that are ready, and those of timers that are due."""
        self.stop()  # before run_forever: it runs one turn, and ends
        self.run_forever()

    def select(self, timeout: float | None) -> Sequence[tuple[int, int]]:
        """What BaseEventLoop asks of a selector."""
        return self.take_ready()

    def _process_events(self, event_list: Sequence[tuple[int, int]]) -> None:
        self.serve(event_list)

    def _write_to_self(self) -> None:
        pass  # no other thread has anything for this loop
