"""What tests against a device share: what it can do, and that nothing is left of them.

A test names the capability that it needs, `@pytest.mark.capability("read")`, and is skipped by that
name where the device under test, or the machine that it is on, lacks it.

A folder of such tests imports the three fixtures in its conftest.py, which is what makes pytest
apply them there; tests import the rest from here.
"""

import fcntl
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiordma.testing import software_objects
from aiordma.verbs.identifier import EventChannel, Identifier
from tests.conftest import BUILT_IN as BUILT_IN
from tests.conftest import DEVICE as DEVICE
from tests.forked import wait_for_the_killed
from tests.internals import (
    SOFTWARE,
    THREAD_NAME,
    Provider,
    calls_under_way,
    ffi,
    provider_of,
    real_devices_are_here,
)
from tests.kernel_objects import kernel_counts
from tests.ports import free_port

# The test bed's interface has the former; the software device has every address.
ADDRESS = "127.0.0.1" if BUILT_IN else "10.1.1.1"

NOT_OURS = "10.99.99.99"
"""An address that this machine does not have."""

SILENT = "127.0.0.77" if BUILT_IN else "10.1.1.77"
"""An address from which no datagram is answered."""

UDMABUF = "/dev/udmabuf"
"""The kernel's dma-bufs of memory of the CPU."""

UNREACHABLE = "fe80::1%lo" if BUILT_IN else "192.0.2.1"
"""An address to which no route leads."""

IPV6 = "::1" if BUILT_IN else "fd00::1"


def own_group(number: int) -> str:
    """A multicast group of IPv4 that no other process's tests use; number is up to 255."""
    return f"239.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}.{number}"


