"""`aiordma bench`: runs a server, a client, or both."""

import json
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from aiordma import RdmaError
from aiordma.bench.client import measure
from aiordma.bench.conditions import MTU_REFUSED, Conditions
from aiordma.bench.loops import LOOPS, SPIN, run
from aiordma.bench.meter import Measurement
from aiordma.bench.mistakes import reporting
from aiordma.bench.processes import serving
from aiordma.bench.server import serve
from aiordma.bench.table import Failure, table_of
from aiordma.bench.tcp import measure_protocol, measure_streams
from aiordma.bench.workload import OPERATIONS, Workload

__all__ = ("bench",)

PORT = 7474
USUAL = tuple(name for name in OPERATIONS if name != "chain")
LARGEST_DATAGRAM = 1024
"""Bytes that fit into a datagram on every path."""

bench: typer.Typer = typer.Typer(no_args_is_help=True, help="Measure latency and throughput.")

Operations = Annotated[
    list[str] | None,
    typer.Option("--operation", "-o", help=f"Of {', '.join(OPERATIONS)}; can be repeated."),
]
Sizes = Annotated[list[int] | None, typer.Option("--size", "-s", help="Bytes; can be repeated.")]
Depths = Annotated[
    list[int] | None, typer.Option("--depth", "-d", help="In flight at a time; can be repeated.")
]
Seconds = Annotated[float, typer.Option(help="For each row.")]
Device = Annotated[str, typer.Option(help="The RDMA device; auto: whichever has the address.")]
Loop = Annotated[str, typer.Option(help=f"The event loop: {', '.join(LOOPS)}.")]
Polling = Annotated[
    bool, typer.Option(help="With --loop auto: look for completions before sleeping.")
]
Spin = Annotated[float, typer.Option(help="Microseconds of that, at most.", min=0, max=1e6)]
Tcp = Annotated[bool, typer.Option(help="Compare with asyncio over TCP.")]
Iterations = Annotated[
    int | None,
    typer.Option(
        "--iters", "-n", help="Operations of each queue pair, instead of --seconds.", min=1
    ),
]
QueuePairs = Annotated[
    int, typer.Option("--qp", "-q", help="Queue pairs that run each row at the same time.")
]
Both = Annotated[
    bool,
    typer.Option("--bidirectional", "-b", help="The server sends, too; send only."),
]
Inline = Annotated[
    int | None,
    typer.Option("--inline_size", "-I", help="Bytes: the longest message that is posted inline."),
]
PathMtu = Annotated[
    int | None, typer.Option("--mtu", "-m", help="Refused: rdma_cm determines the path MTU.")
]
GidIndex = Annotated[
    int | None, typer.Option("--gid-index", "-x", help="Of datagrams; rdma_cm chooses others.")
]
ServiceLevel = Annotated[int | None, typer.Option("--sl", "-S", help="Of datagrams.")]
Tos = Annotated[int | None, typer.Option("--tos", "-T", help="Of connections: type of service.")]
Cm = Annotated[
    bool, typer.Option("--rdma_cm", "-R", help="Accepted: connections always use rdma_cm.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file, too.")]


@bench.command()
def local(
    operation: Operations = None,
    size: Sizes = None,
    depth: Depths = None,
    seconds: Seconds = 1.0,
    host: Annotated[str, typer.Option(help="An address of this machine.")] = "127.0.0.1",
    device: Device = "auto",
    loop: Loop = "auto",
    polling: Polling = True,
    spin: Spin = SPIN * 1e6,
    tcp: Tcp = True,
    file: Json = None,
    iterations: Iterations = None,
    queue_pairs: QueuePairs = 1,
    both: Both = False,
    inline: Inline = None,
    mtu: PathMtu = None,
    gid_index: GidIndex = None,
    service_level: ServiceLevel = None,
    tos: Tos = None,
    rdma_cm: Cm = True,
) -> None:
    """Run server and client on this machine, in two processes."""
    conditions = Conditions(iterations, queue_pairs, tos, gid_index, service_level)
    works = _works(operation, size, depth, both=both, inline=inline)
    _check(conditions, works, mtu)
    seconds_of_polling = spin / 1e6 if polling else 0.0
    with (
        reporting(),
        serving(host, loop=loop, spin=seconds_of_polling, device=device) as ports,
    ):
        tasks = _over_rdma(works, host, ports.rdma, seconds, device, conditions)
        if tcp and loop != "trio":
            tasks += _over_tcp(works, host, ports.streams, ports.protocol, seconds)
        _report(f"on {host}, loop {loop}", tasks, loop, seconds_of_polling, file)


