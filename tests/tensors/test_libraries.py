"""Tensors of torch and jax themselves, in the memory of the CPU. `make suites` installs jax for
this; torch is too large, and its tests run where it is installed."""

import importlib
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aiordma
from aiordma.integrations import arrays
from aiordma.integrations.arrays import ArrayClient, ArrayServer
from tests.device.players import REMOTE, connected
from tests.devices import ADDRESS

pytestmark = pytest.mark.anyio

HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax")}
torch: Any = importlib.import_module("torch") if HAS["torch"] else None
jax: Any = importlib.import_module("jax") if HAS["jax"] else None
of_torch = pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
of_jax = pytest.mark.skipif(not HAS["jax"], reason="jax is not installed")

FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "bfloat16")
DTYPES = (*FLOATS, "float16", "float32", "float64", "int8", "uint16", "int64", "bool", "complex64")


@asynccontextmanager
async def both() -> AsyncIterator[tuple[ArrayServer, ArrayClient]]:
    """Yield a server and a client of it."""
    async with (
        arrays.serve_arrays(ADDRESS) as server,
        arrays.connect_arrays(ADDRESS, server.port) as client,
    ):
        yield server, client


def numbers(dtype: str) -> "np.ndarray[Any, Any]":
    """Return 16 numbers that each dtype has."""
    found: np.ndarray[Any, Any] = (np.arange(16) % 2 + 1).reshape(4, 4)
    return found.astype(getattr(ml_dtypes, dtype, dtype))


def torch_of(array: "np.ndarray[Any, Any]") -> Any:
    """Return a tensor with an array's bytes: torch takes no arrays of ml_dtypes."""
    tensor = torch.from_numpy(array.view(np.uint8).copy())
    return tensor.view(getattr(torch, array.dtype.name))


def same(tensor: Any, array: "np.ndarray[Any, Any]") -> bool:
    """Whether a tensor's bytes are an array's."""
    found: bool = tensor.contiguous().view(torch.uint8).numpy().tobytes() == array.tobytes()
    return found


@of_torch
@pytest.mark.parametrize("dtype", DTYPES)
async def test_torch_tensors_are_fetched_and_put(dtype: str) -> None:
    array = numbers(dtype)
    async with both() as (server, client):
        tensor = torch_of(array)
        server.publish("a", tensor, writable=True)
        fresh = await client.fetch("a")
        assert (fresh.dtype, fresh.tobytes()) == (array.dtype, array.tobytes())
        into = torch.zeros_like(tensor)
        assert await client.fetch("a", into=into) is into
        assert same(into, array)
        await client.put("a", torch_of(array[::-1].copy()))
        assert same(tensor, array[::-1])
        await client.put("a", array)  # numpy's, in the place of torch's
        assert same(tensor, array)


@of_jax
@pytest.mark.parametrize("dtype", DTYPES)
async def test_jax_arrays_are_fetched_and_put(dtype: str) -> None:
    array = numbers(dtype)
    with jax.enable_x64(True):
        tensor = jax.numpy.asarray(array)
    assert tensor.dtype == array.dtype
    async with both() as (server, client):
        server.publish("a", tensor)
        fresh = await client.fetch("a")
        assert (fresh.dtype, fresh.tobytes()) == (array.dtype, array.tobytes())
        assert await client.fetch("a", into=np.zeros_like(array)) is not None
        place = np.zeros_like(array)
        server.publish("w", place, writable=True)
        await client.put("w", tensor)
        assert place.tobytes() == array.tobytes()


@of_jax
async def test_jax_s_order_of_dimensions_is_kept() -> None:
    layouts: Any = importlib.import_module("jax.experimental.layout")
    array = jax.numpy.arange(12.0).reshape(3, 4)
    columns = jax.device_put(array, layouts.Format(layouts.Layout((1, 0)), array.sharding))
    async with both() as (server, client):
        server.publish("a", columns)
        assert (await client.fetch("a") == np.asarray(array)).all()


