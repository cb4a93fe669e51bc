"""What stands where an identifier stands, for queue pairs without the connection manager."""

from aiordma._base.enums import QueuePairType
from aiordma._base.errors import NoDeviceError, check_pointer
from aiordma._base.provider import Provider
from aiordma._base.socket_address import SocketAddress
from aiordma._native import ffi
from aiordma.verbs import (
    Capacity,
    CompletionQueue,
    Context,
    ProtectionDomain,
    QueuePair,
    RawSharedReceiveQueue,
)
from aiordma.verbs.device import no_such_device

__all__ = ("Unmanaged", "opened_device")


class Unmanaged:
    """Makes a queue pair that its owner moves through the states, and reports no events."""

    local_address: SocketAddress | None = None
    peer_address: SocketAddress | None = None

    def __init__(self, port: int = 1) -> None:
        self.port = port
        self.key: int = id(self)
        self.queue_pair: QueuePair | None = None

    def __repr__(self) -> str:
        return f"<Unmanaged, of port {self.port}>"

    def create_queue_pair(
        self,
        domain: ProtectionDomain,
        send_queue: CompletionQueue,
        receive_queue: CompletionQueue,
        capacity: Capacity,
        service: QueuePairType = QueuePairType.RC,
        shared_receive: RawSharedReceiveQueue | None = None,
    ) -> QueuePair:
        """Create it, in RESET. See `QueuePair.create`."""
        self.queue_pair = QueuePair.create(
            domain,
            send_queue,
            receive_queue,
            service=service,
            capacity=capacity,
            shared_receive=shared_receive,
        )
        return self.queue_pair

    def disconnect(self) -> None:
        """Nobody is to be told."""

    def close(self) -> None:
        """Destroy the queue pair."""
        if self.queue_pair is not None:
            self.queue_pair.close()


def opened_device(provider: Provider, name: str) -> Context:
    """Return a device as librdmacm has it open, so that what is made there and what the
    connection manager makes can meet (man rdma_get_devices).

    Raises:
        NoDeviceError: the connection manager knows no device of this name; the message names
            those it knows.
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
