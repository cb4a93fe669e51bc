"""`flush_timeout`: how long a close waits for a device that does not flush."""

import anyio
import pytest

import aiordma
from aiordma.testing import Faults
from tests.device.players import OWN_RECEIVES, connected
from tests.internals import Phase, endpoint_of

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

NEVER = 3600.0


@pytest.mark.promise(
    "Every posted request completes or fails",
    "Every wait has a bound, except waits for the peer's program",
)
@pytest.mark.parametrize("seconds", [0.0, 0.01])
async def test_close_outlasts_a_device_that_never_flushes(faults: Faults, seconds: float) -> None:
    options = OWN_RECEIVES | {"options": aiordma.ConnectionOptions(flush_timeout=seconds)}
    async with connected(server=options) as (_, server):
        receive = server.post_recv(server.register(bytearray(8)))
        faults.delay_completions(NEVER)
        with anyio.fail_after(60):
            await server.aclose()
        with pytest.raises(aiordma.FlushedError):
            await receive


@pytest.mark.promise("Every posted request completes or fails")
@pytest.mark.parametrize(
    ("seconds", "late", "phase"),
    [(NEVER, 0.5, Phase.FLUSHING), (0.01, 3.0, Phase.DESTROYING)],
)
async def test_late_flush_ends_requests_if_close_waits(
    faults: Faults, seconds: float, late: float, phase: Phase
) -> None:
    """A device that flushes late: its completion ends the request, if close waits for it."""
    options = OWN_RECEIVES | {"options": aiordma.ConnectionOptions(flush_timeout=seconds)}
    async with connected(server=options) as (_, server):
        teardown, phases = endpoint_of(server).teardown, []
        receive = server.post_recv(server.register(bytearray(8)))
        receive.add_done_callback(lambda _: phases.append(teardown.phase))
        faults.delay_completions(late)
        with anyio.fail_after(60):
            await server.aclose()
        assert phases == [phase]
        with pytest.raises(aiordma.FlushedError):
            await receive
