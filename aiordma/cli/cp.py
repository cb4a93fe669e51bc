"""`aiordma cp`: copies files as rcopy of rdmacm-utils does."""

import logging
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import anyio
import rich.progress
import typer
from rich.console import Console

from aiordma import RdmaError
from aiordma.cli.copying import FileReceiver, send_file
from aiordma.cli.options import KEEPALIVE, DeviceName, Port, check_device, finite, is_given
from aiordma.cli.rcopy import PORT, RcopyError
from aiordma.cli.running import run_command
from aiordma.streams import Stream, connect_stream, listen_stream


def cp(
    context: typer.Context,
    source: Annotated[Path | None, typer.Argument(help="A file.", show_default=False)] = None,
    target: Annotated[
        str | None, typer.Argument(help="HOST[:PATH], or [IPV6][:PATH].", show_default=False)
    ] = None,
    serve: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Receive files into it.")
    ] = None,
    bind: Annotated[str, typer.Option(help="With --serve: the local address.")] = "0.0.0.0",
    port: Port = PORT,
    timeout: Annotated[
        float,
        typer.Option("--timeout", "-t", min=0.001, callback=finite, help="Seconds to connect."),
    ] = 30.0,
    device: DeviceName = "auto",
) -> None:
    """Copy a file to another machine over RDMA.

    The other machine receives files into a directory, with `aiordma cp --serve DIRECTORY` or with
    rcopy of rdmacm-utils. With --serve, the client can be rcopy, too. A file that is received has
    its name only when it is complete. Whoever reaches the port can write into the directory.

    Example of the receiver: aiordma cp --serve /srv/incoming

    Example of the sender: aiordma cp data.bin 192.0.2.1

    Under another name, and never without RDMA: aiordma cp data.bin 192.0.2.1:new.bin --device rdma
    """
    logging.basicConfig(format="aiordma cp: %(message)s")
    if serve is not None:
        if source is not None or target is not None:
            raise typer.BadParameter("--serve has no other arguments")
        if is_given(context, "timeout"):
            raise typer.BadParameter("--timeout is the sender's: --serve waits for clients")
        run_command("cp", partial(_serve, serve, bind, port, device))
        return
    if source is None or target is None:
        raise typer.BadParameter("give FILE and HOST[:PATH], or --serve DIRECTORY")
    if target.startswith((".", "/")) or ("[" not in target and "/" in target.partition(":")[0]):
        raise typer.BadParameter(
            f"{target} is a path, and not HOST[:PATH]: cp only sends. To fetch a file, run "
            "`aiordma cp --serve DIRECTORY` here, and `aiordma cp FILE HOST` on the other machine"
        )
    if is_given(context, "bind"):
        raise typer.BadParameter("--bind is the receiver's: give it with --serve DIRECTORY")
    try:
        host, path = split_target(target, source.name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    run_command("cp", partial(_send, source, host, path, port, timeout, device))


def split_target(target: str, name: str) -> tuple[str, str]:
    """Return the host and the path of HOST[:PATH].

    Args:
        name: of the file: the path, or its last part, if the target does not have it.

    Raises:
        ValueError: the target has no host, or a bracket that is not closed.
    """
    if target.startswith("["):
        host, bracket, rest = target[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            raise ValueError(f"{target!r} is not [IPV6] or [IPV6]:PATH")
    else:
        host, colon, rest = target.partition(":")
        rest = colon + rest
    if not host:
        raise ValueError(f"{target!r} has no host: give HOST or HOST:PATH")
    path = rest.removeprefix(":")
    return host, path + name if not path or path.endswith("/") else path


async def _send(
    source: Path,
    host: str,
    path: str,
    port: int,
    timeout: float,
    device: str,
) -> None:
    check_device(device)
    try:
        async with connect_stream(host, port, timeout=timeout, device=device) as stream:
            started = time.perf_counter()
            with rich.progress.Progress(
                *rich.progress.Progress.get_default_columns(),
                rich.progress.DownloadColumn(),
                rich.progress.TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
                disable=not sys.stderr.isatty(),
            ) as shown:
                task = shown.add_task(source.name, total=None)
                size = await send_file(stream, source, path, partial(_show, shown, task))
            seconds = time.perf_counter() - started
    except anyio.EndOfStream:
        raise RcopyError(f"{host}: the server ended the stream before it had the file") from None
    print(f"{size} bytes in {seconds:.2f} seconds = {size / 1e6 / seconds:.1f} MB/s")


def _show(shown: rich.progress.Progress, task: rich.progress.TaskID, done: int, size: int) -> None:
    shown.update(task, completed=done, total=size)


async def _serve(directory: Path, bind: str, port: int, device: str) -> None:
    receiver = FileReceiver(directory, _received)
    async with (
        listen_stream(bind, port, device=device, keepalive=KEEPALIVE) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(_end_at_sigterm, group.cancel_scope)
        print(f"listening on {bind}:{listener.port}", flush=True)
        await listener.serve(partial(_handle, receiver))


async def _end_at_sigterm(scope: anyio.CancelScope) -> None:
    """End the server as an interrupt does: the files that are not complete are removed."""
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def _handle(receiver: FileReceiver, stream: Stream) -> None:
    """Serve a client. What goes wrong with it does not end the server."""
    peer = stream.connection.peer_address
    try:
        await receiver.serve(stream)
    except anyio.EndOfStream:
        _say(f"{peer}: the client ended the stream inside a file", sys.stderr)
    except (RdmaError, RcopyError, OSError) as error:
        _say(f"{peer}: {error}", sys.stderr)


def _received(path: Path, size: int) -> None:
    # The client chose the name. repr() escapes what is not printable; what standard output cannot
    # encode would end the server.
    encoding = sys.stdout.encoding
    name = repr(str(path)).encode(encoding, "backslashreplace").decode(encoding)
    _say(f"received {name}, {size} bytes", sys.stdout)


def _say(text: str, to: TextIO) -> None:
    """Print, also if nobody reads it or the disk is full: the server goes on."""
    with suppress(OSError):
        print(text, file=to, flush=True)