@bench.command()
def server(
    bind: Annotated[str, typer.Option(help="A local address; datagrams need one.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="RDMA's; TCP takes the two above it.")] = PORT,
    device: Device = "auto",
    loop: Loop = "auto",
    polling: Polling = True,
    spin: Spin = SPIN * 1e6,
) -> None:
    """Serve clients until interrupted."""

    def announce(*ports: int) -> None:
        print(f"listening on {bind}:{ports[0]}, for TCP on {ports[1]} and {ports[2]}", flush=True)

    try:
        served = partial(serve, bind, port, announce, device=device)
        with reporting():
            run(served, loop=loop, spin=spin / 1e6 if polling else 0.0)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@bench.command()
def client(
    host: Annotated[str, typer.Argument(help="The server's address.")],
    operation: Operations = None,
    size: Sizes = None,
    depth: Depths = None,
    seconds: Seconds = 1.0,
    port: Annotated[int, typer.Option(help="The server's.")] = PORT,
    device: Device = "auto",
    loop: Loop = "auto",
    polling: Polling = True,
    spin: Spin = SPIN * 1e6,
    tcp: Tcp = True,
    file: Json = None,
    iterations: Iterations = None,
    queue_pairs: QueuePairs = 1,
    both: Both = False,
    inline: Inline = None,
    mtu: PathMtu = None,
    gid_index: GidIndex = None,
    service_level: ServiceLevel = None,
    tos: Tos = None,
    rdma_cm: Cm = True,
) -> None:
    """Measure with a server on another machine."""
    conditions = Conditions(iterations, queue_pairs, tos, gid_index, service_level)
    works = _works(operation, size, depth, both=both, inline=inline)
    _check(conditions, works, mtu)
    tasks = _over_rdma(works, host, port, seconds, device, conditions)
    if tcp and loop != "trio":
        tasks += _over_tcp(works, host, port + 1, port + 2, seconds)
    _report(f"with {host}, loop {loop}", tasks, loop, spin / 1e6 if polling else 0.0, file)


Task = tuple[str, Callable[[], Coroutine[Any, Any, Measurement]]]


def _works(
    operations: list[str] | None,
    sizes: list[int] | None,
    depths: list[int] | None,
    *,
    both: bool,
    inline: int | None,
) -> list[Workload]:
    usual = ("send",) if both else USUAL
    if inline is not None:
        usual = tuple(name for name in usual if name != "read")
    try:
        works = [
            Workload(*each, both=both, inline=inline)
            for each in product(operations or usual, sizes or (64, 65536), depths or (1, 16))
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return [
        work
        for work in works
        if work.operation != "datagrams" or sizes or work.size <= LARGEST_DATAGRAM
    ]


def _check(conditions: Conditions, works: list[Workload], mtu: int | None) -> None:
    """Refuse what cannot apply, before anything is measured."""
    if mtu is not None:
        raise typer.BadParameter(MTU_REFUSED)
    try:
        conditions.check(works)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _over_rdma(
    works: list[Workload],
    host: str,
    port: int,
    seconds: float,
    device: str,
    conditions: Conditions,
) -> list[Task]:
    settings: dict[str, Any] = {"device": device, "conditions": conditions}
    return [(work.name, partial(measure, host, port, work, seconds, **settings)) for work in works]


def _over_tcp(
    works: list[Workload], host: str, streams: int, protocol: int, seconds: float
) -> list[Task]:
    tasks: list[Task] = []
    for size in sorted({work.size for work in works}):
        tasks.append(
            (f"tcp streams/{size}", partial(measure_streams, host, streams, size, seconds))
        )
        tasks.append(
            (f"tcp protocol/{size}", partial(measure_protocol, host, protocol, size, seconds))
        )
    return tasks


def _report(title: str, tasks: list[Task], loop: str, spin: float, file: Path | None) -> None:
    found: list[Measurement | Failure] = []
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        shown = progress.add_task("", total=len(tasks))
        for name, task in tasks:
            progress.update(shown, description=name)
            try:
                found.append(run(task, loop=loop, spin=spin))
            except (RdmaError, OSError, ValueError) as error:
                found.append((name, str(error)))
            progress.advance(shown)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table_of(title, found))
    for row in found:
        if isinstance(row, tuple):
            console.print(f"{row[0]}: {row[1]}", markup=False, highlight=False, soft_wrap=True)
    if file is not None:
        rows = [
            {"name": row[0], "error": row[1]} if isinstance(row, tuple) else row.as_dict()
            for row in found
        ]
        file.write_text(json.dumps(rows, indent=1) + "\n")
    if not any(isinstance(row, Measurement) for row in found):
        raise typer.Exit(1)
