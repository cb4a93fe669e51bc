"""Devices, opened devices, and protection domains (man ibv_get_device_list, ibv_open_device)."""

import os
from dataclasses import dataclass, replace
from typing import Any

from aiordma._native import ffi, lib
from aiordma.enums import AtomicCapability, LinkLayer, Mtu, PortState, Transport
from aiordma.errors import BusyError, NoDeviceError, check_pointer, check_positive_errno
from aiordma.provider import Provider, rdma_core
from aiordma.verbs.async_event import AsyncEvent, AsyncEvents, take_async_event
from aiordma.verbs.resource import Resource

__all__ = ("Context", "Device", "DeviceAttributes", "PortAttributes", "ProtectionDomain")


@dataclass(frozen=True, slots=True)
class DeviceAttributes:
    """A device's identity and limits (man ibv_query_device); names without `max_` as in C."""

    firmware: str
    node_guid: int
    vendor_id: int
    vendor_part_id: int
    max_mr_size: int
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    atomic_cap: AtomicCapability
    max_mw: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    phys_port_cnt: int


@dataclass(frozen=True, slots=True)
class PortAttributes:
    """A port's state (man ibv_query_port)."""

    state: PortState
    max_mtu: Mtu
    active_mtu: Mtu
    gid_tbl_len: int
    max_msg_sz: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    link_layer: LinkLayer


