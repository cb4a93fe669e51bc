"""Clients, schedulers and workers, unchanged, over rdma://."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import numpy
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker

from tests.devices import ADDRESS

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.cluster]


# The VM takes half a minute to start a process that imports distributed.
in_own_processes = pytest.mark.natively


def test_distributed_finds_the_backend() -> None:
    (entry,) = entry_points(group="distributed.comm.backends", name="rdma")
    assert entry.value == "aiordma.integrations.dask:RdmaBackend"


@pytest.mark.anyio
async def test_cluster_computes_over_rdma() -> None:
    # A host for each: without one, distributed looks for the address that leads to the Internet,
    # and the VM has none.
    settings: Any = {"host": ADDRESS, "dashboard": False, "dashboard_address": ":0"}
    async with (
        Scheduler(protocol="rdma", port=0, **settings) as scheduler,
        Worker(scheduler.address, name="a", nthreads=1, **settings) as a,
        Worker(scheduler.address, name="b", nthreads=1, **settings) as b,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        for each in (scheduler, a, b):
            assert each.address.startswith(f"rdma://{ADDRESS}:")
        array = client.submit(numpy.arange, 1 << 20, workers=["a"])
        doubled = client.submit(numpy.multiply, array, 2, workers=["b"])  # from a to b: 8 MiB
        back = client.submit(numpy.subtract, doubled, array, workers=["a"])  # from b to a
        assert (await back == numpy.arange(1 << 20)).all()  # to the client, by the scheduler
        assert [sum(log["keys"].values()) for log in b.transfer_incoming_log] == [8 << 20]
        assert [sum(log["keys"].values()) for log in a.transfer_incoming_log] == [8 << 20]
        scattered = await client.scatter(numpy.ones(1 << 17), broadcast=True)
        assert await client.submit(numpy.sum, scattered) == 1 << 17


@in_own_processes
def test_workers_of_their_own_processes_compute() -> None:
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            protocol="rdma",
            host=ADDRESS,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        arrays = [client.submit(numpy.full, 1 << 17, number, pure=False) for number in range(4)]
        assert sum(client.gather(client.map(numpy.sum, arrays))) == 6 << 17
        assert all(address.startswith("rdma://") for address in client.scheduler_info()["workers"])


@in_own_processes
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


@in_own_processes
def test_missing_distributed_is_explained() -> None:
    program = "import sys; sys.modules['distributed'] = None; import aiordma.integrations.dask"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'aiordma[dask]'" in done.stderr.splitlines()[-1]
