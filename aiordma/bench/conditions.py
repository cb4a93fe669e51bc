"""The conditions of a measurement: perftest's options, and why some cannot apply (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiordma.bench.workload import Workload

__all__ = ("Conditions",)

MOST_QUEUE_PAIRS = 1024


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a workload is run.

    Attributes:
        iterations: operations of each queue pair; None: the measurement lasts for its seconds.
        queue_pairs: connections (or datagram sockets) that run the workload at the same time.
        tos: the type of service of connections.
        gid_index: the GID of datagrams, by its index in the port's table.
        service_level: the service level of datagrams.
    """

    iterations: int | None = None
    queue_pairs: int = 1
    tos: int | None = None
    gid_index: int | None = None
    service_level: int | None = None

    def check(self, works: Sequence[Workload]) -> None:
        """Check that the conditions can apply to all of the workloads.

        Raises:
            ValueError: a value is out of range, or a condition cannot apply. The text has the name
                of perftest's option, the reason, and what to do.
        """
        if not 1 <= self.queue_pairs <= MOST_QUEUE_PAIRS:
            raise ValueError(f"-q {self.queue_pairs} is not in 1..{MOST_QUEUE_PAIRS}")
        _in_range("-T", self.tos, 255)
        _in_range("-x", self.gid_index, 255)
        _in_range("-S", self.service_level, 15)
        for work in works:
            if self.iterations is not None and self.iterations < work.depth:
                raise ValueError(
                    f"-n {self.iterations}: {work.name} has {work.depth} operations in flight: "
                    "give at least as many iterations, or a smaller --depth"
                )
            if work.operation == "datagrams":
                self._check_datagrams()
            else:
                self._check_connections(work)

    def _check_datagrams(self) -> None:
        if self.tos is not None:
            raise ValueError(
                "-T: rdma_cm sets the type of service of connections, and datagrams have none: "
                "use -S, or choose other operations with -o"
            )

    def _check_connections(self, work: Workload) -> None:
        if self.gid_index is not None:
            raise ValueError(
                f"-x: {work.operation} connects with rdma_cm (perftest's -R), which chooses the "
                "GID of the local address, as perftest with -R does: connect to an address of the "
                "network that you mean (`aiordma info` lists each GID with its address). "
                "Datagrams take a GID index: -o datagrams"
            )
        if self.service_level is not None:
            raise ValueError(
                f"-S: {work.operation} connects with rdma_cm (perftest's -R), which takes the "
                "service level from the route. On RoCE, give the type of service with -T; on "
                "InfiniBand, the subnet manager assigns the level. Datagrams take one: -o datagrams"
            )


def _in_range(option: str, value: int | None, most: int) -> None:
    if value is not None and not 0 <= value <= most:
        raise ValueError(f"{option} {value} is not in 0..{most}")
