"""Why a handshake failed: the errors of the connection manager's events, and of refused calls."""

import errno
import os

from aiordma._base.enums import CmEventType
from aiordma._base.errors import (
    AddressError,
    DeviceRemovedError,
    DisconnectedError,
    RdmaConnectionError,
    RejectedError,
    RouteError,
    UnreachableError,
    VerbsCallError,
    detached,
)
from aiordma._base.hints import descriptors_hint, is_own_address
from aiordma._base.rejections import REJECT_REASONS, REJECT_TEXTS
from aiordma._endpoint.endpoint import Endpoint
from aiordma.verbs.identifier import Event

_OF_NETWORKS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ETIMEDOUT,
    }
)
"""What the route, or the wait for the peer, fails with at a socket. (Drivers have others.)"""


def unbound(what: str, error: VerbsCallError, source: tuple[str, int] | None) -> AddressError:
    """Return the error for an address that could not be resolved, or a source not be bound."""
    failed = AddressError._of_call(what, error)
    if error.errno == errno.ENODEV and source and not is_own_address(source[0]):
        failed.errno = errno.EADDRNOTAVAIL  # as of a socket's bind
    return failed


def refused_call(what: str, error: VerbsCallError) -> RdmaConnectionError:
    """Return the ConnectionError for a call that the driver refused."""
    text = f"{what}: {error}"
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        reason = -error.errno
        return RejectedError(f"{text}: {REJECT_REASONS[reason]}", reason=reason, private_data=b"")
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        unreachable = UnreachableError(text)
        unreachable.errno = error.errno
        return unreachable
    if error.errno == errno.EPROTO:
        text += f": {REJECT_REASONS[-error.errno]}"
    refused = RdmaConnectionError(text)
    refused.errno = error.errno
    return refused


def failed_handshake(what: str, endpoint: Endpoint) -> Exception:
    """Return why an endpoint's handshake failed, which is the cause of its end."""
    cause = endpoint.cause
    if cause is None:
        cause = endpoint.teardown.cause = failed_event(what, endpoint.handshake.event)
    return detached(cause)


def failed_event(what: str, event: Event | None) -> Exception:
    """Return the error for the CM event that ended an attempt."""
    if event is None:
        return RdmaConnectionError(f"{what}: no reason was given")
    status = event.status
    if status == -1:
        # This is not EPERM: a call inside librdmacm failed, and its errno is not available.
        text = "librdmacm gave no reason (status -1)"
    else:
        text = os.strerror(-status) if status < 0 else f"status {status}"
    shortage = descriptors_hint(-status)
    if shortage is not None:
        text = f"{text}. {shortage}"
    kind = event.type
    if kind is CmEventType.ADDR_ERROR:
        if shortage is None:
            text += (
                ". Either no machine has this address, or no RDMA device reaches it (`rdma link` "
                "lists devices and their interfaces)"
            )
        unresolved = AddressError(f"{what}: resolving the address failed: {text}")
        unresolved.is_unreached = status == -errno.ENODEV
        # A broadcast address fails with EACCES, and TCP's connect to it with ENETUNREACH.
        return _with_errno(unresolved, -errno.ENETUNREACH if status == -errno.EACCES else status)
    if kind is CmEventType.ROUTE_ERROR:
        unrouted = RouteError(f"{what}: resolving the route failed: {text}")
        return _with_errno(unrouted, status, _OF_NETWORKS)
    if kind is CmEventType.REJECTED:
        said = event.private_data.rstrip(b"\0")  # zero-padded on InfiniBand and RoCE
        reason = REJECT_TEXTS.get(said) or REJECT_REASONS.get(status, text)
        return RejectedError(
            f"{what}: rejected ({status}): {reason}",
            reason=status,
            private_data=event.private_data,
        )
    if kind is CmEventType.UNREACHABLE:
        silent = UnreachableError(f"{what}: the peer's connection manager did not answer: {text}")
        return _with_errno(silent, status, _OF_NETWORKS)
    if kind is CmEventType.DISCONNECTED:
        return DisconnectedError(f"{what}: the peer disconnected at once")
    if kind is CmEventType.DEVICE_REMOVAL:
        return DeviceRemovedError(f"{what}: the RDMA device was removed")
    if status == -errno.EPROTO:
        text += f": {REJECT_REASONS[status]}"
    return _with_errno(RdmaConnectionError(f"{what}: {kind.label}: {text}"), status)


def _with_errno(
    error: RdmaConnectionError, status: int, known: frozenset[int] | None = None
) -> RdmaConnectionError:
    """Give an error the errno of an event's status, if the status has one, and it is `known`; None:
    any."""
    if status < -1 and (known is None or -status in known):
        error.errno = -status
    return error
