"""Enumerations: the values are C's, and what a newer device says is no error."""

import enum
from types import ModuleType

import pytest

from aiordma._base import enums
from aiordma.verbs import capabilities
from tests.internals import lib

OPEN = (
    enums.AtomicCapability,
    enums.LinkLayer,
    enums.Mtu,
    enums.PortState,
    enums.Transport,
    enums.WorkCompletionOpcode,
)

# A few that the wire and the kernel's ABI fix for good (IBTA 11.6.2, rdma_user_cm.h).
FIXED: dict[int, int] = {
    enums.WorkCompletionStatus.SUCCESS: 0,
    enums.WorkCompletionStatus.WR_FLUSH_ERR: 5,
    enums.WorkCompletionStatus.REM_ACCESS_ERR: 10,
    enums.WorkCompletionStatus.RNR_RETRY_EXC_ERR: 13,
    enums.WorkCompletionOpcode.RECV: 128,
    enums.WorkRequestOpcode.RDMA_READ: 4,
    enums.QueuePairState.RTS: 3,
    enums.QueuePairType.RC: 2,
    enums.Access.REMOTE_ATOMIC: 8,
    enums.PortSpace.TCP: 0x0106,
    enums.CmEventType.ESTABLISHED: 9,
}


@pytest.mark.parametrize("member", FIXED, ids=str)
def test_a_value_is_the_wires(member: int) -> None:
    assert member == FIXED[member]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in (enums, capabilities)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and kind.__module__ != "enum"
    ],
    ids=str,
)
def test_no_two_names_share_a_value(module: ModuleType, name: str) -> None:
    members = getattr(module, name).__members__
    assert len(set(members.values())) == len(members)


def test_completion_statuses_are_all_that_c_has() -> None:
    known = {name.removeprefix("IBV_WC_"): getattr(lib, name) for name in dir(lib)}
    for status in enums.WorkCompletionStatus:
        assert known[status.name] == status
    assert list(enums.WorkCompletionStatus) == list(range(len(enums.WorkCompletionStatus)))


@pytest.mark.parametrize("open_enum", OPEN)
def test_a_value_of_a_newer_device_is_kept(open_enum: type[enum.IntEnum]) -> None:
    unknown = open_enum(77)
    assert unknown == 77
    assert unknown.name == "UNKNOWN_77"
    assert 77 not in list(open_enum)
    with pytest.raises(ValueError, match="seven"):
        open_enum("seven")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mtu", "size"), list(zip(enums.Mtu, (256, 512, 1024, 2048, 4096), strict=True))
)
def test_an_mtu_code_is_a_number_of_bytes(mtu: enums.Mtu, size: int) -> None:
    assert mtu.bytes == size
    assert mtu.name == f"MTU_{size}"
