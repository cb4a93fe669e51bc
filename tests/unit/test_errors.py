"""Errors: classes of the usual statuses, families that except clauses catch, texts that teach."""

import copy
import copyreg
import errno
import os
import pickle
import resource

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import RdmaError, VerbsCallError, WorkCompletionError
from aiordma._base import errors, hints
from aiordma._base.calls import (
    check_minus_one,
    check_negative_errno,
    check_pointer,
    check_positive_errno,
)
from aiordma._base.errors import completion_error, detached
from aiordma.verbs import AsyncEventType
from aiordma.verbs import WorkCompletionStatus as Status
from tests.alike import alike
from tests.internals import ffi

# -- work completions -----------------------------------------------------------------------------

# man ibv_poll_cq says what each status means; these are the ones with a class of their own.
CLASSES = {
    Status.LOC_LEN_ERR: errors.LocalLengthError,
    Status.LOC_QP_OP_ERR: errors.LocalQueuePairError,
    Status.LOC_EEC_OP_ERR: errors.LocalQueuePairError,
    Status.LOC_PROT_ERR: errors.LocalProtectionError,
    Status.WR_FLUSH_ERR: errors.FlushedError,
    Status.BAD_RESP_ERR: errors.RemoteOperationError,
    Status.LOC_ACCESS_ERR: errors.LocalAccessError,
    Status.REM_INV_REQ_ERR: errors.RemoteInvalidRequestError,
    Status.REM_INV_RD_REQ_ERR: errors.RemoteInvalidRequestError,
    Status.REM_ACCESS_ERR: errors.RemoteAccessError,
    Status.REM_OP_ERR: errors.RemoteOperationError,
    Status.REM_ABORT_ERR: errors.RemoteOperationError,
    Status.RETRY_EXC_ERR: errors.RetryExceededError,
    Status.RESP_TIMEOUT_ERR: errors.RetryExceededError,
    Status.RNR_RETRY_EXC_ERR: errors.ReceiverNotReadyError,
}


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_exceeded_retries_name_what_was_in_force() -> None:
    error = completion_error(Status.RETRY_EXC_ERR, "SEND of 5 bytes", retries=(6, 16))
    assert isinstance(error, errors.RetryExceededError)
    assert (error.retry_count, error.ack_timeout) == (6, 16)
    for part in ("within 1.88 s", "retry_count=6", "ack_timeout=16, 0.268 s", "RETRY_EXC_ERR"):
        assert part in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.retry_count) == (str(error), 6)


def test_no_retries_are_named_as_the_fault() -> None:
    text = str(completion_error(Status.RETRY_EXC_ERR, "SEND of 5 bytes", retries=(0, 16)))
    assert "retry_count=0 allows no retransmission" in text
    assert "ack_timeout=16 (0.268 s)" in text


def test_no_ack_timeout_names_the_limit_of_tcp() -> None:
    text = str(completion_error(Status.RETRY_EXC_ERR, "SEND of 5 bytes", retries=(6, 0)))
    assert "within 900 s, TCP's limit (ack_timeout=0 sets none)" in text


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.SUCCESS])
def test_each_status_has_its_class_or_the_generic_one(status: Status) -> None:
    error = completion_error(status, "SEND of 5 bytes", vendor_err=0x88, qp_num=17)
    assert type(error) is CLASSES.get(status, WorkCompletionError)
    assert (error.status, error.vendor_err, error.qp_num) == (status, 0x88, 17)
    assert error.request == "SEND of 5 bytes"
    assert str(error).startswith("SEND of 5 bytes failed: ")
    assert f"IBV_WC_{status.name}" in str(error)
    assert "vendor error 0x88" in str(error)


def test_each_error_status_has_exactly_one_class() -> None:
    claimed = [
        status for family in WorkCompletionError.__subclasses__() for status in family._statuses
    ]
    assert sorted(claimed) == sorted(CLASSES)


@given(st.integers(min_value=max(Status) + 1, max_value=2**32 - 1))
def test_an_unknown_status_is_a_generic_error_that_names_it(status: int) -> None:
    error = completion_error(status, "SEND of 5 bytes")
    assert type(error) is WorkCompletionError
    assert error.status == status
    assert str(status) in str(error)


def test_flushed_error_says_why_in_its_text() -> None:
    assert "because the queue pair had failed or was closed" in str(_flushed(None))
    explained = _flushed(errors.DisconnectedError("peer 192.0.2.1:7471 disconnected"))
    assert str(explained) == (
        "SEND of 5 bytes failed: it was flushed (IBV_WC_WR_FLUSH_ERR): "
        "peer 192.0.2.1:7471 disconnected"
    )


def test_flushed_error_names_a_cause_without_a_text() -> None:
    assert str(_flushed(KeyError())).endswith("(IBV_WC_WR_FLUSH_ERR): KeyError")


