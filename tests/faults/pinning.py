"""A program: pin memory as a user without privileges, with a limit, on an address.

It prints, as JSON, the errors of a connect and of a register beyond the limit, and what worked
within it.
"""

import json
import os
import resource
import sys

import anyio

import aiordma
from tests.connections import connected

NOBODY = 65534
LITTLE = 128 << 10
"""Bytes: less than the receives of a connection need."""

ENOUGH = 8 << 20


def _limit(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (size, hard))


async def _run(address: str) -> dict[str, str]:
    found = {}
    _limit(LITTLE)
    async with aiordma.listen(address, 0) as listener:
        try:
            await aiordma.connect(address, listener.port)
        except aiordma.RdmaError as error:
            found["connect"] = f"{type(error).__name__}: {error}"
    _limit(ENOUGH)
    async with connected(address) as (client, server):
        try:
            client.register(bytearray(2 * ENOUGH))
        except aiordma.RdmaError as error:
            found["register"] = f"{type(error).__name__}: {error}"
        # The connection works, and so does a region within the limit.
        with client.register(bytearray(ENOUGH // 8)) as region:
            await client.send(region[:5])
            found["message"] = repr(bytes(await server.receive()))
    return found


def main(address: str) -> None:
    """Become a user without privileges, and run."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print(json.dumps(anyio.run(_run, address)))


if __name__ == "__main__":
    main(*sys.argv[1:])
