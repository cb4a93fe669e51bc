"""The exception classes, and the functions that check the results of C calls.

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
from aiordma._native import ffi, given

__all__ = (
    "BACKLOG_IS_FULL",
    "NOT_ACCEPTED",
    "NOT_SERVING",
    "PLAIN_TCP",
    "REJECT_REASONS",
    "REJECT_TEXTS",
    "TCP_SECONDS",
    "UNSUPPORTED",
    "AddressError",
    "BusyError",
    "ClosedError",
    "ConnectTimeoutError",
    "DeviceEventError",
    "DeviceRemovedError",
    "DeviceRequirementError",
    "DisconnectedError",
    "EventLoopError",
    "FlushedError",
    "ForkError",
    "LocalAccessError",
    "LocalLengthError",
    "LocalProtectionError",
    "LocalQueuePairError",
    "MulticastError",
    "NoDeviceError",
    "NoMemoryError",
    "NotPostedError",
    "NotSupportedError",
    "PartialPostError",
    "PeerFlushedError",
    "PeerGoneError",
    "QueueFullError",
    "RdmaConnectionError",
    "RdmaError",
    "ReceiverNotReadyError",
    "RejectedError",
    "RemoteAccessError",
    "RemoteInvalidRequestError",
    "RemoteOperationError",
    "RetryExceededError",
    "RouteError",
    "StreamProtocolError",
    "UnreachableError",
    "VerbsCallError",
    "WorkCompletionError",
    "cause_text",
    "check_minus_one",
    "check_negative_errno",
    "check_pointer",
    "check_positive_errno",
    "check_supported",
    "completion_error",
    "detached",
    "is_backlog_full",
    "is_listeners_answer",
    "is_programs_answer",
    "leaf_errors",
    "retry_seconds",
)


class RdmaError(Exception):
    """Base class of aiordma's exceptions. It can be pickled, together with a cause that is an
    RdmaError."""

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
    """The device or the installed library lacks a capability. The message names both."""


class NoDeviceError(RdmaError, builtins.ConnectionError):
    """There is no RDMA device, or rdma-core is not installed. The message says how to get one. Also
    a builtin ConnectionError, for programs that catch the errors of sockets."""


class DeviceRequirementError(NoDeviceError):
    """The device that would be used is not one that `require=` or AIORDMA_REQUIRE permits: usually
    the software device, because no RDMA device reaches the address. The message says why."""


class ClosedError(RdmaError, anyio.ClosedResourceError):
    """An object was used after it was closed."""


class BusyError(RdmaError, anyio.BusyResourceError):
    """The device or another task is using the object."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # anyio's constructor makes another text


class QueueFullError(RdmaError, anyio.WouldBlock):
    """The work queue is full. Nothing was posted: await a request, then post again."""


class NotPostedError(RdmaError):
    """The request was collected for a chain that was not posted. `__cause__` is the error that
    ended the chain's block, or the post."""


class ForkError(RdmaError):
    """A forked child used an object of its parent. Nothing was done: open the object in the
    child."""


class EventLoopError(RdmaError, RuntimeError):
    """An object was used outside of its event loop: from another thread, in another loop, or after
    its loop has ended. The message names the object and its loop. Nothing was posted."""


