"""The container that this process runs in, and the commands that give it RDMA."""

import os
import re
from pathlib import Path

_MARKERS = (
    ("var/run/secrets/kubernetes.io", "kubernetes"),
    (".dockerenv", "docker"),
    ("run/.containerenv", "podman"),
    ("dev/lxd/sock", "lxc"),
    ("dev/incus/sock", "lxc"),
)
_NAMES = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("podman", "podman"),
    ("lxc", "lxc"),
    ("nspawn", "systemd-nspawn"),
)
"""What the kinds call themselves in variables, in files of systemd and in control groups."""

_VARIABLE = "container"
"""What systemd's interface for containers asks their managers to set for the first process."""

_NODES = {
    "docker": "docker run --device=/dev/infiniband --network=host --ulimit memlock=-1 ...",
    "podman": "podman run --device=/dev/infiniband --network=host --ulimit memlock=-1 ...",
    "kubernetes": (
        "kubectl get nodes -o jsonpath='{.items[*].status.allocatable}'   "
        "# then put the RDMA resource that it lists into the pod's limits"
    ),
    "lxc": (
        r"printf 'lxc.cgroup2.devices.allow = c 231:* rwm\nlxc.cgroup2.devices.allow = c 10:* rwm\n"
        r"lxc.mount.entry = /dev/infiniband dev/infiniband none bind,create=dir\n' "
        ">> /var/lib/lxc/NAME/config   # on the host; then start the container again"
    ),
    "systemd-nspawn": (
        "systemd-nspawn --bind=/dev/infiniband --property='DeviceAllow=char-infiniband_verbs rwm' "
        "--property='DeviceAllow=/dev/infiniband/rdma_cm rwm' ..."
    ),
}
_MEMLOCK = {
    "docker": "docker run --ulimit memlock=-1 ...",
    "podman": "podman run --ulimit memlock=-1 ...",
    "kubernetes": (
        "kubectl edit deployment NAME   "
        "# securityContext: {capabilities: {add: [IPC_LOCK]}}, and run it as root"
    ),
    "lxc": (
        "echo 'lxc.prlimit.memlock = unlimited' >> /var/lib/lxc/NAME/config   "
        "# on the host; then start the container again"
    ),
    "systemd-nspawn": "systemd-nspawn --rlimit=MEMLOCK=infinity ...",
}


def container_of(root: Path = Path("/")) -> str | None:
    """Return the kind of the container that this process runs in: one of those with commands
    here, or "container"; None: it runs in none.

    Args:
        root: the directory that has dev, proc and run, for tests.
    """
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    marked = next((kind for path, kind in _MARKERS if (root / path).exists()), None)
    if marked is not None:
        return marked
    named = os.environ.get(_VARIABLE) or _read(root / "run/systemd/container").strip()
    if not named:
        found = re.search(rf"(?:^|\0){_VARIABLE}=([^\0]+)", _read(root / "proc/1/environ"))
        named = found[1] if found else ""
    if named:
        return _kind(named) or "container"
    return _kind(_read(root / "proc/1/cgroup"))


def _kind(text: str) -> str | None:
    return next((kind for name, kind in _NAMES if name in text), None)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def nodes_command(kind: str) -> str:
    """Return the command that shows the host's device nodes to a container of this kind."""
    return _NODES.get(kind, _NODES["docker"])


def memlock_command(kind: str) -> str:
    """Return the command that raises the limit of locked memory of a container of this kind."""
    return _MEMLOCK.get(kind, _MEMLOCK["docker"])
