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
from aiordma.cli.system import AddressUse, DeviceState, Interface, System, inspect

ETH = Interface("eth0", 1500, True, addresses=("192.0.2.1",))
LO = Interface("lo", 65536, True, is_loopback=True, addresses=("127.0.0.1",))
SOFTWARE = DeviceState("software", "software", loopback="ok")
RXE = DeviceState("rxe0", "roce", "ACTIVE", 1024, ("192.0.2.1",), "eth0", loopback="ok")
SIW = DeviceState("siw0", "iwarp", "ACTIVE", 1024, (), "eth0", loopback="ok")
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


def test_good_machine_has_nothing_to_mend() -> None:
    findings = check(GOOD)
    assert works(findings)
    assert {each.level for each in findings} == {"ok", "note"}
    assert [each.subject for each in findings if each.level == "note"] == ["mtu"]
    assert [each for each in findings if each.fix] == []


def test_missing_library_names_the_packages() -> None:
    state = replace(GOOD, libraries=(("libibverbs.so.1", "no such file"),))
    finding = found(state, "libraries", "error")
    assert "libibverbs.so.1: no such file" in finding.text
    assert "libibverbs1" in finding.command


def test_unloaded_modules_are_loaded_by_fix() -> None:
    finding = found(replace(GOOD, has_manager=False), "kernel", "error")
    assert finding.fix == (("modprobe", "-a", "rdma_ucm"),)
    assert finding.command == "modprobe -a rdma_ucm"


def test_kernel_without_the_module_is_not_mended() -> None:
    state = replace(GOOD, has_verbs=False, missing_modules=("ib_uverbs",))
    finding = found(state, "kernel", "error")
    assert "no module ib_uverbs" in finding.text
    assert (finding.command, finding.fix) == ("", ())


def test_no_device_is_mended_by_soft_roce() -> None:
    finding = found(replace(GOOD, devices=(SOFTWARE,)), "devices", "error")
    assert finding.fix == (
        ("modprobe", "-a", "rdma_rxe", "rdma_ucm"),
        ("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"),
    )
    assert "software device serves every address" in finding.text


def test_no_device_without_the_rdma_tool_names_its_package() -> None:
    state = replace(GOOD, devices=(SOFTWARE,), has_rdma_tool=False)
    assert "iproute2" in found(state, "devices", "error").text


def test_no_device_and_no_soft_roce_has_no_command() -> None:
    state = replace(GOOD, devices=(SOFTWARE,), missing_modules=("rdma_rxe",))
    assert found(state, "devices", "error").fix == ()


def test_kernel_without_loadable_modules_is_asked_for_soft_roce() -> None:
    """It may have rdma_rxe built in, which only the attempt shows."""
    state = replace(GOOD, devices=(SOFTWARE,), missing_modules=("rdma_rxe",), is_modular=False)
    finding = found(state, "devices", "error")
    assert finding.fix == (("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"),)
    assert finding.command == "rdma link add rxe0 type rxe netdev eth0"
    assert "built in" in finding.text


def test_no_device_and_no_interface_has_no_command() -> None:
    state = replace(GOOD, devices=(SOFTWARE,), interfaces=(LO, replace(ETH, is_up=False)))
    finding = found(state, "devices", "error")
    assert "no network interface" in finding.text
    assert finding.fix == ()


def test_soft_roce_prefers_an_interface_of_the_machine() -> None:
    docker = Interface("docker0", 1500, True, addresses=("172.17.0.1",))
    assert usual_interface((docker, ETH)) == ETH
    assert usual_interface((docker,)) == docker
    assert usual_interface((replace(ETH, addresses=("fe80::1%eth0",)),)) is None


def test_device_that_cannot_be_opened_says_why() -> None:
    assert "EACCES" in found(with_rxe(error="EACCES"), "devices", "error").text


def test_missing_node_in_a_container_names_its_option() -> None:
    nodes = (("/dev/infiniband/uverbs0", "missing"),)
    finding = found(replace(GOOD, nodes=nodes, container="docker"), "nodes", "error")
    assert "--device=/dev/infiniband" in finding.command
    kubernetes = found(replace(GOOD, nodes=nodes, container="kubernetes"), "nodes", "error")
    assert kubernetes.command.startswith("kubectl")


