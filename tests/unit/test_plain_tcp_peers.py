"""Plain TCP clients at a listener of the software device are counted, and logged once a host."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

import anyio
import pytest

import aiordma


def http(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def health_check(port: int) -> None:
    socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("visit", "level", "said"),
    [
        (http, logging.WARNING, "bytes that are no handshake"),
        (health_check, logging.INFO, "no handshake"),
    ],
)
def test_plain_tcp_client_is_counted_and_logged_once(
    visit: Callable[[int], None], level: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")

    async def body() -> None:
        async with aiordma.listen("127.0.0.1", 0, device="software") as listener:
            for number in (1, 2, 3):
                await asyncio.to_thread(visit, listener.port)
                with anyio.fail_after(10):
                    while listener.statistics().without_handshake < number:
                        await asyncio.sleep(0.01)
            assert listener.statistics().connection_requests == 0

    asyncio.run(body())
    lines = [each for each in caplog.records if "plain TCP client" in each.getMessage()]
    assert [each.levelno for each in lines] == [level]
    text = lines[0].getMessage()
    assert "127.0.0.1:" in text
    assert f"sent {said} of iWARP: probably a plain TCP client" in text


def test_flood_of_plain_tcp_clients_makes_few_events() -> None:
    async def body() -> None:
        async with aiordma.listen("127.0.0.1", 0, device="software") as listener:

            def visit() -> None:
                for _ in range(500):
                    health_check(listener.port)

            flood = threading.Thread(target=visit)
            flood.start()
            flood.join()  # the event loop stands still meanwhile
            with anyio.fail_after(10):
                while listener.statistics().without_handshake < 500:
                    await asyncio.sleep(0.01)

    asyncio.run(body())
