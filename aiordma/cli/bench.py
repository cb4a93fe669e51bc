"""`aiordma bench`: runs a server, a client, or both."""

import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from functools import partial, wraps
from inspect import Signature, signature
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from aiordma import ConnectTimeoutError, UnreachableError
from aiordma.bench.client import measure
from aiordma.bench.conditions import Conditions
from aiordma.bench.loops import LOOPS, SPIN, check_loop, run
from aiordma.bench.meter import Measurement
from aiordma.bench.mistakes import FAILED, first_error, one_line, status_of
from aiordma.bench.processes import serving
from aiordma.bench.server import serve
from aiordma.bench.table import Failure, print_table
from aiordma.bench.tcp import measure_protocol, measure_streams
from aiordma.bench.workload import OPERATIONS, Workload, row_name
from aiordma.cli.options import DeviceName, check_device, finite
from aiordma.cli.running import fail, reporting

PORT = 7474
STREAM = "stream"
"""Messages and answers by asyncio's streams over RDMA."""
ALL = (*OPERATIONS, STREAM)
LARGEST_DATAGRAM = 1024
"""Bytes that fit into a datagram on every path."""

bench: typer.Typer = typer.Typer(no_args_is_help=True, help="Measure latency and throughput.")


def _checked_loop(loop: str) -> str:
    try:
        check_loop(loop)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return loop


def _operations() -> list[str]:
    return list(ALL)


def _loops() -> list[str]:
    return list(LOOPS)


Operations = Annotated[
    list[str] | None,
    typer.Option(
        "--operation",
        "-o",
        metavar="NAME",
        help=f"Of {', '.join(ALL)}; can be repeated.",
        show_default="all",
        autocompletion=_operations,
    ),
]
Sizes = Annotated[
    list[int] | None,
    typer.Option(
        "--size", "-s", metavar="BYTES", help="Can be repeated.", show_default="64 and 65536"
    ),
]
Depths = Annotated[
    list[int] | None,
    typer.Option(
        "--depth",
        "-d",
        metavar="COUNT",
        help="In flight at a time; can be repeated.",
        show_default="1 and 16",
    ),
]
Seconds = Annotated[float, typer.Option(help="For each row.", min=0.001, callback=finite)]
Port = Annotated[
    int,
    typer.Option(
        "--port", "-p", min=0, max=65532, help="The server's; it uses the three above it, too."
    ),
]
Loop = Annotated[
    str,
    typer.Option(
        help=f"The event loop: {', '.join(LOOPS)}.", callback=_checked_loop, autocompletion=_loops
    ),
]
Polling = Annotated[
    bool, typer.Option(help="With --loop auto: look for completions before sleeping.")
]
Spin = Annotated[
    float, typer.Option(help="Microseconds of that, at most.", min=0, max=1e6, callback=finite)
]
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
GidIndex = Annotated[
    int | None, typer.Option("--gid-index", "-x", help="Of datagrams; rdma_cm chooses others.")
]
ServiceLevel = Annotated[int | None, typer.Option("--sl", "-S", help="Of datagrams.")]
Tos = Annotated[int | None, typer.Option("--tos", "-T", help="Of connections: type of service.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file, too.")]