class Device:
    """An RDMA device by name, not opened yet: `Device("rxe0").open()`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @staticmethod
    def names() -> list[str]:
        """Return the names of this machine's RDMA devices; none is an empty list.

        Raises:
            NoDeviceError: rdma-core is not installed.
        """
        provider = rdma_core()
        count = ffi.new("int *")
        listed = provider.get_device_list(count)
        if listed == ffi.NULL:
            # No kernel support at all (ENOSYS) is no device, as `ibv_devices` says too.
            return []
        try:
            return [
                ffi.string(provider.get_device_name(listed[i])).decode() for i in range(count[0])
            ]
        finally:
            provider.free_device_list(listed)

    def open(self) -> "Context":
        """Open the device.

        Raises:
            NoDeviceError: there is no device of this name; the message names those there are.
            VerbsCallError: it could not be opened.
        """
        provider = rdma_core()
        count = ffi.new("int *")
        listed = provider.get_device_list(count)
        try:
            found = [] if listed == ffi.NULL else [listed[i] for i in range(count[0])]
            names = [ffi.string(provider.get_device_name(device)).decode() for device in found]
            if self.name not in names:
                raise NoDeviceError(
                    f"there is no RDMA device {self.name!r}; "
                    + (f"there is {', '.join(names)}" if names else "there is none at all: ")
                    + ("" if names else "`rdma link add rxe0 type rxe netdev eth0` makes one")
                )
            pointer = provider.open_device(found[names.index(self.name)])
            return Context(provider, check_pointer(pointer, "ibv_open_device"), owned=True)
        finally:
            if listed != ffi.NULL:
                provider.free_device_list(listed)


class Context(Resource):
    """An opened device: where protection domains, completion queues and channels come from.

    `owned=False` wraps a context that librdmacm opened and keeps open.
    """

    def __init__(self, provider: Provider, pointer: Any, *, owned: bool) -> None:
        super().__init__()
        self.provider = provider
        self.pointer = pointer
        self._owned = owned
        self.device_name: str = ffi.string(provider.get_device_name(pointer.device)).decode()
        self.transport = Transport(pointer.device.transport_type)
        self.async_fd: int = pointer.async_fd
        os.set_blocking(self.async_fd, False)
        self._async_events = AsyncEvents(self)

    def __repr__(self) -> str:
        return f"<Context {self.device_name}>"

    def query(self) -> DeviceAttributes:
        """Return the device's identity and limits."""
        self.require_open()
        raw = ffi.new("struct ibv_device_attr *")
        check_positive_errno(self.provider.query_device(self.pointer, raw), "ibv_query_device")
        names = set(DeviceAttributes.__dataclass_fields__) - {
            "firmware",
            "node_guid",
            "atomic_cap",
        }
        return DeviceAttributes(
            firmware=ffi.string(raw.fw_ver).decode(errors="replace"),
            node_guid=int.from_bytes(raw.node_guid.to_bytes(8, "little"), "big"),
            atomic_cap=AtomicCapability(raw.atomic_cap),
            **{name: getattr(raw, name) for name in names},
        )

    def query_port(self, port: int = 1) -> PortAttributes:
        """Return a port's state; ports count from 1."""
        self.require_open()
        raw = ffi.new("struct ibv_port_attr *")
        result = lib.aiordma_query_port(self.provider.table, self.pointer, port, raw)
        check_positive_errno(result, "ibv_query_port")
        return PortAttributes(
            state=PortState(raw.state),
            max_mtu=Mtu(raw.max_mtu),
            active_mtu=Mtu(raw.active_mtu),
            gid_tbl_len=raw.gid_tbl_len,
            max_msg_sz=raw.max_msg_sz,
            pkey_tbl_len=raw.pkey_tbl_len,
            lid=raw.lid,
            sm_lid=raw.sm_lid,
            link_layer=LinkLayer(raw.link_layer),
        )

    def query_gid(self, port: int = 1, index: int = 0) -> bytes:
        """Return an entry of a port's GID table: 16 bytes."""
        self.require_open()
        gid = ffi.new("union ibv_gid *")
        result = self.provider.query_gid(self.pointer, port, index, gid)
        # man ibv_query_gid: -1 on error, and errno is not promised.
        check_positive_errno(result, "ibv_query_gid")
        return bytes(gid.raw)

    def alloc_pd(self) -> "ProtectionDomain":
        """Allocate a protection domain."""
        return ProtectionDomain(self)

    # -- asynchronous events ------------------------------------------------------------------

    def take_async_event(self) -> AsyncEvent | None:
        """Take the next asynchronous event if one waits; never blocks (man ibv_get_async_event).

        `async_fd` is readable while one does.

        Raises:
            BusyError: the context is librdmacm's, whose events go to the connections on it.
            VerbsCallError: the device is gone.
        """
        self.require_open()
        if not self._owned:
            raise BusyError(
                f"the events of librdmacm's context of {self.device_name} go to the connections on "
                f'it; Device("{self.device_name}").open() makes a context with events of its own'
            )
        event = take_async_event(self.provider, self.pointer)
        if event is None or not event.key:
            return event
        return replace(event, resource=self.find(event.key))

    def async_events(self) -> AsyncEvents:
        """Return the asynchronous events as an iterator: `async for event in ...`. See there."""
        self.require_open()
        return self._async_events

    def close(self) -> None:
        """Close the device and all that was made from it. A task that waits for its asynchronous
        events is woken, and its iteration ends.

        Raises:
            BusyError: such a task runs in another thread.
            VerbsCallError: the driver refused something; what else was to be closed has been.
        """
        if not self._closed:
            self._async_events.require_here()
        super().close()

    def _destroy(self) -> None:
        self._async_events.stop()
        if self._owned:
            check_positive_errno(self.provider.close_device(self.pointer), "ibv_close_device")


class ProtectionDomain(Resource):
    """A set of memory regions and queue pairs that may meet (man ibv_alloc_pd)."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.context = context
        self.provider = context.provider
        try:
            self.pointer = check_pointer(self.provider.alloc_pd(context.pointer), "ibv_alloc_pd")
        except BaseException:
            self._abandon()
            raise

    def __repr__(self) -> str:
        return f"<ProtectionDomain of {self.context.device_name}>"

    def _destroy(self) -> None:
        check_positive_errno(self.provider.dealloc_pd(self.pointer), "ibv_dealloc_pd")