def test_missing_node_outside_of_containers_is_udevs() -> None:
    nodes = (("/dev/infiniband/uverbs0", "missing"),)
    assert "udevadm" in found(replace(GOOD, nodes=nodes), "nodes", "error").command


def test_denied_node_names_the_permission() -> None:
    nodes = (("/dev/infiniband/uverbs0", "denied"),)
    finding = found(replace(GOOD, nodes=nodes), "nodes", "error")
    assert finding.command == "chmod 0666 /dev/infiniband/uverbs0"


def test_low_memlock_is_a_warning_except_for_root() -> None:
    state = replace(GOOD, memlock=8 << 20)
    assert "8192 KiB" in found(state, "memlock", "warning").text
    assert found(replace(state, is_root=True), "memlock", "note").command == ""
    assert found(replace(GOOD, memlock=1 << 30), "memlock", "ok")


def test_inactive_port_is_an_error() -> None:
    assert "DOWN" in found(with_rxe(port_state="DOWN"), "link", "error").text


def test_infiniband_port_without_a_subnet_manager_says_so() -> None:
    state = with_rxe(port_state="INIT", kind="infiniband", interface=None)
    assert "subnet manager" in found(state, "link", "error").text


def test_interface_that_is_down_is_set_up() -> None:
    state = replace(GOOD, interfaces=(replace(ETH, is_up=False), LO))
    assert found(state, "link", "error").command == "ip link set eth0 up"


def test_mtu_findings() -> None:
    assert "9000" in found(GOOD, "mtu", "note").command
    assert "4096" in found(with_rxe(active_mtu=4096), "mtu", "ok").text
    small = replace(with_rxe(active_mtu=512), interfaces=(replace(ETH, mtu=1000), LO))
    assert "is less than" in found(small, "mtu", "warning").text


def test_gid_findings() -> None:
    assert "192.0.2.1" in found(with_rxe(gid_addresses=()), "gids", "warning").text
    bare = replace(GOOD, interfaces=(replace(ETH, addresses=()), LO))
    assert "ip address add" in found(bare, "gids", "error").command
    zoned = replace(
        with_rxe(gid_addresses=("fe80::1",)),
        interfaces=(replace(ETH, addresses=("fe80::1%eth0",)),),
    )
    assert found(zoned, "gids", "ok")


def test_namespaces_and_containers_are_named() -> None:
    state = replace(GOOD, has_shared_namespaces=False, container="podman")
    assert "netns" in found(state, "namespaces", "note").command
    assert "podman" in found(state, "container", "note").text
    assert "namespace" in found(with_rxe(interface=None), "namespaces", "warning").text


def test_iwarp_needs_tcp_diag() -> None:
    state = replace(GOOD, devices=(SIW, SOFTWARE))
    assert found(state, "tcp_diag", "warning").fix == (("modprobe", "tcp_diag"),)
    absent = replace(state, missing_modules=("tcp_diag",))
    assert found(absent, "tcp_diag", "note").fix == ()
    loaded = replace(state, loaded_modules=("tcp_diag",))
    assert [each for each in check(loaded) if each.subject == "tcp_diag"] == []


def test_failed_loopback_is_an_error() -> None:
    assert "no answer" in found(with_rxe(loopback="no answer"), "loopback", "error").text


def test_skipped_loopback_is_no_finding() -> None:
    state = replace(GOOD, devices=(replace(RXE, loopback=None),))
    assert [each for each in check(state) if each.subject == "loopback"] == []


def test_address_findings_say_which_device_and_why() -> None:
    uses = (
        AddressUse("192.0.2.1", "rxe0"),
        AddressUse("127.0.0.1", "software", "no route"),
        AddressUse("192.0.2.7", "software", "unreached", is_local=False),
        AddressUse("192.0.2.8", None, "timed out", is_local=False),
    )
    levels = [e.level for e in check(replace(GOOD, uses=uses)) if e.subject == "address"]
    assert levels == ["ok", "note", "warning", "error"]
    required = replace(GOOD, uses=uses[1:2], required="rdma")
    assert "AIORDMA_REQUIRE=rdma refuses it" in found(required, "address", "warning").text


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
    command = "from aiordma.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "doctor", "--json", "--no-loopback"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    shown = json.loads(done.stdout)
    assert done.returncode == (0 if shown["works"] else 1)
    assert {each["subject"] for each in shown["findings"]} >= {"libraries", "kernel", "memlock"}
