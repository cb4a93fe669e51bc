"""`aiordma info`: the devices, their ports, GIDs and limits."""

import json
from dataclasses import asdict, fields
from enum import IntEnum, IntFlag
from importlib.metadata import version
from typing import Annotated, Any

import typer

from aiordma import RdmaError
from aiordma.bench.mistakes import one_line
from aiordma.cli.options import device_names
from aiordma.cli.running import fail, reporting
from aiordma.cli.system import interface_name
from aiordma.verbs import Context, Device, DeviceAttributes, GidEntry, GidType

SHOWN_LIMITS = (
    "max_qp",
    "max_qp_wr",
    "max_sge",
    "max_cq",
    "max_cqe",
    "max_mr",
    "max_mr_size",
    "max_srq",
    "max_ah",
    "max_mw",
    "max_qp_rd_atom",
)


def info(
    device: Annotated[
        list[str] | None,
        typer.Argument(
            help="The devices to describe; all without it.",
            show_default=False,
            autocompletion=device_names,
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every attribute, as ibv_devinfo -v.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything.")] = False,
) -> None:
    """Show RDMA devices, with their ports, GIDs and limits.

    The last two are built in: "software", and "software_roce" for queue pairs that are connected by
    hand. Names and values are those of
    ibv_devinfo. A port's GIDs are its addresses: give one of them to `aiordma ping` and to your
    programs. Exit status: 1 if a device is missing or cannot be opened.

    Example: aiordma info rxe0 --json
    """
    described: list[dict[str, Any]] = []
    errors: list[str] = []
    with reporting("info"):
        names = Device.names()  # here, a mistake in the environment is the command's
        devices = [Device(name) for name in device or names]
    for each in devices:
        try:
            with each.open() as context:
                described.append(describe(context))
        except (RdmaError, ValueError) as error:
            errors.append(f"{each.name}: {one_line(error)}")
    if as_json:
        shown = {"version": version("aiordma"), "devices": described, "errors": errors}
        print(json.dumps(shown, indent=2))
    else:
        for values in described:
            print("\n".join(_lines(values, verbose)))
    if errors:
        fail("info", "; ".join(errors))


def describe(context: Context) -> dict[str, Any]:
    """Return everything that a device says about itself, as plain values for JSON.

    Enumerations are their names, flags lists of names, and GUIDs and GIDs texts.

    Raises:
        VerbsCallError: the driver refused.
    """
    attributes = context.query()
    gids = context.gid_table()
    return {
        "name": context.device_name,
        "kind": context.kind,
        "transport": context.transport.name,
        "attributes": {
            field.name: _plain(getattr(attributes, field.name), field.name)
            for field in fields(DeviceAttributes)
        },
        "ports": [
            {
                "port": port,
                **{
                    name: _plain(value, name)
                    for name, value in asdict(context.query_port(port)).items()
                },
                "gids": [_gid(entry) for entry in gids if entry.port == port],
            }
            for port in range(1, attributes.phys_port_cnt + 1)
        ],
    }


def _plain(value: Any, name: str) -> Any:
    if name.endswith("_guid"):
        return f"{value:016x}"
    if name.endswith("_mtu"):
        return value.bytes
    if isinstance(value, IntFlag):
        return {"value": int(value), "names": [str(each.name) for each in value]}
    if isinstance(value, IntEnum):
        return value.name
    if hasattr(value, "_asdict"):
        return {key: _plain(each, key) for key, each in value._asdict().items()}
    return value


def _gid(entry: GidEntry) -> dict[str, Any]:
    return {
        "index": entry.index,
        "gid": entry.gid.hex(":", 2),
        "type": entry.type.name,
        "address": entry.address if entry.type is not GidType.INFINIBAND else None,
        "interface": interface_name(entry.interface_index),
    }


def _lines(device: dict[str, Any], verbose: bool) -> list[str]:
    attributes = device["attributes"]
    lines = [
        f"{device['name']}: {device['kind']}, firmware {attributes['firmware'] or '-'}, "
        f"node GUID {attributes['node_guid']}"
    ]
    for port in device["ports"]:
        lines.append(
            f"  port {port['port']}: {port['state']}, {port['link_layer'].lower()}, "
            f"MTU {port['active_mtu']} of {port['max_mtu']}, longest message {port['max_msg_sz']}"
        )
        lines += [f"    {line}" for line in _details(port, ("gids",))] if verbose else []
        for gid in port["gids"]:
            address = gid["address"] or gid["gid"]
            where = f" on {gid['interface']}" if gid["interface"] else ""
            lines.append(f"    GID {gid['index']}: {gid['type']} {address}{where}")
    if verbose:
        return lines + [f"  {line}" for line in _details(attributes, ())]
    limits = ", ".join(f"{name} {attributes[name]}" for name in SHOWN_LIMITS)
    return [*lines, f"  limits: {limits}"]


def _details(values: dict[str, Any], without: tuple[str, ...]) -> list[str]:
    lines = []
    for name, value in values.items():
        if name in without:
            continue
        if isinstance(value, dict) and "names" in value:
            value = f"{value['value']:#x} {' '.join(value['names'])}".rstrip()
        elif isinstance(value, dict):
            lines += [f"{name}.{line}" for line in _details(value, ())]
            continue
        lines.append(f"{name}: {value}")
    return lines
