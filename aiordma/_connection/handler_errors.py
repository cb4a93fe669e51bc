"""Whose fault a handler's error is: the peer's, which is one line in the log, or the program's."""

import logging
from collections.abc import Iterator

import anyio

from aiordma._base.errors import (
    FlushedError,
    LocalAccessError,
    LocalLengthError,
    LocalProtectionError,
    LocalQueuePairError,
    RdmaConnectionError,
    RdmaError,
    WorkCompletionError,
    cause_text,
    leaf_errors,
)
from aiordma._connection.connection import Connection

logger: logging.Logger = logging.getLogger("aiordma")

_PEERS_FAULT = (RdmaConnectionError, anyio.BrokenResourceError, anyio.EndOfStream)

_HANDLERS_FAULT = (LocalProtectionError, LocalAccessError)

_TOO_LONG = (LocalLengthError, LocalQueuePairError)
"""The errors of a peer's message that is longer than its receive: rxe reports the second one."""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:  # `raise error from error` makes a circle
        seen.add(id(link))
        yield link
        link = link.__cause__


def _is_of(connection: Connection, error: BaseException) -> bool:
    """Whether an error is one of this connection, and not, for example, of another connection that
    the handler has opened."""
    cause = connection.cause
    for link in _causes(error):
        if isinstance(link, WorkCompletionError) and link.qp_num == connection.qp_num:
            # Queue pairs of two devices can have the same number, so the connection must have
            # ended. Only the cause of a flush can still be unknown.
            return cause is not None or isinstance(link, FlushedError)
        if cause is not None and type(link) is type(cause) and link.args == cause.args:
            return True
    # anyio's own errors, of streams that wrap the connection, do not say what failed.
    return cause is not None and not isinstance(link, RdmaError | OSError)


def _peers_fault(error: Exception, connection: Connection | None) -> BaseException | None:
    """Return the first cause of a handler's error, if the handler did not cause any part of it;
    otherwise None. Without a connection, its handshake failed."""
    leaves = leaf_errors(error)
    if not all(isinstance(leaf, (RdmaError, *_PEERS_FAULT)) for leaf in leaves):
        return None
    causes = []
    for leaf in leaves:
        if not isinstance(leaf, _PEERS_FAULT):
            continue  # for example, the ClosedError of another task of the same connection
        if connection is not None and not _is_of(connection, leaf):
            return None
        while isinstance(leaf, FlushedError) and leaf.__cause__ is not None:
            leaf = leaf.__cause__
        if isinstance(leaf, _HANDLERS_FAULT):
            return None
        causes.append(leaf)
    causes.sort(key=lambda cause: isinstance(cause, FlushedError))  # a flush is never the cause
    return causes[0] if causes else None


def log_failure(error: Exception, peer: str, connection: Connection | None = None) -> None:
    """Log the error of a peer's handshake or, with its connection, of its handler."""
    fault = _peers_fault(error, connection)
    fields = {"peer": peer} if connection is None else connection._endpoint.log_fields
    if fault is None:
        logger.error("the handler of %s failed", peer, exc_info=error, extra=fields)
    else:
        level = logging.WARNING if isinstance(fault, _TOO_LONG) else logging.INFO
        logger.log(level, "%s ended: %s", peer, cause_text(fault), extra=fields)
