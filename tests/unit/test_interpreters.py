"""aiordma in a second interpreter of the process: refused, and the first one works on."""

import sys

import pytest

from tests.unit.child import run_child

SECOND = """
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
else:
    import _xxsubinterpreters as interpreters

def create(is_isolated):
    if sys.version_info >= (3, 13):
        return interpreters.create("isolated" if is_isolated else "legacy")
    return interpreters.create(isolated=is_isolated)

def import_in_second(name, is_isolated):
    second = create(is_isolated)
    try:
        failed = interpreters.run_string(second, "import " + name)
    except Exception as error:  # up to Python 3.12
        failed = error
    finally:
        interpreters.destroy(second)
    return str(failed)
"""

OURS, PYTHONS = "main interpreter only", "does not support loading in subinterpreters"


@pytest.mark.promise("One interpreter")
@pytest.mark.parametrize("is_isolated", [False, True], ids=["legacy", "isolated"])
@pytest.mark.parametrize("name", ["aiordma", "aiordma._native._engine", "aiordma._native._binding"])
def test_a_second_interpreter_is_refused(name: str, is_isolated: bool) -> None:
    reason = PYTHONS if is_isolated and sys.version_info >= (3, 12) else OURS
    run_child(
        SECOND,
        f"""
        first = import_in_second({name!r}, {is_isolated})
        import aiordma, asyncio
        for text in (first, import_in_second({name!r}, {is_isolated})):
            assert "ImportError" in text, text
            assert {reason!r} in text, text

        async def talk():
            async with await aiordma.listen("127.0.0.1", 0, device="software") as listener:
                accepting = asyncio.ensure_future(listener.accept())
                async with await aiordma.connect("127.0.0.1", listener.port) as client:
                    async with await accepting as server:
                        request = client.post_send(b"hello")
                        assert type(await request) is aiordma.verbs.WorkCompletion
                        assert await server.receive() == b"hello"

        asyncio.run(talk())
        """,
        AIORDMA_DEVICE="software",
    )
