"""Blocks: any number of pieces of registered memory, moved to the peer or from it by one await."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anyio.lowlevel

from aiordma._base.arguments import Buffer, whole_number, wrong_type
from aiordma._base.errors import detached
from aiordma._base.opening import WrappedCoroutine
from aiordma._base.ranges import RemoteMemory
from aiordma._endpoint.capabilities import require_immediate, require_reads
from aiordma._endpoint.domain_state import wrong_domain
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import not_writable
from aiordma._loop.event_loop import Waiter
from aiordma._native import BlockPort
from aiordma.verbs.memory import MemoryRegion, MemorySlice

BlockPairs = Iterable[tuple[MemorySlice, RemoteMemory]]


class HasList(Protocol):
    """An array or a tensor, with or without a buffer."""

    def tolist(self) -> Any: ...


_MOST = 2**32 - 1
_WORDS = [code for code in "lqLQ" if array(code).itemsize == 8]
_SLICE = "a slice of registered memory, such as region[0:65536]"
_OFFSETS = "an array of whole numbers, or a list of them"


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of one piece of registered memory, and their places in one piece of the peer's.

    Attributes:
        local: the memory here, a region or a slice of one.
        remote: the peer's memory.
        local_offsets: where each block begins in `local`, in bytes: an array, a tensor, or a
            sequence. The fastest are contiguous arrays of 64-bit integers.
        remote_offsets: the same for `remote`, as many.
        lengths: the bytes of each block: one number for all, or as many as there are offsets.
    """

    local: MemoryRegion | MemorySlice
    remote: RemoteMemory
    local_offsets: Buffer | HasList | Sequence[int]
    remote_offsets: Buffer | HasList | Sequence[int]
    lengths: int | Buffer | HasList | Sequence[int]


