"""Which provider an undertaking gets: the named one's, the one that reaches the address, else the
software device, which is said once."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from aiordma import (
    AddressError,
    DeviceRequirementError,
    NoDeviceError,
    NotSupportedError,
    RdmaConnectionError,
    RejectedError,
    RouteError,
    VerbsCallError,
)
from aiordma._base import provider
from aiordma._base.provider import (
    CLASSES,
    RDMA_CORE_VERSIONS,
    Provider,
    Requirement,
    real_devices_are_here,
    usual_provider,
)
from aiordma._runtime import device_choice
from aiordma._runtime.device_choice import with_device
from aiordma.verbs.device import no_such_device
from tests.internals import ffi

pytestmark = pytest.mark.anyio


async def choose(device: str, *arguments: Any) -> object:
    return await with_device(Requirement(device), *arguments)


REAL, BUILT_IN = Provider("real", None), Provider("built in", None)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Machine:
    """Whether rdma-core is installed, and the kernel has a device, which is rxe0."""

    installed = True
    present = True

    def require_device(self, name: str) -> None:
        if name != "rxe0":
            raise NoDeviceError(f"there is no {name!r}")

    def rdma_core(self) -> Provider:
        if not self.installed:
            raise NoDeviceError("not installed")
        return REAL


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.delenv("AIORDMA_DEVICE", raising=False)
    for module in (provider, device_choice):
        monkeypatch.setattr(module, "rdma_core", machine.rdma_core)
        monkeypatch.setattr(module, "software", lambda: BUILT_IN)
        monkeypatch.setattr(module, "real_devices_are_here", lambda: machine.present)
    monkeypatch.setattr(device_choice, "require_device", machine.require_device)
    monkeypatch.setattr(device_choice, "_logged", set())
    return machine


class Attempt:
    """Fails with the test's error, where the provider is the real one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.tried: list[Provider] = []

    async def __call__(self, provider: Provider) -> str:
        self.tried.append(provider)
        if provider is REAL and self.error is not None:
            raise self.error
        return provider.name


def unreached() -> AddressError:
    error = AddressError("no device is on the way there")
    error.is_unreached = True
    return error


def caused(error: RdmaConnectionError, call: str) -> RdmaConnectionError:
    error.__cause__ = VerbsCallError(errno.ENODEV, call)
    return error


UNREACHED = [
    unreached(),
    caused(AddressError("no such device"), "rdma_resolve_addr"),
    caused(RouteError("no way"), "rdma_resolve_route"),
    VerbsCallError(errno.ENODEV, "rdma_bind_addr"),
    NoDeviceError("/dev/infiniband/rdma_cm cannot be opened"),
]

OTHERS = [
    AddressError("the name does not resolve"),
    VerbsCallError(errno.EADDRINUSE, "rdma_bind_addr"),
    VerbsCallError(errno.ENODEV, "rdma_create_qp"),
    RouteError("no way"),
    caused(RdmaConnectionError("no queue pair"), "rdma_create_qp"),
    RejectedError("nobody listens", reason=8, private_data=b""),
    TimeoutError(),
]


async def test_a_real_device_that_reaches_the_address_serves_it(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = Attempt()
    with caplog.at_level(logging.DEBUG, "aiordma"):
        assert await choose("auto", "192.0.2.1", attempt) == "real"
    assert (attempt.tried, caplog.records) == ([REAL], [])


@pytest.mark.parametrize("error", UNREACHED, ids=lambda error: str(error)[:30])
async def test_what_no_real_device_reaches_the_software_device_serves(
    machine: Machine, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = Attempt(error)
    with caplog.at_level(logging.DEBUG, "aiordma"):
        for _ in range(2):
            assert await choose("auto", "192.0.2.1", attempt) == "built in"
    assert attempt.tried == [REAL, BUILT_IN] * 2
    (record,) = caplog.records  # once, whatever it serves later
    assert record.levelno == logging.WARNING
    for part in ("192.0.2.1", "software device", str(error)):
        assert part in record.message


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:30])
async def test_any_other_failure_is_the_callers(machine: Machine, error: Exception) -> None:
    attempt = Attempt(error)
    with pytest.raises(type(error)) as caught:
        await choose("auto", "192.0.2.1", attempt)
    assert caught.value is error
    assert attempt.tried == [REAL]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.77", "::1"])