# -- families -------------------------------------------------------------------------------------

FAMILIES: dict[type[Exception], tuple[type[Exception], ...]] = {
    errors.AddressError: (errors.RdmaConnectionError, ConnectionError, OSError),
    errors.BusyError: (RdmaError, anyio.BusyResourceError),
    errors.ClosedError: (RdmaError, anyio.ClosedResourceError),
    errors.ConnectTimeoutError: (errors.RdmaConnectionError, ConnectionError, TimeoutError),
    errors.DeviceEventError: (RdmaError, ConnectionError, anyio.BrokenResourceError),
    errors.DeviceRemovedError: (errors.DisconnectedError, ConnectionError),
    errors.DisconnectedError: (
        errors.PeerGoneError,
        errors.RdmaConnectionError,
        ConnectionResetError,
        anyio.BrokenResourceError,
    ),
    errors.FlushedError: (WorkCompletionError, ConnectionError),
    errors.NoDeviceError: (RdmaError, ConnectionError),
    errors.NotPostedError: (RdmaError,),
    errors.NotSupportedError: (RdmaError,),
    errors.PeerFlushedError: (errors.PeerGoneError, errors.FlushedError),
    errors.PeerGoneError: (RdmaError, ConnectionError),
    errors.QueueFullError: (RdmaError, anyio.WouldBlock),
    errors.RdmaConnectionError: (RdmaError, ConnectionError),
    errors.RejectedError: (errors.RdmaConnectionError, ConnectionRefusedError),
    errors.RetryExceededError: (errors.PeerGoneError, WorkCompletionError),
    errors.RouteError: (errors.RdmaConnectionError, ConnectionError),
    errors.UnreachableError: (errors.RdmaConnectionError, ConnectionError),
    VerbsCallError: (RdmaError, OSError),
    WorkCompletionError: (RdmaError, ConnectionError, anyio.BrokenResourceError),
}


@pytest.mark.parametrize("error", FAMILIES, ids=lambda error: error.__name__)
def test_an_error_is_caught_as_what_it_also_is(error: type[Exception]) -> None:
    for family in FAMILIES[error]:
        assert issubclass(error, family)


@pytest.mark.promise("A peer that has gone is a PeerGoneError, or the end of the stream")
def test_peers_that_have_gone_are_these_errors() -> None:
    gone = {error for error in _every_class(RdmaError) if issubclass(error, errors.PeerGoneError)}
    assert {error.__name__ for error in gone} == {
        "DeviceRemovedError",
        "DisconnectedError",
        "PeerFlushedError",
        "PeerGoneError",
        "RetryExceededError",
    }


ERRNOS: list[tuple[RdmaError, int | None]] = [
    (errors.DisconnectedError("peer disconnected"), errno.ECONNRESET),
    (errors.DeviceRemovedError("gone"), errno.ECONNRESET),
    (errors.ConnectTimeoutError("too slow"), errno.ETIMEDOUT),
    (errors.RejectedError("no", reason=28, private_data=b""), errno.ECONNREFUSED),
    (errors.UnreachableError("no answer"), errno.ETIMEDOUT),
    (errors.RouteError("no route"), errno.EHOSTUNREACH),
    (errors.StreamProtocolError("no rsocket"), errno.EPROTO),
    (errors.DeviceEventError(AsyncEventType.QP_FATAL, "a queue pair"), errno.ECONNABORTED),
    (completion_error(Status.RETRY_EXC_ERR, "SEND"), errno.ETIMEDOUT),
    (completion_error(Status.REM_ACCESS_ERR, "WRITE"), errno.ECONNRESET),
    (completion_error(Status.REM_INV_REQ_ERR, "SEND"), errno.ECONNRESET),
    (completion_error(Status.REM_OP_ERR, "SEND"), errno.ECONNRESET),
    (completion_error(Status.WR_FLUSH_ERR, "SEND"), errno.ECONNABORTED),
    (completion_error(Status.WR_FLUSH_ERR, "SEND", peer_gone=True), errno.ECONNRESET),
    (completion_error(9999, "SEND"), errno.ECONNABORTED),
    (errors.AddressError("nowhere"), None),
    (errors.RdmaConnectionError("of a call that has an errno of its own"), None),
]


@pytest.mark.parametrize(("error", "number"), ERRNOS, ids=lambda each: type(each).__name__)
def test_error_has_the_errno_of_a_sockets(error: RdmaError, number: int | None) -> None:
    assert isinstance(error, OSError)
    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), detached(error)):
        assert each.errno == number
        assert str(each) == error.args[0]  # without "[Errno 104]"


@pytest.mark.promise("Every posted request completes or fails")
@pytest.mark.parametrize("error", errors.WorkCompletionError.__subclasses__())
def test_failed_request_is_caught_by_socket_programs(error: type[Exception]) -> None:
    with pytest.raises(ConnectionError):
        raise error(5, "SEND of 5 bytes")
    with pytest.raises(OSError, match="SEND of 5 bytes"):
        raise error(5, "SEND of 5 bytes")


