"""`aiordma info --json` agrees with `ibv_devinfo -v`, field by field."""

import json
import re
import subprocess
import sys
from typing import Any

from tests.devices import DeviceUnderTest
from tests.interop.test_devinfo import printed

COMMAND = "from aiordma.cli.main import main; main()"


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=140)
    return done.stdout


def numbers(values: dict[str, Any]) -> dict[str, int]:
    """Return the plain numbers of a description, and of nested groups those of other names: tag
    matching has a max_sge, too, which ibv_devinfo prints only where there is tag matching."""
    found: dict[str, int] = {}
    for value in values.values():
        if isinstance(value, dict) and "names" not in value:
            found |= numbers(value)
    return found | {name: value for name, value in values.items() if isinstance(value, int)}


def said(text: str, name: str) -> int:
    """Return the number of a field: "0x10", "25kbps", "1024 (3)" (an MTU), or "1X (1)" (a code)."""
    code = re.search(r"\((\d+)\)$", text)
    if code and not name.endswith("_mtu"):
        return int(code[1])
    word = text.split()[0].removesuffix("kbps")
    return int(word, 16) if word.startswith("0x") else int(word)


def test_info_agrees_with_ibv_devinfo(device: DeviceUnderTest) -> None:
    theirs = printed(output("ibv_devinfo", "-v", "-d", device.name))
    shown = output(sys.executable, "-c", COMMAND, "info", device.name, "--json")
    (ours,) = json.loads(shown)["devices"]
    attributes, (port,) = ours["attributes"], ours["ports"]

    compared = []
    for prefix, values in (("", attributes), ("port ", port)):
        for name, number in numbers(values).items():
            key = {"port lid": "port port_lid", "port lmc": "port port_lmc"}.get(
                prefix + name, prefix + name
            )
            if key not in theirs or theirs[key] == ("not supported",):
                continue
            assert said(theirs[key][0], name) == number, key
            compared.append(key)
    assert len(compared) > 45, compared
    assert {"max_qp", "max_mr_size", "port active_mtu", "port max_msg_sz"} <= set(compared)

    assert theirs["hca_id"] == (ours["name"],)
    assert theirs["fw_ver"] == (attributes["firmware"],)
    assert theirs["node_guid"][0].replace(":", "") == attributes["node_guid"]
    assert theirs["sys_image_guid"][0].replace(":", "") == attributes["sys_image_guid"]
    assert theirs["port state"][0].split()[0] == f"PORT_{port['state']}"
    assert theirs["port link_layer"][0].lower() == port["link_layer"].lower()
    flags = attributes["device_cap_flags"]
    assert theirs["device_cap_flags"] == (f"{flags['value']:#010x}", *flags["names"])

    gids = {key: value[0] for key, value in theirs.items() if key.startswith("port GID[")}
    if ours["kind"] == "iwarp" and not gids:
        return  # ibv_devinfo does not list those of every iWARP device
    assert gids
    for gid in port["gids"]:
        text, _, kind = gids.pop(f"port GID[{gid['index']:3}]").partition(", ")
        assert text.lower() in (gid["gid"], gid["address"], f"::ffff:{gid['address']}")
        assert kind == {"ROCE_V1": "RoCE v1", "ROCE_V2": "RoCE v2"}.get(gid["type"], "")
    assert gids == {}