# Two tables of what is missing, by the driver of the device under test; docs/devices.md explains
# the entries to users. This one is for what the device or its driver cannot do, wherever it runs.
DEVICE_LACKS: dict[str, dict[str, str]] = {
    "software": {
        "retries_carried": "iWARP's handshake carries no retry counts, and no queue pair number",
        "torn_message": "the device checks all parts of a message before it sends any, so that no "
        "message breaks off in its middle",
        "explained_flush": "the end of a connection flushes its requests before the connection "
        "manager reports the reason (no event is taken while anything is destroyed), so that a "
        "flushed request may have no cause",
        "port_events": "its port stands for all network interfaces, and is always up",
        "completion_vectors": "it has one: it raises no interrupts to distribute",
        "second_device": "there is one, which serves all addresses; its GID_CHANGE is tested by "
        "tests/unit/test_software_device.py",
        "ece": "iWARP's handshake has no enhanced connection establishment",
        "type_of_service": "iWARP's handshake does not carry it: each side marks its own packets "
        "as its own tos= says",
        "rdma_establish": "iWARP has no rdma_establish, which a client that makes its own queue "
        "pair calls",
        "beside_the_built_in": "it is the built-in one",
        "empty_accesses_refused": "the device itself sends READs and WRITEs of no bytes: none is "
        "refused",
        "librdmacm": "it does not use librdmacm: a forked child opens it anew",
        "kernel": "it is part of the program; the tests on siw connect it with siw",
    },
    "software_roce": {
        "port_events": "its port stands for all network interfaces, and is always up",
        "completion_vectors": "it has one: it raises no interrupts to distribute",
        "second_device": "there is one for each transport, which serves all addresses",
        "torn_message": "the device checks all parts of a message before it sends any, so that no "
        "message breaks off in its middle",
        "ece": "it has no options that enhanced connection establishment could agree on",
        "beside_the_built_in": "it is a built-in one",
        "librdmacm": "it does not use librdmacm: a forked child opens it anew",
        "kernel": "it is part of the program; tests/interop connects it with rxe",
        "iwarp": "RoCE is not iWARP",
        "err_ends_the_peer": "RoCE sends nothing when a queue pair is moved to ERR",
        "killed_peers_reported": "the device is a part of its process, and nothing closes its "
        "connections if that is killed: as if the peer's power were gone",
        "stopped_peers_acknowledge": "the device is a part of its process, and is stopped with it: "
        "an acknowledgement is late then, as from a peer that is gone",
        "plain_peers": "RoCE's port is the device's own: no plain socket can be a peer",
    },
    "rxe": {
        "window_bounds": "rxe 6.1 checks an access through a memory window against the bounds of "
        "the region that it is bound to, not against the window's own",
        "invalidation_told": "rxe 6.1 does not report which rkey a message invalidated",
        "completion_timestamps": "rxe has no clock for completions",
        "moderation": "rxe cannot moderate completion events (cq_mod_caps 0)",
        "memory_advice": "rxe 6.1 has no on-demand paging, and takes no advice (ibv_advise_mr)",
        "reregistration": "rxe 6.1 cannot change a region (ibv_rereg_mr)",
        "dmabuf": "rxe registers no dma-bufs (Linux 6.1, 7.3: no reg_user_mr_dmabuf)",
        "dmabuf_of_file": "rxe registers no dma-bufs, and the kernel takes no other file for one",
        "ignored_overruns": "rxe's completion queues cannot ignore an overrun",
        "iwarp": "RoCE is not iWARP, which the built-in software device speaks",
        "own_qkey": "rxe 6.1 sends a key whose highest bit is set as it is, not the queue pair's",
        "datagram_length_checked": "rxe drops a datagram that is longer than the MTU, and reports "
        "success, as InfiniBand has it (C10-93.1.1)",
        "small_receives_kept": "rxe 6.1 ends a queue pair that gets a datagram longer than the "
        "receive that it takes",
        "local_errors_named": "rxe 6.1 reports a request's memory that is not registered as "
        "LOC_QP_OP_ERR, not LOC_PROT_ERR",
        "drained_at_once": "rxe 6.1 reports a drained send queue only at a later completion",
        "depth_of_none_ends": "rxe 6.1 never ends a READ or an atomic if the depth is 0",
        "late_receives_flushed": "rxe 6.1 does not flush a receive that is posted in ERR",
        "err_ends_the_peer": "RoCE sends nothing when a queue pair is moved to ERR",
        "early_sends_refused": "rxe's library has queued a send when the kernel refuses it",
        "sqd_resumed": "rxe 6.1 sends what was posted in SQD with the next post in RTS",
        "handles_copied": "a program keeps an address handle until the datagrams posted with it "
        "have been sent, as the verbs have it; the built-in device copies it at the post",
    },
    "siw": {
        "resets_named": "siw 6.1 reports a request that the peer's reset meets while it is sent as "
        "LOC_QP_OP_ERR, as any other failure to send (siw_qp_sq_process)",
        "dmabuf_of_file": "siw registers no dma-bufs, and the kernel takes no other file for one",
        "datagrams": "iWARP has no datagrams",
        "plain_peers": "iWARP has no datagrams",
        "rnr": "iWARP has no receiver-not-ready: a message without a receive ends the connection",
        "retries_carried": "iWARP's handshake carries no retry counts, and no queue pair number",
        "queue_pair_state": "siw 6.1 does not report a queue pair's state: ibv_query_qp says RESET",
        "acknowledged_sends": "siw completes a SEND or WRITE once the local TCP has it; it flushes "
        "a READ whose peer is dead",
        "atomics": "siw has no atomics (RFC 7306 is not implemented)",
        "immediate": "siw has no immediate data (RFC 7306 is not implemented)",
        "memory_windows": "siw has no memory windows (max_mw 0)",
        "heard_at_once": "siw's receive path gives up while the accept holds the queue pair's "
        "lock; data that arrives then waits for the next segment, and is lost if the peer leaves",
        "slow_handshakes": "siw establishes a connection as it accepts it, without waiting for the "
        "peer",
        "passive_side_first": "iWARP's accepting side must not send before it has received (RFC "
        "5044, 7.1); siw refuses a handshake's answer that has data behind it",
        "scattered_read": "siw reads into one part only (max_sge_rd 1)",
        "ordered_ends": "siw may complete a request before the READ in front of it: aiordma lets "
        "no READ into a chain with signal_last_only there",
        "fenced_reads": "siw ends a connection that fences a READ (siw_activate_tx_from_sq)",
        "short_reads_across_pages": "siw answers a READ of up to 32 bytes that lies on two "
        "pages with wrong bytes, unless one half is on each (siw_try_1seg)",
        "regions_kept": "siw lets a message invalidate every region of its domain "
        "(siw_invalidate_stag), also one that permits no remote access",
        "listener_kept": "siw 6.1 takes the end of a TCP connection that it has not accepted yet "
        "for its listener's (siw_cm_llp_state_change): nothing listens then, and nothing says so",
        "silent_after_accept": "siw 6.1 stops the kernel (cm_close_handler, a BUG) if a peer that "
        "was accepted leaves before its first frame",
        "half_handshakes": "siw 6.1 waits for the rest of a request's header in the one thread "
        "that serves all connects (siw_recv_mpa_rr)",
        "divided_headers": "siw 6.1 takes bytes behind a header for a part of it, if the header "
        "arrived in two parts (siw_get_hdr)",
        "malformed_answers": "siw 6.1 stops the kernel (siw_cm_upcall, a null pointer in "
        "kmemdup) if its peer answers a request to connect with something other than MPA",
        "read_permission": "siw lets a READ through that the region does not permit",
        "copied_reads": "siw sends the answer of a READ of a page or more from the memory itself "
        "(sendpage), also after the memory was deregistered: the answer can have later contents",
        "named_refusals": "iWARP reports a refused access by ending the connection, and siw gives "
        "no reason; a WRITE has succeeded by then, as far as the sender knows",
        "explained_flush": "siw flushes the requests before the connection manager reports the "
        "reason, so that a flushed request may have no cause",
        "srq_query": "siw's driver has no call to query a shared receive queue",
        "srq_resize": "siw cannot resize a shared receive queue",
        "torn_message": "siw checks all parts of a message before it sends any, so that no message "
        "breaks off in its middle",
        "queue pairs by hand": "iWARP queue pairs are connected by the connection manager only",
        "resized_queues": "siw cannot resize a completion queue",
        "completion_timestamps": "siw's library makes no extended completion queues",
        "moderation": "siw cannot moderate completion events (cq_mod_caps 0)",
        "memory_advice": "siw has no on-demand paging, and takes no advice (ibv_advise_mr)",
        "reregistration": "siw cannot change a region (ibv_rereg_mr)",
        "dmabuf": "siw registers no dma-bufs (no reg_user_mr_dmabuf)",
        "ignored_overruns": "siw's completion queues cannot ignore an overrun",
        "extended_queues": "siw's library makes no extended completion queues, and so none with "
        "flags",
        "iova": "siw registers memory with an iova, and then ignores it",
        "outlives_link_down": "siw disconnects its connections when its interface goes down",
        "removal_reported": "Linux 6.1 reports nothing of the deletion of a device of siw to the "
        "programs that use it, and waits for their end; seen in the virtual machine",
        "gid_events": "a port of iWARP has one GID, made of the interface's own address, which "
        "does not change with its IP addresses",
        "type_of_service": "siw does not mark its TCP stream with it",
        "ipv4_at_ipv6_wildcard": "siw resets a peer that comes over IPv4 to a listener of IPv6",
        "ece": "iWARP's handshake has no enhanced connection establishment",
        "rdma_establish": "iWARP has no rdma_establish, which a client that makes its own queue "
        "pair calls",
    },
}

