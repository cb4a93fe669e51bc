"""An RPC server: time limits, metrics for Prometheus, a log in JSON, and a SIGTERM that drains.

    python examples/rpc_server.py --bind 192.0.2.1 --metrics 9090
    python examples/rpc_client.py 192.0.2.1

A call is one message in JSON, {"id": 1, "method": "double", "number": 4, "seconds": 2.0}, and so is
its answer, {"id": 1, "result": 8} or {"id": 1, "error": "..."}. A client can have any number of
calls in progress.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from prometheus_client import REGISTRY, Histogram, start_http_server

import aiordma
from aiordma.integrations.prometheus import DeviceCollector

MOST_CALLS = 64
"""Calls of one client that are executed at the same time."""
LONGEST_CALL = 5.0
"""Seconds that a call may take, whatever its client asks for."""
SEND_SECONDS = 5.0
"""Seconds that an answer may wait for a client that does not receive."""
DRAIN_SECONDS = 10.0
"""Seconds from a SIGTERM until the connections of the last clients are closed."""

logger = logging.getLogger("rpc")
CALLS = Histogram("rpc_call_seconds", "Time that a call took", ["method", "outcome"])


async def double(number: float) -> float:
    return number * 2


async def sleep(number: float) -> float:
    await anyio.sleep(number)
    return number


METHODS: dict[str, Callable[[float], Awaitable[float]]] = {"double": double, "sleep": sleep}


class Server:
    def __init__(self) -> None:
        self.draining = anyio.Event()

    async def handle(self, connection: aiordma.Connection) -> None:
        """Serve one client until it disconnects."""
        room = anyio.Semaphore(MOST_CALLS)
        async with anyio.create_task_group() as calls:
            calls.start_soon(self.drain, connection, calls.cancel_scope)
            async for message in connection:
                await room.acquire()  # meanwhile the client's further calls wait at the client
                calls.start_soon(self.call, connection, message, room, calls.cancel_scope)
            calls.cancel_scope.cancel()  # the client has gone: nobody waits for the answers

    async def drain(self, connection: aiordma.Connection, scope: anyio.CancelScope) -> None:
        """Ask the client to leave once it has its answers, and wait for that, but not for ever."""
        await self.draining.wait()
        scope.deadline = anyio.current_time() + DRAIN_SECONDS
        await connection.send(json.dumps({"leave": True}).encode())

    async def call(
        self,
        connection: aiordma.Connection,
        message: bytes,
        room: anyio.Semaphore,
        scope: anyio.CancelScope,
    ) -> None:
        started = time.monotonic()
        method = "unknown"
        answer: dict[str, Any] = {"id": None}
        try:
            request = json.loads(message)
            answer["id"] = request["id"]
            function = METHODS[request["method"]]
            method = request["method"]
            seconds = min(request.get("seconds", LONGEST_CALL), LONGEST_CALL)
            with anyio.fail_after(seconds):
                answer["result"] = await function(request["number"])
        except TimeoutError:
            answer["error"] = "time limit"
        except (KeyError, TypeError, ValueError) as error:  # the client's mistake
            answer["error"] = f"bad request: {error!r}"
        outcome = "error" if "error" in answer else "ok"
        CALLS.labels(method, outcome).observe(time.monotonic() - started)
        if outcome == "error":
            logger.warning(answer["error"], extra={"peer": connection.peer_address, "call": method})
        with anyio.move_on_after(SEND_SECONDS) as limit:
            await connection.send(json.dumps(answer).encode())
        if limit.cancelled_caught:
            logger.warning("the client does not receive", extra={"peer": connection.peer_address})
            scope.cancel()  # the end of the handler closes the connection
        room.release()


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record, of aiordma's too."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in ("peer", "call") if name in vars(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bind", default="0.0.0.0", help="address of an RDMA interface")
    parser.add_argument("--port", type=int, default=7475)
    parser.add_argument("--metrics", type=int, default=0, help="port for Prometheus; 0: any")
    arguments = parser.parse_args()

    log = logging.StreamHandler()
    log.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[log])
    REGISTRY.register(DeviceCollector())  # aiordma's counters, beside those of the calls
    exporter, thread = start_http_server(arguments.metrics)

    server = Server()
    # Dead clients are noticed after 5 + 2 seconds, also while they are idle.
    async with aiordma.listen(
        arguments.bind, arguments.port, keepalive=5.0, peer_timeout=2.0
    ) as listener:

        async def stop() -> None:
            logger.info("draining")
            await listener.aclose()  # `serve` returns when the last handler has
            server.draining.set()

        loop, tasks = asyncio.get_running_loop(), set()
        loop.add_signal_handler(signal.SIGTERM, lambda: tasks.add(loop.create_task(stop())))
        print(f"listening on {arguments.bind}:{listener.port}", flush=True)
        print(f"metrics on port {exporter.server_port}", flush=True)
        await listener.serve(server.handle)
    await asyncio.to_thread(exporter.shutdown)
    exporter.server_close()
    thread.join()
    logger.info("drained")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
