"""A KeyboardInterrupt or SystemExit out of a callback: every other completion is delivered first,
then the event loop gets it. Nothing is swallowed, and nothing is lost."""

import pytest

from tests.unit.child import RUN, run_child

ENGINES = pytest.mark.parametrize("engine", ["c", "python"])
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop", "polling", "trio"])

PLAYERS = (
    RUN
    + """
import asyncio, faulthandler, functools, signal, sys
import anyio
import aiordma
from tests.connections import connect_to
from tests.internals import endpoint_of

faulthandler.dump_traceback_later(60, exit=True)  # what hangs fails, and says where
COUNT = 12

async def pair(**options):
    listener = await aiordma.listen("127.0.0.1", 0, device="software", **options)
    return listener, *await connect_to(listener, "127.0.0.1", device="software", **options)

async def closed(*things):
    for thing in things:
        await thing.aclose()

def kinds(error):
    if isinstance(error, BaseExceptionGroup):
        return {kind for each in error.exceptions for kind in kinds(each)}
    found = {type(error).__name__}
    if error.__cause__ is not None:
        found |= kinds(error.__cause__)
    return found
"""
)


@ENGINES
@LOOPS
@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_an_interrupt_in_a_callback_reaches_the_loop(engine: str, loop: str, kind: str) -> None:
    printed = run_child(
        PLAYERS,
        f"""
        ended = []

        async def main():
            listener, client, server = await pair(receive_buffers=64)
            def callback(number, request):
                ended.append(number)
                if number == 2:
                    raise {kind}("out of a callback")
            try:
                requests = [client.post_send(b"%d" % i) for i in range(COUNT)]
                for number, request in enumerate(requests):
                    request.add_done_callback(functools.partial(callback, number))
                    request.add_done_callback(lambda _: None)
                while True:
                    await anyio.sleep(0.01)
            finally:
                arrived = []
                with anyio.CancelScope(shield=True):
                    # All of them ended, and every message arrived.
                    try:
                        for request in requests:
                            await request
                        for _ in range(COUNT):
                            arrived.append(int(await server.receive()))
                    finally:
                        print([request.done() for request in requests] == [True] * COUNT)
                        print(arrived, flush=True)
                    await closed(client, server, listener)

        try:
            run({loop!r}, main)
        except BaseException as error:
            print(sorted(kinds(error) & {{"KeyboardInterrupt", "SystemExit"}}))
        print(ended == list(range(COUNT)))
        """,
        AIORDMA_BACKEND=engine,
    )
    are_done, arrived, *others = printed.splitlines()
    assert (are_done, others) == ("True", [f"['{kind}']", "True"])
    # Trio ends its system tasks at a SystemExit in one of them, and aiordma's close what is open:
    # requests that the device has not completed by then are flushed.
    is_cut_off = (loop, kind) == ("trio", "SystemExit")
    assert arrived == str(list(range(12))) or (is_cut_off and arrived == "[]")


@ENGINES
def test_an_interrupt_in_one_callback_leaves_the_others(engine: str) -> None:
    run_child(
        """
        from types import SimpleNamespace
        import aiordma
        from aiordma._requests.request import WorkRequest

        class Memory:
            held = 0
            def _hold(self): self.held += 1
            def _release(self):
                self.held -= 1
                raise KeyboardInterrupt("release")

        class Waiter:
            woken = 0
            def wake(self): self.woken += 1

        ended, called, memory, waiter = [], [], Memory(), Waiter()
        owner = SimpleNamespace(
            request_ended=ended.append, loop=SimpleNamespace(waiter=lambda: waiter)
        )
        request = WorkRequest(owner, "SEND", 1, [memory, memory])
        def callback(_):
            called.append(1)
            raise SystemExit("callback")
        for _ in range(3):
            request.add_done_callback(callback)
        for end in (lambda: request._complete((1, 0, *[0] * 12)), lambda: callback_now()):
            callback_now = lambda: request.add_done_callback(callback)
            try:
                end()
            except (KeyboardInterrupt, SystemExit):
                continue
            raise AssertionError("swallowed")
        assert request.done() and ended == [request]
        assert memory.held == 0
        assert len(called) == 4
        """,
        AIORDMA_BACKEND=engine,
    )


