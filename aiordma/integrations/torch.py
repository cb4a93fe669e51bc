"""torch: a transport of tensors' bytes, for torch.distributed's one-sided transports (torch 2.15,
private there so far). torch finds it by its entry point:

    from torch.distributed._transport import new_transport

    transport = new_transport("aiordma", host="192.0.2.1")
    transport.connect(peer_url)  # what the peer's bind() returned
    memory = transport.register_memory(tensor)
    transport.write(memory.to_view(), remote)  # the peer's to_remote_buffer()

A transport has an event loop in a thread of its own. The classes are made with the first transport,
so that this module can be imported without torch.
"""

import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partialmethod
from math import isfinite
from operator import index
from typing import Any, Self

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from aiordma._base.enums import Access
from aiordma._base.process import here, require_same_process
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.connection import Connection
from aiordma._connection.connector import connect
from aiordma._connection.listener import listen
from aiordma._connection.open_domain import open_domain
from aiordma.verbs.memory import MemoryRegion

__all__ = ("transport",)

NAME = "aiordma"
_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
_PACKED = RemoteMemory.WIRE.size


def _place(url: bytes) -> tuple[str, int]:
    """Read what `bind` returned at the peer.

    Raises:
        ValueError: it is of another transport.
    """
    name, port, host = url.decode().split(":", 2)
    if name != NAME:
        raise ValueError(f"{url!r} is of another transport than {NAME}")
    return host, int(port)


# -- memory ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Registration:
    """A registered tensor, which it keeps."""

    tensor: Any
    region: MemoryRegion
    is_active: bool = True

    def require_active(self) -> None:
        if not self.is_active:
            raise RuntimeError("memory has been unregistered")


class _View:
    """Bytes of a registered tensor."""

    def __init__(self, memory: "_Memory", start: int, length: int) -> None:
        self.memory = memory
        self.start = start
        self.length = length

    def size(self) -> int:
        return self.length


class _MutableView(_View):
    """Bytes that may be written to."""

    writable = True


@dataclass(frozen=True)
class _RemoteBuffer:
    """A registered tensor, for its peer."""

    url: bytes
    memory: RemoteMemory

    def serialize(self) -> bytes:
        return self.url + self.memory.pack()

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        if type(data) is not bytes:
            raise TypeError(f"a serialized descriptor is bytes, not {type(data).__name__}")
        url = data[:-_PACKED]
        _place(url)
        return cls(url, RemoteMemory.unpack(data[-_PACKED:]))