@dataclass
class _Options:
    """The options of a command that measures."""

    operation: Operations = None
    size: Sizes = None
    depth: Depths = None
    seconds: Seconds = 1.0
    device: DeviceName = "auto"
    loop: Loop = "auto"
    polling: Polling = True
    spin: Spin = SPIN * 1e6
    tcp: Tcp = True
    file: Json = None
    iterations: Iterations = None
    queue_pairs: QueuePairs = 1
    both: Both = False
    inline: Inline = None
    gid_index: GidIndex = None
    service_level: ServiceLevel = None
    tos: Tos = None

    def __post_init__(self) -> None:
        self.conditions = Conditions(
            self.iterations, self.queue_pairs, self.tos, self.gid_index, self.service_level
        )
        is_plain = self.conditions == Conditions() and not self.both and self.inline is None
        self.has_stream = STREAM in (self.operation or [STREAM] * is_plain)
        if self.has_stream and not is_plain:
            raise typer.BadParameter(
                "-o stream takes no options of perftest's: those are of RDMA's own operations"
            )
        if self.operation and set(self.operation) == {STREAM} and self.loop == "trio":
            raise typer.BadParameter("-o stream: asyncio's streams do not run on --loop trio")
        own = self.operation and [name for name in self.operation if name != STREAM]
        self.works = _works(own, self.size, self.depth, both=self.both, inline=self.inline)
        # What streams and TCP are measured with.
        self.messages = _works(["messages"], self.size, self.depth, both=False, inline=None)
        _check(self.conditions, self.works)

    def check_writable(self) -> None:
        """Open the file before anything is measured, without a change.

        Raises:
            OSError: it cannot be written.
        """
        if self.file is not None:
            self.file.open("a").close()

    def report(
        self, where: str, host: str, rdma: int, streams: int, protocol: int, over_rdma: int
    ) -> None:
        """Measure over RDMA and TCP with the server at four ports of the host, and print it."""
        tasks = _over_rdma(self.works, host, rdma, self.seconds, self.device, self.conditions)
        for work in self.messages if self.loop != "trio" else ():
            which = (work.size, self.seconds, work.depth)
            if self.has_stream:
                stream = partial(measure_streams, host, over_rdma, *which, self.device)
                tasks.append((row_name(STREAM, work.size, work.depth), stream))
            if self.tcp:
                for name, measured, port in (
                    ("tcp streams", measure_streams, streams),
                    ("tcp protocol", measure_protocol, protocol),
                ):
                    row = row_name(name, work.size, work.depth)
                    tasks.append((row, partial(measured, host, port, *which)))
        spin = _seconds_of_polling(self.spin, self.polling)
        found = _measured(tasks, self.loop, spin, self.file)
        device = next((row.device for row in found if not isinstance(row, tuple)), "")
        title = f"{where} {host}{f' ({device})' if device else ''}, loop {self.loop}"
        _report(title, found, _verdict(found, self.messages))


