"""Devices, opened devices, and protection domains (man ibv_get_device_list, ibv_open_device)."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from aiordma._base.arguments import resource, text, whole_number
from aiordma._base.calls import (
    check_negative_errno,
    check_pointer,
    check_positive_errno,
    check_supported,
)
from aiordma._base.enums import LinkLayer, Transport
from aiordma._base.errors import BusyError, NoDeviceError
from aiordma._base.provider import (
    BUILT_IN,
    SOFTWARE,
    Provider,
    Requirement,
    provider_of,
    rdma_core,
    software,
)
from aiordma._base.system import set_nonblocking
from aiordma._native import ffi, lib
from aiordma.verbs.async_event import AsyncEvent, AsyncEvents, take_async_event
from aiordma.verbs.attributes import (
    DeviceAttributes,
    GidEntry,
    PortAttributes,
    guid_of,
    read_device,
    read_gid,
    read_port,
)
from aiordma.verbs.resource import Resource

__all__ = (
    "Context",
    "Device",
    "ProtectionDomain",
    "name_of",
    "no_such_device",
    "require_device",
)


class Device:
    """The name of an RDMA device, which need not exist yet: `Device("rxe0").open()`.

    Args:
        name: the name of an RDMA device, such as "rxe0", "software" or
            "software_roce".

    Raises:
        TypeError, ValueError: the name is not a str, or empty.
    """

    def __init__(self, name: str) -> None:
        self.name: str = text(
            name, "name", f"a device's name such as {SOFTWARE!r} or 'rxe0'", "Device"
        )

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @staticmethod
    def names() -> list[str]:
        """Return the names of this machine's RDMA devices, and, last, the two of the built-in
        software device: "software", and "software_roce" for queue pairs that are connected by hand
        (`aiordma.open_queue_pair`). Without rdma-core, there are only these.

        Raises:
            ValueError: an environment variable of the software device has a wrong value; the
                message names it.

        See: man ibv_get_device_list.
        """
        try:
            real = _names(rdma_core())
        except NoDeviceError:
            real = []
        return [*real, *_names(software())]

    @property
    def guid(self) -> int:
        """The node GUID, as a number in host order. Does not open the device (man
        ibv_get_device_guid).

        Raises:
            NoDeviceError: there is no device of this name; the message lists the devices.
            ValueError: as of `names`.
        """
        provider = provider_of(self.name)
        with self._found(provider) as device:
            return guid_of(provider.get_device_guid(device))

    def open(self) -> "Context":
        """Open the device.

        Raises:
            NoDeviceError: there is no device of this name; the message lists the devices.
            VerbsCallError: the device could not be opened.
            ValueError: as of `names`.

        See: man ibv_open_device.
        """
        provider = provider_of(self.name)
        with self._found(provider) as device:
            pointer = check_pointer(provider.open_device(device), "ibv_open_device")
        return Context(provider, pointer, owned=True)

    @contextmanager
    def _found(self, provider: Provider) -> Iterator[Any]:
        with _listed(provider) as devices:
            names = [name_of(provider, device) for device in devices]
            if self.name not in names:
                raise NoDeviceError(no_such_device(self.name, names))
            yield devices[names.index(self.name)]


def require_device(name: str) -> None:
    """Check that there is a device of this name.

    Raises:
        NoDeviceError: there is no device of this name; the message lists the devices.
    """
    provider = provider_of(name)
    names = _names(provider)
    if name not in names:
        raise NoDeviceError(no_such_device(name, names))


def no_such_device(name: str, names: list[str]) -> str:
    """Return the error text for an unknown device name; `names` are the devices that exist. It
    names AIORDMA_DEVICE if that is the variable's value."""
    if names:
        found = f"there is {', '.join(names)} (`rdma link` lists them)"
    else:
        found = (
            "there is none at all: `aiordma doctor` says why. If this kernel has the modules, "
            "`modprobe -a rdma_rxe rdma_ucm && rdma link add rxe0 type rxe netdev eth0` makes one"
        )
    source = f" (AIORDMA_DEVICE names {name!r})" if Requirement().name == name else ""
    built_in = " and ".join(f'device="{each}"' for each in BUILT_IN)
    return f"there is no RDMA device {name!r}{source}; {found}. Built in are {built_in}"


def _names(provider: Provider) -> list[str]:
    with _listed(provider) as devices:
        return [name_of(provider, device) for device in devices]


def name_of(provider: Provider, device: Any) -> str:
    """Return the name of a struct ibv_device."""
    return str(ffi.string(provider.get_device_name(device)).decode())


