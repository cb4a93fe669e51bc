"""A Dask cluster whose client, scheduler and workers communicate over RDMA.

pip install 'aiordma[dask]', then python examples/dask_cluster.py 192.0.2.1
"""

import sys

import numpy
from dask.distributed import Client, LocalCluster


def make(mebibytes: int) -> numpy.ndarray:
    return numpy.ones(mebibytes << 17)


def main(host: str) -> None:
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(protocol="rdma", host=host, processes=False, **settings) as cluster,
        Client(cluster) as client,
    ):
        print(cluster.scheduler_address.partition(":")[0])
        first, second = (worker.address for worker in cluster.workers.values())
        array = client.submit(make, 16, workers=first)
        total = client.submit(numpy.sum, array, workers=second)  # the array moves by RDMA
        print(f"{total.result() * 8 / 2**20:g} MiB")


if __name__ == "__main__":
    main(sys.argv[1])
