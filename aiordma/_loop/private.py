"""Private interfaces of CPython's asyncio, all that aiordma uses, as of Python 3.11 to 3.14, and
one of anyio's.

tests/unit/test_private_interfaces.py fails where a version lacks one. The engine in C has one
more, `_Py_NewReference`, in engine/request.c.
"""

import asyncio
import sys
from asyncio import _get_running_loop
from asyncio.constants import _SendfileMode
from asyncio.sslproto import SSLProtocol as SSLProtocol
from asyncio.transports import _FlowControlMixin
from collections.abc import Callable, Sequence, Sized
from typing import Any

FlowControlMixin = _FlowControlMixin
"""Pauses and resumes a protocol at the limits of a transport's write buffer."""

FALLBACK: Any = _SendfileMode.FALLBACK
"""`_sendfile_compatible` of a transport: `loop.sendfile` reads the file and writes its bytes."""

running_asyncio_loop = _get_running_loop
"""Return the running asyncio loop, or None."""


def expect_unfinished(task: asyncio.Task[Any]) -> None:
    """Let asyncio log nothing if the task is deleted before its end: it ends with its loop."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def is_in_scope() -> bool:
    """Return whether the running task is in a scope of anyio, and so can need a shield. (A shield
    keeps its task for ever if the loop is closed meanwhile, as each scope of anyio does.) True on
    trio."""
    task = asyncio.current_task() if _get_running_loop() else None
    if task is None:
        return True
    backend = sys.modules.get("anyio._backends._asyncio")
    state = backend and backend._task_states.get(task)
    return state is not None and state.cancel_scope is not None


def is_nested(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether nest_asyncio 1.5 or 1.6 has patched the loop to run inside its own tasks."""
    return getattr(loop, "_nest_patched", False)


def copies_at_once(protocol: object) -> bool:
    """Return whether a protocol copies what `data_received` gets, and so needs no bytes: asyncio's
    own reader extends a bytearray."""
    if type(protocol) is not asyncio.StreamReaderProtocol:
        return False
    reader = protocol._stream_reader  # type: ignore[attr-defined]
    return type(reader) is asyncio.StreamReader


def secured_transport(protocol: SSLProtocol) -> Any:
    """Return the transport that a program has above TLS; None: the handshake has not ended."""
    return protocol._app_transport


class _Selector:
    """What BaseEventLoop asks for descriptors that are ready. It never waits."""

    def __init__(self, take_ready: Callable[[], Sequence[tuple[int, int]]]) -> None:
        self._take_ready = take_ready

    def select(self, timeout: float | None) -> Sequence[tuple[int, int]]:
        return self._take_ready()


def leave_the_system(
    loop: asyncio.BaseEventLoop,
    take_ready: Callable[[], Sequence[tuple[int, int]]],
    serve: Callable[[Sequence[tuple[int, int]]], None],
) -> None:
    """Let the loop have no descriptors, threads and clock of the system's. It passes what
    `take_ready` returns to `serve`, which schedules callbacks."""
    replaced: Any = loop
    replaced._selector = _Selector(take_ready)
    replaced._process_events = serve
    replaced._write_to_self = lambda: None  # no other thread has anything for it
    replaced._clock_resolution = 0.0  # no timer is due before its time


def ready_handles(loop: asyncio.BaseEventLoop) -> Sized:
    """Return what `call_soon` has scheduled: always the same object."""
    handles: Sized = loop._ready  # type: ignore[attr-defined]
    return handles


def timers(loop: asyncio.BaseEventLoop) -> list[asyncio.TimerHandle]:
    """Return the loop's timers, cancelled ones too, in no order."""
    return list(loop._scheduled)  # type: ignore[attr-defined]