class VerbsCallError(RdmaError, OSError):
    """A call into libibverbs or librdmacm failed.

    `errno` is C's, and `call` is the function's name in the man pages. If the limit or attribute at
    fault is known, the text names it.
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
    """The device refused a request of a chain, after it had accepted the previous ones.

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
    """The device reported a failure by an asynchronous event.

    It ends connections, so it is also a builtin ConnectionError.

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


class NoMemoryError(RdmaError, builtins.ConnectionError, anyio.BrokenResourceError):
    """This process had no memory for a step that a connection needs, so the connection has ended.

    It is also a builtin ConnectionError. It is no MemoryError.
    """

    _usual_errno = errno_module.ENOMEM


class PeerGoneError(RdmaError, builtins.ConnectionError):
    """The peer of an established connection has gone. This is the base class of all errors that
    say so, except the EndOfStream of `receive` after a disconnect, also of a killed peer:

    - DisconnectedError: the peer, or its kernel, closed or reset the connection.
    - RetryExceededError: the peer's device acknowledged nothing for too long. `keepalive` ends idle
      connections with it.
    - PeerFlushedError: a request was flushed because of one of these.

    A request that fails with it may have been executed by the peer's device, and may not have been.
    Also a builtin ConnectionError.
    """

    _usual_errno = errno_module.ECONNRESET


# ---------------------------------------------------------------------------------------------
# Work completions


class WorkCompletionError(RdmaError, builtins.ConnectionError, anyio.BrokenResourceError):
    """A posted work request failed. The queue pair is then in the error state and the connection
    has ended, so this is also a builtin ConnectionError.

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
    """A message is longer than the receive that it consumed, or a length exceeds the device's
    limit."""

    _statuses = (Status.LOC_LEN_ERR,)
    meaning = (
        "the peer's message is longer than the receive that it consumed: connect with a "
        "larger receive_size= (a shared receive queue: buffer_size=), or post longer receives; or "
        "a length is beyond the device's limit"
    )


class LocalQueuePairError(WorkCompletionError):
    """The queue pair could not process the request. rxe also reports some local access errors
    so."""

    _statuses = (Status.LOC_QP_OP_ERR, Status.LOC_EEC_OP_ERR)
    meaning = (
        "the local queue pair could not process it (rxe also reports this while the network "
        "interface is down, and for a message that is longer than its receive: see receive_size=)"
    )


class LocalProtectionError(WorkCompletionError):
    """A local buffer is not registered, belongs to another protection domain, is not inside its
    region, or its region does not permit the operation."""

    _statuses = (Status.LOC_PROT_ERR,)
    meaning = (
        "a local buffer is not registered for it, or lies outside its region, or the region does "
        "not permit it (a READ or a receive needs LOCAL_WRITE)"
    )


class LocalAccessError(WorkCompletionError):
    """This side's device could not carry out what a peer's message asks of local memory."""

    _statuses = (Status.LOC_ACCESS_ERR,)
    meaning = (
        "the peer's message asks for what local memory does not permit: it invalidates an rkey "
        "that is unknown here or cannot be invalidated, or it is a WRITE with immediate data that "
        "met a protection error"
    )


class RemoteInvalidRequestError(WorkCompletionError):
    """The peer's device refused the request as invalid, usually because its receive was too
    small."""

    _usual_errno = errno_module.ECONNRESET

    _statuses = (Status.REM_INV_REQ_ERR, Status.REM_INV_RD_REQ_ERR)
    meaning = (
        "the peer's device refused it as invalid: the message is longer than the receive that it "
        "consumed there (the peer's receive_size=, or its own receives), or the peer does not "
        "accept this operation"
    )


class RemoteAccessError(WorkCompletionError):
    """The peer's device refused an access: wrong rkey, out of bounds, or not permitted. This also
    happens when the peer's process ends, because the kernel deregisters its memory before it
    disconnects."""

    _usual_errno = errno_module.ECONNRESET

    _statuses = (Status.REM_ACCESS_ERR,)
    meaning = (
        "the peer's device refused the access: the rkey is unknown or revoked (also if the "
        "peer's process ended: its memory is deregistered before it disconnects), the range lies "
        "outside its region, or the region does not permit this operation"
    )


class RemoteOperationError(WorkCompletionError):
    """The peer's device could not execute the operation, or gave an answer that does not belong to
    it."""

    _usual_errno = errno_module.ECONNRESET

    _statuses = (Status.REM_OP_ERR, Status.REM_ABORT_ERR, Status.BAD_RESP_ERR)
    meaning = (
        "the peer's device could not complete it, or gave an unexpected answer "
        "(IBV_WC_BAD_RESP_ERR; rxe also reports a remote error for a message that is longer than "
        "the peer's receive: see its receive_size=)"
    )