async def test_a_loopback_address_is_the_software_devices(
    machine: Machine, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Linux binds such an address to a real device, but does not route connections to it.
    attempt = Attempt()
    with caplog.at_level(logging.DEBUG, "aiordma"):
        for _ in range(2):
            assert await choose("auto", address, attempt) == "built in"
    assert attempt.tried == [BUILT_IN] * 2
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert await choose("rxe0", address, attempt) == "real"
    assert await choose("auto", "fe80::1%2", attempt) == "real"


async def test_where_there_is_no_real_device_none_is_asked(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.present = False
    attempt = Attempt()
    with caplog.at_level(logging.DEBUG, "aiordma"):
        for _ in range(2):
            assert await choose("auto", "192.0.2.1", attempt) == "built in"
    assert attempt.tried == [BUILT_IN] * 2
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "no RDMA device" in record.message


async def test_without_rdma_core_a_real_device_is_none(machine: Machine) -> None:
    machine.installed = False
    attempt = Attempt()
    assert await choose("auto", "192.0.2.1", attempt) == "built in"
    assert attempt.tried == [BUILT_IN]


@pytest.mark.parametrize("from_environment", [False, True], ids=["argument", "AIORDMA_DEVICE"])
async def test_a_name_insists(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, from_environment: bool
) -> None:
    def device(name: str) -> str:
        if not from_environment:
            return name
        monkeypatch.setenv("AIORDMA_DEVICE", name)
        return "auto"

    assert await choose(device("software"), "192.0.2.1", Attempt()) == "built in"
    assert await choose(device("rxe0"), "192.0.2.1", Attempt()) == "real"
    with pytest.raises(AddressError):
        await choose(device("rxe0"), "192.0.2.1", Attempt(unreached()))
    machine.installed = False
    with pytest.raises(NoDeviceError, match="not installed"):
        await choose(device("rxe0"), "192.0.2.1", Attempt())
    assert await choose(device("software"), "192.0.2.1", Attempt()) == "built in"


def with_errno(number: int) -> AddressError:
    error = AddressError(f"resolving the address failed: {os.strerror(number)}")
    error.errno = number
    return error


@pytest.mark.parametrize(
    "error",
    [*UNREACHED, AddressError("that is on rxe0"), with_errno(errno.EINVAL)],
    ids=lambda error: str(error)[:30],
)
async def test_unknown_device_is_named(machine: Machine, error: Exception) -> None:
    with pytest.raises(NoDeviceError, match="there is no 'rxe9'") as unknown:
        await choose("rxe9", "192.0.2.1", Attempt(error))
    assert unknown.value.__cause__ is error
    with pytest.raises(type(error)) as caught:
        await choose("rxe0", "192.0.2.1", Attempt(error))
    assert caught.value is error


SHORTAGES = [with_errno(errno.EMFILE), VerbsCallError(errno.EMFILE, "rdma_create_event_channel")]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
async def test_a_shortage_is_not_an_unknown_device(machine: Machine, error: Exception) -> None:
    # Without descriptors, a list of the devices would be empty.
    with pytest.raises(type(error)) as caught:
        await choose("rxe9", "192.0.2.1", Attempt(error))
    assert caught.value is error


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_DEVICE", "rxe0")
    assert Requirement("siw0").name == "siw0"
    assert Requirement("auto").name == "rxe0"
    monkeypatch.setenv("AIORDMA_DEVICE", "")
    assert Requirement("auto").name is None
    monkeypatch.setenv("AIORDMA_DEVICE", "auto")
    assert Requirement("auto").name is None


def test_unknown_device_of_the_environment_names_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIORDMA_DEVICE", "rxe0")
    assert "AIORDMA_DEVICE names 'rxe0'" in no_such_device("rxe0", [])
    assert "AIORDMA_DEVICE" not in no_such_device("siw0", [])
    monkeypatch.delenv("AIORDMA_DEVICE")
    assert "AIORDMA_DEVICE" not in no_such_device("rxe0", ["siw0"])


def test_where_no_address_decides(machine: Machine) -> None:
    assert usual_provider() is REAL
    assert usual_provider("software") is BUILT_IN
    assert usual_provider("rxe0") is REAL
    machine.present = False
    assert usual_provider() is BUILT_IN
    assert usual_provider("rxe0") is REAL
    machine.present, machine.installed = True, False
    assert usual_provider() is BUILT_IN
    with pytest.raises(NoDeviceError):
        usual_provider("rxe0")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(provider, "_DEVICES", tmp_path / "infiniband")
    return tmp_path / "infiniband"


def test_the_kernel_says_whether_there_is_a_real_device(devices: Path) -> None:
    assert not real_devices_are_here()
    devices.mkdir()
    assert not real_devices_are_here()
    (devices / "rxe0").mkdir()
    assert real_devices_are_here()


def test_empty_provider_slot_names_its_provider() -> None:
    table = ffi.new("struct aiordma_provider *")
    with pytest.raises(NotSupportedError, match="has no rdma_establish: install rdma-core 23 or"):
        _ = Provider("the installed rdma-core", table, RDMA_CORE_VERSIONS).establish
    with pytest.raises(NotSupportedError, match=r"software device has no rdma_establish$"):
        _ = Provider("the built-in software device", table).establish


RDMA_CLASSES = [each for each in CLASSES if each != "software"]


@pytest.mark.promise("A required transport is never replaced")
@pytest.mark.parametrize("kind", RDMA_CLASSES)
@pytest.mark.parametrize("from_environment", [False, True], ids=["argument", "AIORDMA_DEVICE"])
async def test_rdma_classes_refuse_the_software_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str, from_environment: bool
) -> None:
    if from_environment:
        monkeypatch.setenv("AIORDMA_DEVICE", kind)
    device = "auto" if from_environment else kind
    said = f"AIORDMA_DEVICE={kind}" if from_environment else f'device="{kind}"'

    async def refused(address: str, error: Exception | None = None) -> str:
        attempt = Attempt(error)
        with pytest.raises(DeviceRequirementError) as caught:
            await choose(device, address, attempt)
        assert BUILT_IN not in attempt.tried
        assert str(caught.value).startswith(said)
        return str(caught.value)

    assert "loopback" in await refused("127.0.0.1")
    text = await refused("192.0.2.1", unreached())
    assert "no device is on the way there" in text
    assert "aiordma doctor 192.0.2.1" in text
    assert await choose(device, "192.0.2.1", Attempt()) == "real"
    assert usual_provider(device) is REAL
    machine.present = False
    assert "has no RDMA device" in await refused("192.0.2.1")


@pytest.mark.promise("A required transport is never replaced")
async def test_device_of_another_kind_is_not_replaced(machine: Machine) -> None:
    attempt = Attempt(DeviceRequirementError("it is iWARP"))
    with pytest.raises(DeviceRequirementError, match="it is iWARP"):
        await choose("auto", "192.0.2.1", attempt)
    assert attempt.tried == [REAL]


def test_device_argument_is_checked() -> None:
    for wrong in (1, "", None):
        with pytest.raises((TypeError, ValueError), match="device"):
            Requirement(wrong, "connect")


PERMITTED = {
    "auto": {"software", "infiniband", "roce", "iwarp", "other"},
    "rdma": {"infiniband", "roce", "iwarp", "other"},
    "infiniband": {"infiniband"},
    "roce": {"roce"},
    "iwarp": {"iwarp"},
}


@pytest.mark.parametrize("device", PERMITTED)
def test_classes_permit_kinds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORDMA_DEVICE", raising=False)
    requirement = Requirement(device)
    for kind in PERMITTED["auto"]:
        assert requirement.permits("dev0", kind) is (kind in PERMITTED[device])
        if kind in PERMITTED[device]:
            requirement.check("dev0", kind, "listen")
        else:
            with pytest.raises(DeviceRequirementError, match=f"^listen: .*dev0.*{kind}"):
                requirement.check("dev0", kind, "listen")


def test_names_permit_one_device() -> None:
    for name, kind in (("software", "software"), ("rxe0", "roce")):
        assert Requirement(name).permits(name, kind)
        assert not Requirement(name).permits("siw0", "iwarp")
        Requirement(name).check(name, kind, "listen")
        with pytest.raises(AddressError, match=f"^listen: siw0 .*, not {name}, which was asked"):
            Requirement(name).check("siw0", "iwarp", "listen")
