"""The coroutines over the posts: each waits for a free slot, posts, and returns when it is done."""

import sys
from collections.abc import Callable, Iterable

from aiordma.capabilities import require_atomics, require_reads, require_windows
from aiordma.chain import Chain
from aiordma.enums import Access, MemoryWindowType, WorkRequestOpcode
from aiordma.messages import Message, MessageQueue
from aiordma.opcodes import READ, Operation, check_atomic, send_opcode, write_opcode
from aiordma.pool import Lease
from aiordma.posting import Posting
from aiordma.ranges import RemoteMemory
from aiordma.staging import Buffer, Staged
from aiordma.threads import in_thread
from aiordma.verbs import MemorySlice, MemoryWindow, SendWork, WorkCompletion
from aiordma.windows import BoundWindow

__all__ = ("Operations",)

_Op = WorkRequestOpcode


class Operations(Posting):
    """See the module. Cancelled, what was posted goes on, and holds its memory until it ends."""

    _messages: MessageQueue

    def chain(self, *, last_tells: bool = False) -> Chain:
        """Collect requests in a `with` block, and post them with one call at its end.

        Args:
            last_tells: an unsignaled run: only the last one makes a completion, which ends those
                before it as well. Saves the device and this machine the others'.
        """
        chain = Chain(self._endpoint, self._staging, last_tells)
        chain.require_usable()
        return chain

    async def send(
        self, item: Buffer, *, immediate: int | None = None, invalidate: int | None = None
    ) -> None:
        """Send a message and wait until the peer's device has it. Arguments as `post_send`.

        Waits for a free slot, and, where the peer has no receive posted, for one. Cancelled, the
        message may or may not arrive; the buffer stays the device's until it is decided.
        """
        if immediate is None and invalidate is None:
            request = self._plain.send(item)
            if request is not None:
                await request
                return
        await self.sendv([item], immediate=immediate, invalidate=invalidate)

    async def sendv(
        self,
        parts: Iterable[Buffer],
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
    ) -> None:
        """Send one message gathered from several buffers. See `send`."""
        self._endpoint.require_usable()
        operation, extra = send_opcode(self._endpoint, immediate, invalidate)
        await self._run(operation, self._staging.source, parts, None, extra)

    async def receive(self) -> bytes:
        """Return the next message. Cancelled, it loses none.

        Raises:
            anyio.EndOfStream: the peer disconnected and all its messages have been received.
            anyio.BusyResourceError: another task is receiving.
            ClosedError: you closed the connection.
            WorkCompletionError: what broke it.
        """
        return (await self._messages.receive()).data

    async def receive_message(self) -> Message:
        """Return the next message with what came beside its data: immediate data, or the rkey that
        it invalidated. Otherwise as `receive`."""
        return await self._messages.receive()

    async def read(self, remote: RemoteMemory, local: Buffer) -> WorkCompletion:
        """READ the peer's memory into ours. Cancelled, `local` may still be written to."""
        request = self._plain.read(remote, local)
        if request is not None:
            return await request
        return await self.readv(remote, [local])

    async def readv(self, remote: RemoteMemory, parts: Iterable[Buffer]) -> WorkCompletion:
        """READ, scattered over several local buffers. See `read`."""
        parts = list(parts)
        require_reads(self._endpoint, len(parts))
        return await self._run(READ, self._staging.target, parts, remote)

    async def read_bytes(self, remote: RemoteMemory) -> bytes:
        """READ the peer's memory and return it as bytes."""
        if not remote.length:
            return b""
        buffer = bytearray(remote.length)
        await self.read(remote, buffer)
        return bytes(buffer)

    async def write(
        self, local: Buffer, remote: RemoteMemory, *, immediate: int | None = None
    ) -> WorkCompletion:
        """WRITE our memory into the peer's. Cancelled, the write may still happen."""
        if immediate is None:
            request = self._plain.write(local, remote)
            if request is not None:
                return await request
        return await self.writev([local], remote, immediate=immediate)

    async def writev(
        self, parts: Iterable[Buffer], remote: RemoteMemory, *, immediate: int | None = None
    ) -> WorkCompletion:
        """WRITE, gathered from several local buffers. See `write`."""
        self._endpoint.require_usable()
        operation, extra = write_opcode(self._endpoint, immediate)
        return await self._run(operation, self._staging.source, parts, remote, extra)

    async def compare_swap(self, remote: RemoteMemory, compare: int, swap: int) -> int:
        """If the peer's 8 bytes are `compare`, make them `swap`; return what they were.

        Cancelled, it may still happen. Numbers are unsigned, in the byte order of the peer, which
        is taken to be ours. See `post_compare_swap`.
        """
        return await self._atomic_value("COMPARE_SWAP", remote, compare, swap)

    async def fetch_add(self, remote: RemoteMemory, add: int) -> int:
        """Add to the peer's 8 bytes, modulo 2**64; return what they were. See `compare_swap`."""
        return await self._atomic_value("FETCH_ADD", remote, add, None)

    async def _atomic_value(
        self, name: str, remote: RemoteMemory, operand: int, swap: int | None
    ) -> int:
        endpoint = self._endpoint
        require_atomics(endpoint)
        work = SendWork(
            name,
            _Op.ATOMIC_FETCH_AND_ADD if swap is None else _Op.ATOMIC_CMP_AND_SWP,
            remote=remote,
            compare_add=check_atomic(remote, operand),
            swap=0 if swap is None else check_atomic(remote, swap),
        )
        await endpoint.send_credits.take()
        try:
            # The request gives the block back as it ends: it is read just before that.
            landing = _Landing(endpoint.hub.pool.lease(8))
        except BaseException:
            endpoint.send_credits.give()
            raise
        work.sges, work.count, work.length = landing.lease.memory.sge, 1, 8
        work.held = (landing,)
        try:
            (request,) = endpoint.post_sends([work], credited=True)
        except BaseException:
            landing.lease.release()
            raise
        await request
        return landing.value

    async def _run(
        self,
        operation: Operation,
        stage: Callable[[Iterable[Buffer]], Staged],
        parts: Iterable[Buffer],
        remote: RemoteMemory | None,
        immediate: int = 0,
    ) -> WorkCompletion:
        self._endpoint.require_usable()
        given = list(parts)
        # The slot first: who waits for one holds no memory, and what is checked now is posted now.
        await self._endpoint.send_credits.take()
        try:
            staged = await self._staging.prepare(stage, given)
        except BaseException:
            self._endpoint.send_credits.give()
            raise
        return await self._post(operation, staged, remote, 0, immediate, credited=True)

    # -- memory windows -----------------------------------------------------------------------

    async def open_window(self, kind: MemoryWindowType = MemoryWindowType.TYPE_2) -> BoundWindow:
        """Allocate a memory window, bound to nothing: for `post_bind_window`, any number of times.
        It is closed with the connection.

        Raises:
            NotSupportedError: the device has none.
            VerbsCallError: the driver refused.
        """
        endpoint = self._endpoint
        require_windows(endpoint)
        made: list[MemoryWindow] = []
        endpoint.reactor.retain()  # what the thread allocates from must not be closed under it
        try:
            await in_thread(
                endpoint.loop, lambda: made.append(MemoryWindow(endpoint.hub.domain, kind))
            )
            endpoint.require_usable()
        except BaseException:
            for window in made:
                window.close()
            raise
        finally:
            endpoint.reactor.release()
        return BoundWindow(endpoint, made[0])

    async def bind(
        self,
        memory: MemorySlice,
        access: Access,
        kind: MemoryWindowType = MemoryWindowType.TYPE_2,
    ) -> BoundWindow:
        """Open a window and bind it: its `remote` is access for this connection's peer only (type
        2), and until `revoke`. See `post_bind_window`."""
        window = await self.open_window(kind)
        try:
            await self._endpoint.send_credits.take()
            await self._bind(window, memory, access, credited=True)
        except BaseException:
            window.close()
            raise
        return window

    async def revoke(self, window: BoundWindow) -> None:
        """End what a window permits; returns when no access through it can happen any more."""
        await self._endpoint.send_credits.take()
        await self._invalidate(window, credited=True)


class _Landing:
    """Where an atomic's old value arrives; read as the request lets go of it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.value = 0

    def hold(self) -> None:
        """A lease is held from the start."""

    def release(self) -> None:
        """Read, then give the block back."""
        self.value = int.from_bytes(self.lease.memory.view[:8], sys.byteorder)
        self.lease.release()
