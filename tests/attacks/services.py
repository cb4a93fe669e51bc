"""What a victim serves, where an attack needs no more than an echo."""

import aiordma
from tests.attacks.victim import HOST, Ready


async def echo(connection: aiordma.Connection) -> None:
    """Send each message back."""
    async for message in connection:
        await connection.send(message)


async def serve_echo(ready: Ready) -> None:
    """Echo every message."""
    async with aiordma.listen(HOST) as listener:
        ready(listener.port)
        await listener.serve(echo)
