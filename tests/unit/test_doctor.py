"""The checks of `aiordma doctor`: each finding from a state of the machine."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiordma.cli import doctor, system
from aiordma.cli.checks import Finding, check, usual_interface, works
from aiordma.cli.containers import container_of
from aiordma.cli.system import (
    AddressUse,
    DeviceState,
    GidState,
    Interface,
    PortState,
    System,
    inspect,
)
from tests.internals import CLASSES

ETH = Interface("eth0", 1500, True, addresses=("192.0.2.1",))
LO = Interface("lo", 65536, True, is_loopback=True, addresses=("127.0.0.1",))
SOFTWARE = DeviceState("software", "software", loopback="ok")
GIDS = (GidState(0, "ROCE_V1", "192.0.2.1"), GidState(1, "ROCE_V2", "192.0.2.1"))
PORT = PortState(1, "ACTIVE", 1024, GIDS, "eth0")
RXE = DeviceState("rxe0", "roce", (PORT,), loopback="ok")
SIW = DeviceState("siw0", "iwarp", (replace(PORT, gids=()),), loopback="ok")
GOOD = System(
    libraries=(("libibverbs.so.1", None), ("librdmacm.so.1", None)),
    has_verbs=True,
    has_manager=True,
    kernel_devices=("rxe0",),
    nodes=(("/dev/infiniband/rdma_cm", "ok"), ("/dev/infiniband/uverbs0", "ok")),
    loaded_modules=("rdma_rxe", "rdma_ucm", "ib_uverbs"),
    devices=(RXE, SOFTWARE),
    interfaces=(ETH, LO),
    uses=(AddressUse("192.0.2.1", "rxe0"),),
    has_shared_namespaces=True,
)


def found(state: System, subject: str, level: str) -> Finding:
    """Return the only finding of this subject and level."""
    (finding,) = [e for e in check(state) if (e.subject, e.level) == (subject, level)]
    return finding


def with_rxe(**changes: Any) -> System:
    return replace(GOOD, devices=(replace(RXE, **changes), SOFTWARE))


def with_port(kind: str = "roce", **changes: Any) -> System:
    return with_rxe(kind=kind, ports=(replace(PORT, **changes),))


def test_good_machine_has_nothing_to_mend() -> None:
    findings = check(GOOD)
    assert works(findings)
    assert {each.level for each in findings} == {"ok", "note"}
    assert [each.subject for each in findings if each.level == "note"] == ["mtu"]
    assert [each for each in findings if each.fix] == []


MISSING = (("/dev/infiniband/uverbs0", "missing"),)
DENIED = (("/dev/infiniband/uverbs0", "denied"),)
NO_MANAGER = replace(GOOD, has_manager=False, container="lxc")
SMALL = replace(with_port(active_mtu=512), interfaces=(replace(ETH, mtu=1000), LO))
DOWN = replace(GOOD, interfaces=(replace(ETH, is_up=False), LO))
BARE = replace(GOOD, interfaces=(replace(ETH, addresses=()), LO))
IN_PODMAN = replace(GOOD, has_shared_namespaces=False, container="podman")
NO_LIBRARY = replace(GOOD, libraries=(("libibverbs.so.1", "no such file"),))
ZONED = replace(
    with_port(gids=(GidState(0, "ROCE_V2", "fe80::1"),)),
    interfaces=(replace(ETH, addresses=("fe80::1%eth0",)),),
)
FINDINGS: list[tuple[System, str, str, str, str]] = [  # state, level, subject; in text, in command
    (NO_LIBRARY, "error", "libraries", "libibverbs.so.1: no such file", "libibverbs1"),
    (replace(GOOD, has_manager=False), "error", "kernel", "", "modprobe -a rdma_ucm"),
    (NO_MANAGER, "error", "kernel", "", "modprobe -a rdma_ucm   # on the host"),
    (replace(NO_MANAGER, missing_modules=("rdma_ucm",)), "error", "kernel", "", "; on the host"),
    (replace(GOOD, devices=(SOFTWARE,), has_rdma_tool=False), "error", "devices", "iproute2", ""),
    (replace(DOWN, devices=(SOFTWARE,)), "error", "devices", "no network interface", "ip link"),
    (with_rxe(error="EACCES"), "error", "devices", "EACCES", ""),
    (
        replace(GOOD, nodes=MISSING, container="docker"),
        "error",
        "nodes",
        "",
        "--device=/dev/inf",
    ),
    (replace(GOOD, nodes=MISSING), "error", "nodes", "", "udevadm"),
    # A chmod would end with the next start.
    (replace(GOOD, nodes=DENIED), "error", "nodes", "infiniband/uverbs0", "/etc/udev/rules.d/"),
    (with_port(state="DOWN"), "error", "link", "DOWN", "ethtool eth0"),
    (with_port("infiniband", state="INIT"), "error", "link", "subnet manager", "sminfo"),
    (DOWN, "error", "link", "", "ip link set eth0 up"),
    (GOOD, "note", "mtu", "", "9000"),
    (with_port(active_mtu=4096), "ok", "mtu", "4096", ""),
    (SMALL, "warning", "mtu", "is less than", ""),
    (with_port(gids=()), "warning", "gids", "192.0.2.1", ""),
    (BARE, "error", "gids", "", "ip address add"),
    (ZONED, "ok", "gids", "fe80::1", ""),
    (IN_PODMAN, "note", "namespaces", "", "netns"),
    (IN_PODMAN, "note", "container", "podman", ""),
    (with_port(interface=None), "warning", "namespaces", "namespace", ""),
    (with_rxe(loopback="no answer"), "error", "loopback", "no answer", ""),
    (replace(GOOD, wanted="rxe77"), "error", "environment", "DEVICE=rxe77", "unset AIORDMA_DEVICE"),
]


@pytest.mark.parametrize(("state", "level", "subject", "text", "command"), FINDINGS)
def test_finding_says_what_and_what_to_do(
    state: System, level: str, subject: str, text: str, command: str
) -> None:
    finding = found(state, subject, level)
    assert text in finding.text
    assert command in finding.command


def test_kernel_without_the_module_is_not_mended() -> None:
    state = replace(GOOD, has_verbs=False, missing_modules=("ib_uverbs",))
    finding = found(state, "kernel", "error")
    assert "no module ib_uverbs" in finding.text
    assert "linux-image" in finding.command
    assert finding.fix == ()


def test_no_device_is_mended_by_soft_roce() -> None:
    finding = found(replace(GOOD, devices=(SOFTWARE,)), "devices", "error")
    assert finding.fix == (
        ("modprobe", "-a", "rdma_rxe", "rdma_ucm"),
        ("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"),
    )
    assert "software device serves every address" in finding.text


def test_kernel_without_loadable_modules_is_asked_for_soft_roce() -> None:
    """It may have rdma_rxe built in, which only the attempt shows."""
    state = replace(GOOD, devices=(SOFTWARE,), missing_modules=("rdma_rxe",), is_modular=False)
    finding = found(state, "devices", "error")
    assert finding.fix == (("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"),)
    assert finding.command == "rdma link add rxe0 type rxe netdev eth0"
    assert "built in" in finding.text


def test_soft_roce_prefers_an_interface_of_the_machine() -> None:
    docker = Interface("docker0", 1500, True, addresses=("172.17.0.1",))
    assert usual_interface((docker, ETH)) == ETH
    assert usual_interface((docker,)) == docker
    assert usual_interface((replace(ETH, addresses=("fe80::1%eth0",)),)) is None


@pytest.mark.parametrize("kind", ["docker", "podman", "kubernetes", "lxc", "systemd-nspawn"])
def test_each_kind_of_container_has_its_commands(kind: str) -> None:
    nodes = (("/dev/infiniband/uverbs0", "missing"),)
    state = replace(GOOD, nodes=nodes, memlock=1 << 16, container=kind)
    commands = (found(state, "nodes", "error").command, found(state, "memlock", "warning").command)
    tool = {"kubernetes": "kubectl", "lxc": "/var/lib/lxc/"}.get(kind, kind)
    assert [command for command in commands if tool not in command] == []


def test_low_memlock_is_a_warning_without_the_capability() -> None:
    state = replace(GOOD, memlock=8 << 20)
    finding = found(state, "memlock", "warning")
    assert "8192 KiB" in finding.text
    assert "/etc/security/limits.d/" in finding.command
    note = found(replace(state, has_ipc_lock=True), "memlock", "note")
    assert note.command == ""
    assert "CAP_IPC_LOCK" in note.text
    assert found(replace(GOOD, memlock=1 << 30), "memlock", "ok")


def test_each_port_is_checked_and_one_active_port_is_enough() -> None:
    second = PortState(2, "DOWN", 1024, (), "eth1")
    state = with_rxe(ports=(PORT, second))
    assert works(check(state))
    assert "port 1 is ACTIVE" in found(state, "link", "ok").text
    assert "port 2 is DOWN" in found(state, "link", "warning").text
    bare = Interface("eth1", 1500, True)
    state = replace(state, interfaces=(ETH, bare, LO))
    assert "rxe0/2: its interface eth1 has no IP" in found(state, "gids", "error").text


def test_iwarp_needs_tcp_diag() -> None:
    state = replace(GOOD, devices=(SIW, SOFTWARE))
    assert found(state, "tcp_diag", "warning").fix == (("modprobe", "tcp_diag"),)
    absent = replace(state, missing_modules=("tcp_diag",))
    assert found(absent, "tcp_diag", "note").fix == ()
    loaded = replace(state, loaded_modules=("tcp_diag",))
    assert [each for each in check(loaded) if each.subject == "tcp_diag"] == []


def test_skipped_loopback_is_no_finding() -> None:
    state = replace(GOOD, devices=(replace(RXE, loopback=None),))
    assert [each for each in check(state) if each.subject == "loopback"] == []


def of_addresses(state: System) -> list[Finding]:
    return [each for each in check(state) if each.subject == "address"]


def test_address_findings_say_which_device_and_why() -> None:
    uses = (
        AddressUse("192.0.2.1", "rxe0"),
        AddressUse("127.0.0.1", "software", "no route"),
        AddressUse("192.0.2.7", "software", "unreached", is_local=False),
        AddressUse("192.0.2.8", None, "timed out", is_local=False),
    )
    levels = [each.level for each in of_addresses(replace(GOOD, uses=uses))]
    assert levels == ["ok", "note", "warning", "error"]
    required = replace(GOOD, uses=uses[1:2], wanted="rdma")
    assert "AIORDMA_DEVICE=rdma refuses it" in found(required, "address", "warning").text


def test_address_of_a_real_device_has_its_gid_and_its_interface() -> None:
    peer = AddressUse("192.0.2.9", "rxe0", is_local=False, source="192.0.2.1")
    state = replace(GOOD, uses=(AddressUse("192.0.2.1", "rxe0"), peer))
    assert [each.text for each in of_addresses(state)] == [
        "192.0.2.1 is served on rxe0: an address of eth0, GID 1 of port 1, ROCE_V2",
        "192.0.2.9 is served through rxe0: the route begins at 192.0.2.1, which is an address of "
        "eth0, GID 1 of port 1, ROCE_V2",
    ]
    bare = replace(with_port(gids=()), uses=state.uses[:1])
    assert "there is no GID for it" in found(bare, "address", "ok").text
    iwarp = replace(state, devices=(replace(SIW, name="rxe0"),), uses=state.uses[:1])
    assert "iWARP uses IP addresses" in found(iwarp, "address", "ok").text


def test_address_on_infiniband_has_the_first_gid_of_its_port() -> None:
    gids = (GidState(0, "INFINIBAND", ""), GidState(1, "INFINIBAND", ""))
    ports = (PortState(1, interface="ib0"), PortState(2, gids=gids, interface="eth0"))
    state = with_rxe(kind="infiniband", ports=ports)
    assert "GID 0 of port 2, INFINIBAND" in found(state, "address", "ok").text


def test_variables_with_possible_values_are_no_finding() -> None:
    states = [replace(GOOD, wanted=kind) for kind in ("", *CLASSES)]
    states += [replace(GOOD, wanted=name) for name in ("", "auto", "rxe0", "software")]
    subjects = {each.subject for state in states for each in check(state)}
    assert "environment" not in subjects


def test_each_warning_and_error_has_a_command() -> None:
    nodes = (("/dev/infiniband/rdma_cm", "missing"), ("/dev/infiniband/uverbs0", "denied"))
    states = [
        System(),
        System(interfaces=(ETH,)),
        System(has_verbs=True, missing_modules=("rdma_ucm", "rdma_rxe")),
        replace(GOOD, libraries=(("libibverbs.so.1", "no such file"),), nodes=nodes, memlock=1),
        replace(GOOD, nodes=nodes, container="docker", memlock=1),
        replace(GOOD, devices=(SIW,), wanted="dance"),
        replace(GOOD, interfaces=(replace(ETH, is_up=False),)),
        replace(GOOD, interfaces=(replace(ETH, addresses=()),)),
        replace(GOOD, has_shared_namespaces=False, wanted="roce"),
        replace(GOOD, uses=(AddressUse("192.0.2.8", None, "timed out", is_local=False),)),
        replace(GOOD, uses=(AddressUse("192.0.2.8", "software", "no route", is_local=False),)),
        replace(GOOD, uses=(AddressUse("192.0.2.1", "software", "none"),), wanted="rdma"),
        with_rxe(error="EACCES"),
        with_rxe(loopback="no answer"),
        with_port(active_mtu=512, gids=()),
        *(with_port(kind, state="DOWN") for kind in ("roce", "infiniband")),
        with_port(state="DOWN", interface=None),
    ]
    findings = [finding for state in states for finding in check(state)]
    assert {each.level for each in findings} == {"ok", "note", "warning", "error"}
    bare = [each for each in findings if each.level in ("warning", "error") and not each.command]
    assert bare == []


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("var/run/secrets/kubernetes.io/serviceaccount", "", "kubernetes"),
        ("dev/lxd/sock", "", "lxc"),
        ("run/systemd/container", "systemd-nspawn\n", "systemd-nspawn"),
        ("run/systemd/container", "lxc\n", "lxc"),
        ("run/systemd/container", "other\n", "container"),
        ("proc/1/environ", "PATH=/bin\0container=lxc\0", "lxc"),
        ("proc/1/environ", "PATH=/bin\0", None),
        ("proc/1/cgroup", "0::/kubepods.slice/pod1\n", "kubernetes"),
        ("proc/1/cgroup", "0::/system.slice/docker-1234.scope\n", "docker"),
        ("proc/1/cgroup", "0::/machine.slice/libpod-1234.scope\n", "podman"),
        ("proc/1/cgroup", "0::/init.scope\n", None),
    ],
)
def test_container_is_recognized(
    file: str, text: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert container_of(tmp_path) == kind


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("KUBERNETES_SERVICE_HOST", "192.0.2.1", "kubernetes"),
        ("container", "podman", "podman"),
    ],
)
def test_container_is_recognized_by_a_variable(
    variable: str, value: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv(variable, value)
    assert container_of(tmp_path) == kind


@pytest.mark.parametrize(
    ("mask", "users", "has"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("0000000000004000", "0 0 4294967295", True),
        ("00000000a80425fb", "0 0 4294967295", False),  # root in a container of docker
        ("000001ffffffffff", "0 1000 1\n1 100000 65536", False),  # without root
    ],
)
def test_capability_counts_in_the_first_user_namespace_only(
    mask: str, users: str, has: bool, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{mask}\n")
    (tmp_path / "proc/self/uid_map").write_text(users)
    assert inspect(tmp_path).has_ipc_lock is has


def fake_root(tmp_path: Path) -> Path:
    for name in ("infiniband/rxe0", "infiniband_verbs/uverbs0", "misc/rdma_cm", "net/eth7"):
        (tmp_path / "sys/class" / name).mkdir(parents=True)
    (tmp_path / "sys/class/net/eth7/flags").write_text("0x1003\n")
    (tmp_path / "sys/class/net/eth7/mtu").write_text("4200\n")
    (tmp_path / "sys/class/net/bonding_masters").write_text("")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").write_text("")
    parameters = tmp_path / "sys/module/ib_core/parameters"
    parameters.mkdir(parents=True)
    (parameters / "netns_mode").write_text("N\n")
    (tmp_path / "sys/module/rdma_rxe").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").write_text("")
    return tmp_path


def test_inspection_reads_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    state = inspect(fake_root(tmp_path))
    assert state.kernel_devices == ("rxe0",)
    assert state.has_verbs
    assert state.has_manager
    assert dict(state.nodes) == {
        "/dev/infiniband/rdma_cm": "missing",
        "/dev/infiniband/uverbs0": "ok",
    }
    assert state.has_shared_namespaces is False
    assert state.container == "podman"
    assert "rdma_rxe" in state.loaded_modules
    assert [(each.name, each.mtu, each.is_up) for each in state.interfaces] == [
        ("eth7", 4200, True)
    ]
    assert state.devices[-1].name == "software"


def test_inspection_finds_this_machines_loopback() -> None:
    (lo,) = [each for each in inspect().interfaces if each.is_loopback]
    assert "127.0.0.1" in lo.addresses


def test_inspection_of_nothing_is_an_empty_system(tmp_path: Path) -> None:
    state = inspect(tmp_path)
    assert (state.kernel_devices, state.nodes, state.interfaces) == ((), (), ())
    assert state.has_shared_namespaces is None


def test_fix_runs_each_safe_command_once_and_stops_at_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **_keywords: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        refused = command[0] == "rdma"
        return subprocess.CompletedProcess(command, int(refused), "", "not permitted\n" * refused)

    monkeypatch.setattr(subprocess, "run", run)
    load, link, last = ("modprobe", "a"), ("rdma", "link"), ("modprobe", "b")
    findings = [
        Finding("error", "kernel", "", fix=(load,)),
        Finding("error", "devices", "", fix=(load, link, last)),
    ]
    assert doctor._mend(findings)
    assert ran == [load, link]
    assert "rdma link failed: not permitted" in capsys.readouterr().err


def test_fix_runs_nothing_without_a_safe_command(capsys: pytest.CaptureFixture[str]) -> None:
    dangerous = Finding("error", "link", "eth0 is down", "ip link set eth0 up")
    assert not doctor._mend([dangerous])
    assert "nothing that --fix may mend" in capsys.readouterr().err


def test_fixes_only_load_modules_and_add_links() -> None:
    states = [
        System(),
        System(interfaces=(ETH,)),
        replace(GOOD, devices=(SIW,)),
        replace(GOOD, has_verbs=False),
    ]
    fixes = {command[:3] for state in states for each in check(state) for command in each.fix}
    assert fixes
    assert all(each[0] == "modprobe" or each == ("rdma", "link", "add") for each in fixes)


def test_modules_are_missing_without_modprobe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", refuse)
    assert not system._is_available(Path("/nowhere"), "rdma_rxe")


def test_exit_status_and_json_agree() -> None:
    done = run("doctor", "--json", "--no-loopback")
    shown = json.loads(done.stdout)
    assert done.returncode == (0 if shown["works"] else 1)
    assert {each["subject"] for each in shown["findings"]} >= {"libraries", "kernel", "memlock"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = "from aiordma.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", command, *words], capture_output=True, text=True, timeout=60
    )


def test_address_of_this_machine_is_one_finding() -> None:
    lines = run("doctor", "127.0.0.1", "--no-loopback").stdout.splitlines()
    assert len([line for line in lines if " address: 127.0.0.1 " in line]) == 1
    if lines[-1] != "RDMA works here.":
        assert lines[-1].endswith(
            "Programs run on the built-in software device, also those in C, with `aiordma exec`."
        )


@pytest.mark.parametrize("words", [("info",), ("doctor", "--no-loopback")])
def test_full_standard_output_is_one_line(words: tuple[str, ...]) -> None:
    command = "from aiordma.cli.main import main; main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", command, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "aiordma: [Errno 28] No space left on device\n")
