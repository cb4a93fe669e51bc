"""A ring of simulated hosts that add up their numbers by WRITEs, and one that is slow.

    python examples/simulated_ring.py [hosts [steps]] >ring.svg

In each step a host adds what its left neighbour wrote, and WRITEs the sum to its right neighbour:
the reduce half of a ring all-reduce. The picture has a line for each host, and a dot for each step:
to the right is the time. The slow host delays its right neighbour, that one the next, and so on.
"""

import asyncio
import sys

import aiordma
from aiordma.testing import Host, Simulation, simulate

HOSTS, STEPS = (int(each) for each in (*sys.argv[1:], *("1000", "12")[len(sys.argv) - 1 :]))
WORK, SLOW = 0.001, 0.005  # seconds for a step
STRAGGLER = HOSTS // 3
NUMBER = 8


async def member(hosts: list[Host], index: int, done: list[list[float]]) -> int:
    """Take STEPS steps. Returns the sum of the own number and those of STEPS hosts to the left."""
    now = asyncio.get_running_loop().time
    async with aiordma.listen(hosts[index].address, 7471) as listener:
        await asyncio.sleep(0.1)  # until all listen
        neighbour = aiordma.connect(hosts[(index + 1) % HOSTS].address, 7471)
        right, left = await asyncio.gather(neighbour, listener.accept())
        async with right, left:
            inbox = left.register(bytearray(NUMBER * STEPS), aiordma.Access.REMOTE_WRITE)
            await left.send(inbox.remote().pack())
            remote = aiordma.RemoteMemory.unpack(await right.receive())
            total, number = index, index
            for step in range(STEPS):
                await asyncio.sleep(SLOW if index == STRAGGLER else WORK)
                place = slice(NUMBER * step, NUMBER * (step + 1))
                # The message that follows a WRITE says that its bytes are there.
                await right.write(number.to_bytes(NUMBER, "little"), remote[place])
                await right.send(b"written")
                await left.receive()
                number = int.from_bytes(inbox.view[place], "little")
                total += number
                done[index].append(now())
            await asyncio.sleep(1)  # until the neighbours have all
    return total


async def scenario(simulation: Simulation) -> list[list[float]]:
    simulation.link(latency=5e-6, jitter=1e-6, bandwidth=10e9)
    hosts = [simulation.host() for _ in range(HOSTS)]
    done: list[list[float]] = [[] for _ in hosts]
    sums = await asyncio.gather(*(host.run(member, hosts, i, done) for i, host in enumerate(hosts)))
    assert sums == [sum((i - step) % HOSTS for step in range(STEPS + 1)) for i in range(HOSTS)]
    return done


times = simulate(scenario, seed=1)
first, last = min(map(min, times)), max(map(max, times))
print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {HOSTS}">')
for row, line in enumerate(times):
    for time in line:
        print(f'<circle cx="{1000 * (time - first) / (last - first):.1f}" cy="{row}" r="0.8"/>')
print("</svg>")