# This one is for what the machine under the device cannot do: its kernel, the connection manager
# there, or librdmacm. The same device may do it elsewhere.
MACHINE_LACKS: dict[str, dict[str, str]] = {
    "software_roce": {
        "wire": "faults of a wire are made where the kernel has netem, in the virtual machine",
    },
    "software": {
        "wire": "faults of a wire are made where the kernel has netem, in the virtual machine; "
        "aiordma.testing.Faults makes the device's",
    },
    "rxe": {
        "ipv6_multicast": "Linux's connection manager joins no IPv6 group on RoCE v2 (ENOTSUPP)",
        "plain_peers": "the kernel keeps RoCE v2's port: no plain socket can be a peer",
        "groups_by_hand": "Linux delivers a datagram that this machine sends to a group to this "
        "machine only if the connection manager has joined: attaching a queue pair is not enough",
        "questions_wait": "Linux's connection manager refuses requests for the queue pair of a "
        "datagram port beyond the port's backlog",
        "joins_checked": "Linux's connection manager joins an address that is no group, and joins "
        "twice",
        "anew_in_a_child": "librdmacm keeps its devices open, and a forked child may not use them",
    },
    "siw": {
        "anew_in_a_child": "librdmacm keeps its devices open, and a forked child may not use them",
        **(
            {"completion_vectors": "siw has one for each possible processor, and there is one"}
            if Path("/sys/devices/system/cpu/possible").read_text().strip() == "0"
            else {}
        ),
    },
}

