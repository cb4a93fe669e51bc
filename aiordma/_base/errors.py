"""The exception classes.

The class states the kind of failure. `VerbsCallError`: a call into C failed; the text has a hint.
`WorkCompletionError`: a posted request failed. `RdmaConnectionError`: the peer, or the path to it,
failed. An error that ends a connection is also a builtin ConnectionError, because programs written
for sockets catch it (a VerbsCallError is an OSError). Misuse raises Python's TypeError, ValueError
or IndexError, or a subclass of anyio's ClosedResourceError or BusyResourceError.
"""

import builtins
import copy
import errno as errno_module
import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

import anyio

from aiordma._base.enums import AsyncEventType
from aiordma._base.enums import WorkCompletionStatus as Status
from aiordma._base.hints import hint as hint_for
from aiordma._native import given


class RdmaError(Exception):
    """Base class of aiordma's exceptions. It is never raised itself. It does not include Python's
    TypeError, ValueError and IndexError, which report invalid arguments. An RdmaError can be
    pickled, together with a cause that is an RdmaError."""

    _usual_errno: ClassVar[int | None] = None
    """The `errno` of an error that has none of its own: that of a socket's error with the same
    cause, for programs that look at it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        made: object = self
        if isinstance(made, OSError) and made.errno is None:
            made.errno = self._usual_errno

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        if isinstance(self, OSError) and self.errno is not None:
            state["errno"] = self.errno  # it need not be among the arguments
        if isinstance(self.__cause__, RdmaError):
            state["__cause__"] = self.__cause__
        return _restore, (type(self), self.args), state


def _restore(family: type[RdmaError], args: tuple[Any, ...]) -> RdmaError:
    """Recreate a pickled error without its constructor, which would compose the text again."""
    error = family.__new__(family, *args)
    if isinstance(error, OSError):
        OSError.__init__(error, *args)
    return error


Stored = TypeVar("Stored", bound=BaseException)


@given("detached")
def detached(error: Stored) -> Stored:
    """Copy an exception that is stored, to raise the copy or to store it.

    A raise adds a traceback to an exception. The traceback keeps the callers' local variables
    alive, such as exported buffers. So a stored exception is never raised itself.

    Returns:
        An exception of the same class, with the same arguments, attributes and cause, but without
        a traceback or a context. If the exception cannot be copied: the same exception without its
        traceback.
    """
    try:
        again = copy.copy(error)
    except Exception:
        return error.with_traceback(None)
    # Some packages teach `copy` to keep both, for errors of other processes (tblib, and so Dask).
    again.__traceback__ = again.__context__ = None
    cause = error.__cause__
    again.__cause__ = detached(cause) if isinstance(cause, RdmaError) else cause
    again.__suppress_context__ = error.__suppress_context__
    return again


def leaf_errors(error: BaseException) -> list[BaseException]:
    """Return the errors of an exception group and of the groups in it; else the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaf_errors(each)]
    return [error]


def cause_text(error: BaseException) -> str:
    """Return an exception's text, or its class's name if it has none."""
    return str(error) or type(error).__name__


class NotSupportedError(RdmaError):
    """The device or the installed library lacks a capability; the message names both. Nothing was
    posted, and the connection keeps working. Use another operation, such as a message after a WRITE
    where the device has no immediate data: docs/devices.md lists what each device supports."""


class NoDeviceError(RdmaError, builtins.ConnectionError):
    """There is no such RDMA device, or rdma-core or the kernel's RDMA is missing. The message lists
    the devices that exist and the command that installs what is missing; `aiordma doctor` says
    more. Without `device=`, aiordma uses the software device. Also a builtin ConnectionError, for
    programs that catch the errors of sockets."""


class DeviceRequirementError(NoDeviceError):
    """`device=` or AIORDMA_DEVICE does not permit the device that would be used: usually the
    software device, because no RDMA device reaches the address. No peer was contacted. The message
    says why no RDMA device can be used, and `aiordma doctor ADDRESS` says what to do
    (docs/devices.md). If a name has several addresses, the reason holds for each of them."""


