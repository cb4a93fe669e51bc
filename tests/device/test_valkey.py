"""Valkey's client on each device, before there is a connection."""

import subprocess
import sys

import anyio
import pytest

import aiordma
from aiordma.integrations.valkey import open_connection
from tests.conftest import LOOPS
from tests.devices import ADDRESS, DeviceUnderTest


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [each for each in LOOPS if each.id != "trio"])
async def test_only_a_device_without_immediate_data_is_refused(device: DeviceUnderTest) -> None:
    async with await aiordma.listen(ADDRESS) as listener, anyio.create_task_group() as group:

        async def reject() -> None:
            await (await anext(listener)).reject()

        group.start_soon(reject)
        if device.lacks("immediate"):
            with pytest.raises(aiordma.NotSupportedError, match="immediate data"):
                await open_connection(ADDRESS, listener.port)
            assert listener.statistics().connection_requests == 0
        else:
            with pytest.raises(aiordma.RejectedError):
                await open_connection(ADDRESS, listener.port)
        group.cancel_scope.cancel()


@pytest.mark.natively
def test_missing_client_of_valkeys_is_explained() -> None:
    program = "import sys; sys.modules['valkey'] = None; import aiordma.integrations.valkey"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'aiordma[valkey]'" in done.stderr.splitlines()[-1]
