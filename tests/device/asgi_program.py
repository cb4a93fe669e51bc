"""An ASGI application for uvicorn's command line: names the event loop that serves it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Call = Callable[..., Awaitable[Any]]


async def app(scope: Any, receive: Call, send: Call) -> None:
    """Answer each request."""
    if scope["type"] == "http":
        loop = type(asyncio.get_running_loop()).__name__
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": loop.encode()})
