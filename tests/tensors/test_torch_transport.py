"""The transport for torch.distributed's one-sided transports, where a torch that has them (2.15) is
installed."""

import asyncio
import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import aiordma
from tests.devices import ADDRESS

HAS = importlib.util.find_spec("torch") is not None
torch: Any = importlib.import_module("torch") if HAS else None
HAS = HAS and importlib.util.find_spec("torch.distributed._transport") is not None
api: Any = importlib.import_module("torch.distributed._transport") if HAS else None

pytestmark = pytest.mark.skipif(not HAS, reason="no torch with one-sided transports is installed")

LARGE = 128 << 20
SECONDS = 60


def made(**options: Any) -> Any:
    return api.new_transport("aiordma", "cpu", host=ADDRESS, **options)


@contextmanager
def both() -> Iterator[tuple[Any, Any]]:
    """Yield two transports that are connected to each other."""
    with made() as first, made() as second:
        assert first.connect(second.bind()) == second.connect(first.bind()) == 0
        assert first.connected()
        yield first, second


def remote_of(memory: Any) -> Any:
    """Return a tensor's descriptor, as the peer gets it."""
    descriptor = memory.to_remote_buffer()
    return type(descriptor).deserialize(descriptor.serialize())


@contextmanager
def both_with(tensor: Any) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    """Yield two transports, the first one's memory with a tensor, the second one's with zeros, and
    these."""
    with both() as (first, second):
        zeros = torch.zeros_like(tensor)
        yield first, second, first.register_memory(tensor), second.register_memory(zeros), zeros


def test_torch_finds_the_transport_by_its_entry_point() -> None:
    assert "aiordma" in api.available_transports()
    with made() as transport:
        assert isinstance(transport, api.Transport)
        assert transport.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float8_e4m3fn", "bool"])
def test_tensors_are_written_and_read(dtype: str) -> None:
    tensor = (torch.arange(4096) % 2).to(getattr(torch, dtype))
    with both_with(tensor) as (first, second, source, target, zeros):
        assert isinstance(source, api.Memory)
        assert isinstance(source.to_mutable_view(), api.MutableMemoryView)
        assert not isinstance(source.to_view(), api.MutableMemoryView)
        assert (source.to_view().size(), source.to_view(16, 32).size()) == (tensor.nbytes, 32)
        assert first.write(source.to_view(), remote_of(target)) == 0
        assert torch.equal(tensor.view(torch.uint8), zeros.view(torch.uint8))
        tensor.zero_()
        assert first.read(source.to_mutable_view(), remote_of(target)) == 0
        assert torch.equal(tensor.view(torch.uint8), zeros.view(torch.uint8))
        assert second.write(target.to_view(0, 0), remote_of(source)) == 0


def test_part_of_a_tensor_is_moved() -> None:
    with both_with(torch.arange(64, dtype=torch.uint8)) as (first, _, source, target, zeros):
        first.write(source.to_view(16, 8), remote_of(target))
        assert zeros[:9].tolist() == [*range(16, 24), 0]
        for start, length in ((65, None), (-1, None), (0, 65), (64, 1), (0, -1)):
            with pytest.raises(ValueError, match="memory"):
                source.to_view(start, length)


def test_parameters_are_moved() -> None:
    weights = torch.nn.Parameter(torch.arange(8.0))
    with both() as (first, second):
        zeros = torch.zeros(8)
        target = second.register_memory(zeros)
        first.write(first.register_memory(weights).to_view(), remote_of(target))
        assert torch.equal(zeros, weights.detach())


def test_work_and_its_future_end() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    with both_with(tensor) as (first, _, source, target, zeros):
        work = first.write(source.to_view(), remote_of(target), async_op=True)
        assert isinstance(work, api.Work)
        assert work.wait()
        assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
        assert work.get_future().wait() == work.result() == []
        assert torch.equal(zeros, tensor)


def test_memory_is_unregistered_as_soon_as_its_transfer_is_done() -> None:
    with both_with(torch.ones(LARGE, dtype=torch.uint8)) as (first, _, source, target, zeros):
        work = first.write(source.to_view(), remote_of(target), async_op=True)
        work.get_future().add_done_callback(lambda _: time.sleep(0.3))  # in the transport's thread
        work.wait()
        first.unregister_memory(source)
        assert zeros.all()


def test_a_forked_child_may_not_use_it() -> None:
    with both_with(torch.ones(8)) as (first, _, source, target, _):
        uses = [
            partial(first.connect, first.url),
            partial(first.register_memory, torch.ones(8)),
            partial(first.unregister_memory, source),
            partial(first.write, source.to_view(), remote_of(target)),
            first.close,
        ]

        def use() -> None:
            for each in uses:
                with pytest.raises(aiordma.ForkError):
                    each()

        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        child.join(SECONDS)
        assert child.exitcode == 0


