"""Stand-in for an identifier, for queue pairs without the connection manager."""

from aiordma._base.calls import check_pointer
from aiordma._base.errors import NoDeviceError
from aiordma._base.provider import Provider
from aiordma._base.socket_address import SocketAddress
from aiordma._native import ffi
from aiordma.verbs import Context
from aiordma.verbs.device import no_such_device


class Unmanaged:
    """Of a queue pair that its owner moves through the states. It has no events."""

    peer_address: SocketAddress | None = None
    closed = True  # the device has no object of it

    def __init__(self, port: int = 1) -> None:
        self.port = port
        self.key: int = id(self)

    def __repr__(self) -> str:
        return f"<Unmanaged, of port {self.port}>"

    def _local(self) -> bytes:
        return bytes(28)  # of no address family

    def disconnect(self) -> None:
        """Do nothing: the peer is not notified."""

    def close(self) -> None:
        """Do nothing: the owner destroys the queue pair."""


def opened_device(provider: Provider, name: str) -> Context:
    """Return librdmacm's own context of a device, so that objects with and without the connection
    manager can be used together (man rdma_get_devices).

    Raises:
        NoDeviceError: the connection manager has no device of this name; the message lists its
            devices.
    """
    count = ffi.new("int *")
    listed = check_pointer(provider.get_devices(count), "rdma_get_devices")
    try:
        contexts = [Context(provider, listed[i], owned=False) for i in range(count[0])]
    finally:
        provider.free_devices(listed)
    found = [context for context in contexts if context.device_name == name]
    for context in contexts:
        if context not in found:
            context.close()
    if not found:
        names = sorted(context.device_name for context in contexts)
        raise NoDeviceError(no_such_device(name, names))
    return found[0]
