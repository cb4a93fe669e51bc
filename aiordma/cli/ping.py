"""`aiordma ping`: rping's client and server."""

import logging
import time
from functools import partial
from typing import Annotated

import anyio
import typer

import aiordma
from aiordma import Connection
from aiordma._base.socket_address import address_text
from aiordma.cli.options import KEEPALIVE, DeviceName, Port, check_device, finite
from aiordma.cli.rping import MOST, OPTIONS, PORT, answer
from aiordma.cli.rping import ping as ping_peer
from aiordma.cli.running import fail, run_command


def ping(
    host: Annotated[
        str | None, typer.Argument(help="The server's name or address.", show_default=False)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("-a", metavar="ADDRESS", help="The same, as of rping; a server's own."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", "-s", help="Be the server, for one client.")
    ] = False,
    client: Annotated[bool, typer.Option("-c", help="Be the client, the default.")] = False,
    persistent: Annotated[
        bool, typer.Option("--persistent", "-P", help="Be a server for many clients.")
    ] = False,
    port: Port = PORT,
    count: Annotated[
        int, typer.Option("--count", "-C", min=0, help="A client's rounds; 0: until interrupted.")
    ] = 5,
    size: Annotated[
        int, typer.Option("--size", "-S", min=1, max=MOST, help="Bytes of a client's round.")
    ] = 64,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", "-i", min=0, callback=finite, help="Seconds between a client's rounds."
        ),
    ] = 0.0,
    timeout: Annotated[
        float,
        typer.Option("--timeout", "-t", min=0.001, callback=finite, help="Seconds to connect."),
    ] = 5.0,
    show: Annotated[bool, typer.Option("-v", help="Print the data.")] = False,
    verify: Annotated[bool, typer.Option("--verify", "-V", help="Compare the data.")] = False,
    device: DeviceName = "auto",
) -> None:
    """Test RDMA between two machines: SEND, READ and WRITE, as rping(1) does.

    Each side can be the C program: `rping -s` on the other machine, or `rping -c -a HOST`. A round
    is two messages in each direction, a READ and a WRITE. Its time includes all of them.

    Example of the server: aiordma ping --serve -P

    Example of the client: aiordma ping 192.0.2.1 --device rdma
    """
    is_server = serve or persistent
    if client and is_server:
        raise typer.BadParameter("a program is the client (-c) or the server (-s), not both")
    if host is not None and address is not None and host != address:
        raise typer.BadParameter(f"two addresses: {host} and -a {address}")
    host = host or address
    # The output names the device of each connection; an error is one line.
    logging.basicConfig(format="aiordma ping: %(message)s", level=logging.ERROR)
    if is_server:
        where = host or "0.0.0.0"
        serving = partial(_serve, where, port, persistent, verify, show, device)
        run_command("ping", serving)
        return
    if host is None:
        raise typer.BadParameter("a client needs the server's address: aiordma ping 192.0.2.1")
    times: list[float] = []
    pinging = partial(
        _ping, host, port, count, size, interval, timeout, verify, show, device, times
    )
    try:
        run_command("ping", pinging)
    finally:
        if times:
            low, mean, high = min(times), sum(times) / len(times), max(times)
            print(
                f"{_rounds(len(times))} of {size} bytes: min {low * 1e6:.0f} us, mean "
                f"{mean * 1e6:.0f} us, max {high * 1e6:.0f} us",
                flush=True,
            )


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"


def _peer(connection: Connection) -> str:
    peer = connection.peer_address
    return "a peer" if peer is None else address_text(peer)


async def _ping(
    host: str,
    port: int,
    count: int,
    size: int,
    interval: float,
    timeout: float,
    verify: bool,
    show: bool,
    device: str,
    times: list[float],
) -> None:
    check_device(device)
    started = time.perf_counter()
    connecting = aiordma.connect(host, port, timeout=timeout, device=device, options=OPTIONS)
    async with connecting as connection:
        took, kind = time.perf_counter() - started, connection.context.kind
        print(
            f"connected to {address_text((host, port))} through {connection.device_name}"
            f"{'' if kind == connection.device_name else f' ({kind})'} in {took * 1e3:.1f} ms",
            flush=True,
        )
        await ping_peer(
            connection,
            count=count,
            size=size,
            verify=verify,
            show=show,
            interval=interval,
            on_round=times.append,
        )


async def _serve(
    host: str,
    port: int,
    persistent: bool,
    verify: bool,
    show: bool,
    device: str,
) -> None:
    async def serve_one(connection: Connection) -> None:
        rounds = await answer(connection, verify=verify, show=show)
        name = connection.device_name
        print(f"{_peer(connection)} left after {_rounds(rounds)}, on {name}", flush=True)

    async def serve_and_report(connection: Connection) -> None:
        try:
            await serve_one(connection)
        except (aiordma.RdmaError, anyio.BrokenResourceError) as error:
            print(f"{_peer(connection)}: {error}", flush=True)

    listening = aiordma.listen(host, port, device=device, options=OPTIONS, keepalive=KEEPALIVE)
    async with listening as listener:
        print(f"listening on {host}:{listener.port}", flush=True)
        if persistent:
            await listener.serve(serve_and_report)
            fail("ping", "the listener ended")
        async with listener.accept() as connection:
            await serve_one(connection)
