"""An RPC client: calls with a time limit, which connects again and retries when the server goes.

    python examples/rpc_client.py 192.0.2.1 --calls 100

The calls of examples/rpc_server.py can be repeated: executing one twice does no harm. So the client
repeats each call that has no answer when its connection ends.
"""

import argparse
import asyncio
import json

import aiordma

WINDOW = 8
"""Calls in progress: fewer than the receives of a connection (`receive_buffers`, 16)."""


async def call_all(
    host: str, port: int, calls: dict[int, dict[str, object]], seconds: float
) -> tuple[dict[int, object], int]:
    """Return the answer of each call, and the number of connections that it took."""
    answers: dict[int, object] = {}
    sessions = aiordma.reconnecting(
        host,
        port,
        attempts=50,
        max_delay=0.5,
        retry_on=(TimeoutError,),  # also leave a server that answers nothing in time
        keepalive=5.0,
        peer_timeout=2.0,
    )
    async for session in sessions:
        async with session as connection:
            unsent = [number for number in calls if number not in answers]
            in_progress: set[int] = set()
            while unsent or in_progress:
                while unsent and len(in_progress) < WINDOW:
                    number = unsent.pop(0)
                    in_progress.add(number)
                    request = {"id": number, "seconds": seconds, **calls[number]}
                    async with asyncio.timeout(seconds + 4):  # the server may not receive
                        await connection.send(json.dumps(request).encode())
                async with asyncio.timeout(seconds + 4):  # the server's own limit comes first
                    answer = json.loads(await connection.receive())
                if "leave" in answer:  # the server drains: take the answers, and go
                    unsent.clear()
                else:
                    in_progress.discard(answer["id"])
                    answers[answer["id"]] = answer.get("result", answer.get("error"))
        if len(answers) == len(calls):
            break
    return answers, session.number


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server")
    parser.add_argument("--port", type=int, default=7475)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that each call takes")
    arguments = parser.parse_args()

    calls: dict[int, dict[str, object]] = {0: {"method": "double", "number": 21}}
    calls[1] = {"method": "sleep", "number": 60}  # longer than its time limit
    for number in range(2, arguments.calls):
        calls[number] = {"method": "sleep", "number": arguments.sleep}
    answers, connections = await call_all(arguments.address, arguments.port, calls, seconds=1.0)
    print(f"double 21: {answers[0]}; sleep 60: {answers[1]}")
    print(f"{len(answers)} answers, {connections} connections")


if __name__ == "__main__":
    asyncio.run(main())
