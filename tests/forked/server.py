"""The server: python3 -m tests.forked.server DESCRIPTOR EXECUTABLE: the listening socket, and a
program that is a client, with the arguments of python3.

It imports what most programs import, opens no device and starts no thread. Each connection is a
client (client.c) that asks for a program, or asks to be told when those that were killed have
ended. The fork returns from `serve` in the child, which then runs the program and ends as any
Python process does.
"""

import builtins
import gc
import importlib
import io
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
import warnings
from contextlib import suppress
from dataclasses import dataclass

from tests.forked import QUESTION

PRELOADED = (
    "aiordma",
    "aiordma.bench",
    "aiordma.bench.server",
    "aiordma.cli.bench",
    "aiordma.cli.cp",
    "aiordma.cli.doctor",
    "aiordma.cli.info",
    "aiordma.cli.ping",
    "aiordma.streams",
    "anyio",
    "anyio._backends._asyncio",
    "argparse",
    "asyncio",
    "pydantic.fields",
    "pydantic.functional_validators",
    "pydantic.type_adapter",
    "struct",
    "trio",
    "typer",
    "uvloop",
)
NUMBER = struct.Struct("=i")


@dataclass
class Program:
    """What a client asks for: the words after "python3", and what the process has."""

    streams: list[int]
    words: list[str]
    environment: dict[str, str]
    folder: str


def main() -> None:
    """Serve until standard input ends; in a child, run the program."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        run(program)


def serve(listener: socket.socket) -> Program | None:
    """Fork for each client, and report each child's end. Returns the program in the child."""
    wakes, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    clients: dict[int, socket.socket] = {}  # by the child's process identifier
    killed = set[int]()  # the children of clients that were killed
    asking: list[socket.socket] = []  # when those have ended
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(wakes, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    try:
                        program = received(client)
                    except ConnectionResetError:
                        client.close()
                        continue
                    if program is None:
                        asking.append(client)
                        continue
                    process = os.fork()
                    if not process:
                        for mine in (listener, client, *asking, *clients.values()):
                            mine.close()
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        os.close(wakes)
                        os.close(woken)
                        return program
                    for stream in program.streams:
                        os.close(stream)
                    send(client, process)
                    clients[process] = client
                    selector.register(client, selectors.EVENT_READ, process)
                elif key.fileobj == wakes:
                    os.read(wakes, 1 << 16)
                    for process, status in ended():
                        client = clients.pop(process)
                        if process not in killed:
                            selector.unregister(client)
                            send(client, status)
                        killed.discard(process)
                        client.close()
                elif key.data is None:  # standard input
                    for process in clients:
                        os.kill(process, signal.SIGKILL)
                    return None
                elif key.data in clients:
                    os.kill(key.data, signal.SIGKILL)
                    killed.add(key.data)
                    selector.unregister(key.fileobj)
            # Here: a client's end comes in one batch with the question that follows it.
            while asking and not killed:
                asking.pop().close()


def received(client: socket.socket) -> Program | None:
    """Receive what client.c sends, None for a question.

    Raises ConnectionResetError where the client is killed.
    """
    first, streams, _, _ = socket.recv_fds(client, 1, 3)
    if first == QUESTION:
        return None
    words, environment, (folder,) = (received_words(client) for _ in range(3))
    settings = dict(word.split("=", 1) for word in environment)
    return Program(list(streams), words, settings, folder)


def received_words(client: socket.socket) -> list[str]:
    """A size in bytes, then strings, each with a null byte behind it."""
    (size,) = NUMBER.unpack(received_bytes(client, NUMBER.size))
    return [os.fsdecode(word) for word in received_bytes(client, size).split(b"\0")[:-1]]


def received_bytes(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = client.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def send(client: socket.socket, number: int) -> None:
    """Send a number to a client, which may have been killed."""
    with suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(NUMBER.pack(number))


def ended() -> list[tuple[int, int]]:
    """The children that have ended, each with its status as waitpid gives it."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not process:
            return found
        found.append((process, status))


def run(program: Program) -> None:
    """Become the process that the client stands for, and run its program as Python would."""
    for number, stream in enumerate(program.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    words = program.words
    if "bench" in words:
        sys.executable = sys.argv[2]  # for the benchmark's server, a Python process, too
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            heed(words.pop(0))
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = unbuffered(1)
    sys.stderr = unbuffered(2)
    kind, *rest = words
    if kind == "-c":
        source, *rest = rest
        sys.argv = ["-c", *rest]
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(source, "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


def heed(option: str) -> None:
    """Do what -W does, with an action, or with an action and a built-in category."""
    action, _, category = option.partition("::")
    kind = getattr(builtins, category or "Warning")
    warnings.simplefilter(action, kind)  # type: ignore[arg-type]


def unbuffered(number: int) -> io.TextIOWrapper:
    """A stream as PYTHONUNBUFFERED makes it, which the test bed sets."""
    return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)


if __name__ == "__main__":
    main()
