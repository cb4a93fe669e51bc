"""aiordma in a second interpreter of the process: refused, and the first one works on."""

import sys

import pytest

from tests.unit.child import run_child

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="_xxsubinterpreters is called _interpreters since 3.13"
)

SECOND = """
import _xxsubinterpreters as interpreters

def import_in_second(name):
    second = interpreters.create()
    try:
        interpreters.run_string(second, "import " + name)
    except interpreters.RunFailedError as error:
        return str(error)
    finally:
        interpreters.destroy(second)
    return "it was imported"
"""


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("name", ["aiordma", "aiordma._native._engine", "aiordma._native._binding"])
def test_a_second_interpreter_is_refused(engine: str, name: str) -> None:
    run_child(
        SECOND,
        f"""
        first = import_in_second({name!r})  # before and after the first interpreter has it
        import aiordma, asyncio
        for text in (first, import_in_second({name!r})):
            assert "ImportError" in text, text
            assert "main interpreter only" in text, text

        async def talk():
            async with await aiordma.listen("127.0.0.1", 0, device="software") as listener:
                accepting = asyncio.ensure_future(listener.accept())
                async with await aiordma.connect("127.0.0.1", listener.port) as client:
                    async with await accepting as server:
                        request = client.post_send(b"hello")
                        assert type(await request) is aiordma.WorkCompletion
                        assert await server.receive() == b"hello"

        asyncio.run(talk())
        """,
        AIORDMA_BACKEND=engine,
        AIORDMA_DEVICE="software",
    )
