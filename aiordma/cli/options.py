"""Options that several commands have."""

import math
from typing import Annotated

import typer

from aiordma._base.provider import CLASSES, Requirement
from aiordma.verbs import Device

KEEPALIVE: float = 30.0
"""The `keepalive` of the commands' servers, in seconds: a client that vanished does not keep its
connection, or its part of a file, until the server ends."""


def device_names() -> list[str]:
    """Return the devices' names, for the completion of a shell."""
    try:
        return Device.names()
    except ValueError:  # of the environment: a command says so
        return []


def _devices() -> list[str]:
    return [*dict.fromkeys([*device_names(), *CLASSES])]


def check_device(device: str) -> None:
    """Check that there is the device that a command is to use, if it is required by name.

    Args:
        device: the option's value; "auto": that of AIORDMA_DEVICE, if it is set.

    Raises:
        NoDeviceError: there is no device of this name; the message lists the devices.
    """
    name = Requirement(device or "auto").name
    if name is not None:
        _ = Device(name).guid


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


DeviceName = Annotated[
    str,
    typer.Option(
        help="A device's name; or rdma, infiniband, roce, iwarp, software; auto: by the address.",
        autocompletion=_devices,
    ),
]
Port = Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="The server's port.")]