@pytest.mark.promise("Every posted request completes or fails")
def test_closed_and_broken_errors_are_disjoint() -> None:
    # Closed is your doing, broken somebody else's: nothing is both.
    for error in FAMILIES:
        assert not (
            issubclass(error, anyio.ClosedResourceError)
            and issubclass(error, anyio.BrokenResourceError)
        )


def _every_class(root: type[Exception]) -> set[type[Exception]]:
    return {root}.union(*(_every_class(child) for child in root.__subclasses__()))


def test_every_error_class_is_exported() -> None:
    ours = {error for error in _every_class(RdmaError) if error.__module__ == "aiordma"}
    assert len(ours) > 20
    assert {error.__name__ for error in ours} <= set(vars(errors))


# -- pickling -------------------------------------------------------------------------------------


def _flushed(cause: Exception | None) -> RdmaError:
    error = completion_error(Status.WR_FLUSH_ERR, "SEND of 5 bytes", qp_num=9)
    error.__cause__ = cause
    return error


EXAMPLES: list[RdmaError] = [
    *(completion_error(status, "SEND of 5 bytes", qp_num=9) for status in CLASSES),
    _flushed(errors.DisconnectedError("peer 192.0.2.1:7471 disconnected")),
    VerbsCallError(errno.ENOMEM, "ibv_reg_mr", "Asked for 8 pages"),
    completion_error(Status.REM_ACCESS_ERR, "RDMA_READ of 8 bytes", vendor_err=3, qp_num=9),
    completion_error(9999, "SEND of 1 bytes"),
    errors.RejectedError("refused", reason=28, private_data=b"try later\0\0"),
    errors.AddressError("nobody there"),
    errors.AddressError._of_call("connect to x:1", errors.VerbsCallError(98, "rdma_bind_addr")),
    errors.ConnectTimeoutError("too slow"),
    errors.DeviceEventError(AsyncEventType.QP_FATAL, "a queue pair of rxe0"),
    errors.DeviceRemovedError("gone"),
    errors.QueueFullError("64 requests are in flight"),
    errors.ClosedError("this connection is closed"),
    errors.BusyError("2 posted work requests still own it"),
    errors.NoDeviceError("there is none"),
    errors.NotPostedError("its chain was not posted"),
    RdmaError(),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(error: RdmaError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)
        if isinstance(error, OSError):
            assert isinstance(again, OSError)
            assert (again.errno, again.strerror) == (error.errno, error.strerror)


def test_pickled_partial_post_leaves_its_requests() -> None:
    error = errors.PartialPostError(errno.ENOMEM, "ibv_post_send", "no room", [lambda: None])
    again = pickle.loads(pickle.dumps(error))
    assert (again.posted, again.refused, str(again)) == ([], 1, str(error))
    assert detached(error).posted == error.posted


# -- copies of what is stored ---------------------------------------------------------------------


def _copy_of(error: RdmaError) -> RdmaError:
    again = type(error)(*error.args)
    again.__context__ = error.__context__
    return again.with_traceback(error.__traceback__)


def test_detached_copy_is_detached_where_copies_keep_the_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As copies of exceptions do once Dask's distributed is imported."""
    kind = errors.DisconnectedError
    monkeypatch.setitem(copyreg.dispatch_table, kind, lambda error: (_copy_of, (error,)))
    stored = kind("the peer disconnected")
    stored.__context__ = ValueError("a context")
    with pytest.raises(kind):
        raise stored
    again = detached(stored)
    assert again is not stored
    assert (again.__traceback__, again.__context__) == (None, None)


@pytest.mark.promise("Every posted request completes or fails")
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_detached_copy_keeps_everything_but_the_traceback(error: RdmaError) -> None:
    stored = copy.copy(error)
    stored.__cause__ = cause = errors.DisconnectedError("the peer disconnected")
    stored.__context__ = ValueError("a context")
    with pytest.raises(RdmaError):
        raise stored
    again = detached(stored)
    assert alike(again, stored)
    assert again.__cause__ is not cause
    assert (again.__traceback__, again.__context__) == (None, None)
    assert stored.__traceback__ is not None


def test_detached_keeps_a_cause_that_is_not_ours() -> None:
    stored = errors.NotPostedError("its chain was not posted")
    stored.__cause__ = cause = KeyError("the program's own")
    assert detached(stored).__cause__ is cause


def test_detached_error_that_cannot_be_copied_is_the_same_one() -> None:
    class Strange(Exception):
        def __init__(self, one: int, *, other: int) -> None:
            super().__init__(one)

    strange = Strange(1, other=2)
    with pytest.raises(Strange) as caught:
        raise strange
    assert detached(strange) is strange
    assert strange.__traceback__ is None
    del caught


# -- calls ----------------------------------------------------------------------------------------


def _set_errno(number: int) -> None:
    ffi.errno = number


def test_a_verbs_call_error_is_an_os_error_that_names_the_call() -> None:
    error = VerbsCallError(errno.EBUSY, "ibv_dealloc_pd")
    assert error.errno == errno.EBUSY
    assert error.call == "ibv_dealloc_pd"
    assert f"ibv_dealloc_pd: {os.strerror(errno.EBUSY)}" in str(error)


def test_hints_of_the_table_and_of_the_call_site_are_both_in_the_text() -> None:
    error = VerbsCallError(errno.EADDRINUSE, "rdma_listen", "Port 7471")
    assert "Another listener has this port. Port 7471" in str(error)


@pytest.mark.parametrize("call", ["ibv_reg_mr", "ibv_create_cq", "ibv_create_qp", "rdma_create_qp"])
def test_out_of_memory_names_the_limit_and_how_to_raise_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    text = str(VerbsCallError(errno.ENOMEM, call))
    for part in ("RLIMIT_MEMLOCK", "64 KiB", "ulimit -l unlimited", "limits.conf", "LimitMEMLOCK="):
        assert part in text


def test_out_of_memory_without_a_limit_looks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (unlimited, unlimited))
    text = str(VerbsCallError(errno.ENOMEM, "ibv_reg_mr"))
    assert "RLIMIT_MEMLOCK is unlimited" in text
    assert "ibv_devinfo -v" in text
    assert "ulimit" not in text


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOENT])
def test_no_device_names_the_command_that_makes_one(number: int) -> None:
    text = str(VerbsCallError(number, "rdma_create_event_channel"))
    assert "rdma link add rxe0 type rxe netdev" in text
    assert "rdma_ucm" in text