class RetryExceededError(WorkCompletionError, PeerGoneError):
    """The peer stopped acknowledging: the peer or the network failed.

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
    """The peer had no receive posted for longer than rnr_retry_count allows: the peer's own, or
    this side's on a queue pair of `open_queue_pair`."""

    _statuses = (Status.RNR_RETRY_EXC_ERR,)
    meaning = "the peer had no receive posted within all RNR retries"


class FlushedError(WorkCompletionError):
    """The queue pair entered the error state, or was closed, before the request completed.

    `__cause__` is the first error that was not a flush, if there is one. The text includes it.
    """

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
    """A request was flushed because the peer has gone.

    `__cause__` is the PeerGoneError that ended the connection. It is None if an iWARP device
    flushed the request before the connection manager reported the disconnect.
    """

    _usual_errno = errno_module.ECONNRESET


def _families_by_status() -> dict[int, type[WorkCompletionError]]:
    found: dict[int, type[WorkCompletionError]] = {}
    for family in WorkCompletionError.__subclasses__():
        for status in family._statuses:
            if status in found:
                raise RuntimeError(f"{status!r} is claimed twice")
            found[status] = family
    return found


_BY_STATUS = _families_by_status()


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
    if family is RetryExceededError and retries is not None:
        return RetryExceededError(
            status,
            request,
            vendor_err=vendor_err,
            qp_num=qp_num,
            retry_count=retries[0],
            ack_timeout=retries[1],
            peer=peer,
        )
    if why:
        return family(status, request, vendor_err=vendor_err, qp_num=qp_num, why=why, peer=peer)
    return family(status, request, vendor_err=vendor_err, qp_num=qp_num, peer=peer)


# ---------------------------------------------------------------------------------------------
# Connections


class RdmaConnectionError(RdmaError, builtins.ConnectionError):
    """The peer, or the path to it, failed. Also a builtin ConnectionError."""

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
    """No RDMA device reaches the address, or the address does not resolve."""

    is_unreached = False
    """Whether the cause is that no RDMA device reaches the address."""

    @classmethod
    def _unreached(cls, message: str) -> "AddressError":
        """Return the error for an address that no RDMA device reaches."""
        error = cls(message)
        error.is_unreached = True
        return error


class RouteError(RdmaConnectionError):
    """The address was resolved, but no route to it was found."""

    _usual_errno = errno_module.EHOSTUNREACH


class UnreachableError(RdmaConnectionError):
    """The peer's connection manager did not answer."""

    _usual_errno = errno_module.ETIMEDOUT


class MulticastError(RdmaConnectionError):
    """A multicast group could not be joined, or the network ended the membership."""


class RejectedError(RdmaConnectionError, ConnectionRefusedError):
    """The peer, or its connection manager, rejected the connection.

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
    """A step of connecting took longer than its timeout. The message names the step."""

    _usual_errno = errno_module.ETIMEDOUT


class DisconnectedError(
    PeerGoneError, RdmaConnectionError, ConnectionResetError, anyio.BrokenResourceError
):
    """The peer closed the connection, or broke it. Also a builtin ConnectionResetError."""

    _usual_errno = errno_module.ECONNRESET


class DeviceRemovedError(DisconnectedError):
    """The RDMA device was removed while the connection used it."""


class StreamProtocolError(RdmaConnectionError, anyio.BrokenResourceError):
    """The peer of a stream does not use rsockets' protocol, or violates it. The message has what
    arrived, and what is permitted."""

    _usual_errno = errno_module.EPROTO


BACKLOG_IS_FULL: bytes = b"the listener's backlog is full"
"""The private data of a rejection because of a full backlog."""
NOT_SERVING: bytes = b"the server does not serve yet"
"""The private data of a rejection before a server of streams was started."""

REJECT_TEXTS: dict[bytes, str] = {
    BACKLOG_IS_FULL: (
        "the listener's backlog is full, because peers arrive faster than it accepts them: try "
        "again after a pause, or give the listener a larger backlog="
    ),
    NOT_SERVING: "the server does not serve yet: try again after its start_serving()",
}
"""What the private data of aiordma's own listeners mean."""

