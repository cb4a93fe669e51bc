"""The servers of the commands notice a client that has vanished."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import aiordma
from aiordma.cli import cp
from aiordma.cli.commands import main
from aiordma.cli.options import KEEPALIVE


class Asked(Exception):
    """Ends the command at its listener."""


def asked(found: dict[str, Any]) -> Callable[..., NoReturn]:
    def listen(*_: Any, **options: Any) -> NoReturn:
        found.update(options)
        raise Asked

    return listen


@pytest.mark.parametrize("command", ["cp", "ping"])
def test_server_probes_an_idle_client(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(cp, "listen_stream", asked(found))
    monkeypatch.setattr(aiordma, "listen", asked(found))
    words = {"cp": ["cp", "--serve", str(tmp_path)], "ping": ["ping", "--serve", "-P"]}[command]
    monkeypatch.setattr(sys, "argv", ["aiordma", *words])
    with pytest.raises(Asked):
        main()
    assert found["keepalive"] == KEEPALIVE > 0
