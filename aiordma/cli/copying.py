"""Copying files over streams, as rcopy of rdmacm-utils does: the two sides of `aiordma cp`."""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import anyio
from anyio.to_thread import run_sync

from aiordma import RdmaError
from aiordma.cli.rcopy import (
    HEADER_BYTES,
    Command,
    Header,
    close_message,
    open_message,
    path_of,
    size_of,
    write_message,
)
from aiordma.streams import Stream

CHUNK_BYTES = 1 << 20
Progress = Callable[[int, int], object]
"""Called with the bytes that are done, and with all of them."""


async def _exactly(stream: Stream, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        data += await stream.receive(length - len(data))
    return bytes(data)


async def _receive_header(stream: Stream) -> Header:
    return Header.unpack(await _exactly(stream, HEADER_BYTES))


# -- the client -----------------------------------------------------------------------------------


async def send_file(
    stream: Stream, source: Path, destination: str, progress: Progress = lambda done, size: None
) -> int:
    """Send a file to rcopy's server, and return its size in bytes.

    Args:
        stream: a new one to the server; it is used for this file only.
        source: a regular file.
        destination: the path at the server.

    Raises:
        OSError: the file cannot be read, or the server replied with that error.
        RcopyError: the path is too long, or the server does not use rcopy's protocol.
        anyio.EndOfStream, RdmaError: the connection has ended.

    Cancellation: the server has a part of the file.
    """
    file = await run_sync(source.open, "rb")
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(source))
        await stream.send(open_message(destination, status.st_mode))
        await _require_success(stream, Command.OPEN, destination)
        # The server of rdma-core cannot write 0 bytes. The file is empty already.
        if status.st_size:
            await stream.send(write_message(status.st_size))
            try:
                await _send_bytes(stream, file, status.st_size, progress)
            except RdmaError:
                # The server may have given up, and replied with its reason.
                with suppress(anyio.EndOfStream, RdmaError):
                    await _require_success(stream, Command.WRITE, destination)
                raise
            await _require_success(stream, Command.WRITE, destination)
        await stream.send(close_message())
        await _require_success(stream, Command.CLOSE, destination)
    return status.st_size


async def _send_bytes(stream: Stream, file: IO[bytes], size: int, progress: Progress) -> None:
    region = stream.connection.register(bytearray(min(CHUNK_BYTES, size)))
    done = 0
    while done < size:
        chunk = region[: min(len(region), size - done)]
        # `readinto` of a buffered file returns less only at the file's end.
        if await run_sync(file.readinto, chunk.view) < len(chunk):  # type: ignore[attr-defined]
            raise OSError(errno.EIO, "the file became shorter while it was sent", file.name)
        await stream.send(chunk)
        done += len(chunk)
        progress(done, size)


async def _require_success(stream: Stream, command: Command, destination: str) -> None:
    header = await _receive_header(stream)
    error = header.status(command)
    if error:
        raise OSError(error, f"{os.strerror(error)} (the server's reply)", destination)


# -- the server -----------------------------------------------------------------------------------


class _Incoming:
    """A file that is being received. It gets its name when it is complete."""

    def __init__(self, target: Path, mode: int) -> None:
        self.target = target
        self._part = target.with_name(f".aiordma-{secrets.token_hex(8)}.part")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._part, flags, mode & 0o777)
        self._is_open = True
        self._is_named = False

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def commit(self) -> None:
        self._close()
        self._part.replace(self.target)
        self._is_named = True

    def discard(self) -> None:
        """Remove the file, unless it was committed."""
        if self._is_open:
            self._close()
        if not self._is_named:
            self._part.unlink(missing_ok=True)

    def _close(self) -> None:
        self._is_open = False
        os.close(self._descriptor)


class FileReceiver:
    """rcopy's server: receives files into one directory.

    A client's path is relative to the directory; paths that lead out of it are refused. A file
    appears under its name when it is complete.

    Args:
        directory: an existing one.
        received: called with the path and the size of each file.

    Raises:
        OSError: there is no such directory.
    """

    def __init__(self, directory: Path, received: Callable[[Path, int], object]) -> None:
        self._directory = directory.resolve(strict=True)
        if not self._directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
        self._received = received

    async def serve(self, stream: Stream) -> None:
        """Do what a client asks for, until it ends the stream. After an error, which the client
        gets as the reply, the call returns.

        Raises:
            RcopyError: the client does not keep to the protocol.
            anyio.EndOfStream, RdmaError: the connection ended inside a message or a file.

        Cancellation: an incomplete file is removed.
        """
        incoming: _Incoming | None = None
        try:
            while (first := await self._next_byte(stream)) is not None:
                header = Header.unpack(first + await _exactly(stream, HEADER_BYTES - 1))
                payload = await _exactly(stream, header.length - HEADER_BYTES)
                try:
                    incoming = await self._do(stream, header, payload, incoming)
                except OSError as error:
                    await stream.send(header.reply(error.errno or errno.EIO))
                    raise
                await stream.send(header.reply(0))
        finally:
            if incoming is not None:
                incoming.discard()

    async def _next_byte(self, stream: Stream) -> bytes | None:
        try:
            return await stream.receive(1)
        except anyio.EndOfStream:
            return None

    async def _do(
        self, stream: Stream, header: Header, payload: bytes, incoming: _Incoming | None
    ) -> _Incoming | None:
        """Do one command; returns the file that is being received after it."""
        if header.is_reply or not Command.OPEN <= header.command <= Command.WRITE:
            raise OSError(errno.EINVAL, f"the client sent command {header.command}")
        if header.command == Command.OPEN:
            if incoming is not None:
                raise OSError(errno.EBUSY, "the client opened a second file", str(incoming.target))
            return await run_sync(self._open, path_of(payload), header.data)
        if header.command == Command.WRITE:
            if incoming is None:
                raise OSError(errno.EINVAL, "the client has opened no file")
            await self._fill(stream, incoming, size_of(payload))
            return None
        if incoming is not None:  # opened, and not written: an empty file
            await self._fill(stream, incoming, 0)
        return None

    def _open(self, path: str, mode: int) -> _Incoming:
        try:
            target = (self._directory / path).resolve()
        except RuntimeError:  # of Python before 3.13
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
        if not target.is_relative_to(self._directory):
            raise OSError(errno.EACCES, "the path leads out of the served directory", path)
        if target.exists() and not target.is_file():
            raise OSError(errno.EISDIR, "the path is not one of a regular file", path)
        return _Incoming(target, mode)

    async def _fill(self, stream: Stream, incoming: _Incoming, size: int) -> None:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, size)))
        done = 0
        while done < size:
            chunk = buffer[: min(len(buffer), size - done)]
            filled = 0
            while filled < len(chunk):
                filled += await stream.receive_into(chunk[filled:])
            await run_sync(incoming.write, chunk)
            done += filled
        await run_sync(incoming.commit)
        self._received(incoming.target, size)
