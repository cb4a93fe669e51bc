"""Which table of C calls lies below: today libibverbs and librdmacm, by dlopen."""

from collections.abc import Callable
from functools import cache
from typing import Any

from aiordma._native import load_rdma_core
from aiordma.errors import NoDeviceError, NotSupportedError

__all__ = ("Provider", "rdma_core")


class Provider:
    """A table of verbs and rdma_cm calls; each slot is an attribute, named as in provider.h.

    Raises:
        NotSupportedError: (on use of a slot) the installed library lacks the function.
    """

    def __init__(self, name: str, table: Any) -> None:
        self.name = name
        self.table = table

    def __getattr__(self, slot: str) -> Callable[..., Any]:
        pointer: Any = getattr(self.table, slot)
        if not pointer:
            raise NotSupportedError(
                f"the installed {self.name} has no {slot}: a newer rdma-core is needed"
            )
        # Found once, then an ordinary attribute.
        call: Callable[..., Any] = pointer
        setattr(self, slot, call)
        return call


@cache
def rdma_core() -> Provider:
    """Return the system's libibverbs and librdmacm, opened at the first call.

    Raises:
        NoDeviceError: one of the two is not installed; the message names the packages.
    """
    try:
        return Provider("rdma-core", load_rdma_core())
    except OSError as error:
        raise NoDeviceError(
            f"rdma-core's libraries cannot be opened ({error}). Install them: "
            "`apt-get install libibverbs1 librdmacm1 ibverbs-providers` on Debian, "
            "`dnf install libibverbs librdmacm` on Fedora"
        ) from error