class ClosedError(RdmaError, anyio.ClosedResourceError):
    """An object was used after it was closed, usually by a task that still ran when the program
    closed the connection. The call did nothing. Cancel such tasks before the close, or treat this
    error as their end. A region whose `reregister` has failed halfway counts as closed. Also
    anyio's ClosedResourceError, and not a ConnectionError."""


class BusyError(RdmaError, anyio.BusyResourceError):
    """The object is in use: a request in flight or a memory window uses the region, connections use
    the domain or the shared receive queue, another task already receives or waits, or views hold
    all receive buffers. The call changed nothing. Await the requests or close what uses the object,
    then call again; let one task receive, and pass each message on. Also anyio's
    BusyResourceError."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # anyio's constructor makes another text


class QueueFullError(RdmaError, anyio.WouldBlock):
    """The work queue is full: `max_send_wr` requests are in flight, or `max_recv_wr` receives are
    posted. Nothing was posted. Await a request, then post again, or use the coroutines (`send`,
    `write`, `read`), which wait for a slot (docs/back-pressure.md). Also anyio's WouldBlock."""


class NotPostedError(RdmaError):
    """The request was collected for a chain that was not posted, because the chain's block raised
    or the post failed. `__cause__` is that error, which the block raised, too: handle that one. The
    peer got nothing of the chain, the request holds no memory and no slot, and the connection keeps
    working unless the cause has ended it."""


class ForkError(RdmaError):
    """A forked child used an object of its parent, or it connects or listens although the parent
    has used a real device, which the kernel refuses to a child. Nothing was done. Open the
    connections in the child, and start it with multiprocessing's "spawn" or "forkserver", or before
    the first use of a real device."""


class EventLoopError(RdmaError, RuntimeError):
    """An object was used outside of its event loop: from another thread, in another loop, or after
    its loop has ended. The message names the object and its loop. Nothing was posted. Call from
    another thread with `loop.call_soon_threadsafe`, `anyio.from_thread.run` or
    `trio.from_thread.run_sync`, and open one connection for each loop (docs/threads.md)."""


class VerbsCallError(RdmaError, OSError):
    """A call into libibverbs or librdmacm failed: a limit was reached (ENOMEM, EMFILE), an address
    or port is not available (EADDRNOTAVAIL, EADDRINUSE), an attribute is wrong (EINVAL), or the
    user may not open the nodes in /dev/infiniband (EACCES). The text names the limit or the
    attribute if it is known; `aiordma doctor` checks all of this. If a post raises it, the request
    was not posted, unless `was_taken`. If a close raises it with EBUSY, close again later; after
    any other refusal the object stays for the life of the process (docs/fault-model.md).

    `errno` is C's, and `call` is the function's name in the man pages.
    """

    call: str
    was_taken = False
    """Whether the device has the request although its post failed, and may execute it."""

    def __init__(self, error: int, call: str, hint: str | None = None) -> None:
        hints = [text for text in (hint_for(call, error), hint) if text]
        text = ". ".join([f"{call}: {os.strerror(error)}", *hints])
        super().__init__(error, text)
        self.call = call


class PartialPostError(VerbsCallError):
    """The device refused a request of `chain()` or of `post_srq_recv` after it had accepted the
    previous ones: its queue is full, or an argument does not suit the device.

    `refused` is the index of the refused request (C's bad_wr). This request and all later ones were
    not posted, and hold nothing. `posted` are the earlier requests, which are in flight: await
    them. A pickled error has none of them.
    """

    def __init__(self, error: int, call: str, hint: str, posted: Sequence[Any]) -> None:
        text = f"request {len(posted)} of the chain was refused, those before it are posted"
        super().__init__(error, call, f"{text}. {hint}")
        self.posted: list[Any] = list(posted)
        self.refused: int = len(posted)

    def __reduce__(self) -> tuple[Any, ...]:
        make, args, state = super().__reduce__()
        return make, args, state | {"posted": []}  # requests belong to their process

    def __copy__(self) -> Self:
        make, args, state = super().__reduce__()
        again: Self = make(*args)
        again.__setstate__(state)
        return again