async def test_coroutines_put_and_get(anyio_backend_name: str) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("torch's coroutines are asyncio's")
    tensor = torch.arange(64, dtype=torch.uint8)
    with both_with(tensor) as (first, second, source, target, zeros):
        await second.read_async(target.to_mutable_view(), remote_of(source))
        assert torch.equal(zeros, tensor)
        zeros.zero_()
        await first.write_async(source.to_view(), remote_of(target))
        assert torch.equal(zeros, tensor)
        writes = (first.write(source.to_view(), remote_of(target), async_op=True) for _ in range(8))
        await api.wait_all(writes)
        await first.close_async()
        await first.close_async()


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize("way", ["cancellation", "timeout", "closing"])
def test_what_ends_a_wait_ends_no_transfer(way: str) -> None:
    """The contract of torch's transports: cancellation and timeouts stop waiting, not DMA."""
    with both_with(torch.ones(LARGE, dtype=torch.uint8)) as (first, _, source, target, zeros):

        async def give_up() -> None:
            writing = first.write_async(source.to_view(), remote_of(target))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writing, 0.001)
            assert first._pending

        if way == "cancellation":
            asyncio.run(give_up())
        elif way == "timeout":
            with pytest.raises(TimeoutError, match="operation remains pending"):
                first.write(source.to_view(), remote_of(target), timeout=0.001)
        else:
            first.write(source.to_view(), remote_of(target), async_op=True)
            with pytest.raises(TimeoutError, match="operations remain pending"):
                first.close(timeout=0.001)
            with pytest.raises(RuntimeError, match="closed"):
                first.write(source.to_view(), remote_of(target))
        if way != "closing":
            with pytest.raises(RuntimeError, match="pending transfers"):
                first.unregister_memory(source)
        first.close()
        assert zeros.all()


def test_a_peer_s_end_ends_transfers_with_an_error() -> None:
    with both_with(torch.ones(64)) as (first, second, source, target, _):
        remote = remote_of(target)
        second.close()
        work = first.write(source.to_view(), remote, async_op=True)
        with pytest.raises(aiordma.RdmaError):
            work.wait()
        assert isinstance(work.exception(), aiordma.RdmaError)
        assert not work.is_success()
        with pytest.raises(Exception, match="disconnected"):
            work.get_future().wait()
        assert not first.connected()


def test_unregistered_memory_is_refused_on_both_sides() -> None:
    tensor = torch.ones(64)
    with both_with(tensor) as (first, second, source, target, zeros):
        alias, view, remote = first.register_memory(tensor), source.to_view(), remote_of(target)
        first.unregister_memory(source)
        first.unregister_memory(alias)
        for call in (alias.to_view, alias.to_remote_buffer, lambda: first.write(view, remote)):
            with pytest.raises(RuntimeError, match="unregistered"):
                call()
        again = first.register_memory(tensor)
        second.unregister_memory(target)
        with pytest.raises(aiordma.RdmaError):
            first.write(again.to_view(), remote)
        assert not zeros.any()


def test_what_does_not_fit_is_refused() -> None:
    with both_with(torch.ones(64)) as (first, second, source, target, zeros):
        remote, small = remote_of(target), second.register_memory(torch.ones(1))
        with pytest.raises(TypeError, match="local_buffer"):
            first.read(source.to_view(), remote)
        with pytest.raises(TypeError, match="local_buffer"):
            first.write(target.to_view(), remote)
        with pytest.raises(TypeError, match="remote_buffer"):
            first.write(source.to_view(), b"")
        with pytest.raises(ValueError, match="does not belong to the connected peer"):
            first.write(source.to_view(), remote_of(source))
        with pytest.raises(ValueError, match="does not fit"):
            first.write(source.to_view(), remote_of(small))
        with pytest.raises(RuntimeError, match="already connected"):
            first.connect(second.bind())
        for data in (b"", bytes(20), b"nixl:1:x" + bytes(20), remote.serialize()[1:]):
            with pytest.raises(ValueError, match=r".+"):
                type(remote).deserialize(data)
        for wrong in (torch.ones(4, 4).T, torch.ones(0)):
            with pytest.raises(ValueError, match=r"contiguous|empty"):
                first.register_memory(wrong)
        for memory in (None, target):
            with pytest.raises(TypeError, match="not registered"):
                first.unregister_memory(memory)
        for timeout in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="timeout"):
                first.write(source.to_view(), remote, timeout=timeout)
        assert not zeros.any()


def test_ranks_are_connected_by_a_store() -> None:
    store = torch.distributed.HashStore()

    def rank(number: int) -> Any:
        places = {"store": store, "rank": number, "peer_rank": 1 - number}
        return api.new_transport_rank("aiordma", "cpu", host=ADDRESS, **places)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    with first, second:
        assert first.connected()
        assert second.connected()


def other_process(pipe: Any) -> None:
    """Be the peer: register zeros, and send them back when they have been written."""
    with made() as transport:
        pipe.send(transport.bind())
        transport.connect(pipe.recv())
        zeros = torch.zeros(1024)
        pipe.send(transport.register_memory(zeros).to_remote_buffer().serialize())
        pipe.recv()
        pipe.send(zeros.tolist())
        pipe.recv()


def test_another_process_is_written_to_and_its_death_is_an_error() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=other_process, args=(theirs,))
    process.start()
    try:
        with pipe, theirs, made() as transport:
            pipe.send(transport.bind())
            transport.connect(pipe.recv())
            source = transport.register_memory(torch.arange(1024.0))
            kind = type(source.to_remote_buffer())
            remote = kind.deserialize(pipe.recv())
            transport.write(source.to_view(), remote)
            pipe.send("written")
            assert pipe.recv() == list(range(1024))
            process.kill()
            process.join(SECONDS)
            with pytest.raises(aiordma.RdmaError):
                transport.write(source.to_view(), remote)
    finally:
        process.kill()
        process.join(SECONDS)