def _measuring(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose last parameter is an `_Options`: the command line has a parameter
    for each option in its place."""
    names = [field.name for field in fields(_Options)]

    @wraps(command)
    def run(**given: Any) -> None:
        options = _Options(**{name: given.pop(name) for name in names})
        command(**given, options=options)

    *own, _ = signature(command).parameters.values()
    run.__dict__["__signature__"] = Signature([*own, *signature(_Options).parameters.values()])
    return run


def _seconds_of_polling(spin: float, polling: bool) -> float:
    return spin / 1e6 if polling else 0.0


@bench.command()
@_measuring
def local(
    host: Annotated[str, typer.Option(help="An address of this machine.")] = "127.0.0.1",
    *,
    options: _Options,
) -> None:
    """Run server and client on this machine, in two processes.

    Each operation is measured with each size and depth, and compared with asyncio over TCP. Name
    an address of an RDMA device with --host: 127.0.0.1 is always the software device's.

    Example of latency, as ib_send_lat: aiordma bench local -o echo -s 64 -d 1 -n 1000 --no-tcp

    Example of bandwidth, as ib_write_bw: aiordma bench local -o write -s 65536 -d 16
    """
    spin = _seconds_of_polling(options.spin, options.polling)
    with reporting("bench"):
        options.check_writable()
    with (
        reporting("bench"),
        serving(host, loop=options.loop, spin=spin, device=options.device) as ports,
    ):
        at = (ports.rdma, ports.streams, ports.protocol, ports.over_rdma)
        options.report("on", host, *at)


@bench.command()
def server(
    bind: Annotated[str, typer.Option(help="A local address; datagrams need one.")] = "0.0.0.0",
    port: Port = PORT,
    device: DeviceName = "auto",
    loop: Loop = "auto",
    polling: Polling = True,
    spin: Spin = SPIN * 1e6,
) -> None:
    """Serve clients until interrupted. On another machine, run `aiordma bench client`.

    Example: aiordma bench server --bind 192.0.2.1
    """

    def announce(*ports: int) -> None:
        tcp = f"for TCP on {ports[1]} and {ports[2]}"
        print(f"listening on {bind}:{ports[0]}, for streams on {ports[3]}, {tcp}", flush=True)

    with reporting("bench"):
        served = partial(serve, bind, port, announce, device=device)
        run(served, loop=loop, spin=_seconds_of_polling(spin, polling))


@bench.command()
@_measuring
def client(
    host: Annotated[str, typer.Argument(help="The server's address.")],
    port: Port = PORT,
    *,
    options: _Options,
) -> None:
    """Measure with `aiordma bench server` on another machine.

    Example of READs of 64 KiB, 16 in flight: aiordma bench client 192.0.2.1 -o read -s 65536 -d 16

    Example with the rows in a file, too: aiordma bench client 192.0.2.1 --json rows.json
    """
    with reporting("bench"):
        check_device(options.device)
        options.check_writable()
        options.report("with", host, port, port + 1, port + 2, port + 3)


Task = tuple[str, Callable[[], Coroutine[Any, Any, Measurement]]]


def _works(
    operations: list[str] | None,
    sizes: list[int] | None,
    depths: list[int] | None,
    *,
    both: bool,
    inline: int | None,
) -> list[Workload]:
    usual: tuple[str, ...] = ("send",) if both else OPERATIONS
    if inline is not None:
        usual = tuple(name for name in usual if name != "read")
    names = usual if operations is None else operations
    try:
        works = [
            Workload(*each, both=both, inline=inline)
            for each in product(names, sizes or (64, 65536), depths or (1, 16))
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return [
        work
        for work in works
        if work.operation != "datagrams" or sizes or work.size <= LARGEST_DATAGRAM
    ]


def _check(conditions: Conditions, works: list[Workload]) -> None:
    """Refuse what cannot apply, before anything is measured."""
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


def _measured(
    tasks: list[Task], loop: str, spin: float, file: Path | None
) -> list[Measurement | Failure]:
    """Measure all. If nothing could be measured, exit with the reasons."""
    found: list[Measurement | Failure] = []
    statuses: list[int] = []
    silent: dict[str, str] = {}  # by protocol: the row that waited in vain
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        shown = progress.add_task("", total=len(tasks))
        for name, task in tasks:
            progress.update(shown, description=name)
            protocol = _protocol(name)
            try:
                if protocol in silent:
                    raise UnreachableError(f"not tried: {silent[protocol]} reached no server")
                found.append(run(task, loop=loop, spin=spin))
            except Exception as error:
                status = status_of(error)
                if status is None:
                    raise
                first = first_error(error)
                if isinstance(first, ConnectTimeoutError | UnreachableError):
                    silent.setdefault(protocol, name)
                found.append((name, one_line(first)))
                statuses.append(status)
            progress.advance(shown)
    if file is not None:
        rows = [
            {"name": row[0], "error": row[1]} if isinstance(row, tuple) else row.as_dict()
            for row in found
        ]
        file.write_text(json.dumps(rows, indent=1) + "\n")
    if len(statuses) == len(found):
        fail("bench", "; ".join(_failures(found)), min(statuses, default=FAILED))
    return found


def _report(title: str, found: list[Measurement | Failure], verdict: str) -> None:
    console = Console()
    print_table(console, title, found)
    for line in (*_failures(found), *[verdict] * bool(verdict)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _verdict(found: list[Measurement | Failure], works: list[Workload]) -> str:
    """Answer whether messages over RDMA are faster than over TCP here, by what takes their place in
    an asyncio program: the smallest, one at a time, and the largest, with the most in flight."""
    rows = {row.name: row for row in found if not isinstance(row, tuple)}
    parts = []
    for work in (
        min((each for each in works if each.depth == 1), key=lambda each: each.size, default=None),
        max(works, key=lambda each: (each.depth > 1, each.size, each.depth), default=None),
    ):
        if work is None:
            continue
        names = [row_name(each, work.size, work.depth) for each in ("messages", STREAM)]
        ours = [rows[name] for name in names if name in rows]
        tcp = rows.get(row_name("tcp streams", work.size, work.depth))
        if not ours or tcp is None:
            continue
        if work.depth == 1:
            ratio = min(row.percentile_us(50) for row in ours) / tcp.percentile_us(50)
            part = f"{'yes' if ratio < 1 else 'no'}, {ratio:.2f} of the time"
        else:
            ratio = max(row.rate for row in ours) / tcp.rate
            part = f"{'yes' if ratio > 1 else 'no'}, {ratio:.2f} of the rate"
        parts.append(f"{work.size} B: {part}.")
    return " ".join(["Faster than TCP?", *dict.fromkeys(parts)]) if parts else ""


def _protocol(row: str) -> str:
    """Return the protocol of a row: the server can be unreachable by one, and not by another."""
    return next((each for each in ("tcp", "datagrams") if row.startswith(each)), "connections")


def _failures(found: list[Measurement | Failure]) -> list[str]:
    """Return a text for each reason, with the rows that failed for it."""
    names: dict[str, list[str]] = {}
    for row in found:
        if isinstance(row, tuple):
            names.setdefault(row[1], []).append(row[0])
    return [
        f"{', '.join(rows) if len(rows) < 4 else f'{len(rows)} rows'}: {reason}"
        for reason, rows in names.items()
    ]