class DeviceEventError(RdmaError, builtins.ConnectionError, anyio.BrokenResourceError):
    """The device reported by an asynchronous event that a queue pair, a completion queue or the
    device itself failed, and the connection has ended. Open new connections; after DEVICE_FATAL the
    driver has to reset the device (see the kernel's log). Also a builtin ConnectionError.

    `event` is the event (man ibv_get_async_event), `what` names the object that failed.
    """

    _usual_errno = errno_module.ECONNABORTED

    _meanings: ClassVar[dict[AsyncEventType, str]] = {
        AsyncEventType.QP_ACCESS_ERR: "it refused an access of the peer's: the rkey is unknown or "
        "revoked, the range lies outside its region, or the region does not permit it",
        AsyncEventType.QP_REQ_ERR: "the peer sent a request that is not valid, or corrupt bytes",
    }

    def __init__(self, event: AsyncEventType, what: str) -> None:
        meaning = self._meanings.get(event)
        text = f"{what}: the device reports {event.name} (man ibv_get_async_event)"
        super().__init__(f"{text}: {meaning}" if meaning else text)
        self.event = event
        self.what = what


class PeerGoneError(RdmaError, builtins.ConnectionError):
    """The peer of an established connection has gone. Base class of DisconnectedError (the peer or
    its kernel disconnected), RetryExceededError (the peer's device acknowledges nothing),
    PeerFlushedError (a request was flushed because of one of these) and DeviceRemovedError. A
    request that fails with it may or may not have been executed by the peer's device. Catch it
    together with EndOfStream, which `receive` raises instead after a disconnect, mostly also of a
    killed peer; then connect again. Set `keepalive=` if a side is idle or only receives
    (docs/dead-peers.md). Also a builtin ConnectionError."""

    _usual_errno = errno_module.ECONNRESET


# ---------------------------------------------------------------------------------------------
# Work completions


class WorkCompletionError(RdmaError, builtins.ConnectionError, anyio.BrokenResourceError):
    """A posted work request failed: the device completed it with another status than success. The
    queue pair is then in the error state and the connection has ended, so this is also a builtin
    ConnectionError. Close the connection and open a new one. All other requests fail with
    FlushedError, whose `__cause__` is the first error.

    `status`, `vendor_err` and `qp_num` are fields of the work completion; no other field of a
    failed completion is valid (man ibv_poll_cq). `request` describes the request. The text names
    the peer of a connection.
    """

    _usual_errno = errno_module.ECONNABORTED

    _statuses: ClassVar[tuple[Status, ...]] = ()
    meaning: ClassVar[str] = ""

    def __init__(
        self,
        status: int,
        request: str,
        *,
        vendor_err: int = 0,
        qp_num: int = 0,
        why: str = "",
        peer: str | None = None,
    ) -> None:
        try:
            self.status: Status | int = Status(status)
            name = f"IBV_WC_{Status(status).name}"
        except ValueError:  # a status of a newer device
            self.status, name = status, f"unknown status {status}"
        text = f"{request} failed: {why or self.meaning or 'see man ibv_poll_cq'} ({name}"
        text += f", vendor error {vendor_err:#x}" if vendor_err else ""
        text += f", peer {peer})" if peer else ")"
        super().__init__(text)
        self.request = request
        self.vendor_err = vendor_err
        self.qp_num = qp_num


class LocalLengthError(WorkCompletionError):
    """The peer's message is longer than the receive that it consumed, or a request is longer than
    the device's limit (`max_msg_sz`). The connection has ended. Use a larger `receive_size=` (of a
    shared receive queue: `buffer_size=`), or let the peer describe large data in a message, and
    READ it. rxe reports some of these as LocalQueuePairError."""

    _statuses = (Status.LOC_LEN_ERR,)
    meaning = (
        "the peer's message is longer than the receive that it consumed: connect with a "
        "larger receive_size= (a shared receive queue: buffer_size=), or post longer receives; or "
        "a length is beyond the device's limit"
    )


