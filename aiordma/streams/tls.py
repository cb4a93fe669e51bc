"""TLS inside a stream, by asyncio's own protocol."""

import asyncio
import ssl as tls
from typing import Any, cast

from aiordma._loop.private import SSLProtocol

__all__ = ("check_tls", "tls_protocol")


def check_tls(
    context: "bool | tls.SSLContext | None",
    handshake_timeout: float | None,
    shutdown_timeout: float | None,
) -> None:
    """Check that the arguments for TLS fit together.

    Raises:
        ValueError: they do not.
    """
    if not context and handshake_timeout is not None:
        raise ValueError("ssl_handshake_timeout is only meaningful with ssl")
    if not context and shutdown_timeout is not None:
        raise ValueError("ssl_shutdown_timeout is only meaningful with ssl")


def tls_protocol(
    loop: asyncio.AbstractEventLoop,
    protocol: asyncio.BaseProtocol,
    context: "bool | tls.SSLContext",
    waiter: "asyncio.Future[None] | None",
    **options: Any,
) -> SSLProtocol:
    """Return a protocol that speaks TLS below another one.

    Raises:
        TypeError: `context` is no SSLContext.
    """
    chosen = None if context is True else context
    if chosen is not None and not isinstance(chosen, tls.SSLContext):
        raise TypeError(f"ssl={context!r} is not an ssl.SSLContext")
    return SSLProtocol(loop, protocol, cast(Any, chosen), cast(Any, waiter), **options)