PLAIN_TCP: str = "a plain TCP server"
NOT_ACCEPTED: str = (
    f": the program that listens there does not accept now, or it is {PLAIN_TCP}, which waits for "
    "a request of its own protocol"
)
"""Why a wait for an accept on iWARP can take too long."""

REJECT_REASONS: dict[int, str] = {
    1: "the peer has no queue pair left",
    3: "the peer has no resources left",
    4: "the peer's connection manager timed out",
    5: "the peer does not support the request",
    8: "no program listens on that port (a device's addresses also need a moment after it appears)",
    10: "the queue pair number is still in use at the peer: try again",
    28: "the peer's program refused",
    35: "the peer does not take these options (ECE): try without",
    -errno_module.ECONNREFUSED: "no program listens on that port, or the peer's program refused",
    -errno_module.ECONNRESET: (
        "the peer closed the TCP connection in the handshake: its program ended, or the program "
        "that listens there does not speak iWARP (MPA)"
    ),
    -errno_module.EPROTO: (
        f"the program that listens there does not speak iWARP (MPA); it may be {PLAIN_TCP}"
    ),
    -errno_module.ETIMEDOUT: "the peer did not answer",
}


def is_backlog_full(error: BaseException) -> bool:
    """Return whether an aiordma listener rejected the request because its backlog is full."""
    return isinstance(error, RejectedError) and _said(error) == BACKLOG_IS_FULL


def is_listeners_answer(error: BaseException) -> bool:
    """Return whether an aiordma listener rejected the request without its program, and said why."""
    return isinstance(error, RejectedError) and _said(error) in REJECT_TEXTS


def is_programs_answer(error: BaseException) -> bool:
    """Return whether the peer's program rejected the request, and said why in private data."""
    return isinstance(error, RejectedError) and _said(error) not in {b"", *REJECT_TEXTS}


def _said(error: RejectedError) -> bytes:
    return error.private_data.rstrip(b"\0")  # InfiniBand and RoCE pad it with zeros


# ---------------------------------------------------------------------------------------------
# One checker for each return convention

_UNSAID = errno_module.EIO  # for a call that failed without setting errno


def check_positive_errno(result: int, call: str, hint: str | None = None) -> None:
    """Check the result of most verbs: 0, or a positive errno."""
    if result:
        # Some drivers return -1 and set errno, or return -errno, contrary to the man page.
        if result < -1:
            result = -result
        raise VerbsCallError(result if result > 0 else ffi.errno or _UNSAID, call, hint)


UNSUPPORTED: frozenset[int] = frozenset({errno_module.EOPNOTSUPP, errno_module.ENOSYS})
"""Errnos of a call that the device or its library does not have."""


def check_supported(error: int, what: str, device: str) -> None:
    """Raise if the errno of a call means that the device does not support it.

    Raises:
        NotSupportedError: the device or its library lacks the call.
    """
    if error in UNSUPPORTED:
        raise NotSupportedError(f"{what}: {device} or its library cannot")


def check_minus_one(result: int, call: str, hint: str | None = None) -> None:
    """Check the result of the rdma_ calls: 0, or -1 with errno set."""
    if result:
        raise VerbsCallError(ffi.errno or _UNSAID, call, hint)


def check_pointer(result: Any, call: str, hint: str | None = None) -> Any:
    """Check the result of a creating call: a pointer, or NULL with errno set."""
    if result == ffi.NULL:
        raise VerbsCallError(ffi.errno or errno_module.ENOMEM, call, hint)
    return result


def check_negative_errno(result: int, call: str) -> int:
    """Check the result of aiordma's own C functions: a count, or -errno."""
    if result < 0:
        raise VerbsCallError(-result, call)
    return result