class LocalQueuePairError(WorkCompletionError):
    """The local queue pair could not process the request, and the connection has ended. rxe reports
    some local errors this way, such as a message that is longer than its receive, and a network
    interface that is down; siw, a request that it was sending when the peer's reset arrived. With
    the synchronous verbs, the request may not suit the queue pair's type or state. Check
    `receive_size=` and the interface (`ip link`), then `vendor_err` and the kernel's log. The
    status does not tell these causes apart, so this is not a PeerGoneError: give `reconnecting` a
    `retry_on=`."""

    _statuses = (Status.LOC_QP_OP_ERR, Status.LOC_EEC_OP_ERR)
    meaning = (
        "the local queue pair could not process it (rxe also reports this while the network "
        "interface is down, and for a message that is longer than its receive: see receive_size=; "
        "siw, for one that it was sending when the peer reset the connection)"
    )


class LocalProtectionError(WorkCompletionError):
    """A local buffer is not registered, belongs to another protection domain, is not inside its
    region, or its region does not permit the operation (a READ or a receive needs LOCAL_WRITE). The
    connection has ended. The methods of `Connection` check this before they post, so with them the
    usual reason is a mapped file that was truncated while it was registered."""

    _statuses = (Status.LOC_PROT_ERR,)
    meaning = (
        "a local buffer is not registered for it, or lies outside its region, or the region does "
        "not permit it (a READ or a receive needs LOCAL_WRITE)"
    )


class LocalAccessError(WorkCompletionError):
    """This side's device could not carry out what a peer's message asks of local memory, and the
    connection has ended: the message invalidates an rkey that is unknown here or cannot be
    invalidated (the peer gets RemoteAccessError), or a WRITE with immediate data met a protection
    error. Correct the peer: it may invalidate only the rkey of a window that this side has bound,
    and each rkey once."""

    _statuses = (Status.LOC_ACCESS_ERR,)
    meaning = (
        "the peer's message asks for what local memory does not permit: it invalidates an rkey "
        "that is unknown here or cannot be invalidated, or it is a WRITE with immediate data that "
        "met a protection error"
    )


class RemoteInvalidRequestError(WorkCompletionError):
    """The peer's device refused the request as invalid: the message is longer than the receive that
    it consumed there, the peer's device or queue pair does not accept the operation, or an atomic's
    memory is not aligned to 8 bytes. The connection has ended. Agree on `receive_size=` with the
    peer, and move longer data with READ or WRITE (docs/one-sided.md)."""

    _usual_errno = errno_module.ECONNRESET

    _statuses = (Status.REM_INV_REQ_ERR, Status.REM_INV_RD_REQ_ERR)
    meaning = (
        "the peer's device refused it as invalid: the message is longer than the receive that it "
        "consumed there (the peer's receive_size=, or its own receives), or the peer does not "
        "accept this operation"
    )


class RemoteAccessError(WorkCompletionError):
    """The peer's device refused the access: the rkey is unknown, revoked or of another protection
    domain, its grant has ended, the range lies outside the region, or the region does not permit
    the operation. The connection has ended. This also happens when the peer's process ends, because
    the kernel deregisters its memory before it disconnects. Register with the access that the peer
    needs, and let the peer report that it is done before you close a region or leave a grant's
    block. On siw, a refused access is a DisconnectedError."""

    _usual_errno = errno_module.ECONNRESET

    _statuses = (Status.REM_ACCESS_ERR,)
    meaning = (
        "the peer's device refused the access: the rkey is unknown or revoked (also if the "
        "peer's process ended: its memory is deregistered before it disconnects), the range lies "
        "outside its region, or the region does not permit this operation"
    )


