"""Which opcode and flags a request gets, and the checks of what goes beside its memory."""

from typing import Any

from aiordma.capabilities import require_immediate, require_invalidate
from aiordma.endpoint import Endpoint
from aiordma.enums import SendFlag, WorkRequestOpcode
from aiordma.ranges import RemoteMemory

__all__ = (
    "READ",
    "WRITE",
    "Operation",
    "check_atomic",
    "send_flags",
    "send_opcode",
    "write_opcode",
)

_Op = WorkRequestOpcode
READ = ("RDMA_READ", int(_Op.RDMA_READ))
WRITE = ("RDMA_WRITE", int(_Op.RDMA_WRITE))
_SEND = ("SEND", int(_Op.SEND))
_SEND_WITH_IMM = ("SEND_WITH_IMM", int(_Op.SEND_WITH_IMM))
_SEND_WITH_INV = ("SEND_WITH_INV", int(_Op.SEND_WITH_INV))
_WRITE_WITH_IMM = ("RDMA_WRITE_WITH_IMM", int(_Op.RDMA_WRITE_WITH_IMM))
_FENCE, _SOLICITED = int(SendFlag.FENCE), int(SendFlag.SOLICITED)

Operation = tuple[str, int]
"""Its name, for messages, and its WorkRequestOpcode."""


def send_flags(fence: bool, solicited: bool) -> int:
    """Return the SendFlag bits."""
    return (_FENCE if fence else 0) | (_SOLICITED if solicited else 0)


def _check_32_bits(name: str, value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is no whole number")
    if not 0 <= value < 2**32:
        raise ValueError(f"{name}={value:#x} does not fit into 32 bits")
    return value


def send_opcode(
    endpoint: Endpoint, immediate: int | None, invalidate: int | None
) -> tuple[Operation, int]:
    """Return which SEND it is, and what goes beside it."""
    if immediate is not None:
        if invalidate is not None:
            raise ValueError("a message carries immediate data or invalidates an rkey, not both")
        require_immediate(endpoint)
        return _SEND_WITH_IMM, _check_32_bits("immediate", immediate)
    if invalidate is not None:
        require_invalidate(endpoint)
        return _SEND_WITH_INV, _check_32_bits("invalidate", invalidate)
    return _SEND, 0


def write_opcode(endpoint: Endpoint, immediate: int | None) -> tuple[Operation, int]:
    """Return which WRITE it is, and what goes beside it."""
    if immediate is None:
        return WRITE, 0
    require_immediate(endpoint)
    return _WRITE_WITH_IMM, _check_32_bits("immediate", immediate)


def check_atomic(remote: RemoteMemory, operand: int) -> int:
    """Return the operand as C takes it: a negative one modulo 2**64.

    Raises:
        ValueError: not 8 bytes, not aligned to 8, or the operand does not fit.
        TypeError: no RemoteMemory, or no whole number.
    """
    if not isinstance(remote, RemoteMemory):
        raise TypeError(f"{type(remote).__name__} is no RemoteMemory")
    if remote.length != 8 or remote.address % 8:
        raise ValueError(f"an atomic works on 8 bytes aligned to 8, and this is {remote}")
    if not isinstance(operand, int):
        raise TypeError(f"{operand!r} is no whole number")
    if not -(2**63) <= operand < 2**64:
        raise ValueError(f"{operand:#x} does not fit into 64 bits")
    return operand % 2**64
