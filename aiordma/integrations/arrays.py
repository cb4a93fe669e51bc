"""Arrays by name: a process publishes arrays, and others fetch them, or put theirs in their place.

    async with serve_arrays("192.0.2.1", 7473) as arrays:
        arrays.publish("weights", weights)
        await anyio.sleep_forever()

    async with connect_arrays("192.0.2.1", 7473) as arrays:
        weights = await arrays.fetch("weights")

The bytes move by READs and WRITEs, without the publishing program. Arrays are those of numpy, and
tensors of torch and jax; numpy makes the fresh ones.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import anyio
import numpy as np

from aiordma._base.arguments import text, whole_number
from aiordma._base.enums import Access
from aiordma._base.errors import DisconnectedError, NotSupportedError
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.connection import Connection
from aiordma._connection.connector import connect
from aiordma._connection.domain import Domain
from aiordma._connection.gpu_staging import read_staged, write_staged
from aiordma._connection.listener import Listener, listen, serving
from aiordma._connection.open_domain import open_domain
from aiordma._endpoint.registration import register_in_thread
from aiordma.verbs.cuda import CudaError
from aiordma.verbs.foreign_memory import described, described_on_gpu
from aiordma.verbs.gpu_memory import register_anywhere
from aiordma.verbs.memory import MemoryRegion

__all__ = ("ArrayClient", "ArrayError", "ArrayServer", "connect_arrays", "serve_arrays")

MOST_BYTES = 1 << 30
"""Of an array that `fetch` makes room for, unless the program permits more."""
MOST_DIMENSIONS = 32
_MOST = 2**62
_NAME = "a name of 1 to 255 characters"


class ArrayError(Exception):
    """The server has no such array, or the arrays of both sides do not fit; the message says how.
    The connection can be used further."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What an array's elements are, and where they are in its memory."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, array: Any, call: str, name: str = "array") -> Self:
        """Return the layout of an array or a tensor, which a parameter names.

        Raises:
            TypeError: it is neither.
            ValueError: its elements are no numbers.
        """
        try:
            dtype = str(array.dtype).removeprefix("torch.")
            size = array.dtype.itemsize
            shape = tuple(int(each) for each in array.shape)
        except AttributeError:
            raise TypeError(
                f"{call}(): {name}={type(array).__name__}: expected an array with shape and dtype, "
                "of numpy, torch or jax"
            ) from None
        if not dtype.replace("_", "").isalnum() and dtype[:1] not in "<>|":
            raise ValueError(f"{call}(): {name}: its elements are {dtype}: expected numbers")
        strides = usual = _row_major(shape, size)
        if hasattr(array, "stride"):  # torch's, in elements
            strides = tuple(int(each) * size for each in array.stride())
        elif hasattr(array, "strides"):
            strides = tuple(int(each) for each in array.strides)
        elif (found := described(array, f"{call}(): {name}")) is not None and found.strides:
            strides = tuple(found.strides)  # jax can have any order
        # That of a dimension of one element means nothing, and libraries differ in it.
        strides = tuple(
            stride if count > 1 else plain
            for count, stride, plain in zip(shape, strides, usual, strict=True)
        )
        return cls(dtype, shape, strides, prod(shape) * size)

    def difference(self, other: "_Layout") -> str:
        """Return in what they differ, for messages; empty if they are the same."""
        return ", ".join(
            f"{name} {getattr(other, name)} in place of {getattr(self, name)}"
            for name in ("dtype", "shape", "strides", "length")
            if getattr(self, name) != getattr(other, name)
        )