class BlockTransfer(WrappedCoroutine[None]):
    """The transfer of `Connection.write_blocks` and `read_blocks`, a coroutine: await it to begin
    it, and to wait for its end.

    It posts chains of requests as slots of the send queue come free, and leaves a quarter of them
    to others. Neighbours, which continue each other on both sides, are moved as one, and a block
    that is longer than the device's longest message in several requests.

    Raises:
        TypeError, ValueError: a block is invalid, which the message names; nothing was posted.
        NotSupportedError: the connection permits no READs, or the device no immediate data.
        WorkCompletionError: a request failed, and the connection ends; `completed_bytes` of the
            blocks were moved. FlushedError: the connection ended before.
        ClosedError, DisconnectedError, DeviceEventError: the connection has ended.
        VerbsCallError: the device refused a request.
        EventLoopError, ForkError: awaited outside of its event loop, or in a forked child.

    Cancellation: posts no more, and returns at once. Requests in flight may still be carried out,
    and the device owns their memory until they complete.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        call: str,
        blocks: BlockPairs | Blocks,
        immediate: int | None,
        progress: Callable[[int], object] | None,
    ) -> None:
        self._endpoint = endpoint
        self._call = call
        super().__init__(self._run())
        self._blocks = blocks
        self._immediate = immediate
        self._progress = progress
        self._is_read = call == "read_blocks"
        self._waiter: Waiter | None = None
        operation = "RDMA_READ" if self._is_read else "RDMA_WRITE"
        signals_all = self._is_read and not endpoint.hub.keeps_order
        self._port = BlockPort(endpoint.work.port, operation, self._is_read, signals_all)

    def __repr__(self) -> str:
        done = f"{self.completed_bytes} of {self.total_bytes} bytes"
        return f"<BlockTransfer {self._call}: {done}, {self._endpoint.name}>"

    @property
    def total_bytes(self) -> int:
        """The bytes of all blocks; 0 before the transfer begins."""
        return self._port.total_bytes

    @property
    def completed_bytes(self) -> int:
        """The bytes of the requests that have completed. After a cancellation it grows until those
        in flight have."""
        return self._port.completed_bytes

    async def _run(self) -> None:
        self._check()
        port = self._port
        port.changed = self._changed
        # The end of a loop that runs no more tasks must not leave the regions held.
        on_ended = self._endpoint.teardown.on_ended
        on_ended.append(port.stop)
        try:
            self._add(self._blocks)
            if self._immediate is not None and not port.total_bytes:
                port.add_empty()
            await self._move()
        finally:
            if port.stop in on_ended:
                on_ended.remove(port.stop)
            port.stop()
            port.changed = None

    def _check(self) -> None:
        endpoint = self._endpoint
        if self._progress is not None:
            if not callable(self._progress):
                raise wrong_type(self._progress, "progress", "a function, or None", self._call)
            self._port.reports = True
        endpoint.require_sendable()
        if self._is_read:
            require_reads(endpoint, 1)
        if self._immediate is not None:
            require_immediate(endpoint)
            self._port.immediate = whole_number(self._immediate, "immediate", 0, _MOST, self._call)

    async def _move(self) -> None:
        port, slots = self._port, self._endpoint.work.sends.slots
        if port.is_over:
            await anyio.lowlevel.checkpoint()
            return
        port.post(False)
        while not port.is_over:
            if port.in_flight:
                self._waiter = self._endpoint.loop.waiter()
                await self._waiter.wait()
                continue
            with await slots.take() as slot:
                self._endpoint.require_sendable()
                slot.hand_over()
                port.post(True)
        if port.error is not None:
            raise detached(port.error)
        if port.stopped:  # by the end of the connection, whose cause this raises
            self._endpoint.require_sendable()

    def _changed(self) -> None:
        try:
            if self._progress is not None:
                self._progress(self.completed_bytes)
        finally:
            if self._waiter is not None and not self._port.in_flight:
                self._waiter.wake()

    # -- reading the blocks ---------------------------------------------------------------------

    def _add(self, blocks: BlockPairs | Blocks) -> None:
        if isinstance(blocks, Blocks):
            self._add_offsets(blocks)
            return
        if not isinstance(blocks, Iterable):
            raise wrong_type(blocks, "blocks", "pairs of local and remote memory", self._call)
        pairs = list(blocks)
        refused = self._port.add_pairs(pairs)
        if refused >= 0:
            self._refuse(pairs[refused], f"blocks[{refused}]")

    def _refuse(self, pair: object, name: str) -> None:
        """Raise the reason why a pair cannot be moved."""
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise wrong_type(pair, name, "a tuple of local and remote memory", self._call)
        local, remote = pair
        self._check_memory(local, remote, name)
        raise ValueError(
            f"{self._call}(): {name}: local has {local.length} bytes, and remote {remote.length}: "
            "slice both to the same length"
        )

    def _check_memory(self, local: object, remote: object, name: str) -> None:
        if not isinstance(local, MemorySlice):
            raise wrong_type(local, f"{name}, local", _SLICE, self._call)
        local.region._require_open()
        if local.region.domain is not self._endpoint.memory.domain:
            raise wrong_domain(local.region, self._endpoint.memory.domain)
        if self._is_read and not local.region._writable:
            text = not_writable(local.region)
            raise TypeError(f"{self._call}(): {name}, local={local!r}: {text}")
        if type(remote) is not RemoteMemory:
            raise wrong_type(remote, f"{name}, remote", "a RemoteMemory", self._call)

    def _add_offsets(self, blocks: Blocks) -> None:
        local = blocks.local[:] if isinstance(blocks.local, MemoryRegion) else blocks.local
        self._check_memory(local, blocks.remote, "blocks")
        ours, theirs, lengths = numbers(self._call, blocks)
        at = self._port.add_offsets(local, blocks.remote, ours, theirs, lengths)
        if at >= 0:
            raise ValueError(
                f"{self._call}(): block {at}: {lengths[at]} bytes at {ours[at]} of the "
                f"{local.length} bytes of local, and at {theirs[at]} of the {blocks.remote.length} "
                "of remote: out of bounds"
            )


def numbers(call: str, blocks: Blocks) -> tuple[memoryview, memoryview, memoryview]:
    """Return the local offsets, the remote offsets and the lengths, as many of each.

    Raises:
        TypeError, ValueError: they are no numbers, or not as many.
    """
    ours = _words(call, blocks.local_offsets, "local_offsets")
    theirs = _words(call, blocks.remote_offsets, "remote_offsets")
    if isinstance(blocks.lengths, int):
        length = whole_number(blocks.lengths, "lengths", 0, 2**63 - 1, call)
        lengths = memoryview(array("Q", [length]) * len(ours))
    else:
        lengths = _words(call, blocks.lengths, "lengths")
    if not len(ours) == len(theirs) == len(lengths):
        raise ValueError(
            f"{call}(): {len(ours)} local_offsets, {len(theirs)} remote_offsets and "
            f"{len(lengths)} lengths: give as many of each"
        )
    return ours, theirs, lengths


def _words(call: str, given: object, name: str) -> memoryview:
    """Return numbers as 64-bit integers in contiguous memory."""
    try:
        view = memoryview(given)  # type: ignore[arg-type]
        if view.c_contiguous and view.ndim == 1 and view.format in _WORDS:
            return view
        given = view.tolist()
    except (TypeError, NotImplementedError):  # torch has no buffer; jax's format is not Python's
        given = getattr(given, "tolist", lambda: given)()
    if not isinstance(given, Sequence):
        raise wrong_type(given, name, _OFFSETS, call)
    return memoryview(array("Q", [whole_number(each, name, 0, 2**63 - 1, call) for each in given]))
