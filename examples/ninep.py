"""Serve a folder to the Linux kernel's 9P client, over RDMA.

    python examples/ninep.py /srv/files --bind 10.1.1.1
    mount -t 9p -o trans=rdma,version=9p2000.L,port=5640 10.1.1.1 /mnt       # as root

The client speaks as soon as it is accepted, into receives of ours that must be there by then: each
request is prepared, receives are posted, and only then is the peer accepted. They are plain
receives into registered memory, posted again before the reply, which is what lets the client send
its next request. The client never has more requests outstanding than its mount option rq= says.

It implements what mounting, listing, reading, writing, renaming and removing take of 9P2000.L. File
operations run on the event loop, which waits for the disk: that keeps this example short. It has no
access control: whoever reaches the port can change the folder.
"""

import argparse
import asyncio
import contextlib
import errno
import os
import stat
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiordma

PORT = 5640
MESSAGE_SIZE = 1 << 16
"""Bytes of the longest message; the two sides agree on it, or on less if the client wants that."""
REQUESTS = 64
"""Receives posted: at least the client's rq=, which is 32 if the mount does not say."""
HEADER = 11
"""Bytes of a reply to a read in front of the data."""

OPTIONS = aiordma.ConnectionOptions(receive_buffers=0, max_recv_wr=REQUESTS)

VERSION = "9P2000.L"
RLERROR = 7
OPEN_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND
AT_REMOVEDIR = 0x200
GETATTR_BASIC = 0x7FF
# Bits of Tsetattr's `valid`.
SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME = (1 << bit for bit in range(6))
SET_ATIME_GIVEN, SET_MTIME_GIVEN = 1 << 7, 1 << 8


class Reader:
    """Takes numbers and strings from a request, one after the other."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 0

    def take(self, layout: str) -> tuple[int, ...]:
        values: tuple[int, ...] = struct.unpack_from("<" + layout, self._message, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def number(self) -> int:
        return self.take("I")[0]

    def data(self, length: int) -> bytes:
        self._at += length
        return self._message[self._at - length : self._at]

    def text(self) -> str:
        return os.fsdecode(self.data(self.take("H")[0]))

    def name(self) -> str:
        """A name in a folder, and nothing that leads out of it."""
        name = self.text()
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise OSError(errno.EINVAL, "not a name")
        return name


def packed(text: str) -> bytes:
    data = os.fsencode(text)
    return struct.pack("<H", len(data)) + data


def qid(status: os.stat_result) -> bytes:
    """9P's identity of a file: its kind, a version, its number."""
    kind = 0x80 if stat.S_ISDIR(status.st_mode) else 0x02 if stat.S_ISLNK(status.st_mode) else 0
    return struct.pack("<BIQ", kind, status.st_mtime_ns & 0xFFFFFFFF, status.st_ino)


@dataclass
class Fid:
    """What a number of the client's stands for: a path, and the open file or the listed folder."""

    path: Path
    file: int | None = None
    entries: list[bytes] = field(default_factory=list)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def opened(self) -> int:
        if self.file is None:
            raise OSError(errno.EBADF, "not open")
        return self.file


