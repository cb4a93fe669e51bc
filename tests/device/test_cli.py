"""`aiordma` as people run it: output, exit status, and one line for a mistake."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import aiordma
from tests.devices import ADDRESS, BUILT_IN, DEVICE, DeviceUnderTest
from tests.docs.programs import ROOT, serving
from tests.forked import python
from tests.internals import SOFTWARE
from tests.ports import free_port

pytestmark = [pytest.mark.one_kernel_device, pytest.mark.slow]

COMMAND = ("-m", "aiordma")
PORT = str(free_port())


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(), *COMMAND, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def fails(done: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    """Check that a command failed with one line, which has these parts."""
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("aiordma ")
    assert [part for part in parts if part not in line] == []


@pytest.mark.natively
def test_version_is_printed() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, "aiordma 0.1.0\n")


TEACHING = ("info", "doctor", "ping", "cp", "bench local", "bench server", "bench client")


@pytest.mark.natively
@pytest.mark.parametrize("command", ["", "bench", *TEACHING])
def test_help_teaches(command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.returncode == 0
    if command in ("", "info", "doctor"):
        assert "Exit status:" in done.stdout
    if command in TEACHING:
        assert re.search(rf"Example\b[^:]*:\s+aiordma {command}\b", done.stdout), done.stdout


def completed(shell: str, words: str) -> set[str]:
    """Return what a shell is offered for the last word of `aiordma WORDS`."""
    line = f"aiordma {words}"
    environment = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(words.count(" ") + 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = run(_AIORDMA_COMPLETE=f"complete_{shell}", **environment)
    assert "Traceback" not in done.stderr
    # zsh gets a command of its own, with words in quotation marks; the others a word in each line.
    if shell == "zsh":
        return set(re.findall(r'^(?:.*\(\()?"([^":]+)"', done.stdout, re.MULTILINE))
    found = done.stdout.splitlines()
    return {word.partition("\t")[0] for word in found}


@pytest.mark.natively
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_lists_commands_devices_and_values(shell: str, device: DeviceUnderTest) -> None:
    assert {"info", "doctor", "ping", "cp", "bench"} <= completed(shell, "")
    assert {"local", "client", "server"} <= completed(shell, "bench ")
    devices = {device.name, "software"}
    assert devices <= completed(shell, "info ")
    if shell != "bash":
        return  # the shells differ in the form of the question and of the answer, not in the words
    for command in ("ping", "cp", "bench local", "bench server", "bench client"):
        assert devices <= completed(shell, f"{command} --device ")
        assert {"rdma", "roce"} <= completed(shell, f"{command} --device r")
    assert "views" in completed(shell, "bench local -o ")
    assert "uvloop" in completed(shell, "bench local --loop ")


@pytest.mark.natively
def test_bash_completes_at_the_tab(tmp_path: Path) -> None:
    """In a shell that has a terminal, as --install-completion leaves it behind."""
    command = tmp_path / "aiordma"
    command.write_text(f'#!/bin/sh\nexec {shlex.join([*python(), *COMMAND])} "$@"\n')
    command.chmod(0o755)
    (tmp_path / ".bashrc").write_text("PS1='ready> '\n")
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
    }
    # The command finds out which shell has started it.
    install = ["bash", "-c", "aiordma --install-completion; exit $?"]
    _ = subprocess.run(install, cwd=tmp_path, env=environment, check=True, timeout=120)
    ours, its = os.openpty()
    shell = subprocess.Popen(
        ["bash", "-i"],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,  # it leaves the terminal of the tests alone
    )
    os.close(its)
    seen = ""

    def see(text: str) -> None:
        nonlocal seen
        while text not in seen:
            # EIO once the shell has ended. It rings the bell if it cannot complete more.
            seen += os.read(ours, 4096).decode().replace("\a", "")

    try:
        see("ready> ")
        for typed, completed in (
            ("aiordma inf", "aiordma info "),
            ("soft", "aiordma info software"),
            ("_", "aiordma info software_roce "),
            ("--js", "aiordma info software_roce --json "),
        ):
            _ = os.write(ours, f"{typed}\t".encode())
            see(completed)
    finally:
        shell.kill()
        _ = shell.wait()
        os.close(ours)


def test_info_describes_the_device(device: DeviceUnderTest) -> None:
    done = run("info", device.name, "--json")
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["devices"]
    assert (shown["name"], shown["kind"]) == (device.name, device.kind)
    with aiordma.verbs.Device(device.name).open() as context:
        assert shown["attributes"]["max_qp"] == context.query().max_qp
        assert shown["attributes"]["node_guid"] == f"{context.query().node_guid:016x}"
        (port,) = shown["ports"]
        assert port["state"] == "ACTIVE"
        assert port["active_mtu"] == context.query_port(1).active_mtu.bytes
        theirs = [(each.index, each.gid.hex(":", 2)) for each in context.gid_table()]
        assert [(each["index"], each["gid"]) for each in port["gids"]] == theirs
    if device.driver != "siw":  # its only GID is its interface's hardware address
        assert ADDRESS in [each["address"] for each in port["gids"]]


def test_info_prints_every_device_for_people(device: DeviceUnderTest) -> None:
    done = run("info")
    assert done.returncode == 0, done.stderr
    for name in (device.name, "software"):
        assert f"\n{name}: " in f"\n{done.stdout}"
    verbose = run("info", device.name, "-v")
    assert "max_qp_rd_atom: " in verbose.stdout
    assert "node_guid: " in verbose.stdout


def test_doctor_tests_the_device(device: DeviceUnderTest) -> None:
    done = run("doctor", "--json")
    shown = json.loads(done.stdout)
    loopback = [each for each in shown["findings"] if each["subject"] == "loopback"]
    name = SOFTWARE if device.is_built_in else device.name  # no address leads to software_roce
    tested = [each for each in loopback if each["text"].startswith(f"{name}:")]
    assert [each["level"] for each in tested] == ["ok"], loopback
    errors = [each for each in shown["findings"] if each["level"] == "error"]
    assert shown["works"] is (not errors)
    if not BUILT_IN:
        assert errors == []
        uses = [each["text"] for each in shown["findings"] if each["subject"] == "address"]
        (use,) = [
            text for text in uses if text.startswith(f"{ADDRESS} is served on {device.name}: ")
        ]
        assert "an address of " in use
        gids = json.loads(run("info", device.name, "--json").stdout)["devices"][0]["ports"][0][
            "gids"
        ]
        if device.driver == "rxe":
            (index,) = [
                each["index"]
                for each in gids
                if (each["address"], each["type"]) == (ADDRESS, "ROCE_V2")
            ]
            assert f"GID {index} of port 1, ROCE_V2" in use
        else:
            assert "no GID" in use
    assert done.returncode == (1 if errors else 0)


def test_doctor_names_the_device_for_a_peer(device: DeviceUnderTest) -> None:
    done = run("doctor", "--no-loopback", ADDRESS, AIORDMA_DEVICE=DEVICE)
    assert f"{ADDRESS} is served through {device.name}" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.natively
def test_doctor_reports_a_name_that_does_not_resolve() -> None:
    done = run("doctor", "--no-loopback", "no-such-host.invalid")
    assert done.returncode == 1
    assert "no-such-host.invalid cannot be reached" in done.stdout
    assert "Traceback" not in done.stderr


def test_ping_measures_rounds_with_its_own_server(device: DeviceUnderTest) -> None:
    server = (*COMMAND, "ping", "--serve", "-a", ADDRESS, "-p", PORT, "--device", device.name)
    with serving(*server):
        done = run("ping", ADDRESS, "-p", PORT, "-C", "3", "-V", "--device", device.name)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith(f"connected to {ADDRESS}:{PORT} through {device.name} ")
    assert last.startswith("3 rounds of 64 bytes: min ")


def test_ping_without_a_server_is_one_line(device: DeviceUnderTest) -> None:
    done = run("ping", ADDRESS, "-p", "7999", "-t", "3", "--device", device.name)
    fails(done, 1, "ping", f"{ADDRESS}:7999")


@pytest.mark.natively
def test_ping_requires_rdma() -> None:
    fails(run("ping", "127.0.0.1", "--device", "rdma"), 1, 'device="rdma"', "aiordma doctor")
    fails(run("ping", "127.0.0.1", AIORDMA_DEVICE="rdma"), 1, "AIORDMA_DEVICE=rdma")


@pytest.mark.natively
def test_command_without_a_standard_output_succeeds() -> None:
    """As cron or a supervisor may start it."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, *COMMAND, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