if not os.path.exists(UDMABUF):
    for _names in MACHINE_LACKS.values():
        _names["udmabuf"] = f"the kernel has no {UDMABUF} (CONFIG_UDMABUF), which makes dma-bufs"

CAPABILITIES = frozenset(
    ("udmabuf",)  # which only some machines lack
) | frozenset(
    name for table in (DEVICE_LACKS, MACHINE_LACKS) for names in table.values() for name in names
)


@dataclass(frozen=True)
class DeviceUnderTest:
    name: str
    driver: str
    address: str

    @property
    def is_built_in(self) -> bool:
        return BUILT_IN

    @property
    def kind(self) -> str:
        """Its `Context.kind`."""
        return {"rxe": "roce", "siw": "iwarp"}.get(self.driver, SOFTWARE)

    @property
    def by_hand(self) -> str:
        """The name of the device for queue pairs by hand."""
        return f"{SOFTWARE}_roce" if BUILT_IN else self.name

    def lacks(self, capability: str) -> str | None:
        """What is missing, and why, or None: of the device, or of the machine under it."""
        for owner, table in ((self.driver, DEVICE_LACKS), ("this machine", MACHINE_LACKS)):
            reason = table[self.driver].get(capability)
            if reason:
                return f"{owner} lacks {capability}: {reason}"
        return None


@pytest.fixture(scope="session")
def device() -> Iterator[DeviceUnderTest]:
    driver = DEVICE.rstrip("0123456789")
    if driver not in DEVICE_LACKS:
        pytest.fail(
            f"no RDMA device to test ({DEVICE}): run `make test-software`, `make test-rxe` or "
            "`make test-siw`",
            False,
        )
    if BUILT_IN and (DEVICE != SOFTWARE or real_devices_are_here()):
        os.environ["AIORDMA_DEVICE"] = DEVICE  # else another one would be tested in its place
    # A device is opened at its first use and kept open: not a leak of the first test's.
    with EventChannel(DEVICE) as channel, Identifier(channel) as identifier:
        identifier.bind(ADDRESS, 0)
        identifier.listen(1)
    if BUILT_IN:
        provider = provider_of(DEVICE)
        provider.free_devices(provider.get_devices(ffi.NULL))  # opens the one of `by_hand`, too
    free_port()  # its process's block, which is taken with a socket, and kept
    # What is imported by now stays: no need to look through it after each test again.
    gc.collect()
    gc.freeze()
    yield DeviceUnderTest(DEVICE, driver, ADDRESS)
    gc.unfreeze()


def provider_under_test() -> Provider:
    """The table of calls under the device under test, for tests that play with one."""
    return provider_of(DEVICE)