class RemoteOperationError(WorkCompletionError):
    """The peer's device could not execute the operation, or gave an answer that does not belong to
    it (IBV_WC_BAD_RESP_ERR). The connection has ended. rxe also reports a message that is longer
    than the peer's receive this way. Check the peer's `receive_size=` and its kernel log."""

    _usual_errno = errno_module.ECONNRESET

    _statuses = (Status.REM_OP_ERR, Status.REM_ABORT_ERR, Status.BAD_RESP_ERR)
    meaning = (
        "the peer's device could not complete it, or gave an unexpected answer "
        "(IBV_WC_BAD_RESP_ERR; rxe also reports a remote error for a message that is longer than "
        "the peer's receive: see its receive_size=)"
    )


class RetryExceededError(WorkCompletionError, PeerGoneError):
    """The peer did not acknowledge the request within all retries: its machine or the network
    failed, or `retry_count` and `ack_timeout` are so small that one lost packet is enough. The
    connection has ended; treat the peer as gone. The request may or may not have been executed. The
    text has the time limit that was in force: raise `peer_timeout=` (or `ack_timeout=`) if the peer
    is only slow.

    `retry_count` and `ack_timeout` are the connection's (see ConnectionOptions), None if they are
    not known.
    """

    _usual_errno = errno_module.ETIMEDOUT

    _statuses = (Status.RETRY_EXC_ERR, Status.RESP_TIMEOUT_ERR)
    meaning = "the peer did not acknowledge it within all retries (retry_count x ack_timeout)"

    def __init__(
        self,
        status: int,
        request: str,
        *,
        vendor_err: int = 0,
        qp_num: int = 0,
        retry_count: int | None = None,
        ack_timeout: int | None = None,
        peer: str | None = None,
    ) -> None:
        why = ""
        if retry_count is not None and ack_timeout is not None:
            why = _unacknowledged(retry_count, ack_timeout)
        super().__init__(status, request, vendor_err=vendor_err, qp_num=qp_num, why=why, peer=peer)
        self.retry_count = retry_count
        self.ack_timeout = ack_timeout


TCP_SECONDS = 900.0
"""Seconds after which a peer on iWARP that acknowledges nothing is given up, also with a longer
limit or none: TCP itself gives up soon after that (sysctl net.ipv4.tcp_retries2)."""


def retry_seconds(retry_count: int, ack_timeout: int) -> float:
    """Return the seconds after which a device gives up on an acknowledgement. With an ack_timeout
    of 0, it never does."""
    return (retry_count + 1) * 4.096e-6 * 2**ack_timeout if ack_timeout else math.inf


def _unacknowledged(retry_count: int, ack_timeout: int) -> str:
    """Return the text of a missing acknowledgement: the time, and the option to change."""
    if not ack_timeout:  # only iWARP gives up then
        return (
            f"the peer did not acknowledge it within {TCP_SECONDS:g} s, TCP's limit (ack_timeout=0 "
            "sets none): it died, or the network between"
        )
    once = retry_seconds(0, ack_timeout)
    if retry_count == 0:
        return (
            f"retry_count=0 allows no retransmission, and the peer did not acknowledge it within "
            f"ack_timeout={ack_timeout} ({once:.3g} s); one lost packet is enough. Give a "
            "retry_count of 1 to 6"
        )
    return (
        f"the peer did not acknowledge it within {retry_seconds(retry_count, ack_timeout):.3g} s "
        f"(retry_count={retry_count} retransmissions after ack_timeout={ack_timeout}, "
        f"{once:.3g} s, each): it died, or the network between. If it is only slow, raise "
        "ack_timeout"
    )


class ReceiverNotReadyError(WorkCompletionError):
    """The peer had no receive posted for longer than `rnr_retry_count` allows, and the connection
    has ended. Each side sets this limit for the sends of the other side, and on a queue pair of
    `open_queue_pair` for its own. aiordma's default, 7, sets no limit; a C program that leaves it
    at 0 permits no wait. Let the peer post more receives, or earlier (before it accepts), or set
    the count to 7, and bound the messages in flight (docs/back-pressure.md)."""

    _statuses = (Status.RNR_RETRY_EXC_ERR,)
    meaning = "the peer had no receive posted within all RNR retries"


