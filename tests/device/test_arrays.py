"""Arrays by name: published by one process, fetched and put by others."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest

import aiordma
from aiordma.integrations import arrays
from aiordma.integrations.arrays import ArrayClient, ArrayError, ArrayServer
from tests.device.players import one_loop
from tests.devices import ADDRESS

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def both() -> AsyncIterator[tuple[ArrayServer, ArrayClient]]:
    """Yield a server and a client of it."""
    async with (
        arrays.serve_arrays(ADDRESS) as server,
        arrays.connect_arrays(ADDRESS, server.port) as client,
    ):
        yield server, client


class Tensor:
    """What torch's tensors say of themselves; its memory is numpy's."""

    class dtype:
        itemsize = 4

        def __str__(self) -> str:
            return "torch.float32"

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.dtype = Tensor.dtype()  # type: ignore[misc,assignment]
        self.shape = array.shape
        self.__array_interface__ = array.__array_interface__

    def stride(self) -> tuple[int, ...]:
        return tuple(each // 4 for each in self._array.strides)


class LikeJax:
    """An array without strides of its own, and with a DLPack without flags: it is immutable."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.dtype = array.dtype
        self.shape = array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, *, max_version: Any = None, copy: bool | None = None) -> Any:
        return self._array.__dlpack__()


class Refusing(Tensor):
    """A tensor of torch's that requires grad."""

    def __init__(self) -> None:
        super().__init__(np.zeros((2, 2), np.float32))
        del self.__array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


class Negated(Refusing):
    """A tensor of torch's whose memory has the opposite signs."""

    def is_neg(self) -> bool:
        return True