@pytest.fixture(autouse=True)
def required_capabilities(
    request: pytest.FixtureRequest, device: DeviceUnderTest
) -> Iterator[None]:
    names = [marker.args[0] for marker in request.node.iter_markers("capability")]
    for name in names:
        assert name in CAPABILITIES, f"no device and no machine lacks {name}"
        reason = device.lacks(name)
        if reason:
            pytest.skip(reason)
    if device.is_built_in and "queue pairs by hand" in names:
        with alone_on_roce_port():
            yield
    else:
        yield


@contextmanager
def alone_on_roce_port() -> Iterator[None]:
    """One test after the other: what waits at a socket of RoCE's port is lost when its process
    ends, also if it was for another process, and UC and UD send nothing again."""
    with open(Path(tempfile.gettempdir()) / f"aiordma-roce-{os.geteuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kernel_objects(device: str) -> dict[str, int]:
    """What there is on the device: pd, cq, qp, cm_id, mr, srq. The kernel counts them, and the
    software device counts its own, which are more kinds."""
    if device.startswith(SOFTWARE):
        objects = software_objects()
        return {_KERNELS_NAMES.get(kind, kind): count for kind, count in objects.items()}
    counts = kernel_counts(device)
    return {name: counts[name] for name in ("pd", "cq", "qp", "cm_id", "mr", "srq")}


_KERNELS_NAMES = {
    "domains": "pd",
    "queues": "cq",
    "queue_pairs": "qp",
    "identifiers": "cm_id",
    "regions": "mr",
    "shared_receives": "srq",
}

_OURS = ("socket:", "anon_inode:") if BUILT_IN else ("infiniband",)


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the directory's own
    return {entry for entry in found if any(kind in entry for kind in _OURS)}


def _about(descriptors: set[str]) -> str:
    """What the kernel tells of descriptors that were left: of an epoll, what it waits for."""
    numbers = [entry.split()[0] for entry in descriptors]
    return "; ".join(f"{n}: {Path('/proc/self/fdinfo', n).read_text().split()}" for n in numbers)


def _threads() -> set[str]:
    """Threads of ours. Pools keep idle workers: ours, anyio's and trio's for a while, Dask's for
    ever. asyncio's `waitpid` of a process is ending when it has told the event loop."""
    patience = time.monotonic() + 10
    while calls_under_way() and time.monotonic() < patience:
        time.sleep(0.001)
    return {
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and (thread.name != THREAD_NAME or calls_under_way())
        and "AnyIO" not in thread.name
        and not thread.name.startswith("waitpid-")
        and "Dask-Offload" not in thread.name
        and "Trio" not in thread.name
        and "trio" not in thread.name
        and "pytest_timeout" not in thread.name
    }


_baseline: list[tuple[dict[str, int], set[str], set[str]]] = []


@pytest.fixture(autouse=True)
def nothing_is_left(device: DeviceUnderTest) -> Iterator[None]:
    """Kernel objects, descriptors and threads are the same after each test as before."""
    if not _baseline:
        _baseline.append((kernel_objects(device.name), _descriptors(), _threads()))
    before = _baseline[0]
    yield
    gc.collect()
    wait_for_the_killed()
    left = (kernel_objects(device.name), _descriptors(), _threads())
    # The end of a stream of the software device, said to a peer that has not ended its own, takes
    # its socket with it after two seconds.
    patience = time.monotonic() + (3 if device.is_built_in else 0)
    while left != before and time.monotonic() < patience:
        time.sleep(0.02)
        left = (kernel_objects(device.name), _descriptors(), _threads())
    # What one test left is not held against the next.
    _baseline[0] = left
    assert left == before, (
        f"{before} before the test, {left} after it; {_about(left[1] - before[1])}"
    )
    # What pytest keeps of each test would make the next collection longer: after 250 tests 2.5 ms
    # natively instead of 0.2, and more with each.
    gc.freeze()