class FlushedError(WorkCompletionError):
    """The queue pair failed or was closed before the request completed. `__cause__` is the first
    error that was not a flush, if there is one, and the text includes it: look at that one. The
    request may or may not have been executed. Its memory is free again, unless the text says that
    the driver refused to destroy the queue pair. A receive that is left when the connection ends
    fails this way, which is normal."""

    _statuses = (Status.WR_FLUSH_ERR,)
    meaning = "it was flushed, because the queue pair had failed or was closed"

    def __str__(self) -> str:
        text, cause = super().__str__(), self.__cause__
        if cause is None:
            return text
        # The actual cause replaces the list of possible causes.
        text = text.replace(self.meaning, "it was flushed", 1)
        return f"{text}: {cause_text(cause)}"


class PeerFlushedError(FlushedError, PeerGoneError):
    """A request was flushed because the peer has gone: catch PeerGoneError. The request may or may
    not have been executed. `__cause__` is the PeerGoneError that ended the connection; it is None
    if an iWARP device flushed the request before the connection manager reported the disconnect."""

    _usual_errno = errno_module.ECONNRESET


_BY_STATUS: dict[int, type[WorkCompletionError]] = {
    status: family for family in WorkCompletionError.__subclasses__() for status in family._statuses
}


def completion_error(
    status: int,
    request: str,
    *,
    vendor_err: int = 0,
    qp_num: int = 0,
    retries: tuple[int, int] | None = None,
    peer_gone: bool = False,
    peer: str | None = None,
    why: str = "",
) -> WorkCompletionError:
    """Make the error for a work completion's status; for an unknown status, the base class.
    `retries` are the connection's retry_count and ack_timeout. `peer_gone` is whether flushes are a
    consequence of the peer's end. `peer` is its address, for the text. `why` is the reason of a
    flush; "": the status has it."""
    family = _BY_STATUS.get(status, WorkCompletionError)
    if family is FlushedError and peer_gone:
        family = PeerFlushedError
    own: dict[str, Any] = {"why": why}
    if family is RetryExceededError:
        own = dict(zip(("retry_count", "ack_timeout"), retries or (), strict=False))
    return family(status, request, vendor_err=vendor_err, qp_num=qp_num, peer=peer, **own)


# ---------------------------------------------------------------------------------------------
# Connections


class RdmaConnectionError(RdmaError, builtins.ConnectionError):
    """The peer, or the path to it, failed, or the driver refused a call while a connection was
    opened (`errno` is then the call's). Base class of the errors of the usual steps: AddressError,
    RouteError, UnreachableError, RejectedError, ConnectTimeoutError. The text names the step and
    the limit. Raise the limit, or try again after a pause. Also a builtin ConnectionError."""

    @classmethod
    def _of_call(cls, what: str, error: VerbsCallError) -> Self:
        """Make the error for a failed call into C, with the call's `errno`."""
        made = cls(f"{what}: {error}")
        made.errno = error.errno
        return made

    # Programs that use sockets show an OSError by its number and this text: without it, they would
    # show "None".
    @property
    def strerror(self) -> str:  # type: ignore[override]
        """The text of the error."""
        return str(self)


class AddressError(RdmaConnectionError):
    """No RDMA device reaches the address, or the name does not resolve. No peer was contacted.
    `aiordma doctor ADDRESS` says which device would be used, and why; check the name with `getent
    hosts NAME` and the route with `ip route get ADDRESS`. With `device="mlx5_0"`, another interface
    may have the route; without `device=`, aiordma uses the software device if no RDMA device
    reaches the address."""

    is_unreached = False
    """Whether the cause is that no RDMA device reaches the address."""

    @classmethod
    def _unreached(cls, message: str) -> "AddressError":
        """Return the error for an address that no RDMA device reaches."""
        error = cls(message)
        error.is_unreached = True
        return error


