"""The round trip with ucxx, by tag: a program by itself, run by a Python that has it.

ucxx_peer.py serve|ask polling|blocking|thread HOST PORT SIZE SECONDS

Each says "ready"; the one that asks measures for each line on its standard input.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

role, way, host, port, size, seconds = sys.argv[1:]
os.environ["UCXPY_PROGRESS_MODE"] = way

import numpy
import ucxx


async def echo(endpoint: Any) -> None:
    place = numpy.empty(int(size), dtype="u1")
    try:
        while True:
            await endpoint.recv(place)
            await endpoint.send(place)
    except ucxx.exceptions.UCXError:
        pass  # the client is done


async def serve() -> None:
    listener = ucxx.create_listener(echo, port=int(port))
    print("ready", flush=True)
    while not listener.closed:
        await asyncio.sleep(0.2)


async def ask() -> None:
    endpoint = await ucxx.create_endpoint(host, int(port))
    ours, place = numpy.zeros(int(size), dtype="u1"), numpy.empty(int(size), dtype="u1")
    print("ready", flush=True)
    for _ in sys.stdin:
        samples: list[float] = []
        now, until = 0.0, time.perf_counter() + float(seconds)
        while now < until:
            before = time.perf_counter()
            await endpoint.send(ours)
            await endpoint.recv(place)
            now = time.perf_counter()
            samples.append(now - before)
        samples = sorted(samples[len(samples) // 10 :])
        found = {
            "p50_us": samples[len(samples) // 2] * 1e6,
            "mean_us": sum(samples) / len(samples) * 1e6,
            "count": len(samples),
        }
        print(json.dumps(found), flush=True)
    await endpoint.close()


asyncio.run(serve() if role == "serve" else ask())
