"""Clients, schedulers and workers, unchanged, over rdma://."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points

import numpy
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker

from tests.devices import ADDRESS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_distributed_finds_the_backend() -> None:
    (entry,) = entry_points(group="distributed.comm.backends", name="rdma")
    assert entry.value == "aiordma.integrations.dask:RdmaBackend"


@pytest.mark.anyio
async def test_cluster_computes_over_rdma() -> None:
    async with (
        Scheduler(protocol="rdma", host=ADDRESS, port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, name="a", nthreads=1, dashboard=False) as a,
        Worker(scheduler.address, name="b", nthreads=1, dashboard=False) as b,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        assert scheduler.address.startswith(f"rdma://{ADDRESS}:")
        assert {a.address.partition(":")[0], b.address.partition(":")[0]} == {"rdma"}
        array = client.submit(numpy.arange, 1 << 20, workers=["a"])
        total = client.submit(numpy.sum, array, workers=["b"])
        assert await total == sum(range(1 << 20))
        assert (await array)[-1] == (1 << 20) - 1  # to the client, by the scheduler
        scattered = await client.scatter(numpy.ones(1 << 17), broadcast=True)
        assert await client.submit(numpy.sum, scattered) == 1 << 17


def test_workers_of_their_own_processes_compute() -> None:
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            protocol="rdma",
            host=ADDRESS,
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        arrays = [client.submit(numpy.full, 1 << 17, number, pure=False) for number in range(4)]
        assert sum(client.gather(client.map(numpy.sum, arrays))) == 6 << 17
        assert all(address.startswith("rdma://") for address in client.scheduler_info()["workers"])


def test_command_line_starts_a_cluster() -> None:
    dask = [sys.executable, "-m", "dask"]
    arguments = ["--protocol", "rdma", "--host", ADDRESS, "--port", "0", "--no-dashboard"]
    with subprocess.Popen(
        [*dask, "scheduler", *arguments], stderr=subprocess.PIPE, text=True
    ) as scheduler:
        assert scheduler.stderr is not None
        found = None
        for line in scheduler.stderr:
            if found := re.search(r"Scheduler at:\s+(rdma://\S+)", line):
                break
        assert found
        workers = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", "60"]
        worker = subprocess.Popen([*dask, "worker", found[1], *workers], stderr=subprocess.DEVNULL)
        try:
            with Client(found[1], timeout=60) as client:
                assert client.submit(os.getpid).result(timeout=60) == worker.pid
        finally:
            # One after the other: a worker that loses its scheduler while it handles a signal may
            # not end, over tcp:// neither.
            for each in (worker, scheduler):
                each.terminate()
                each.wait(30)


def test_missing_distributed_is_explained() -> None:
    program = "import sys; sys.modules['distributed'] = None; import aiordma.integrations.dask"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'aiordma[dask]'" in done.stderr.splitlines()[-1]
