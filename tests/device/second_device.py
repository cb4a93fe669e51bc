"""A second device of the driver under test, which a test may take down."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.devices import DeviceUnderTest

LINK = "dummy7"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def second_device(device: DeviceUnderTest) -> Iterator[str]:
    """A device of the same driver on an interface of its own, which a test may take down."""
    name = f"{device.driver}7"
    ip("link", "add", LINK, "type", "dummy")
    try:
        ip("link", "set", LINK, "up")
        subprocess.run(
            ["rdma", "link", "add", name, "type", device.driver, "netdev", LINK], check=True
        )
        yield name
        subprocess.run(["rdma", "link", "delete", name], check=True)
    finally:
        ip("link", "delete", LINK)