def test_every_hint_is_a_text() -> None:
    for call, number in hints._HINTS:
        hint = hints.hint(call, number)
        assert hint
        assert hint in str(VerbsCallError(number, call))
        assert not hint.endswith(".")  # texts are joined with ". "


# -- the checkers, one per return convention ------------------------------------------------------


@pytest.mark.parametrize("check", [check_positive_errno, check_minus_one])
def test_zero_is_success_whatever_errno_holds(check: object) -> None:
    assert callable(check)
    _set_errno(errno.EPERM)
    check(0, "ibv_any")


def test_a_positive_result_is_the_errno() -> None:
    _set_errno(errno.EPERM)
    with pytest.raises(VerbsCallError) as caught:
        check_positive_errno(errno.EINVAL, "ibv_modify_qp", "RESET to RTS")
    assert (caught.value.errno, caught.value.call) == (errno.EINVAL, "ibv_modify_qp")
    assert str(caught.value).endswith("RESET to RTS")


def test_minus_one_from_a_verb_falls_back_on_errno() -> None:
    _set_errno(errno.ENODATA)
    with pytest.raises(VerbsCallError) as caught:
        check_positive_errno(-1, "ibv_query_gid")
    assert caught.value.errno == errno.ENODATA


def test_minus_one_of_an_rdma_call_takes_errno() -> None:
    _set_errno(errno.EADDRINUSE)
    with pytest.raises(VerbsCallError) as caught:
        check_minus_one(-1, "rdma_bind_addr")
    assert (caught.value.errno, caught.value.call) == (errno.EADDRINUSE, "rdma_bind_addr")


def test_null_takes_errno() -> None:
    _set_errno(errno.EMFILE)
    with pytest.raises(VerbsCallError) as caught:
        check_pointer(ffi.NULL, "ibv_create_cq")
    assert caught.value.errno == errno.EMFILE


def test_a_pointer_is_handed_on() -> None:
    pointer = ffi.new("int *")
    _set_errno(errno.EMFILE)
    assert check_pointer(pointer, "ibv_create_cq") is pointer


def test_a_count_is_handed_on_and_a_negative_errno_raised() -> None:
    assert [check_negative_errno(count, "ibv_poll_cq") for count in (0, 7)] == [0, 7]
    with pytest.raises(VerbsCallError) as caught:
        check_negative_errno(-errno.EIO, "ibv_poll_cq")
    assert caught.value.errno == errno.EIO


def test_a_failure_without_an_errno_is_never_called_success() -> None:
    # Not all providers set errno as the man pages say.
    checks = (
        lambda: check_positive_errno(-1, "ibv_query_gid"),
        lambda: check_minus_one(-1, "rdma_connect"),
        lambda: check_pointer(ffi.NULL, "ibv_create_qp"),
    )
    for check in checks:
        _set_errno(0)
        with pytest.raises(VerbsCallError) as caught:
            check()
        assert caught.value.errno != 0
        assert "Success" not in str(caught.value)
