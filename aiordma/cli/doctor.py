"""`aiordma doctor`: why RDMA works here, or does not."""

import json
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

import anyio
import typer

import aiordma
from aiordma._base.provider import SOFTWARE, Requirement
from aiordma.bench.mistakes import one_line
from aiordma.cli.checks import Finding, check, works
from aiordma.cli.running import run_command
from aiordma.cli.system import AddressUse, DeviceState, System, inspect

SECONDS = 10.0
NO_RDMA = "RDMA does not work here."
_UNSENT = 9
"""A port to resolve an address with. Nothing is sent to it."""


def doctor(
    address: Annotated[
        list[str] | None,
        typer.Argument(help="Peers: which device would reach them?", show_default=False),
    ] = None,
    loopback: Annotated[
        bool, typer.Option(help="Send a message on each device, to this machine.")
    ] = True,
    fix: Annotated[
        bool, typer.Option("--fix", help="As root: load modules, and add a soft-RoCE device.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find out why RDMA works here, or does not, and how to mend it.

    Looks at libraries, kernel modules, device nodes and permissions, the limit of locked memory,
    links, MTU, GIDs, namespaces and containers. Then it says which device and GID each address
    would get, and sends a message over each device. Below each finding is the command that mends
    it, or "nothing to do".

    --fix runs only commands that add something: modprobe, and rdma link add if there is no device.

    Exit status: 0: RDMA works; 1: it does not (the software device still serves your programs).

    Example: aiordma doctor 192.0.2.1
    """
    peers = address or []
    findings = run_command("doctor", partial(_examine, peers, loopback))
    if fix and _mend(findings):
        findings = run_command("doctor", partial(_examine, peers, loopback))
    if as_json:
        shown = {"works": works(findings), "findings": [asdict(each) for each in findings]}
        print(json.dumps(shown, indent=2))
    else:
        for finding in findings:
            print(_filled(f"{finding.level:8}{finding.subject}: {finding.text}"))
            if finding.level != "ok":
                print(f"{'':8}  {finding.command or 'nothing to do'}")
        print("RDMA works here." if works(findings) else f"{NO_RDMA} {_instead()}")
    if not works(findings):
        raise typer.Exit(1)


def _instead() -> str:
    required = Requirement()
    if required.permits_software:
        return "Programs run on the built-in software device, also those in C, with `aiordma exec`."
    return f"{required.text} lets no program run on the built-in software device."


def _filled(line: str) -> str:
    """Break a line of text for a terminal. Other programs get it whole."""
    if not sys.stdout.isatty():
        return line
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )


async def _examine(peers: list[str], loopback: bool) -> list[Finding]:
    system = inspect()
    if loopback:
        tested = [replace(each, loopback=await _try(each, system)) for each in system.devices]
        system = replace(system, devices=tuple(tested))
    uses = [await _reach(peer) for peer in peers]
    others = [each for each in system.uses if each.address not in peers]
    return check(replace(system, uses=(*others, *uses)))


def _mend(findings: list[Finding]) -> bool:
    """Run the commands that are safe, once each; return whether any was run."""
    commands = list(dict.fromkeys(command for each in findings for command in each.fix))
    if not commands:
        print("nothing that --fix may mend", file=sys.stderr)
    for command in commands:
        print(f"+ {shlex.join(command)}", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            why = one_line(OSError(done.stderr)) if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = one_line(error)
        if why:
            print(f"aiordma doctor: {shlex.join(command)} failed: {why}", file=sys.stderr)
            break
    return bool(commands)


async def _reach(peer: str) -> AddressUse:
    """Find the device that would connect to a peer. The peer is not contacted."""
    prepare = partial(aiordma.prepare_connection, peer, _UNSENT, timeout=SECONDS)
    why = ""
    if Requirement().name == SOFTWARE:
        return AddressUse(peer, SOFTWARE, "AIORDMA_DEVICE names it", is_local=False)
    try:
        # AIORDMA_DEVICE decides, if it is set.
        async with prepare(device="rdma" if Requirement().permits_all else "auto") as connection:
            source = connection.local_address
            assert source is not None  # the route is resolved
            return AddressUse(peer, connection.device_name, is_local=False, source=source[0])
    except aiordma.DeviceRequirementError as error:
        # The reason, without the requirement, which is the doctor's own.
        _, _, why = one_line(error).partition(f"can be used for {peer}: ")
        why = why.partition(". `aiordma doctor")[0] or one_line(error)
    except (aiordma.RdmaError, ValueError) as error:
        return AddressUse(peer, None, one_line(error), is_local=False)
    try:
        async with prepare(device=SOFTWARE) as connection:
            return AddressUse(peer, connection.device_name, why, is_local=False)
    except (aiordma.RdmaError, ValueError) as error:
        return AddressUse(peer, None, one_line(error), is_local=False)


async def _try(device: DeviceState, system: System) -> str | None:
    """Send a message over a device to this machine, and READ memory; return "ok" or the error."""
    if device.error is not None:
        return None
    if device.name == SOFTWARE:
        address: str | None = "127.0.0.1"
    else:
        uses = [use.address for use in system.uses if use.device == device.name]
        address = next(iter(sorted(uses, key=lambda each: "%" in each)), None)
    if address is None:
        return "not tested: this machine has no address on it"
    try:
        with anyio.fail_after(SECONDS):
            return await _converse(address, device.name)
    except TimeoutError:
        return f"no answer from itself on {address} in {SECONDS:g} s"
    except (aiordma.RdmaError, anyio.BrokenResourceError, OSError, ValueError) as error:
        return f"on {address}: {one_line(error)}"


async def _converse(address: str, device: str) -> str:
    data = b"aiordma doctor"
    listen = partial(aiordma.listen, device=device)
    connect = partial(aiordma.connect, device=device)
    async with (
        listen(address, 0) as listener,
        anyio.create_task_group() as group,
    ):

        async def serve() -> None:
            async with listener.accept() as connection:
                source = connection.register(bytearray(data), aiordma.Access.REMOTE_READ)
                if await connection.receive() == data:
                    await connection.send(source.remote().pack())
                async for _ in connection:
                    pass

        group.start_soon(serve)
        async with connect(address, listener.port) as connection:
            await connection.send(data)
            remote = aiordma.RemoteMemory.unpack(await connection.receive())
            into = connection.register(bytearray(len(data)))
            await connection.read(into, remote)
            if into.view != data:
                return "the READ brought other bytes than were there"
    return "ok"