class RouteError(RdmaConnectionError):
    """The address was resolved, but no route to it was found: on InfiniBand the subnet manager has
    no path to the peer; on RoCE the neighbour does not answer (ARP), or the interface is down.
    Check `ping ADDRESS`, `ip neighbour` and `rdma link`, and on InfiniBand `sminfo`."""

    _usual_errno = errno_module.EHOSTUNREACH


class UnreachableError(RdmaConnectionError):
    """The peer's connection manager did not answer: its machine is down or has no RDMA connection
    manager (the module rdma_cm), or a firewall drops the packets. Check `aiordma info` at the peer,
    and open UDP port 4791 for RoCE v2 or the listener's TCP port for iWARP. Both sides need the
    same kind of device: the software device speaks iWARP over TCP, not RoCE."""

    _usual_errno = errno_module.ETIMEDOUT


class MulticastError(RdmaConnectionError):
    """A multicast group could not be joined, or the network ended the membership: the subnet
    manager refused the group, or the interface has no multicast or lost its address. Check that the
    address is a group (IPv4: 224.0.0.0/4) and that `ip link` shows MULTICAST, then join again."""


class RejectedError(RdmaConnectionError, ConnectionRefusedError):
    """The peer, or its connection manager, rejected the connection. Usually no program listens on
    the port. Otherwise the peer's program called `reject`, the listener's backlog is full, a server
    of streams does not serve yet, or the program there does not speak iWARP; the text says which.
    Check the address, the port and the kind of device of both sides: a client on RoCE does not find
    a server on the software device (`rdma resource show cm_id` lists the ports of RDMA devices,
    `ss` does not). If the backlog was full, try again after a pause, or give the listener a larger
    `backlog=`. Also a builtin ConnectionRefusedError.

    `private_data` is the data that the peer's program sent with the rejection (it may be
    zero-padded). `reason` is the CM's number (InfiniBand spec, table of REJ reasons; on iWARP an
    errno).
    """

    def __init__(self, message: str, *, reason: int, private_data: bytes) -> None:
        super().__init__(message)
        self.errno: int | None = errno_module.ECONNREFUSED
        self.reason = reason
        self.private_data = private_data


class ConnectTimeoutError(RdmaConnectionError, TimeoutError):
    """A step of connecting took longer than `timeout=`, 30 s by default. The message names the
    step. Usually the peer's program has not accepted in time: a blocked event loop accepts nothing,
    so let the server run what blocks in a worker thread, and call `serve` or `accept` all the time.
    On iWARP, the peer may be a plain TCP server that waits for its client, such as Redis: name the
    hosts to reach over RDMA in AIORDMA_STREAM_HOSTS (docs/streams.md). Also a builtin
    ConnectionError and TimeoutError."""

    _usual_errno = errno_module.ETIMEDOUT


class DisconnectedError(
    PeerGoneError, RdmaConnectionError, ConnectionResetError, anyio.BrokenResourceError
):
    """The peer closed the connection or broke it, and this side then posted, or waited for
    something other than a message (`receive` raises EndOfStream after an orderly end). On siw, a
    refused access or a message without a receive ends the connection this way, too. Connect again,
    and repeat only what may happen twice. Also a builtin ConnectionResetError."""

    _usual_errno = errno_module.ECONNRESET


class DeviceRemovedError(DisconnectedError):
    """The RDMA device was removed while the connection used it: the driver was unloaded, `rdma link
    delete` was called, or the card was unplugged. Close what used the device, and connect again:
    aiordma then chooses a device for the address anew."""


class StreamProtocolError(RdmaConnectionError, anyio.BrokenResourceError):
    """The peer of a stream does not use rsockets' protocol, or violates it, and the stream has
    ended. The peer may use `aiordma.connect`, which sends messages, or another version, or send
    lengths or grants that are not permitted. The message has what arrived and what is permitted.
    Use `aiordma.streams` or rsockets on both sides."""

    _usual_errno = errno_module.EPROTO