@contextmanager
def _listed(provider: Provider) -> Iterator[list[Any]]:
    """Yield the list of devices, which is valid during the block."""
    count = ffi.new("int *")
    listed = provider.get_device_list(count)
    # Without kernel support (NULL, ENOSYS) the list is empty, as for `ibv_devices`.
    try:
        yield [] if listed == ffi.NULL else [listed[i] for i in range(count[0])]
    finally:
        if listed != ffi.NULL:
            provider.free_device_list(listed)


def _port(port: int, call: str) -> int:
    return whole_number(port, "port", 0, 255, call)


def _index(index: int, call: str) -> int:
    return whole_number(index, "index", -(2**31), 2**31 - 1, call)


class Context(Resource):
    """An opened device. Protection domains, completion queues and channels are created on it.

    `owned=False` wraps a context that librdmacm opened and keeps open.
    """

    def __init__(self, provider: Provider, pointer: Any, *, owned: bool) -> None:
        super().__init__()
        self.provider = provider
        self.pointer: Any = pointer
        self._owned = owned
        self._attributes: DeviceAttributes | None = None
        self._ports: dict[int, PortAttributes] = {}
        self._async_events = AsyncEvents(self)
        try:
            self.device_name: str = name_of(provider, pointer.device)
            self.transport: Transport = Transport(pointer.device.transport_type)
            self.num_comp_vectors: int = pointer.num_comp_vectors
            self.async_fd: int = pointer.async_fd
            set_nonblocking(self.async_fd)
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<Context {self.device_name}>"

    @property
    def kind(self) -> str:
        """The kind of the device, as of `device=`: "software" (the built-in device), "infiniband",
        "roce" or "iwarp"; "other" for a transport of another kind.

        Raises:
            VerbsCallError: the driver refused to describe its first port.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.
        """
        if self.device_name in BUILT_IN:
            return SOFTWARE
        if self.transport is Transport.IWARP:
            return "iwarp"
        if self.transport is not Transport.INFINIBAND:
            return "other"
        return "roce" if self._constant_port(1).link_layer is LinkLayer.ETHERNET else "infiniband"

    def query(self) -> DeviceAttributes:
        """Return the device's identity and limits. Only the first call queries the device, because
        they do not change while it is open.

        Raises:
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_device_ex.
        """
        self._require_open()
        if self._attributes is None:
            raw = ffi.new("struct ibv_device_attr_ex *")
            result = lib.aiordma_query_device(self.provider.table, self.pointer, raw)
            check_positive_errno(result, "ibv_query_device_ex")
            self._attributes = read_device(raw, self.num_comp_vectors)
        return self._attributes

    def query_port(self, port: int = 1) -> PortAttributes:
        """Return a port's attributes. The first port is 1.

        Args:
            port: its number, from 1.

        Raises:
            TypeError, ValueError: `port` is not a number, or out of range.
            VerbsCallError: the device has no such port.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_port.
        """
        self._require_open()
        port = _port(port, "query_port")
        raw = ffi.new("struct ibv_port_attr *")
        result = lib.aiordma_query_port(self.provider.table, self.pointer, port, raw)
        check_positive_errno(result, "ibv_query_port")
        return read_port(raw)

    def _constant_port(self, port: int) -> PortAttributes:
        """Return a port's attributes as the first call read them: for those that do not change
        while the device is open, such as max_msg_sz, gid_tbl_len and link_layer.

        Raises: as `query_port`.
        """
        if port not in self._ports:
            self._ports[port] = self.query_port(port)
        return self._ports[port]

    def query_gid(self, port: int = 1, index: int = 0) -> bytes:
        """Return an entry of a port's GID table: 16 bytes.

        Args:
            port: the number of a port, from 1.
            index: of the entry, from 0.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there is no such port or entry.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_gid.
        """
        self._require_open()
        port, index = _port(port, "query_gid"), _index(index, "query_gid")
        gid = ffi.new("union ibv_gid *")
        result = self.provider.query_gid(self.pointer, port, index, gid)
        # man ibv_query_gid: -1 on error, without a guarantee for errno.
        check_positive_errno(result, "ibv_query_gid")
        return bytes(gid.raw)

    def query_gid_entry(self, port: int = 1, index: int = 0) -> GidEntry:
        """Return an entry of a port's GID table with its type and network interface.

        Args:
            port: the number of a port, from 1.
            index: of the entry, from 0.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            NotSupportedError: the installed library lacks this call.
            VerbsCallError: ENODATA: the entry is empty; EINVAL: there is no such entry.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_gid_ex.
        """
        self._require_open()
        port = _port(port, "query_gid_entry")
        index = whole_number(index, "index", 0, 2**32 - 1, "query_gid_entry")
        raw = ffi.new("struct ibv_gid_entry *")
        result = self.provider.query_gid_ex(self.pointer, port, index, raw, 0, ffi.sizeof(raw[0]))
        check_positive_errno(result, "ibv_query_gid_ex")
        return read_gid(raw)

    def gid_table(self) -> list[GidEntry]:
        """Return the entries of all ports' GID tables, without the empty ones.

        On RoCE, each address of the network interface has an entry for each version of RoCE that
        the device supports.

        Raises:
            NotSupportedError: the installed library lacks this call.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_gid_table.
        """
        self._require_open()
        ports = range(1, self.query().phys_port_cnt + 1)
        most = sum(self._constant_port(port).gid_tbl_len for port in ports)
        raw = ffi.new("struct ibv_gid_entry[]", max(1, most))
        size = ffi.sizeof("struct ibv_gid_entry")
        count = self.provider.query_gid_table(self.pointer, raw, most, 0, size)
        return [read_gid(raw[i]) for i in range(check_negative_errno(count, "ibv_query_gid_table"))]

    def query_pkey(self, port: int = 1, index: int = 0) -> int:
        """Return an entry of a port's P_Key table: 16 bits, the highest for full membership.

        Args:
            port: the number of a port, from 1.
            index: of the entry, from 0.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there is no such entry (iWARP devices have none).
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_pkey.
        """
        self._require_open()
        port, index = _port(port, "query_pkey"), _index(index, "query_pkey")
        raw = ffi.new("uint16_t *")
        check_positive_errno(
            self.provider.query_pkey(self.pointer, port, index, raw), "ibv_query_pkey"
        )
        return socket.ntohs(raw[0])

    def read_clock(self) -> int:
        """Read the device's clock, whose ticks the timestamps of completions count
        (`CompletionQueue.poll_timestamped`).

        Raises:
            NotSupportedError: the device or its library has no such clock.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_rt_values_ex.
        """
        self._require_open()
        ticks = ffi.new("uint64_t *")
        error = lib.aiordma_read_clock(self.pointer, ticks)
        check_supported(error, "reading the device's clock", self.device_name)
        check_positive_errno(error, "ibv_query_rt_values_ex")
        return int(ticks[0])

    def alloc_pd(self) -> "ProtectionDomain":
        """Allocate a protection domain.

        Raises: as `ProtectionDomain`.

        See: man ibv_alloc_pd.
        """
        return ProtectionDomain(self)

    # -- asynchronous events ------------------------------------------------------------------

    def take_async_event(self) -> AsyncEvent | None:
        """Take the next asynchronous event; None if there is none. Never blocks.

        `async_fd` is readable while an event is pending.

        Raises:
            BusyError: librdmacm opened the context, and its connections get the events.
            VerbsCallError: the device was removed.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_get_async_event.
        """
        self._require_open()
        if not self._owned:
            raise BusyError(
                f"the events of librdmacm's context of {self.device_name} go to the connections on "
                f'it; Device("{self.device_name}").open() makes a context with events of its own'
            )
        event = take_async_event(self.provider, self.pointer)
        if event is None or not event.key:
            return event
        return replace(event, resource=self._find(event.key))

    def async_events(self) -> AsyncEvents:
        """Return the asynchronous iterator of the events. See `AsyncEvents`.

        Raises:
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.
        """
        self._require_open()
        return self._async_events

    def close(self) -> None:
        """Close the device and every object created on it. If a task waits for its asynchronous
        events, the iteration of that task ends. Idempotent.

        Raises:
            BusyError: a task of another thread waits for the events, or posted requests or bound
                windows still use a memory region. The region stays open then, and so do its domain
                and the device.
            VerbsCallError: the driver refused to destroy an object. See `Resource.close`.

        See: man ibv_close_device.
        """
        super().close()

    _can_be_in_use = True

    def _require_closable(self) -> None:
        self._async_events._require_here()

    def _destroy(self) -> None:
        self._async_events._stop()
        if self._owned:
            check_positive_errno(self.provider.close_device(self.pointer), "ibv_close_device")


class ProtectionDomain(Resource):
    """A protection domain: queue pairs can use the memory regions of their own domain only.

    Args:
        context: the device.

    Raises:
        TypeError: the context has the wrong type.
        VerbsCallError: the driver refused.
        ClosedError, ForkError: the context is closed, or was opened by the parent of this process.

    See: man ibv_alloc_pd.
    """

    def __init__(self, context: Context) -> None:
        resource(context, "context", "a Context", "ProtectionDomain")
        super().__init__(context)
        try:
            self.context = context
            self.provider: Provider = context.provider
            pointer = self.provider.alloc_pd(context.pointer)
            self.pointer: Any = check_pointer(pointer, "ibv_alloc_pd")
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<ProtectionDomain of {self.context.device_name}>"

    def _destroy(self) -> None:
        check_positive_errno(self.provider.dealloc_pd(self.pointer), "ibv_dealloc_pd")
