"""A name that has several addresses."""

import socket
import time
from typing import Any

import pytest

MANY = "many.test"


def names(monkeypatch: pytest.MonkeyPatch, *addresses: str, seconds: float = 0.0) -> None:
    """Let the name "many.test" have these addresses, and its lookup take these seconds."""
    getaddrinfo = socket.getaddrinfo

    def resolve(host: Any, port: Any, family: int = 0, *arguments: Any) -> Any:
        if host != MANY:
            return getaddrinfo(host, port, family, *arguments)
        time.sleep(seconds)
        found = [getaddrinfo(each, port, 0, *arguments)[0] for each in addresses]
        return [entry for entry in found if family in (0, entry[0])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
