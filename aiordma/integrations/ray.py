"""Ray: a transport of arrays between actors, for Ray Direct Transport (ray.experimental, alpha).

    aiordma.integrations.ray.register()  # before the actors are made, which need aiordma, too

    @ray.remote
    class Source:
        @ray.method(tensor_transport="AIORDMA")
        def weights(self):
            return numpy.ones(1 << 20)

The reader READs the arrays from the memory of the source's process: Ray's object store has no copy.
The source registers an array once, as long as a reference to it exists.
"""

import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import numpy as np
import ray.util
from anyio.from_thread import start_blocking_portal
from ray.exceptions import RayDirectTransportError
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from ray.experimental.rdt.tensor_transport_manager import FetchRequest
from ray.experimental.rdt.util import TransportManagerInfo, transport_manager_info

from aiordma._base.enums import Access
from aiordma._base.errors import RdmaError
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.connection import Connection
from aiordma._connection.connector import connect
from aiordma._connection.listener import listen
from aiordma._connection.open_domain import open_domain
from aiordma.verbs.memory import MemoryRegion

__all__ = ("register",)

NAME = "AIORDMA"

Result = TypeVar("Result")


@dataclass(eq=False)
class _RemoteArrays(TensorTransportMetadata):
    """Where the arrays of a reference are, for its readers."""

    host: str = ""
    port: int = 0
    memories: list[bytes] = field(default_factory=list)
    """Each array's RemoteMemory, packed; empty of an array without bytes."""


@dataclass
class _Fetch(FetchRequest):
    """A transfer under way."""

    future: "Future[None] | None" = None


class _Registered:
    """A registered array, and how many references it is in."""

    def __init__(self, array: Any, region: MemoryRegion) -> None:
        self.array = array
        self.region = region
        self.users = 1


class _Service:
    """The event loop of a process, in a thread of its own, with a listener for the readers of its
    arrays, and the connections to the sources of others."""

    def __init__(self) -> None:
        self._stack = ExitStack()  # to the end of the process
        self._portal = self._stack.enter_context(start_blocking_portal("asyncio"))
        self._registered: dict[int, _Registered] = {}
        self._connections: dict[tuple[str, int], Connection] = {}
        self._connecting = self._portal.call(anyio.Lock)
        self._publishing = self._portal.call(anyio.Lock)
        self.host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self.port: int = self._portal.call(self._open)
        self._portal.start_task_soon(self._listener.serve, _until_the_end)

    def start(
        self, function: Callable[..., Awaitable[Result]], *arguments: Any
    ) -> "Future[Result]":
        """Start a coroutine function on the loop. The future's cancellation cancels it."""
        return self._portal.start_task_soon(function, *arguments)

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on the loop."""
        return self._portal.call(function, *arguments)

    async def _open(self) -> int:
        self._domain = await open_domain(self.host)
        self._listener = await listen(self.host, 0, domain=self._domain)
        return self._listener.port

    # -- the source -----------------------------------------------------------------------------

    async def publish(self, arrays: Sequence[Any]) -> list[bytes]:
        """Register arrays, and return the description of each."""
        found: list[bytes] = []
        async with self._publishing:  # a threaded actor returns the same array twice
            try:
                for array in arrays:
                    found.append(await self._describe(array))
            except BaseException:
                self.withdraw(arrays[: len(found)])
                raise
        return found

    async def _describe(self, array: Any) -> bytes:
        if not array.nbytes:
            return b""
        if not _is_row_major(array):
            raise ValueError("an array that is not contiguous in C's order: return a copy of it")
        known = self._registered.get(id(array))
        if known is None:
            region = await self._domain.register_in_thread(array, Access.REMOTE_READ)
            self._registered[id(array)] = known = _Registered(array, region)
        else:
            known.users += 1
        return known.region.remote().pack()

    def withdraw(self, arrays: Sequence[Any]) -> None:
        """End what `publish` began."""
        for array in arrays:
            known = self._registered.get(id(array))
            if known is None:
                continue
            known.users -= 1
            if not known.users:
                del self._registered[id(array)]
                known.region.close()

    # -- the reader -----------------------------------------------------------------------------

    async def fetch(self, place: tuple[str, int], memories: list[bytes], into: list[Any]) -> None:
        """READ arrays of another process."""
        connection = await self._connected(place)
        regions: list[MemoryRegion] = []
        try:
            pairs = []
            for packed, target in zip(memories, into, strict=True):
                if packed:
                    if not _is_row_major(target):
                        raise ValueError("a target buffer that is not contiguous in C's order")
                    regions.append(await connection.register_in_thread(target))
                    pairs.append((regions[-1][:], RemoteMemory.unpack(packed)))
            await connection.read_blocks(pairs)
        finally:
            for region in regions:
                region._retire()

    async def _connected(self, place: tuple[str, int]) -> Connection:
        async with self._connecting:
            known = self._connections.get(place)
            if known is not None and known.cause is not None:
                del self._connections[place]  # its source has gone, or another has its port
                await known.aclose()
                known = None
            if known is None:
                known = self._connections[place] = await connect(*place)
            return known


def _is_row_major(array: Any) -> bool:
    """Whether an array's or a tensor's memory has its elements in C's order."""
    flags = getattr(array, "flags", None)
    return bool(array.is_contiguous() if flags is None else flags.c_contiguous)


