"""A pytest plugin for the examples of simloop and simloom, which simulate hosts over TCP. Their
hosts are hosts of aiordma's simulated network, too, and streams over RDMA take the place of theirs.
So the programs run unchanged, and a fault of the network or of a host strikes RDMA.

Environment: AIORDMA_SUITE_SIMULATION ("simloop" or "simloom").
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from importlib import import_module
from typing import Any, cast

from aiordma import streams
from aiordma.testing import Host, Simulation, simulated_network

PLUGIN = os.environ["AIORDMA_SUITE_SIMULATION"]
WAYS = 2 / 3
"""A request and its answer take six ways over RDMA, and four over TCP: latencies are so much
shorter that the programs' time limits mean the same."""

Main = Callable[..., Coroutine[Any, Any, Any]]


class Network:
    """What stands for the other simulation's network in one run."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self._hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        if name not in self._hosts:
            self._hosts[name] = self.simulation.host(name)
        return self._hosts[name]

    def link(self, low: float, high: float) -> None:
        self.simulation.link(latency=low * WAYS, jitter=(high - low) * WAYS)

    def partition(self, one: Iterable[str], other: Iterable[str]) -> None:
        sides = (tuple(map(self.host, each)) for each in (one, other))
        self.simulation.partition(*sides)


_networks: dict[object, Network] = {}
"""By the other simulation's network."""


async def _on(host: Host, coroutine: Coroutine[Any, Any, Any]) -> Any:
    host.enter()
    return await coroutine


async def _run(net: object, seed: int, main: Callable[[Network], Awaitable[Any]]) -> Any:
    async with simulated_network(seed=seed) as simulation:
        _networks[net] = Network(simulation)
        try:
            return await main(_networks[net])
        finally:
            del _networks[net]


def _before(kind: Any, name: str, ours: Callable[..., object]) -> None:
    """Call a function before a method, with the same arguments."""
    method = getattr(kind, name)

    def both(*arguments: Any, **options: Any) -> Any:
        ours(*arguments, **options)
        return method(*arguments, **options)

    setattr(kind, name, both)


def simloop() -> None:
    net: Any = import_module("simloop._net")
    explorer: Any = import_module("simloop._explore")
    run_once = explorer.run_once

    def run(loop: Any, function: Main) -> Any:
        def main(network: Network) -> Awaitable[Any]:
            return network.host("driver").run(function)

        return run_once(loop, lambda: _run(loop.net, loop.seed, main))

    explorer.run_once = run
    create_task = net.Host.create_task

    def create(self: Any, coroutine: Any, *, name: str | None = None) -> Any:
        host = _networks[self._net].host(self.name)
        return create_task(self, _on(host, coroutine), name=name)

    net.Host.create_task = create

    def defaults(self: Any, latency: tuple[float, float]) -> None:
        _networks[self].link(*latency)

    _before(net.SimNetwork, "set_defaults", defaults)
    _before(net.SimNetwork, "partition", lambda self, *sides: _networks[self].partition(*sides))
    _before(net.SimNetwork, "heal", lambda self: _networks[self].simulation.heal())
    _before(net.SimNetwork, "crash", lambda self, name: _networks[self].host(name).crash())
    _before(net.SimNetwork, "restart", lambda self, name: _networks[self].host(name).boot())
    asyncio.start_server = streams.start_server  # type: ignore[assignment]


def simloom() -> None:
    names = "simloom", "simloom._world", "simloom._net"
    root, world, net = map(cast("Callable[[str], Any]", import_module), names)

    def inside(main: Main) -> Main:
        def begin(network: Network, given: Any) -> Coroutine[Any, Any, Any]:
            network.link(given.net._min_delay, given.net._max_delay)
            return main(given)

        async def run(given: Any) -> Any:
            seed = root.draw("aiordma", 1 << 30)
            return await _run(given.net, seed, lambda network: begin(network, given))

        run.__annotations__["given"] = world.World
        return run

    run, replay = root.run, root.replay
    root.run = lambda main, **options: run(inside(main), **options)
    root.replay = lambda main, **options: replay(inside(main), **options)

    def ours(host: Any) -> Host:
        return _networks[host._world.net].host(f"{host.name}.raft")

    def sides(self: Any, *groups: Any) -> None:
        _networks[self].partition(*([f"{each.name}.raft" for each in group] for group in groups))

    def loss(self: Any, percent: int) -> None:
        _networks[self].simulation.link(loss=percent / 100)

    spawn = world.Host._spawn

    def spawned(self: Any, target: Any, *, name: str | None) -> Any:
        host = ours(self)
        host.boot()
        return spawn(self, lambda: _on(host, target()), name=name)

    world.Host._spawn = spawned
    _before(world.Host, "crash", lambda self: ours(self).crash())
    _before(net.SimNetwork, "partition", sides)
    _before(net.SimNetwork, "heal", lambda self: _networks[self].simulation.heal())
    _before(net.SimNetwork, "set_loss", loss)

    def start_server(serve: Any, _: str, port: int) -> Any:
        return streams.start_server(serve, "0.0.0.0", port)

    asyncio.start_server = start_server  # type: ignore[assignment]


{"simloop": simloop, "simloom": simloom}[PLUGIN]()
asyncio.open_connection = streams.open_connection
