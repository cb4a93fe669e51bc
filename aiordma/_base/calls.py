"""Checks of the results of C calls: one for each return convention."""

import errno
from typing import Any

from aiordma._base.errors import NotSupportedError, VerbsCallError
from aiordma._native import ffi

_UNSAID = errno.EIO  # for a call that failed without setting errno


def check_positive_errno(result: int, call: str, hint: str | None = None) -> None:
    """Check the result of most verbs: 0, or a positive errno."""
    if result:
        # Some drivers return -1 and set errno, or return -errno, contrary to the man page.
        if result < -1:
            result = -result
        raise VerbsCallError(result if result > 0 else ffi.errno or _UNSAID, call, hint)


UNSUPPORTED: frozenset[int] = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, 524})
"""Errnos of a call that the device or its library does not have. 524 is the kernel's internal
ENOTSUPP, which has no name in C: some drivers let it out."""


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
        raise VerbsCallError(ffi.errno or errno.ENOMEM, call, hint)
    return result


def check_negative_errno(result: int, call: str) -> int:
    """Check the result of aiordma's own C functions: a count, or -errno."""
    if result < 0:
        raise VerbsCallError(-result, call)
    return result