class _Memory:
    """A tensor that is registered with a transport."""

    def __init__(self, transport: "_Transport", registration: _Registration) -> None:
        self.transport = transport
        self.registration = registration

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.registration.require_active()
        size = self.registration.region.length
        start = 0 if offset is None else index(offset)
        if not 0 <= start <= size:
            raise ValueError(f"offset={start} is outside the {size} bytes of the memory")
        count = size - start if length is None else index(length)
        if not 0 <= count <= size - start:
            raise ValueError(f"{count} bytes at {start} are more than the memory's {size}")
        return start, count

    def to_view(self, offset: int | None = None, length: int | None = None) -> _View:
        return _View(self, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> _MutableView:
        return _MutableView(self, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> _RemoteBuffer:
        self.registration.require_active()
        return _RemoteBuffer(self.transport.url, self.registration.region.remote())


# -- transfers ------------------------------------------------------------------------------------


class _Work:
    """A transfer under way: the methods of a torch.distributed.Work. It goes on when a wait ends
    before it does, by a time limit or a cancellation."""

    def __init__(self, done: "Future[None]", timeout: float | None, future: Any) -> None:
        super().__init__()
        self._done = done
        self._timeout = timeout
        self._future = future
        done.add_done_callback(self._settle)

    def _settle(self, done: "Future[None]") -> None:
        error = done.exception()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self.is_completed() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self.is_completed() else None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = _checked(timeout.total_seconds()) or self._timeout
        if not wait((self._done,), limit).done:
            raise TimeoutError("transport wait timed out; operation remains pending")
        self._done.result()
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[Any]:
        self.wait()
        return []

    def synchronize(self) -> None:
        self.wait()


def _checked(timeout: float | None) -> float | None:
    if timeout is not None and not (isfinite(timeout) and timeout >= 0):
        raise ValueError("timeout must be finite and nonnegative")
    return timeout


# -- the transport --------------------------------------------------------------------------------


class _Transport:
    """One endpoint: the methods of torch's Transport, which any thread may call.

    It has a domain with its tensors, a listener for the peer, which READs and WRITEs them, and a
    connection to the peer's listener, for its own transfers.
    """

    def __init__(self, device: Any, host: str | None, timeout: float) -> None:
        super().__init__(device)  # type: ignore[call-arg]  # torch's
        self._default_timeout = _checked(timeout)
        self._torch: Any = sys.modules["torch"]
        self._lock = threading.Lock()
        self._registrations: dict[tuple[Any, ...], _Registration] = {}
        self._pending: dict[Future[None], tuple[_Registration, Any]] = {}
        self._connection: Connection | None = None
        self._is_closing = False
        self._process = here.pid
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio"))
            host = host or socket.gethostname()
            self._ended, url = self._portal.start_task(self._run, host)
            self.url: bytes = url
            stack.callback(self._portal.call, self._closing.set)
            self._stack = stack.pop_all()

    async def _run(self, host: str, *, task_status: TaskStatus[bytes]) -> None:
        """Be the endpoint until it is closed."""
        self._closing = anyio.Event()
        async with (
            open_domain(host) as self._domain,
            listen(host, 0, domain=self._domain) as listener,
            anyio.create_task_group() as group,
        ):
            group.start_soon(listener.serve, _until_the_end)
            place = listener.local_address
            assert place is not None
            task_status.started(f"{NAME}:{place[1]}:{place[0]}".encode())
            await self._closing.wait()
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                if self._connection is not None:
                    await self._connection.aclose()

    @staticmethod
    def supported() -> bool:
        return True

    def _require_open(self) -> None:
        require_same_process(self._process, "an aiordma transport")
        if self._is_closing:
            raise RuntimeError("transport is closed")

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Let no other thread use it during the block. Check that it is open and of this process:
        first without the lock, which a forked child can inherit locked."""
        self._require_open()
        with self._lock:
            self._require_open()
            yield

    def bind(self, *, timeout: float | None = None) -> bytes:
        self._require_open()
        return self.url

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        limit = self._default_timeout if timeout is None else _checked(timeout)
        with self._used():
            if self._connection is not None:
                raise RuntimeError("transport is already connected")
            self._peer = peer_url
            self._connection = self._portal.call(self._connect, *_place(peer_url), limit)
        return 0

    async def _connect(self, host: str, port: int, timeout: float | None) -> Connection:
        return await connect(host, port, domain=self._domain, timeout=timeout)

    def connected(self) -> bool:
        connection = self._connection
        return connection is not None and connection.cause is None and not self._is_closing

    def register_memory(self, tensor: Any, *, timeout: float | None = None) -> _Memory:
        if not isinstance(tensor, self._torch.Tensor):
            raise TypeError(f"tensor is a torch.Tensor, not {type(tensor).__name__}")
        if not tensor.is_contiguous():
            raise ValueError("the tensor is not contiguous")
        self._check_device(tensor.device)  # type: ignore[attr-defined]  # torch's
        key = tensor.data_ptr(), tensor.nbytes, tensor.device
        with self._used():
            found = self._registrations.get(key)
            if found is None:
                # Detached, it has the same memory, and tells where that is.
                region = self._portal.call(self._register, tensor.detach())
                found = self._registrations[key] = _Registration(tensor, region)
        return _Memory(self, found)

    async def _register(self, tensor: Any) -> MemoryRegion:
        return await self._domain.register_in_thread(tensor, _ACCESS)

    def unregister_memory(self, memory: Any, *, timeout: float | None = None) -> None:
        _checked(timeout)
        with self._used():
            if not isinstance(memory, _Memory) or memory.transport is not self:
                raise TypeError("memory was not registered by this transport")
            registration = memory.registration
            if not registration.is_active:
                return
            of_streams = self._cuda_stream_views()  # type: ignore[attr-defined]  # torch's
            used = [each.memory.registration for each in of_streams]
            # The callback that removes a transfer runs after its waiters have been woken.
            used += [each for done, (each, _) in list(self._pending.items()) if not done.done()]
            if registration in used:
                raise RuntimeError("memory has pending transfers; wait before unregistering")
            self._portal.call(registration.region.close)
            registration.is_active = False
            self._registrations = {
                key: each for key, each in self._registrations.items() if each is not registration
            }

    def _check_transfer(self, local_buffer: Any, remote_buffer: Any, *, mutable: bool) -> None:
        expected = _MutableView if mutable else _View
        if not isinstance(local_buffer, expected) or local_buffer.memory.transport is not self:
            raise TypeError("local_buffer was not registered by this transport")
        if not isinstance(remote_buffer, _RemoteBuffer):
            raise TypeError("remote_buffer was not registered by an aiordma transport")
        if self._connection is None or remote_buffer.url != self._peer:
            raise ValueError("remote buffer does not belong to the connected peer")
        if local_buffer.length > remote_buffer.memory.length:
            raise ValueError("local view does not fit in the remote buffer")
        local_buffer.memory.registration.require_active()

    def _move(
        self,
        call: str,
        local_buffer: Any,
        remote_buffer: Any,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        limit = self._default_timeout if timeout is None else _checked(timeout)
        with self._used():
            self._check_transfer(local_buffer, remote_buffer, mutable=call == "read_blocks")
            registration = local_buffer.memory.registration
            start, length = local_buffer.start, local_buffer.length
            pair = registration.region[start : start + length], remote_buffer.memory[:length]
            done = self._portal.start_task_soon(self._transfer, call, pair)
            work = _classes()[1](done, limit, self._torch.futures.Future())
            self._pending[done] = registration, work
        done.add_done_callback(lambda _: self._pending.pop(done))
        if async_op:
            return work
        work.wait()
        return 0

    write = partialmethod(_move, "write_blocks")
    read = partialmethod(_move, "read_blocks")

    async def _transfer(self, call: str, pair: Any) -> None:
        await getattr(self._connection, call)([pair])

    def _begin_close(self) -> list[Any]:
        """Permit no more transfers; return those under way."""
        require_same_process(self._process, "an aiordma transport")
        self._close_cuda_streams()  # type: ignore[attr-defined]  # torch's
        with self._lock:
            self._is_closing = True
            return [work for _, work in list(self._pending.values())]

    def _release(self) -> None:
        for each in self._registrations.values():
            each.is_active = False
        self._stack.close()
        self._ended.result()

    def close(self, *, timeout: float | None = None) -> None:
        limit = self._default_timeout if timeout is None else _checked(timeout)
        pending = [work._done for work in self._begin_close()]
        if wait(pending, limit).not_done:
            raise TimeoutError("transport close timed out; operations remain pending")
        self._release()

    async def close_async(self, *, timeout: float | None = None) -> None:
        limit = self._default_timeout if timeout is None else _checked(timeout)
        pending = self._begin_close()
        with anyio.fail_after(limit):
            for work in pending:
                await anyio.to_thread.run_sync(wait, (work._done,), abandon_on_cancel=True)
        await anyio.to_thread.run_sync(self._release)


async def _until_the_end(connection: Connection) -> None:
    async for _ in connection:
        pass


@cache
def _classes() -> tuple[Any, Any]:
    """Make the classes of the transport and of its transfers, which torch's are bases of."""
    base = sys.modules.get("torch.distributed._transport")
    if base is None:
        raise ImportError("import torch.distributed._transport first: torch 2.15 and newer have it")
    return type("AiordmaTransport", (_Transport, base.Transport), {}), type(
        "AiordmaWork", (_Work, base.Work), {}
    )


def transport(device: Any = None, *, host: str | None = None, timeout: float = 30.0) -> Any:
    """Make a transport. torch calls it for `new_transport("aiordma", device, host=...)`.

    Every process that reaches its port, and knows an rkey, can read and write its registered
    tensors, until they are unregistered or the transport is closed. A timeout ends a wait, not the
    transfer: the tensor is the device's until it completes.

    Args:
        device: the torch.device that tensors have to be on; None: any.
        host: a local address of an RDMA device, for the peer to connect to. None: that of this
            machine's name.
        timeout: seconds for a call that is given none.

    Returns:
        A torch.distributed._transport.Transport.

    Raises:
        ImportError: torch.distributed._transport has not been imported; torch 2.15 has it.
        ValueError: the timeout is negative or infinite.
        as `open_domain` and `listen`.
    """
    return _classes()[0](device, host, timeout)