async def _until_the_end(connection: Connection) -> None:
    async for _ in connection:
        pass


class _ArrayTransport(TensorTransportManager):
    """The transport of `register`. Ray makes one in each process, and calls it in its threads."""

    def __init__(self) -> None:
        self._made: _Service | None = None
        self._lock = threading.Lock()
        self._fetches: dict[str, Future[None]] = {}

    @property
    def _service(self) -> _Service:
        with self._lock:
            if self._made is None:
                self._made = _Service()
            return self._made

    def tensor_transport_backend(self) -> str:
        """Return the transport's name."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: only the reader transfers."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: a reader whose source has gone gets an error, and its actor lives."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True: each process that can import this has it."""
        return True

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[Any]
    ) -> _RemoteArrays:
        """Register the arrays of a reference, at their source."""
        service = self._service
        memories = service.start(service.publish, rdt_object).result() if rdt_object else []
        metas = [(each.shape, each.dtype) for each in rdt_object]
        return _RemoteArrays(
            metas, "cpu" if rdt_object else None, service.host, service.port, memories
        )

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Return nothing: the description of the arrays is enough."""
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> FetchRequest:
        """Begin to READ the arrays of a reference."""
        found = tensor_transport_metadata
        assert isinstance(found, _RemoteArrays)
        into = list(target_buffers or [_empty(*meta) for meta in found.tensor_meta])
        service, place = self._service, (found.host, found.port)
        future = service.start(service.fetch, place, found.memories, into)
        self._fetches[obj_id] = future
        future.add_done_callback(lambda _: self._fetches.pop(obj_id, None))
        return _Fetch(obj_id, into, future)

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        """Wait for the arrays.

        Raises:
            TimeoutError: they have not arrived within so many seconds; -1 is no limit.
            RayDirectTransportError: the source has gone, or ended the access; its cause is an
                RdmaError.
        """
        assert isinstance(fetch_request, _Fetch)
        assert fetch_request.future is not None
        try:
            fetch_request.future.result(None if timeout < 0 else timeout)
        except RdmaError as error:
            raise RayDirectTransportError(  # type: ignore[no-untyped-call]
                f"reading the arrays of the object {fetch_request.obj_id} failed: {error}. "
                "The source actor may have died"
            ) from error
        return fetch_request.tensors

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """READ the arrays of a reference."""
        request = self.fetch_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return self.wait_fetch_complete(request)

    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Not called: the transport is one-sided."""
        raise NotImplementedError

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]
    ) -> None:
        """End the access to the arrays of a reference that has gone."""
        service = self._service
        service.call(service.withdraw, tensors)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Cancel a transfer under way."""
        future = self._fetches.get(obj_id)
        if future is not None:
            future.cancel()


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new array, or a new tensor if the dtype is torch's."""
    if type(dtype).__module__ == "torch":
        return sys.modules["torch"].empty(tuple(shape), dtype=dtype)
    return np.empty(shape, dtype)


def register(data_type: type[Any] = np.ndarray, name: str = NAME) -> None:
    """Make the transport known to Ray, for the actors that this process makes from now on. Does
    nothing if it is known under this name.

    Args:
        data_type: numpy.ndarray, or torch.Tensor (on the CPU).
        name: what `tensor_transport=` of ray.method names.

    Raises:
        ValueError: Ray has another transport of this name, or this one for another type.
    """
    wanted = TransportManagerInfo(_ArrayTransport, ["cpu"], data_type)
    if transport_manager_info.get(name.upper()) != wanted:
        register_tensor_transport(name, wanted.devices, _ArrayTransport, data_type)