@of_jax
async def test_jax_s_arrays_are_not_written_to() -> None:
    array = jax.numpy.ones(4)
    async with both() as (server, client):
        server.publish("a", np.zeros(4, np.float32))
        with pytest.raises(TypeError, match=r"fetch\(\): into: ArrayImpl is read-only, as jax's"):
            await client.fetch("a", into=array)
        with pytest.raises(TypeError, match=r"publish\(\): buffer=.* is read-only"):
            server.publish("b", array, writable=True)
        assert (array == 1).all()
    async with connected() as (one, other):
        region = other.register(bytearray(16), REMOTE)
        with pytest.raises(TypeError, match="ArrayImpl is read-only"):
            await one.read(array, region.remote())
        with pytest.raises(TypeError, match="LOCAL_WRITE"):
            await one.read_blocks([(one.register(array)[:], region.remote())])


@of_torch
async def test_torch_s_views_are_fetched_as_they_are() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = {
        "transposed": base[0].T,
        "a row": base[1, 2],
        "one element": torch.tensor(7.0),
        "one of a dimension": torch.empty_strided((1, 4), (77, 1)).fill_(3),
    }
    async with both() as (server, client):
        for name, view in views.items():
            server.publish(name, view)
            assert (await client.fetch(name) == view.numpy()).all()
            into = torch.zeros_like(view)
            assert torch.equal(await client.fetch(name, into=into), view)
        for view in (base[:, :, 1], base[:, ::2], base.permute(2, 0, 1), base[:1].expand(2, 3, 4)):
            with pytest.raises(ValueError, match=r"publish\(\): buffer: .* not contiguous"):
                server.publish("part", view)


@of_torch
async def test_torch_s_advice_is_given() -> None:
    weights = torch.zeros(4, requires_grad=True)
    complexes = torch.tensor([1 + 2j, 3 + 4j]).conj()
    async with both() as (server, client):
        server.publish("a", np.ones(4, np.float32), writable=True)
        advice = r"requires? gradient, use tensor\.detach\(\)$"
        for tensor in (weights, torch.nn.Parameter(weights), weights * 2):
            with pytest.raises(TypeError, match=rf"^publish\(\): buffer: .*{advice}"):
                server.publish("b", tensor)
            with pytest.raises(TypeError, match=rf"^put\(\): buffer: .*{advice}"):
                await client.put("a", tensor)
            with pytest.raises(TypeError, match=rf"^fetch\(\): buffer: .*{advice}"):
                await client.fetch("a", into=tensor)
        await client.fetch("a", into=weights.detach())
        assert weights.tolist() == [1] * 4
        with pytest.raises(TypeError, match="conjugate bit set"):
            server.publish("b", complexes)
        with pytest.raises(TypeError, match=r"use tensor\.resolve_neg\(\)$"):
            server.publish("b", complexes.imag)
        server.publish("b", complexes.imag.resolve_neg().contiguous())
        assert (await client.fetch("b")).tolist() == [-2, -4]


@pytest.mark.parametrize(
    "library", [pytest.param("torch", marks=of_torch), pytest.param("jax", marks=of_jax)]
)
async def test_offsets_are_tensors(library: str) -> None:
    make = importlib.import_module(library if library == "torch" else "jax.numpy").arange
    here, there = np.arange(4096), np.zeros(4096, np.int64)
    async with connected() as (client, server):
        local, remote = client.register(here), server.register(there, REMOTE).remote()
        offsets = make(0, here.nbytes, 256)
        await client.write_blocks(aiordma.Blocks(local, remote, offsets, offsets, 256))
        assert (here == there).all()


@of_torch
async def test_blocks_of_torch_s_tensors_are_moved() -> None:
    here = torch.arange(1 << 16).to(torch.bfloat16)
    there = torch.zeros_like(here)
    async with connected() as (client, server):
        local, remote = client.register(here), server.register(there, REMOTE).remote()
        await client.write_blocks(
            [(local[i : i + 256], remote[i : i + 256]) for i in range(0, here.nbytes, 512)]
        )
        assert torch.equal(here.view(-1, 128)[::2], there.view(-1, 128)[::2])
        assert not there.view(-1, 128)[1::2].any()
        here.zero_()
        await client.read_blocks([(local[:], remote)])
        assert torch.equal(here, there)