def _row_major(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(size * prod(shape[place + 1 :]) for place in range(len(shape)))


@dataclass(frozen=True, slots=True)
class _Published:
    layout: _Layout
    region: MemoryRegion


class ArrayServer:
    """Publishes arrays, made by `serve_arrays`. Any peer that reaches its port can fetch them."""

    def __init__(self, listener: Listener, domain: Domain) -> None:
        self._listener = listener
        self._domain = domain
        self._published: dict[str, _Published] = {}

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.port

    def publish(self, name: str, array: Any, *, writable: bool = False) -> None:
        """Let peers fetch an array, which stays where it is. Peers that fetch while the program
        changes it get a mixture.

        Args:
            name: 1 to 255 characters.
            array: a contiguous array or tensor, of at least one element.
            writable: peers may also put arrays in its place.

        Raises:
            TypeError, ValueError: an argument is invalid, or the name is taken: withdraw it first.
            as `Domain.register`.
        """
        _check_name(name, "publish")
        if name in self._published:
            raise ValueError(f"publish(): name={name!r}: it is published: withdraw it first")
        layout = _Layout.of(array, "publish")
        access = Access.REMOTE_READ | (Access.REMOTE_WRITE if writable else Access(0))
        region = self._domain._state.register(
            lambda domain: register_anywhere(domain, array, access, "publish")
        )
        if region.length != layout.length:
            region.close()
            raise ValueError(f"publish(): array: its {layout.length} bytes are not contiguous")
        self._published[name] = _Published(layout, region)

    def withdraw(self, name: str) -> None:
        """End the access to an array. When this returns, no byte of a peer's arrives in it. A peer
        that fetches or puts it at the moment loses its connection.

        Args:
            name: of a published array.

        Raises:
            KeyError: no such array is published.
            VerbsCallError: the driver refused.
        """
        self._published.pop(name).region.close()

    def _describe(self, question: bytes) -> dict[str, Any]:
        try:
            number, name = json.loads(question)
            whole_number(number, "number", 0, _MOST)
            _check_name(name, "fetch")
        except (ValueError, TypeError, RecursionError):
            return {"number": 0, "error": "no question: expected a number and a name"}
        found = self._published.get(name)
        if found is None:
            return {"number": number, "error": f"no array {name!r} is published"}
        layout, region = found.layout, found.region
        return {
            "number": number,
            "dtype": layout.dtype,
            "shape": layout.shape,
            "strides": layout.strides,
            "writable": bool(region.access & Access.REMOTE_WRITE),
            "memory": region.remote().pack().hex(),
        }

    async def _answer(self, connection: Connection) -> None:
        """Serve one peer."""
        async for question in connection:
            await connection.send(json.dumps(self._describe(question)).encode())

    def _close(self) -> None:
        for name in list(self._published):
            self.withdraw(name)


class ArrayClient:
    """Fetches arrays from an ArrayServer, made by `connect_arrays`. Tasks can share it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._asking = anyio.Lock()
        self._number = 0

    async def fetch(
        self, name: str, *, into: Any = None, max_bytes: int = MOST_BYTES, staging: bool = False
    ) -> Any:
        """READ a published array.

        Args:
            name: the array's name.
            into: a writable array or tensor of the same dtype, shape and strides, whose elements
                are replaced. None: numpy makes a fresh one.
            max_bytes: the longest array to make room for; the server determines its length. 1 GiB
                by default.
            staging: READ through pinned memory of the CPU if `into` is memory of a GPU that the
                device cannot register.

        Returns:
            `into`, or the fresh array.

        Raises:
            ArrayError: there is no such array, or it does not fit; nothing was read. Or CUDA's
                driver refused to copy to `into`.
            NotSupportedError: `into` is memory of a GPU that the device cannot register.
            TypeError, ValueError: an argument is invalid, or `into` is read-only.
            RdmaError: the connection has ended, or ends; `into` may have been changed in part.

        Cancellation: the device may go on to write to `into` until the connection's next READ.
        """
        _check_name(name, "fetch")
        limit = whole_number(max_bytes, "max_bytes", 0, 2**63 - 1, "fetch")
        layout, remote, _ = await self._ask(name)
        is_fresh = into is None
        if is_fresh:
            if layout.length > limit:
                raise ArrayError(
                    f"fetch(): {name!r} has {layout.length} bytes, and max_bytes={limit}: raise "
                    "it, or give into="
                )
            into = _fresh(layout, name)
        elif difference := _Layout.of(into, "fetch", "into").difference(layout):
            raise ArrayError(f"fetch(): {name!r} does not fit into=: it has {difference}")
        # numpy describes no elements of its extensions: so the bytes of a fresh array.
        memory = into.base if is_fresh else into
        await self._move("fetch", memory, remote, staging)
        return into

    async def put(self, name: str, array: Any, *, staging: bool = False) -> None:
        """WRITE an array in the place of a published one, whose elements are replaced.

        Args:
            name: the name of an array that was published with `writable`.
            array: a contiguous array or tensor of the same dtype, shape and strides.
            staging: WRITE through pinned memory of the CPU if `array` is memory of a GPU that the
                device cannot register.

        Raises:
            ArrayError: there is no such array, it is not writable, or it does not fit; nothing was
                written. Or CUDA's driver refused to copy from `array`.
            NotSupportedError: `array` is memory of a GPU that the device cannot register.
            TypeError, ValueError: an argument is invalid.
            RdmaError: the connection has ended, or ends; the array may have been changed in part.

        Cancellation: the array may be changed in part; the device owns the memory of `array` until
            its requests have ended.
        """
        _check_name(name, "put")
        given = _Layout.of(array, "put")
        layout, remote, writable = await self._ask(name)
        if not writable:
            raise ArrayError(f"put(): {name!r} is not writable: publish it with writable=True")
        if difference := given.difference(layout):
            raise ArrayError(f"put(): array does not fit into {name!r}, which has {difference}")
        await self._move("put", array, remote, staging)

    async def _move(self, call: str, array: Any, remote: RemoteMemory, staging: bool) -> None:
        """READ or WRITE the bytes of an array, for a call."""
        is_read, gpu = call == "fetch", None
        access = None if is_read else Access(0)
        try:
            region = await register_in_thread(self._connection._endpoint, array, access, call)
        except NotSupportedError as error:
            gpu = described_on_gpu(array, f"{call}(): array")
            if gpu is None:
                raise
            if not staging:
                raise NotSupportedError(f"{error}, or give staging=True") from error
        try:
            if is_read and (not region._writable if gpu is None else gpu.readonly):
                raise TypeError(
                    f"fetch(): into: {type(array).__name__} is read-only, as jax's arrays are: "
                    "give a writable array, or None, and make yours of the fresh one"
                )
            if gpu is not None:
                await (read_staged if is_read else write_staged)(self._connection, gpu, remote)
            elif is_read:
                await self._connection.read_blocks([(region[:], remote)])
            else:
                await self._connection.write_blocks([(region[:], remote)])
        except CudaError as error:
            raise ArrayError(f"{call}(): {error}") from error
        finally:
            if gpu is None:
                region._retire()

    async def _ask(self, name: str) -> tuple[_Layout, RemoteMemory, bool]:
        """Ask the server for the description of an array.

        Raises:
            ArrayError: it has none, or what it says is no description.
        """
        async with self._asking:
            self._number += 1  # a cancelled question's answer may arrive before this one's
            question = json.dumps([self._number, name])
            await self._connection.send(question.encode())
            try:
                found = json.loads(await self._connection.receive())
                while found["number"] != self._number:
                    found = json.loads(await self._connection.receive())
                if "error" not in found:
                    return _description(found)
            except anyio.EndOfStream as error:
                raise DisconnectedError(f"the server of arrays has ended: {error}") from error
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ArrayError(f"the server's answer is no description: {error}") from error
            raise ArrayError(str(found["error"]))


def _description(found: dict[str, Any]) -> tuple[_Layout, RemoteMemory, bool]:
    """Read a server's answer. What it says is checked before it is used: here and in `_fresh`."""
    remote = RemoteMemory.unpack(bytes.fromhex(found["memory"]))
    shape = tuple(whole_number(each, "shape", 0, _MOST) for each in found["shape"])
    strides = tuple(whole_number(each, "strides", -_MOST, _MOST) for each in found["strides"])
    if not len(shape) == len(strides) <= MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions and {len(strides)} strides")
    layout = _Layout(str(found["dtype"]), shape, strides, remote.length)
    return layout, remote, found["writable"] is True


def _check_name(name: str, call: str) -> None:
    text(name, "name", _NAME, call)
    if not 1 <= len(name) <= 255:
        raise ValueError(f"{call}(): name has {len(name)} characters: expected {_NAME}")


def _fresh(layout: _Layout, name: str) -> Any:
    """Make an array with room for what the server describes, which is not trusted: numpy checks
    that all elements are in the memory.

    Raises:
        ArrayError: it is no array.
    """
    try:
        dtype = np.dtype(layout.dtype)
        if dtype.hasobject or dtype.itemsize * prod(layout.shape) != layout.length:
            raise ValueError(f"{layout.length} bytes, and dtype {dtype}, shape {layout.shape}")
        memory = np.empty(layout.length, np.uint8)
        return np.ndarray(layout.shape, dtype, memory, strides=layout.strides)
    except (TypeError, ValueError, SyntaxError) as error:  # SyntaxError: of a dtype's text
        raise ArrayError(
            f"fetch(): {name!r} cannot be an array of numpy here: {error}: import ml_dtypes for "
            "bfloat16 and the like, or give into="
        ) from error


@asynccontextmanager
async def serve_arrays(
    host: str, port: int = 0, *, device: str = "auto"
) -> AsyncIterator[ArrayServer]:
    """Serve arrays during the block, whose end ends the peers' access.

    Args:
        host: a local address of a device.
        port: 0 takes a free one: `ArrayServer.port`.
        device: as of `listen`.

    Raises: as `listen` and `open_domain`.

    Cancellation: all is closed.
    """
    async with (
        open_domain(host, device=device) as domain,
        listen(host, port, device=device, domain=domain) as listener,
    ):
        server = ArrayServer(listener, domain)
        async with serving(listener, server._answer):
            try:
                yield server
            finally:
                server._close()


@asynccontextmanager
async def connect_arrays(
    host: str, port: int, *, device: str = "auto", timeout: float | None = 30.0
) -> AsyncIterator[ArrayClient]:
    """Connect to an ArrayServer for the block.

    Args:
        host, port: of the server.
        device, timeout: as of `connect`.

    Raises: as `connect`.

    Cancellation: all is closed.
    """
    async with connect(host, port, device=device, timeout=timeout) as connection:
        yield ArrayClient(connection)
