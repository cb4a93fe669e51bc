"""Our sides of what the small C programs of rdma-core speak."""

import aiordma

MESSAGE = bytes(16)
"""What rdma_client and rdma_server send: 16 bytes that they never fill."""


async def converse_with_rdma_client(connection: aiordma.Connection, reply: bytes) -> bytes:
    """The server's part: one message, one reply, and the client disconnects."""
    message = await connection.receive()
    await connection.send(reply)
    assert [late async for late in connection] == []
    return message


async def converse_with_rdma_server(connection: aiordma.Connection, message: bytes) -> bytes:
    """The client's part: one message, one reply, and the server disconnects."""
    await connection.send(message)
    reply = await connection.receive()
    assert [late async for late in connection] == []
    return reply


async def be_ucmatose_server(connection: aiordma.Connection, messages: list[bytes]) -> list[bytes]:
    """Send all, take as many back, and be the one that disconnects."""
    for message in messages:
        await connection.send(message)
    return [await connection.receive() for _ in messages]


async def be_ucmatose_client(connection: aiordma.Connection, count: int) -> list[bytes]:
    """Take all, send as many back, and wait for the server to disconnect."""
    messages = [await connection.receive() for _ in range(count)]
    for message in messages:
        await connection.send(message)
    assert [late async for late in connection] == []
    return messages
