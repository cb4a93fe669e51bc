"""`aiordma cp`: copies files as rcopy of rdmacm-utils does."""

import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import anyio
import rich.progress
import typer
from rich.console import Console

import aiordma
from aiordma import RdmaError
from aiordma.cli.copying import FileReceiver, send_file
from aiordma.cli.rcopy import PORT, RcopyError
from aiordma.streams import Stream, connect_stream, listen_stream

__all__ = ("cp", "split_target")

Device = Annotated[str, typer.Option(help="The RDMA device; auto: whichever has the address.")]


def cp(
    source: Annotated[Path | None, typer.Argument(help="A file.", show_default=False)] = None,
    target: Annotated[
        str | None, typer.Argument(help="HOST[:PATH], or [IPV6][:PATH].", show_default=False)
    ] = None,
    serve: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Receive files into it.")
    ] = None,
    bind: Annotated[str, typer.Option(help="With --serve: the local address.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", "-p", help="The server's.")] = PORT,
    device: Device = "auto",
) -> None:
    """Copy a file to another machine over RDMA: aiordma cp FILE HOST[:PATH].

    There, `aiordma cp --serve DIRECTORY` receives it, or rcopy of rdmacm-utils. With --serve, the
    client can be rcopy, too.
    """
    logging.basicConfig(format="aiordma: %(message)s")
    try:
        if serve is not None:
            if source is not None or target is not None:
                raise typer.BadParameter("--serve has no other arguments")
            aiordma.run(_serve(serve, bind, port, device))
        elif source is None or target is None:
            raise typer.BadParameter("give FILE and HOST[:PATH], or --serve DIRECTORY")
        else:
            host, path = split_target(target, source.name)
            aiordma.run(_send(source, host, path, port, device))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def split_target(target: str, name: str) -> tuple[str, str]:
    """Return the host and the path of HOST[:PATH].

    Args:
        name: of the file: the path, or its last part, if the target does not have it.
    """
    if target.startswith("["):
        host, _, rest = target[1:].partition("]")
    else:
        host, colon, rest = target.partition(":")
        rest = colon + rest
    path = rest.removeprefix(":")
    return host, path + name if not path or path.endswith("/") else path


async def _send(source: Path, host: str, path: str, port: int, device: str) -> None:
    try:
        async with connect_stream(host, port, device=device) as stream:
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
        _fail(f"{host}: the server ended the stream before it had the file")
    except (RdmaError, RcopyError, OSError, ValueError) as error:
        _fail(str(error))
    print(f"{size} bytes in {seconds:.2f} seconds = {size * 8 / 1e9 / seconds:.2f} Gb/sec")


def _show(shown: rich.progress.Progress, task: rich.progress.TaskID, done: int, size: int) -> None:
    shown.update(task, completed=done, total=size)


def _fail(reason: str) -> NoReturn:
    print(f"aiordma cp: {reason}", file=sys.stderr)
    raise typer.Exit(1) from None


async def _serve(directory: Path, bind: str, port: int, device: str) -> None:
    try:
        receiver = FileReceiver(directory, _received)
        async with listen_stream(bind, port, device=device) as listener:
            print(f"listening on {bind}:{listener.port}", flush=True)
            await listener.serve(partial(_handle, receiver))
    except (RdmaError, OSError, ValueError) as error:
        _fail(str(error))


async def _handle(receiver: FileReceiver, stream: Stream) -> None:
    """Serve a client. What goes wrong with it does not end the server."""
    peer = stream.connection.peer_address
    try:
        await receiver.serve(stream)
    except anyio.EndOfStream:
        print(f"{peer}: the client ended the stream inside a file", file=sys.stderr, flush=True)
    except (RdmaError, RcopyError, OSError) as error:
        print(f"{peer}: {error}", file=sys.stderr, flush=True)


def _received(path: Path, size: int) -> None:
    # repr() escapes what a client may have put into the name.
    print(f"received {str(path)!r}, {size} bytes", flush=True)
