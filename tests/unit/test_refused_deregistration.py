"""Memory that the driver refuses to deregister stays in place: the device can access it."""

import errno
import gc
import weakref
from typing import Any

import pytest

from aiordma import Access
from aiordma._base.errors import BusyError, VerbsCallError
from aiordma.testing import software_objects
from aiordma.verbs import Device, MemoryRegion, ProtectionDomain
from aiordma.verbs.memory import OUTLIVING, retire_all
from tests.unit.software_device import nothing_left

pytestmark = pytest.mark.natively


class Buffer(bytearray):
    """A bytearray that can be referenced weakly."""


class Refusing:
    """A provider that refuses to deregister memory while `error` is set."""

    def __init__(self, table: Any, error: int) -> None:
        self._table = table
        self.error = error

    def dereg_mr(self, pointer: Any) -> int:
        return self.error or int(self._table.dereg_mr(pointer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def refuse(domain: ProtectionDomain, error: int) -> Refusing:
    refusing = Refusing(domain.provider, error)
    domain.provider = refusing  # type: ignore[assignment]
    return refusing


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EINVAL], ids=["others", "rxe"])
def test_region_with_a_bound_window_stays_open_until_it_can_be_closed(error: int) -> None:
    with nothing_left(), Device("software").open() as context, context.alloc_pd() as domain:
        driver = refuse(domain, error)
        buffer = Buffer(64)
        region = MemoryRegion(domain, buffer, Access.LOCAL_WRITE | Access.MW_BIND)
        memory = weakref.ref(buffer)
        for _ in range(2):
            with pytest.raises(BusyError, match="close or invalidate the window, then repeat"):
                region.close()
            assert not region.closed
        del buffer
        gc.collect()
        assert memory() is not None
        assert len(bytes(region[:])) == 64  # it can still be used
        driver.error = 0
        kept = len(OUTLIVING)
        region.close()
        assert (region.closed, len(OUTLIVING)) == (True, kept - 1)
        gc.collect()
        assert memory() is None


def test_other_refusals_keep_the_region_open() -> None:
    with nothing_left(), Device("software").open() as context, context.alloc_pd() as domain:
        driver = refuse(domain, errno.EIO)
        region = MemoryRegion(domain, bytearray(64))
        with pytest.raises(VerbsCallError, match="ibv_dereg_mr: Input/output error"):
            region.close()
        assert not region.closed
        driver.error = 0
        region.close()


@pytest.mark.filterwarnings("ignore:unclosed <:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_collected_region_that_is_not_deregistered_keeps_its_memory() -> None:
    buffer = bytearray(64)
    raw: list[tuple[Any, Any]] = []

    def forget() -> None:
        domain = ProtectionDomain(Device("software").open())
        driver = refuse(domain, errno.EBUSY)
        region = MemoryRegion(domain, buffer, Access.REMOTE_WRITE)
        raw.append((driver._table, (region.pointer, domain.pointer, domain.context.pointer)))

    before = software_objects()
    forget()
    gc.collect()
    with pytest.raises(BufferError):
        buffer.append(0)  # it is still exported
    (table, (region, domain, context)) = raw[0]
    assert table.dereg_mr(region) == table.dealloc_pd(domain) == table.close_device(context) == 0
    assert software_objects() == before


def test_region_that_waits_for_siw_does_so_at_its_later_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[None] = []
    monkeypatch.setattr("aiordma.verbs.memory._outwait_receiving", lambda: waits.append(None))
    with nothing_left(), Device("software").open() as context, context.alloc_pd() as domain:
        driver = refuse(domain, errno.EBUSY)
        region = MemoryRegion(domain, bytearray(64), Access.REMOTE_WRITE)
        region._outwaits = True
        with pytest.raises(VerbsCallError):
            retire_all([region])
        waits.clear()
        driver.error = 0
        region.close()
        assert len(waits) == 1
