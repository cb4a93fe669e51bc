"""A parameter server: clients READ the newest weights under a lease, while the owner trains on.

    python examples/parameter_server.py --serve 192.0.2.1      # one terminal
    python examples/parameter_server.py 192.0.2.1              # another, any number of times

A READ of memory that its owner updates can return a mixture of versions. Here it cannot: the owner
keeps two copies of the weights. A lease gives a client access to the copy that is current, and the
owner fills a copy only when no lease of it is left. A lease ends when the client gives it back,
goes, or is late: a client cannot hold up the owner for longer than LEASE_SECONDS.
"""

import argparse
import asyncio
import contextlib

import anyio
import numpy as np

import aiordma
from aiordma import Access

WEIGHTS = 1 << 20
LEASE_SECONDS = 6.0
CLIENT_SECONDS = 4.0
"""The time in which a client READs: shorter than the lease, whose end would break its READ."""


class Copy:
    """One copy of the weights, and the number of its leases."""

    def __init__(self) -> None:
        self.weights = np.zeros(WEIGHTS, np.float32)
        self.leases = 0
        self.returned = anyio.Event()

    def give_back(self) -> None:
        self.leases -= 1
        if not self.leases:
            self.returned.set()
            self.returned = anyio.Event()


class Parameters:
    def __init__(self) -> None:
        self.current, self.next = Copy(), Copy()

    async def train(self) -> None:
        """Make a new version of the weights, again and again."""
        while True:
            while self.next.leases:
                await self.next.returned.wait()
            # numpy releases the GIL, and the event loop goes on meanwhile.
            await asyncio.to_thread(np.add, self.current.weights, 1, out=self.next.weights)
            self.current, self.next = self.next, self.current
            await asyncio.sleep(0.01)

    async def lend(self, connection: aiordma.Connection) -> None:
        """Serve one client: each message asks for a lease."""
        async for _ in connection:
            copy = self.current
            copy.leases += 1
            try:
                # At the end of this block, however it comes, the client's access has ended.
                async with connection.grant(copy.weights.data, Access.REMOTE_READ) as grant:
                    await connection.send(grant.remote.pack())
                    with anyio.fail_after(LEASE_SECONDS):
                        await connection.receive()  # the client gives the lease back
            except TimeoutError:
                print(f"{connection.peer_address} was late", flush=True)
                return
            finally:
                copy.give_back()


async def serve(address: str, port: int) -> None:
    parameters = Parameters()
    async with aiordma.listen(address, port, keepalive=5.0) as listener:
        training = asyncio.create_task(parameters.train())
        print(f"listening on {address}:{listener.port}", flush=True)
        try:
            await listener.serve(parameters.lend)
        finally:
            training.cancel()


async def use(address: str, port: int, leases: int) -> None:
    weights = np.empty(WEIGHTS, np.float32)
    newest = -1.0
    async with aiordma.connect(address, port) as connection:
        local = connection.register(weights)
        for _ in range(leases):
            async with asyncio.timeout(CLIENT_SECONDS):
                await connection.send(b"lease")
                remote = aiordma.RemoteMemory.unpack(await connection.receive())
                await connection.read(local, remote)
            await connection.send(b"done")
            assert (weights == weights[0]).all(), "a mixture of versions"
            assert weights[0] >= newest
            newest = weights[0]
            await asyncio.sleep(0.02)
    print(f"{leases} leases, each of one version")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server's RDMA interface")
    parser.add_argument("--port", type=int, default=7476)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--leases", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.serve:
        await serve(arguments.address, arguments.port)
    else:
        await use(arguments.address, arguments.port, arguments.leases)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
