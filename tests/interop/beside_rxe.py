"""Two hosts that a wire joins: the kernel's rxe on one, and on the other the built-in device, in a
network namespace, because each has the port 4791 of its own. Our programs run as an ordinary user.

In the virtual machine the wire is a veth pair. Natively it is a tap device, and rxe is in a virtual
machine of its own, whose commands come to it through the wire.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from aiordma.cli.exec import FOLDER
from tests.devices import DEVICE
from tests.internals import SOFTWARE
from tests.interop.programs import AS_ORDINARY_USER, PACKAGES, for_everyone
from tests.unit.sources import ROOT

SPACE = "aiordma-roce"
IN_SPACE = ("nice", "-n", "-10", "ip", "netns", "exec", SPACE)
"""First of all programs: those of libibverbs give up when no answer comes for half a second."""
RXE = "rxe_wire"
RXE_ADDRESS, OUR_ADDRESS = "10.9.7.1", "10.9.7.2"
SHELL_PORT = 7000
SECONDS = 240.0
"""For an emulated machine beside others, to boot or to run a script; normally 6, and 3."""

DAMAGE = "loss 3% delay 2ms 1ms reorder 10% duplicate 3% corrupt 2%"
"""In each direction, at rxe's end: the kernel outside of the virtual machine may lack netem."""

RXE_SETUP = """
ip addr add {address}/24 dev {interface}
ip link set {interface} up
modprobe -a rdma_rxe rdma_ucm
rdma link add {rxe} type rxe netdev {interface}
"""
DAMAGED = f"""
modprobe -a sch_netem ifb act_mirred cls_matchall sch_ingress
ip link add ifb-rxe type ifb
ip link set ifb-rxe up
tc qdisc add dev {{interface}} root netem {DAMAGE}
tc qdisc add dev ifb-rxe root netem {DAMAGE}
tc qdisc add dev {{interface}} handle ffff: ingress
tc filter add dev {{interface}} parent ffff: matchall action mirred egress redirect dev ifb-rxe
"""
MENDED = """
tc qdisc del dev {interface} root
tc qdisc del dev {interface} ingress
ip link del ifb-rxe
"""


@dataclass(frozen=True)
class Wire:
    """Where rxe's end of the wire is.

    Attributes:
        interface: rxe's network interface.
        is_remote: rxe is in another virtual machine than this process.
    """

    interface: str
    is_remote: bool

    def ours(self, *words: str | int) -> tuple[str | int, ...]:
        """A program on the built-in device."""
        libraries = {for_everyone(file).parent for file in FOLDER.glob("*.so.1")}.pop()
        settings = (f"LD_LIBRARY_PATH={libraries}", "AIORDMA_DEVICE=software_roce")
        return (*IN_SPACE, *AS_ORDINARY_USER, "env", *settings, *words)

    def rxe(self, *words: str | int) -> tuple[str | int, ...]:
        """A program on rxe. A remote one's status is lost: its output has to tell."""
        if not self.is_remote:
            return words
        line = f"exec stdbuf -oL {shlex.join(map(str, words))} 2>&1"
        script = f"exec 3<>/dev/tcp/{RXE_ADDRESS}/{SHELL_PORT}; echo {shlex.quote(line)} >&3"
        return (*IN_SPACE, "bash", "-c", f"{script}; exec cat <&3")

    def run(self, script: str) -> None:
        """Run a script at rxe's end."""
        words = self.rxe("sh", "-ec", script.format(interface=self.interface) + "\necho done")
        done = _run(*map(str, words))
        assert done.stdout.endswith("done\n"), done

    @contextmanager
    def damaged(self) -> Iterator[None]:
        """Lose, delay, reorder, duplicate and corrupt packets of both directions."""
        self.run(DAMAGED)
        yield
        self.run(MENDED)

    async def rxe_listens(self, port: int) -> None:
        """Wait until a program on rxe listens to that port."""
        command = [*map(str, self.rxe("rdma", "resource", "show", "cm_id"))]
        while f":{port}" not in (await anyio.run_process(command)).stdout.decode():
            await anyio.sleep(0.1)

    async def has_socket(self, end: "End", kind: str, port: int) -> None:
        """Wait until a program of that end has a port: with a listening TCP socket, "t", or with a
        UDP socket, "u", by which our device claims a port of the connection manager."""
        command = [*map(str, end("ss", f"-Hln{kind}", f"sport = :{port}"))]
        while f":{port}" not in (await anyio.run_process(command)).stdout.decode():
            await anyio.sleep(0.1)


