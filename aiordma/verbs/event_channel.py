"""Event channels of the connection manager, and their events.

The C call that takes an event copies it and acknowledges it, so that destroying an identifier never
waits for an acknowledgement (man rdma_ack_cm_event, rdma_destroy_id).
"""

import errno
from collections.abc import Iterator
from typing import Any, NamedTuple

from aiordma._base.calls import check_negative_errno, check_pointer
from aiordma._base.enums import CmEventType
from aiordma._base.errors import NoDeviceError, VerbsCallError
from aiordma._base.provider import Provider, usual_provider
from aiordma._base.system import set_nonblocking
from aiordma._native import ffi, lib
from aiordma.verbs.address import AddressVector
from aiordma.verbs.resource import Resource

__all__ = ("Event", "EventChannel")

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_TYPES = {int(each): each for each in CmEventType}
_WITH_ADDRESS = (CmEventType.ESTABLISHED, CmEventType.MULTICAST_JOIN)
_WITHOUT_PARAMETERS = (
    CmEventType.ADDR_RESOLVED,
    CmEventType.ROUTE_RESOLVED,
    CmEventType.DISCONNECTED,
)
_NO_PARAMETERS = (0, b"", 0, 0, 0, 0, 0, 0, None, False, False)


class Event(NamedTuple):
    """A copied and acknowledged CM event. `key` is the key of its identifier, `new_key` that of the
    identifier of a connection request. `responder_resources` and `initiator_depth` are those of the
    side that gets the event.

    `address`, `qp_num` and `qkey` are the destination of datagrams: the peer in the UDP port space
    (with ESTABLISHED), or the multicast group (with MULTICAST_JOIN).
    """

    type: CmEventType
    status: int
    key: int
    new_key: int
    private_data: bytes
    responder_resources: int
    initiator_depth: int
    retry_count: int
    rnr_retry_count: int
    qp_num: int
    qkey: int = 0
    address: AddressVector | None = None
    flow_control: bool = False
    shared_receive: bool = False


class EventChannel(Resource):
    """A channel for the events of many identifiers. `fd` is readable while an event is pending.
    Non-blocking.

    Args:
        device: the name or the class of a device, or "auto": what AIORDMA_DEVICE says; without it,
            all real devices, or, if this machine has none, the built-in software device.

    Raises:
        NoDeviceError: the connection manager cannot be opened; the message has the reason.
        VerbsCallError: no file descriptors or memory are left.
        TypeError, ValueError: the device's name is invalid.
        ForkError: this process is a forked child, and its parent has used real devices.

    See: man rdma_create_event_channel.
    """

    def __init__(self, device: str | Provider = "auto") -> None:
        if not isinstance(device, Provider):
            device = usual_provider(device, "EventChannel")
        super().__init__()
        provider = device
        try:
            self.provider: Provider = provider
            self._requests: set[int] = set()
            """The keys of identifiers, made by CONNECT_REQUEST events, that were not adopted."""
            self._raws: list[Any] = []
            """Structs for an event, which no call uses: a call releases the GIL."""
            provider.use_manager()
            pointer = provider.create_event_channel()
            self.pointer: Any = check_pointer(pointer, "rdma_create_event_channel")
            self.fd: int = self.pointer.fd
            set_nonblocking(self.fd)
        except VerbsCallError as error:
            self._give_up()
            if error.errno in _SHORTAGES:
                raise
            raise NoDeviceError(str(error)) from error
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<EventChannel of {self.provider.name}>"

    def events(self) -> Iterator[Event]:
        """Take the pending events one by one. Each is acknowledged before it is returned. Closing
        the channel ends the iteration.

        Several threads can take events: each event is returned to one of them.

        When librdmacm takes an event, it can also change the connection (it moves the queue pair to
        another state). If this fails, the error is raised, and the next call takes the next event.

        Raises:
            VerbsCallError: librdmacm could not take the event, or change the connection.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_get_cm_event, rdma_ack_cm_event.
        """
        self._require_open()
        while (event := self._take()) is not None:
            yield event
            if self._closed:
                return
            self._require_open()  # the program may have forked since

    def _take(self) -> Event | None:
        """Take the next event; None: none is pending. The channel is open. See `events`."""
        try:
            raw = self._raws.pop()
        except IndexError:
            raw = ffi.new("struct aiordma_cm_event *")
        try:
            while True:
                taken = lib.aiordma_next_cm_event(self.provider.table, self.pointer, raw)
                if taken < 0:
                    check_negative_errno(taken, "rdma_get_cm_event")
                if not taken:
                    return None
                kind = _TYPES.get(raw.event)
                if kind is not None:  # else it is an event of a newer librdmacm
                    break
            if kind in _WITHOUT_PARAMETERS:
                return tuple.__new__(Event, (kind, raw.status, raw.id, *_NO_PARAMETERS))
            request = kind is CmEventType.CONNECT_REQUEST
            if request:
                self._requests.add(raw.id)
            has_address = kind in _WITH_ADDRESS and raw.address.port_num
            fields = (
                kind,
                raw.status,
                raw.listen_id if request else raw.id,
                raw.id if request else 0,
                bytes(ffi.buffer(raw.private_data, raw.private_data_length)),
                raw.responder_resources,
                raw.initiator_depth,
                raw.retry_count,
                raw.rnr_retry_count,
                raw.qp_num,
                raw.qkey,
                AddressVector._read(raw.address) if has_address else None,
                raw.flow_control != 0,
                raw.srq != 0,
            )
        finally:
            self._raws.append(raw)
        return tuple.__new__(Event, fields)  # the class's own constructor is written in Python

    def _destroy(self) -> None:
        self.provider.destroy_event_channel(self.pointer)
