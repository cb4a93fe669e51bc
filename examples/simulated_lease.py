"""A lease that two clients hold at the same time, found by a simulation, and its mend.

The hasty client counts its second from the answer, which can be late, the careful one from before.
"""

import asyncio
from functools import partial

import aiordma
from aiordma.testing import Host, Simulation, simulate


async def owner(host: Host) -> None:
    now, free_at = asyncio.get_running_loop().time, 0.0

    async def lend(connection: aiordma.Connection) -> None:
        nonlocal free_at
        async for _ in connection:
            if answer := now() >= free_at:
                free_at = now() + 1
            await connection.send(b"yes" if answer else b"no")

    async with aiordma.listen(host.address, 7471) as listener:
        await listener.serve(lend)


async def client(owner: Host, host: Host, holders: list[str], careful: bool) -> None:
    now = asyncio.get_running_loop().time
    async with aiordma.connect(owner.address, 7471) as connection:
        for _ in range(3):
            asked = now()
            await connection.send(b"may I?")
            answer = await connection.receive()
            until = (asked if careful else now()) + 0.99
            if answer == b"yes" and now() < until:
                assert not holders, f"{host.name} and {holders[0]} hold the lease"
                holders.append(host.name)
                await asyncio.sleep(until - now())
                holders.remove(host.name)


async def scenario(simulation: Simulation, careful: bool) -> None:
    lender, *clients = (simulation.host(name) for name in ("owner", "one", "two"))
    simulation.link(latency=0.001, jitter=0.4)
    lender.run(owner, lender)
    await asyncio.sleep(0.1)
    holders: list[str] = []
    await asyncio.gather(*(host.run(client, lender, host, holders, careful) for host in clients))


for careful in (False, True):
    for seed in range(200):
        try:
            simulate(partial(scenario, careful=careful), seed=seed)
        except AssertionError as error:
            print(f"careful={careful}: seed {seed}: {error}", *error.__notes__, sep="\n")
            break
    else:
        print(f"careful={careful}: 200 seeds found nothing")