End = Callable[..., tuple[str | int, ...]]
"""Wire.ours or Wire.rxe."""


@contextmanager
def wire() -> Iterator[Wire]:
    """Make the two hosts, or skip where that cannot be."""
    if not (DEVICE.startswith("rxe") or DEVICE == SOFTWARE):
        pytest.skip("the peer is rxe: test-rxe, or natively with a virtual machine of its own")
    is_remote = DEVICE == SOFTWARE
    if os.geteuid() != 0:
        pytest.skip("only root makes a network namespace and a tap device")
    if is_remote and not Path("/dev/net/tun").exists():
        pytest.skip("this machine has no tap devices: /dev/net/tun")
    _forget()
    try:
        _run("ip", "netns", "add", SPACE)
        _run("ip", "-n", SPACE, "link", "set", "lo", "up")
        with _over_tap() if is_remote else _over_veth() as made:
            _know_each_other(made)
            yield made
    finally:
        _forget()


@contextmanager
def _over_veth() -> Iterator[Wire]:
    _run(*f"ip link add wire-rxe type veth peer name wire-own netns {SPACE}".split())
    made = Wire("wire-rxe", is_remote=False)
    _give_address()
    try:
        made.run(RXE_SETUP.replace("{rxe}", RXE).replace("{address}", RXE_ADDRESS))
        yield made
    finally:
        subprocess.run(["rdma", "link", "delete", RXE], capture_output=True)


@contextmanager
def _over_tap() -> Iterator[Wire]:
    bed = (sys.executable, "-m", "tests.vm")
    prepared = subprocess.run([*bed, "prepare"], cwd=ROOT, capture_output=True, text=True)
    if prepared.returncode != 0:
        pytest.skip(f"no virtual machine: {prepared.stdout}{prepared.stderr}")
    _run(*f"ip -n {SPACE} tuntap add wire-own mode tap".split())
    _give_address()
    made = Wire("eth0", is_remote=True)
    network = "-netdev tap,id=wire,ifname=wire-own,script=no,downscript=no"
    script = RXE_SETUP.format(rxe=RXE, address=RXE_ADDRESS, interface=made.interface)
    serve = f"exec busybox nc -ll -p {SHELL_PORT} -e /bin/sh"
    guest = subprocess.Popen(
        [
            "setpriv",
            "--pdeathsig",
            "TERM",
            *IN_SPACE,
            *bed,
            "run",
            f"set -e\nmodprobe virtio_net\n{script}{serve}",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ
        | {"PROVIDER": "none", "VM_TIMEOUT": "3600", "VM_SMP": "1"}
        | {"VM_QEMU": f"{network} -device virtio-net-pci,netdev=wire"},
    )
    try:
        deadline = time.monotonic() + SECONDS
        while "ready" not in _run(*map(str, made.rxe("echo", "ready")), check=False).stdout:
            assert guest.poll() is None, guest.communicate()
            assert time.monotonic() < deadline, "the virtual machine did not boot"
            time.sleep(0.5)
        yield made
    finally:
        guest.terminate()
        guest.communicate(timeout=SECONDS)


def _know_each_other(made: Wire) -> None:
    """Without ARP, whose packets damage would change, too: a host then has a wrong address."""
    where = f"/sys/class/net/{made.interface}/address"
    theirs = _run(*map(str, made.rxe("cat", where))).stdout.strip()
    ours = _run(*IN_SPACE, "cat", "/sys/class/net/wire-own/address").stdout.strip()
    neighbour = "ip neighbour replace {} lladdr {} dev {} nud permanent"
    _run(*IN_SPACE, *neighbour.format(RXE_ADDRESS, theirs, "wire-own").split())
    made.run(neighbour.format(OUR_ADDRESS, ours, made.interface))


def _forget() -> None:
    """Remove the namespace, and with it our end of the wire. A killed run may have left one."""
    subprocess.run(["ip", "netns", "delete", SPACE], capture_output=True)


def _give_address() -> None:
    _run(*f"ip -n {SPACE} addr add {OUR_ADDRESS}/24 dev wire-own".split())
    _run(*f"ip -n {SPACE} link set wire-own up".split())


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert not check or done.returncode == 0, (PACKAGES, done)
    return done
