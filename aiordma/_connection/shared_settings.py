"""The settings of a shared receive queue, and the checks against the device's limits."""

from dataclasses import dataclass

from aiordma._base.arguments import within_device
from aiordma._base.errors import NotSupportedError
from aiordma._runtime.hub import DeviceHub

MOST_WORK_REQUESTS = 2**32 - 1
"""The maximum of the C field max_wr. Devices have lower limits."""

DEFAULT_SGE = 8


@dataclass(frozen=True, slots=True)
class SharedReceiveSettings:
    """The settings of a shared receive queue; see `open_shared_receive`."""

    depth: int = 64
    max_sge: int | None = None
    buffers: int = 0
    buffer_size: int = 16384
    comp_vector: int = 0
    cqe: int | None = None

    def check(self, hub: DeviceHub) -> None:
        """Check the settings against the device's limits.

        Raises:
            NotSupportedError: the device has no shared receive queues.
            ValueError: an argument exceeds the device's limit; the message has both.
        """
        device, name = hub.attributes, hub.context.device_name
        if not device.max_srq:
            raise NotSupportedError(f"{name} has no shared receive queues (max_srq 0)")
        for argument, value, limit in (
            ("depth", self.depth, device.max_srq_wr),
            ("max_sge", self.parts(hub), device.max_srq_sge),
        ):
            within_device(value, argument, 1, limit, name)

    def parts(self, hub: DeviceHub) -> int:
        """Return the number of parts that a receive may have on this device."""
        if self.max_sge is not None:
            return self.max_sge
        return 1 if self.buffers else min(DEFAULT_SGE, hub.attributes.max_srq_sge)