ARRAYS = {
    "float32": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "a column's order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "of one element": np.array(7),
    "the other byte order": np.arange(5, dtype=">i8"),
    "bool": np.array([True, False]),
    "complex": np.arange(3) * 1j,
    "bfloat16": np.arange(6).astype(ml_dtypes.bfloat16),
    "float8": np.arange(6).astype(ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("name", ARRAYS)
async def test_a_fetched_array_is_the_published_one(name: str) -> None:
    array = ARRAYS[name]
    async with both() as (server, client):
        server.publish(name, array)
        fresh = await client.fetch(name)
        into = np.zeros_like(array)
        assert await client.fetch(name, into=into) is into
        for found in (fresh, into):
            assert (found.dtype, found.shape, found.strides) == (
                array.dtype,
                array.shape,
                array.strides,
            )
            assert found.tobytes() == array.tobytes()


async def test_an_array_is_put_where_it_was_published() -> None:
    async with both() as (server, client):
        array = np.zeros((100, 1000), np.int64)
        server.publish("writable", array, writable=True)
        await client.put("writable", np.arange(100_000).reshape(100, 1000))
        assert (array == np.arange(100_000).reshape(100, 1000)).all()
        server.publish("tensor", Tensor(np.ones((2, 2), np.float32)))
        into = Tensor(np.zeros((2, 2), np.float32))
        assert await client.fetch("tensor", into=into) is into
        assert (into._array == 1).all()
        assert ((await client.fetch("tensor")) == 1).all()


async def test_what_does_not_fit_is_named_and_nothing_moves() -> None:
    async with both() as (server, client):
        array = np.zeros((2, 3))
        server.publish("a", array)
        with pytest.raises(ArrayError, match="no array 'b' is published"):
            await client.fetch("b")
        with pytest.raises(ArrayError, match=r"'a' has 48 bytes, and max_bytes=47"):
            await client.fetch("a", max_bytes=47)
        with pytest.raises(ArrayError, match=r"dtype float64 in place of float32"):
            await client.fetch("a", into=np.zeros((2, 3), np.float32))
        with pytest.raises(ArrayError, match=r"shape \(2, 3\) in place of \(3, 2\)"):
            await client.fetch("a", into=np.zeros((3, 2)))
        with pytest.raises(ArrayError, match="strides"):
            await client.fetch("a", into=np.zeros((2, 3), order="F"))
        with pytest.raises(TypeError, match=r"fetch\(\): into=int: expected an array"):
            await client.fetch("a", into=5)
        with pytest.raises(ArrayError, match="'a' is not writable"):
            await client.put("a", np.ones((2, 3)))
        server.publish("w", array.copy(), writable=True)
        with pytest.raises(ArrayError, match="does not fit into 'w'"):
            await client.put("w", np.ones(6))
        assert not array.any()
        assert (await client.fetch("w")).shape == (2, 3)  # the connection is as it was


@pytest.mark.parametrize("order", ["C", "F"])
async def test_an_array_without_strides_is_fetched_in_its_order(order: Any) -> None:
    array = np.asarray(np.arange(12.0).reshape(3, 4), order=order)
    async with both() as (server, client):
        server.publish("a", LikeJax(array))
        assert (await client.fetch("a") == array).all()
        server.publish("w", np.zeros_like(array), writable=True)
        await client.put("w", LikeJax(array))
        assert (await client.fetch("w") == array).all()


async def test_strides_of_one_element_are_not_compared() -> None:
    wide = np.arange(40.0).reshape(4, 10)
    array = wide[:1, :10]
    odd = np.lib.stride_tricks.as_strided(array, (1, 10), (8 * 77, 8))
    async with both() as (server, client):
        server.publish("a", odd)
        assert (await client.fetch("a") == array).all()
        assert (await client.fetch("a", into=np.zeros((1, 10))) == array).all()


async def test_memory_that_cannot_be_used_is_explained_and_nothing_moves() -> None:
    async with both() as (server, client):
        array = np.ones((2, 2), np.float32)
        server.publish("a", array, writable=True)
        fixed = array.copy()
        fixed.setflags(write=False)
        for into in (fixed, LikeJax(array.copy())):
            with pytest.raises(
                TypeError, match=rf"fetch\(\): into: {type(into).__name__} is read-"
            ):
                await client.fetch("a", into=into)
        with pytest.raises(TypeError, match=r"publish\(\): buffer=.*is read-only"):
            server.publish("b", LikeJax(array), writable=True)
        for tensor, advice in ((Refusing(), "detach"), (Negated(), "resolve_neg")):
            with pytest.raises(TypeError, match=rf"^publish\(\): .* use tensor\.{advice}\(\)$"):
                server.publish("b", tensor)
            with pytest.raises(TypeError, match=rf"^fetch\(\): .* use tensor\.{advice}\(\)$"):
                await client.fetch("a", into=tensor)
            with pytest.raises(TypeError, match=rf"^put\(\): .* use tensor\.{advice}\(\)$"):
                await client.put("a", tensor)
        assert (array == 1).all()
        assert (await client.fetch("a") == 1).all()


@one_loop
async def test_wrong_arguments_are_named() -> None:
    async with both() as (server, client):
        for name in ("", "x" * 256):
            with pytest.raises(ValueError, match=r"publish\(\): name"):
                server.publish(name, np.zeros(1))
        with pytest.raises(TypeError, match=r"publish\(\): array=list: expected an array"):
            server.publish("a", [1, 2])
        with pytest.raises(ValueError, match=r"publish\(\): array: its elements are"):
            server.publish("a", np.zeros(1, [("x", "i4")]))
        with pytest.raises((TypeError, ValueError), match="Python objects"):
            server.publish("a", np.array([object()]))
        with pytest.raises(ValueError, match="not contiguous"):
            server.publish("a", np.zeros((4, 4))[:, 0])
        server.publish("a", np.zeros(1))
        with pytest.raises(ValueError, match="withdraw it first"):
            server.publish("a", np.zeros(1))
        with pytest.raises(TypeError, match=r"fetch\(\): name=5"):
            await client.fetch(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"fetch\(\): max_bytes='1'"):
            await client.fetch("a", max_bytes="1")  # type: ignore[arg-type]


async def write_on(connection: aiordma.Connection, remote: aiordma.RemoteMemory) -> None:
    """WRITE until that is refused: siw completes a WRITE before the peer refuses it."""
    while True:
        await connection.write(b"too late", remote)


async def test_an_array_that_was_withdrawn_is_not_found_and_not_written() -> None:
    async with both() as (server, client):
        array = np.zeros(8, np.uint8)
        server.publish("a", array, writable=True)
        _, remote, _ = await client._ask("a")
        server.withdraw("a")
        with pytest.raises(KeyError):
            server.withdraw("a")
        with pytest.raises(ArrayError, match="no array"):
            await client.fetch("a")
        server.publish("a", array)  # again, in another way
        with pytest.raises(ArrayError, match="not writable"):
            await client.put("a", np.ones(8, np.uint8))
        with pytest.raises(aiordma.RdmaError), anyio.fail_after(30):
            await write_on(client._connection, remote)
        assert not array.any()


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
async def test_a_cancelled_fetch_leaves_the_client_usable() -> None:
    async with both() as (server, client):
        server.publish("a", np.arange(10))
        server.publish("b", np.arange(20))
        for steps in range(12):
            async with anyio.create_task_group() as group:
                group.start_soon(client.fetch, "a")
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            assert (await client.fetch("b") == np.arange(20)).all()


async def test_tasks_share_a_client() -> None:
    async with both() as (server, client):
        for number in range(10):
            server.publish(f"{number}", np.full(1000, number))

        async def fetch(number: int) -> None:
            for _ in range(5):
                assert ((await client.fetch(f"{number}")) == number).all()

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(fetch, number)


ANSWERS: dict[str, Any] = {
    "no JSON": b"{",
    "deep": b"[" * 3000,
    "no object": b"[1]",
    "no number": b"{}",
    "no description": {"number": 1},
    "memory": {"memory": "00"},
    "objects": {"dtype": "object"},
    "dtype": {"dtype": "no such"},
    "a dtype that is no syntax": {"dtype": "(2,f4"},
    "a length that is not the shape's": {"shape": [1 << 40]},
    "many dimensions": {"shape": [1] * 33, "strides": [1] * 33},
    "strides out of memory": {"strides": [4096]},
    "strides before memory": {"strides": [-8]},
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_a_hostile_server_s_answer_is_refused(answer: Any) -> None:
    memory = aiordma.RemoteMemory(4096, 16, 1).pack().hex()
    good = {"number": 1, "dtype": "int64", "shape": [2], "strides": [8], "writable": True}
    if isinstance(answer, dict) and answer != {"number": 1}:
        answer = {**good, "memory": memory, **answer}
    said = answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    async def serve(connection: aiordma.Connection) -> None:
        async for _ in connection:
            await connection.send(said)

    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        async with arrays.connect_arrays(ADDRESS, listener.port) as client:
            with pytest.raises(ArrayError):
                await client.fetch("a")
        group.cancel_scope.cancel()


async def test_a_hostile_client_s_question_is_answered_and_harms_nobody() -> None:
    async with both() as (server, client), aiordma.connect(ADDRESS, server.port) as hostile:
        server.publish("a", np.arange(3))
        for question in (
            b"",
            b"\xff",
            b"{",
            b"[" * 4000,
            b"[1]",
            b'[1, ["a"]]',
            b'[1, {"a": 1}]',
            b'["a", "a"]',
        ):
            await hostile.send(question)
            assert "error" in json.loads(await hostile.receive())
        assert (await client.fetch("a") == np.arange(3)).all()


async def test_an_error_of_the_server_s_block_is_raised_as_it_is() -> None:
    async def fail() -> None:
        async with arrays.serve_arrays(ADDRESS) as server:
            server.publish("a", np.arange(3))
            raise LookupError("of the program's")

    with pytest.raises(LookupError, match="of the program's"):
        await fail()


async def test_the_server_s_end_ends_the_access() -> None:
    async with AsyncExitStack() as stack:
        async with arrays.serve_arrays(ADDRESS) as server:
            server.publish("a", np.arange(3))
            connecting = arrays.connect_arrays(ADDRESS, server.port)
            client = await stack.enter_async_context(connecting)
            await client.fetch("a")
        with pytest.raises(aiordma.RdmaError):
            await client.fetch("a")
