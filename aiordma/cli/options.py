"""Options that several commands have."""

import math
import os
from typing import Annotated

import typer

from aiordma import Device

__all__ = (
    "KEEPALIVE",
    "KINDS",
    "DeviceName",
    "Port",
    "Require",
    "check_device",
    "device_names",
    "finite",
    "is_given",
)

KEEPALIVE: float = 30.0
"""The `keepalive` of the commands' servers, in seconds: a client that vanished does not keep its
connection, or its part of a file, until the server ends."""

KINDS: tuple[str, ...] = ("any", "rdma", "infiniband", "roce", "iwarp")
"""The values of `require=`."""


def device_names() -> list[str]:
    """Return the devices' names, for the completion of a shell."""
    try:
        return Device.names()
    except ValueError:  # of the environment: a command says so
        return []


def check_device(device: str) -> None:
    """Check that there is the device that a command is to use.

    Args:
        device: the option's value; "auto": that of AIORDMA_DEVICE, if it is set.

    Raises:
        NoDeviceError: there is no device of this name; the message lists the devices.
    """
    if device == "auto":
        device = os.environ.get("AIORDMA_DEVICE") or "auto"
    if device not in ("", "auto"):
        _ = Device(device).guid


def finite(number: float) -> float:
    """Return a number of the command line, unless it is inf or nan.

    Raises:
        typer.BadParameter: it is.
    """
    if not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _kinds() -> list[str]:
    return list(KINDS)


DeviceName = Annotated[
    str, typer.Option(help="The device; auto: chosen by the address.", autocompletion=device_names)
]
Port = Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="The server's port.")]
Require = Annotated[
    str | None,
    typer.Option(
        help="rdma, infiniband, roce or iwarp: fail if another kind of device would be used.",
        show_default=False,
        autocompletion=_kinds,
    ),
]