class Session:
    """One client's view of the folder: from requests to replies."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fids: dict[int, Fid] = {}
        self._limit = MESSAGE_SIZE
        self._calls: dict[int, Callable[[Reader], bytes]] = {
            8: self._statfs,
            12: self._open,
            14: self._create,
            24: self._getattr,
            26: self._setattr,
            40: self._readdir,
            50: self._fsync,
            72: self._mkdir,
            74: self._renameat,
            76: self._unlinkat,
            100: self._version,
            104: self._attach,
            108: lambda _: b"",  # flush: every request before it has been answered
            110: self._walk,
            116: self._read,
            118: self._write,
            120: self._clunk,
        }

    def answer(self, message: bytes) -> bytes:
        """Carry out a request, and return the reply."""
        reader = Reader(message)
        _, kind, tag = reader.take("IBH")
        try:
            if kind not in self._calls:
                raise OSError(errno.EOPNOTSUPP, f"message {kind}")
            reply, kind = self._calls[kind](reader), kind + 1
        except OSError as error:
            reply, kind = struct.pack("<I", error.errno or errno.EIO), RLERROR
        return struct.pack("<IBH", 7 + len(reply), kind, tag) + reply

    def close(self) -> None:
        for fid in self._fids.values():
            fid.close()
        self._fids.clear()

    def _fid(self, reader: Reader) -> Fid:
        try:
            return self._fids[reader.number()]
        except KeyError:
            raise OSError(errno.EBADF, "unknown fid") from None

    def _version(self, reader: Reader) -> bytes:
        self.close()
        self._limit = min(reader.number(), MESSAGE_SIZE)
        version = VERSION if reader.text() == VERSION else "unknown"
        return struct.pack("<I", self._limit) + packed(version)

    def _attach(self, reader: Reader) -> bytes:
        self._fids[reader.number()] = Fid(self._root)
        return qid(os.lstat(self._root))

    def _walk(self, reader: Reader) -> bytes:
        path = self._fid(reader).path
        target, count = reader.take("IH")
        qids: list[bytes] = []
        for _ in range(count):
            name = reader.text()
            if name == "..":
                path = path.parent if path != self._root else path
            elif "/" in name or not stat.S_ISDIR(os.lstat(path).st_mode):
                break
            else:
                path /= name
            try:
                qids.append(qid(os.lstat(path)))
            except OSError:
                if not qids:
                    raise
                break
        if len(qids) == count:
            if target in self._fids:
                self._fids[target].close()
            self._fids[target] = Fid(path)
        return struct.pack("<H", len(qids)) + b"".join(qids)

    def _clunk(self, reader: Reader) -> bytes:
        number = reader.number()
        if number in self._fids:
            self._fids.pop(number).close()
        return b""

    def _open(self, reader: Reader) -> bytes:
        fid, flags = self._fid(reader), reader.number()
        fid.close()
        if not fid.path.is_dir():
            fid.file = os.open(fid.path, flags & OPEN_FLAGS | os.O_NOFOLLOW | os.O_CLOEXEC)
        return qid(os.lstat(fid.path)) + struct.pack("<I", 0)

    def _create(self, reader: Reader) -> bytes:
        fid = self._fid(reader)
        path = fid.path / reader.name()
        flags, mode, _group = reader.take("III")
        flags = flags & OPEN_FLAGS | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fid.file, fid.path = os.open(path, flags, mode & 0o7777), path
        return qid(os.lstat(path)) + struct.pack("<I", 0)

    def _read(self, reader: Reader) -> bytes:
        file = self._fid(reader).opened()
        offset, count = reader.take("QI")
        data = os.pread(file, min(count, self._limit - HEADER), offset)
        return struct.pack("<I", len(data)) + data

    def _write(self, reader: Reader) -> bytes:
        file = self._fid(reader).opened()
        offset, count = reader.take("QI")
        return struct.pack("<I", os.pwrite(file, reader.data(count), offset))

    def _fsync(self, reader: Reader) -> bytes:
        os.fsync(self._fid(reader).opened())
        return b""

    def _readdir(self, reader: Reader) -> bytes:
        fid = self._fid(reader)
        offset, count = reader.take("QI")
        if offset == 0:
            fid.entries = [
                qid(entry.stat(follow_symlinks=False))
                + struct.pack("<QB", number, 4 if entry.is_dir(follow_symlinks=False) else 8)
                + packed(entry.name)
                for number, entry in enumerate(os.scandir(fid.path), 1)
            ]
        most, listed = min(count, self._limit - HEADER), b""
        for entry in fid.entries[offset:]:
            if len(listed) + len(entry) > most:
                break
            listed += entry
        return struct.pack("<I", len(listed)) + listed

    def _getattr(self, reader: Reader) -> bytes:
        status = os.lstat(self._fid(reader).path)
        times = [
            part
            for nanoseconds in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
            for part in divmod(nanoseconds, 10**9)
        ]
        return (
            struct.pack("<Q", GETATTR_BASIC)
            + qid(status)
            + struct.pack("<III", status.st_mode, status.st_uid, status.st_gid)
            + struct.pack("<QQQ", status.st_nlink, status.st_rdev, status.st_size)
            + struct.pack("<QQ", status.st_blksize, status.st_blocks)
            + struct.pack("<10Q", *times, 0, 0, 0, 0)
        )

    def _setattr(self, reader: Reader) -> bytes:
        path = self._fid(reader).path
        valid, mode, user, group, size, *times = reader.take("IIIIQQQQQ")
        if valid & SET_MODE:
            os.chmod(path, mode & 0o7777)
        if valid & (SET_UID | SET_GID):
            ids = (user if valid & SET_UID else -1, group if valid & SET_GID else -1)
            os.chown(path, *ids, follow_symlinks=False)
        if valid & SET_SIZE:
            os.truncate(path, size)
        if valid & (SET_ATIME | SET_MTIME):
            now = os.lstat(path)
            access, change = now.st_atime_ns, now.st_mtime_ns
            if valid & SET_ATIME_GIVEN:
                access = times[0] * 10**9 + times[1]
            if valid & SET_MTIME_GIVEN:
                change = times[2] * 10**9 + times[3]
            os.utime(path, ns=(access, change), follow_symlinks=False)
        return b""

    def _mkdir(self, reader: Reader) -> bytes:
        path = self._fid(reader).path / reader.name()
        os.mkdir(path, reader.number() & 0o7777)
        return qid(os.lstat(path))

    def _renameat(self, reader: Reader) -> bytes:
        old = self._fid(reader).path / reader.name()
        os.rename(old, self._fid(reader).path / reader.name())
        return b""

    def _unlinkat(self, reader: Reader) -> bytes:
        path = self._fid(reader).path / reader.name()
        if reader.number() & AT_REMOVEDIR:
            path.rmdir()
        else:
            path.unlink()
        return b""

    def _statfs(self, reader: Reader) -> bytes:
        found = os.statvfs(self._fid(reader).path)
        sizes = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<II6QI", 0x01021997, found.f_bsize, *sizes, 0, found.f_namemax)


async def serve_client(request: aiordma.ConnectionRequest, root: Path) -> int:
    """Serve one client until it disconnects, and return how many requests it made."""
    session, count = Session(root), 0
    async with request.prepare(options=OPTIONS) as connection:
        memory = bytearray(REQUESTS * MESSAGE_SIZE)
        region = connection.register(memory, aiordma.Access.LOCAL_WRITE)
        places = range(0, len(memory), MESSAGE_SIZE)
        receives = deque(
            (start, connection.post_recv(region[start : start + MESSAGE_SIZE])) for start in places
        )
        await connection.establish()
        try:
            while True:
                start, receive = receives.popleft()
                length = (await receive).byte_len
                message = bytes(memory[start : start + length])
                again = connection.post_recv(region[start : start + MESSAGE_SIZE])
                receives.append((start, again))
                await connection.send(session.answer(message))
                count += 1
        except (aiordma.FlushedError, aiordma.DisconnectedError):
            # An iWARP device flushes before the connection manager says why.
            if not isinstance(await connection.ended(), aiordma.DisconnectedError):
                raise
        finally:
            session.close()
    return count


async def serve(listener: aiordma.Listener, root: Path) -> None:
    """Serve every client in a task of its own."""

    async def one(request: aiordma.ConnectionRequest) -> None:
        try:
            count = await serve_client(request, root)
            print(f"{request.peer_address} unmounted after {count} requests", flush=True)
        except (aiordma.RdmaError, struct.error) as error:
            print(f"{request.peer_address} failed: {error}", flush=True)

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(one(await listener.request()))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="the folder to serve")
    parser.add_argument("--bind", default="0.0.0.0", help="address of our own RDMA interface")
    parser.add_argument("--port", type=int, default=PORT)
    arguments = parser.parse_args()
    async with aiordma.listen(arguments.bind, arguments.port) as listener:
        print(f"serving {arguments.root} on {arguments.bind}:{listener.port}", flush=True)
        await serve(listener, arguments.root.resolve())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
