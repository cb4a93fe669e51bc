"""SIGINT while aiordma changes its state: the change is finished first, and the program's handler
is called behind it. A walk over the package's lines interrupts at each of them."""

import pytest

from tests.unit.child import RUN, run_child

PREPARED = """
import faulthandler, signal, threading
from functools import partial
from aiordma import _native
from aiordma._base.interrupts import deferring, deferring_steps, uninterrupted

faulthandler.dump_traceback_later(60, exit=True)
done = []

def interrupt(times=1):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)

def work():
    interrupt()
    done.append("worked")

def interrupted(function):
    try:
        function()
    except KeyboardInterrupt:
        done.append("interrupted")
"""


def test_deferred_interrupt_follows_the_call() -> None:
    printed = run_child(
        PREPARED,
        """
        interrupted(uninterrupted(work))
        interrupted(deferring(lambda: interrupt(5)))
        print(done, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """,
    )
    assert printed == "['worked', 'interrupted', 'interrupted'] True\n"


def test_outermost_call_ends_the_deferral() -> None:
    printed = run_child(
        PREPARED,
        """
        @deferring
        def outer():
            deferring(work)()
            done.append("outer")

        interrupted(outer)
        print(done)
        """,
    )
    assert printed == "['worked', 'outer', 'interrupted']\n"


def test_deferral_returns_results_and_errors() -> None:
    printed = run_child(
        PREPARED,
        """
        @deferring
        def divide(numerator, *, by):
            if not by:
                interrupt()
            return numerator / by

        print(divide(6, by=3))
        try:
            divide(1, by=0)
        except KeyboardInterrupt as error:
            print(repr(error.__context__))
        """,
    )
    assert printed == "2.0\nZeroDivisionError('division by zero')\n"


def test_deferral_leaves_other_handlers() -> None:
    """Nothing is put in the place of no handler, or of one that the call installs; in another
    thread Python handles no signals."""
    printed = run_child(
        PREPARED,
        """
        seen = []
        note = lambda *_: seen.append("program")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        uninterrupted(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        uninterrupted(lambda: signal.signal(signal.SIGINT, note))()
        print(signal.getsignal(signal.SIGINT) is note)
        uninterrupted(interrupt)()
        print(seen)
        thread = threading.Thread(target=uninterrupted(
            lambda: print(signal.getsignal(signal.SIGINT) is note)))
        thread.start()
        thread.join()
        """,
    )
    assert printed == "True\nTrue\n['program']\nTrue\n"


def test_endless_call_can_be_interrupted() -> None:
    """Such as a callback of the program's that aiordma calls while it closes a connection."""
    run_child(
        PREPARED,
        """
        import os, time

        def insist():
            for _ in range(8):
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGINT)

        def endless():
            while True:
                time.sleep(60)

        threading.Thread(target=insist, daemon=True).start()
        interrupted(deferring(endless))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert done == ["interrupted"]
        """,
    )


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
def test_deferred_interrupt_spares_the_coroutine(loop: str) -> None:
    """The coroutine goes on behind its wait; the loop handles the interrupt."""
    printed = run_child(
        PREPARED,
        RUN,
        f"""
        import anyio

        @deferring_steps
        async def steps():
            interrupt(2)
            done.append("begun")
            try:
                await anyio.sleep(60)
            except anyio.get_cancelled_exc_class():
                done.append("cancelled")
                raise
            except KeyboardInterrupt:  # of trio, which raises it at a wait of its main task
                done.append("cancelled")
                raise

        interrupted(lambda: run({loop!r}, steps))
        print(done)
        """,
    )
    assert printed == "['begun', 'cancelled', 'interrupted']\n"


WALK = """
import gc, os, sys, time, warnings
import anyio, aiordma
from aiordma.testing import software_objects

warnings.simplefilter("ignore")
sys.unraisablehook = lambda _: None
PACKAGE = os.path.dirname(aiordma.__file__) + os.sep
OPTIONS = {"device": "software", "receive_buffers": 2, "max_send_wr": 2}

async def session():
    async with aiordma.listen("127.0.0.1", 0, **OPTIONS) as listener:
        async def serve():
            async with listener.accept() as server:
                await server.send(await server.receive())
                await server.receive()
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            async with aiordma.connect("127.0.0.1", listener.port, **OPTIONS) as client:
                await client.send(b"question")
                await client.receive()
                await client.send(b"end")

def attempt(loop, on_line):
    def trace_lines(frame, event, _):
        if event == "line":
            on_line((frame.f_code.co_filename, frame.f_lineno))
        return trace_lines
    def trace(frame, event, _):
        return trace_lines if frame.f_code.co_filename.startswith(PACKAGE) else None
    sys.settrace(trace)
    try:
        run(loop, session)
    except BaseException as error:
        return kinds(error)
    finally:
        sys.settrace(None)
    return set()

def kinds(error):
    if error is None:
        return set()
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    found = [kinds(each) for each in (error.__cause__, error.__context__, *parts)]
    return {type(error).__name__}.union(*found)

def all_given_back(before):
    for _ in range(200):
        if software_objects() == before:
            return True
        gc.collect()
        time.sleep(0.05)
    return False

def walk(loop, first, stride):
    lines = {}
    assert attempt(loop, lines.setdefault) == set()
    before, reached = software_objects(), 0
    for target in list(lines)[first::stride]:
        sent = []
        def on_line(line):
            if line == target and not sent:
                sent.append(line)
                interrupt(2)
        faulthandler.dump_traceback_later(60, exit=True)
        print(target, file=sys.stderr, flush=True)
        raised = attempt(loop, on_line)
        if sent:
            reached += 1
            assert "KeyboardInterrupt" in raised, (target, raised)
        assert all_given_back(before), (target, software_objects())
    assert reached >= len(lines) / stride / 2, (reached, len(lines))
"""


@pytest.mark.parametrize(("loop", "first"), [("asyncio", 0), ("uvloop", 4), ("trio", 8)])
def test_interrupts_at_any_line_lose_nothing(loop: str, first: int) -> None:
    """Two SIGINT at a line of the package: KeyboardInterrupt ends the program, all is released."""
    walk = f"walk({loop!r}, {first}, stride=20)\n"
    run_child(PREPARED, RUN, WALK, walk)