@ENGINES
def test_an_interrupt_in_an_end_ends_the_others_too(engine: str) -> None:
    """The end of a connection fails its requests, whatever the callback of one raises."""
    printed = run_child(
        PLAYERS,
        """
        requests, things = [], []

        async def begin():
            things.extend(await pair(receive_buffers=0))
            requests.extend(things[1].post_recv(bytearray(8)) for _ in range(COUNT))
            def callback(request):
                raise KeyboardInterrupt
            requests[3].add_done_callback(callback)
            endpoint_of(things[1]).close()
            await anyio.sleep(60)

        runner = asyncio.Runner()
        loop = runner.get_loop()
        beginning = loop.create_task(begin())
        try:
            loop.run_until_complete(beginning)
        except KeyboardInterrupt:
            print("interrupted")
        loop.run_until_complete(asyncio.wait_for(closed(*reversed(things)), 30))
        assert all(request.done() for request in requests)
        beginning.cancel()
        runner.close()
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "interrupted\n"


STORM = """
import os, random, threading, time

async def conversation(seconds, begin):
    # Messages back and forth, with senders that wait for slots, until the time is over.
    listener, client, server = await pair(receive_buffers=8, max_send_wr=2)
    async with listener, client, server:
        begin()
        async def answer():
            async for message in server:
                await server.send(message)
        async def ask(name):
            number = 0
            while time.monotonic() < end:
                number += 1
                await client.send(b"%d %d" % (name, number))
        async def hear():
            while True:
                await client.receive()
        end = time.monotonic() + seconds
        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            group.start_soon(hear)
            async with anyio.create_task_group() as asking:
                for name in range(4):
                    asking.start_soon(ask, name)
            group.cancel_scope.cancel()

def interrupt(delays):
    for delay in delays:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)
        sent_signals.append(delay)

def knows(error):
    # uvloop cannot close where a signal interrupts its own code: a RuntimeError in its place.
    return "KeyboardInterrupt" in kinds(error) or (
        error.__context__ is not None and knows(error.__context__)
    )

def one_run(loop, delays, quiet):
    # Signals while it runs; then it has to have ended, by one of them or by itself.
    thread = threading.Thread(target=interrupt, args=(delays,))
    async def main():
        await conversation(quiet, thread.start)
    try:
        run(loop, main)
    except BaseException as error:
        if not knows(error):
            raise
        interrupted.append(1)
    finally:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt:
                pass

sent_signals, interrupted = [], []
chance = random.Random(7)
"""


@LOOPS
def test_interrupted_programs_end(loop: str) -> None:
    """One SIGINT in each run, at any moment: the program ends, and learns of it."""
    run_child(
        PLAYERS,
        STORM,
        f"""
        for _ in range(12):
            one_run({loop!r}, [chance.uniform(0.0, 0.1)], 0.5)
        assert len(interrupted) >= 9, (interrupted, sent_signals)
        """,
        PYTHONWARNINGS="ignore",
    )


def test_repeated_interrupts_hang_nothing() -> None:
    """Two or three SIGINT within milliseconds in each run. On trio only: in asyncio's own code a
    second one can lose the wake-up of a task."""
    run_child(
        PLAYERS,
        STORM,
        """
        for number in range(12):
            again = [chance.uniform(0.0, 0.01) for _ in range(1 + number % 2)]
            one_run("trio", [chance.uniform(0.0, 0.1), *again], 0.5)
        assert len(interrupted) >= 9, (interrupted, sent_signals)
        """,
        PYTHONWARNINGS="ignore",
    )
