"""Describes the operation of a request: its opcode, its flags, and its fields except local memory.

This is the one place that checks whether the arguments, the endpoint's state and the device's
capabilities permit a request. In addition to the errors below, each function raises the errors of
`Endpoint.require_usable` (ClosedError, DisconnectedError, ...).
"""

from aiordma._base.arguments import shown, whole_number
from aiordma._base.enums import SendFlag, WorkRequestOpcode
from aiordma._base.ranges import RemoteMemory
from aiordma._endpoint.capabilities import (
    require_atomics,
    require_immediate,
    require_invalidate,
    require_reads,
)
from aiordma._endpoint.endpoint import Endpoint
from aiordma.verbs import SendWork

_SEND = int(WorkRequestOpcode.SEND)
_SEND_WITH_IMM = int(WorkRequestOpcode.SEND_WITH_IMM)
_SEND_WITH_INV = int(WorkRequestOpcode.SEND_WITH_INV)
_WRITE = int(WorkRequestOpcode.RDMA_WRITE)
_WRITE_WITH_IMM = int(WorkRequestOpcode.RDMA_WRITE_WITH_IMM)
_READ = int(WorkRequestOpcode.RDMA_READ)
_COMPARE_SWAP = int(WorkRequestOpcode.ATOMIC_CMP_AND_SWP)
_FETCH_ADD = int(WorkRequestOpcode.ATOMIC_FETCH_AND_ADD)

_MOST = 2**32 - 1
_FENCE, _SOLICITED = int(SendFlag.FENCE), int(SendFlag.SOLICITED)


def send_flags(fence: bool, solicited: bool = False) -> int:
    """Return the SendFlag bits."""
    return (_FENCE if fence else 0) | (_SOLICITED if solicited else 0)


def message_work(
    endpoint: Endpoint,
    call: str,
    immediate: int | None,
    invalidate: int | None = None,
    flags: int = 0,
) -> SendWork:
    """Describe a SEND; `call` is the function's name, for messages.

    Raises:
        ValueError, TypeError: a value is not a number or out of range, or both are given.
        NotSupportedError: the device does not support immediate data, or SEND with invalidate.
    """
    endpoint.require_usable()
    if immediate is not None:
        if invalidate is not None:
            raise ValueError(
                f"{call}(): a message carries immediate data or invalidates an rkey, not both"
            )
        require_immediate(endpoint)
        value = whole_number(immediate, "immediate", 0, _MOST, call)
        return SendWork("SEND_WITH_IMM", _SEND_WITH_IMM, flags=flags, immediate=value)
    if invalidate is not None:
        require_invalidate(endpoint)
        rkey = whole_number(invalidate, "invalidate", 0, _MOST, call)
        return SendWork("SEND_WITH_INV", _SEND_WITH_INV, flags=flags, immediate=rkey)
    return SendWork("SEND", _SEND, flags=flags)


def write_work(
    endpoint: Endpoint, call: str, remote: RemoteMemory, immediate: int | None, flags: int = 0
) -> SendWork:
    """Describe a WRITE. Arguments and errors are as of `message_work`."""
    check_remote(remote, call)
    endpoint.require_usable()
    if immediate is None:
        return SendWork("RDMA_WRITE", _WRITE, flags=flags, remote=remote)
    require_immediate(endpoint)
    value = whole_number(immediate, "immediate", 0, _MOST, call)
    return SendWork(
        "RDMA_WRITE_WITH_IMM", _WRITE_WITH_IMM, flags=flags, remote=remote, immediate=value
    )


def read_work(
    endpoint: Endpoint, call: str, remote: RemoteMemory, parts: int, flags: int = 0
) -> SendWork:
    """Describe a READ that is scattered over a number of parts.

    Raises:
        TypeError: `remote` is not a RemoteMemory.
        NotSupportedError: the connection permits no READs, or the device none of so many parts.
    """
    check_remote(remote, call)
    endpoint.require_sendable()
    require_reads(endpoint, parts)
    return SendWork("RDMA_READ", _READ, flags=flags, remote=remote)


def compare_swap_work(
    endpoint: Endpoint, call: str, remote: RemoteMemory, compare: int, swap: int, flags: int = 0
) -> SendWork:
    """Describe a compare and swap.

    Raises:
        ValueError: the range is not 8 bytes or not aligned to 8, or a number is out of range.
        TypeError: `remote` is not a RemoteMemory, or a value is not a whole number.
        NotSupportedError: the connection permits no atomics.
    """
    operand = _operand(remote, compare, "compare", call)
    new = _operand(remote, swap, "swap", call)
    endpoint.require_sendable()
    require_atomics(endpoint)
    return SendWork(
        "COMPARE_SWAP", _COMPARE_SWAP, flags=flags, remote=remote, compare_add=operand, swap=new
    )


def fetch_add_work(
    endpoint: Endpoint, call: str, remote: RemoteMemory, add: int, flags: int = 0
) -> SendWork:
    """Describe a fetch and add. Errors are as of `compare_swap_work`."""
    operand = _operand(remote, add, "add", call)
    endpoint.require_sendable()
    require_atomics(endpoint)
    return SendWork("FETCH_ADD", _FETCH_ADD, flags=flags, remote=remote, compare_add=operand)


def _operand(remote: RemoteMemory, operand: int, name: str, call: str) -> int:
    """Return an atomic's operand as an unsigned number for C: modulo 2**64."""
    check_remote(remote, call)
    if remote.length != 8 or remote.address % 8:
        raise ValueError(
            f"{call}(): an atomic works on 8 bytes aligned to 8, and remote is {remote}"
        )
    return whole_number(operand, name, -(2**63), 2**64 - 1, call) % 2**64


def check_remote(remote: RemoteMemory, call: str) -> None:
    """Check the type of a range of the peer's memory.

    Raises:
        TypeError: it is not a RemoteMemory.
    """
    if not isinstance(remote, RemoteMemory):
        raise TypeError(
            f"{call}(): remote={shown(remote)}: expected RemoteMemory, got {type(remote).__name__}"
            ": local memory comes first, then the peer's, which it makes with region.remote() and "
            "sends packed"
        )
