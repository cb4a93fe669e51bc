"""A pytest plugin for distributed's suite: aiordma's backend takes the place of that of tcp://, so
that the tests run unchanged.

Environment: AIORDMA_SUITE_LOOP ("ours" or "stock"). Processes that the tests start substitute it,
too: site/sitecustomize.py.
"""

import os
from pathlib import Path
from typing import Any

import distributed.comm.tcp as tcp
import pytest
from distributed.comm.registry import backends

from aiordma.integrations.dask import RdmaBackend, RdmaComm, RdmaConnector, RdmaListener
from tests.internals import threads

__all__ = ("substitute",)


IDLE_SECONDS = 0.5
"""How long aiordma's idle threads stay. The suite waits 5 s for the end of a test's threads, and
otherwise these stay as long."""


class _Comm(RdmaComm):
    prefix = "tcp://"

    def _read_extra(self) -> None:
        """The suite's TLS comms, which are not ours, call the one of tcp.TCP."""


class _Connector(RdmaConnector):
    comm_class = _Comm


class _Listener(RdmaListener):
    comm_class = _Comm


class _Backend(RdmaBackend):
    _connector_class = _Connector
    _listener_class = _Listener


def substitute() -> None:
    """Put our backend in the place of tcp://'s."""
    patched: Any = tcp
    patched.TCP, patched.TCPConnector, patched.TCPListener = _Comm, _Connector, _Listener
    patched.TCPBackend = _Backend
    backends["tcp"] = _Backend()
    threads.IDLE_SECONDS = IDLE_SECONDS


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["AIORDMA_SUITE_LOOP"] != "ours":
        return
    from .report import count

    begin: Any = RdmaComm.__init__

    def begin_counted(self: Any, *arguments: Any, **keywords: Any) -> None:
        count("comms")
        begin(self, *arguments, **keywords)

    write: Any = RdmaComm.write

    async def write_counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        length = await write(self, *arguments, **keywords)
        count("bytes", length)
        return length

    RdmaComm.__init__ = begin_counted  # type: ignore[method-assign]
    RdmaComm.write = write_counted  # type: ignore[method-assign]
    substitute()
    site = str(Path(__file__).parent / "site")
    os.environ["PYTHONPATH"] = os.pathsep.join((site, os.environ["PYTHONPATH"]))
