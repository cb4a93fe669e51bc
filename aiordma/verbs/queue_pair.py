"""Queue pairs: creation within limits, transitions, and raw posting (man ibv_create_qp)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from aiordma._base.arguments import (
    checked_gid,
    instance,
    member,
    nearest,
    whole_number,
    within_device,
    wrong_type,
)
from aiordma._base.calls import check_minus_one, check_pointer, check_positive_errno
from aiordma._base.enums import (
    Access,
    Mtu,
    QueuePairAttribute,
    QueuePairState,
    QueuePairType,
    SendFlag,
    WorkRequestOpcode,
)
from aiordma._base.errors import NotSupportedError, VerbsCallError
from aiordma._base.process import reentrant_lock
from aiordma._base.provider import Provider
from aiordma._base.ranges import RemoteMemory
from aiordma._base.states import check_transition
from aiordma._native import ffi, lib
from aiordma.verbs.address import MOST_LID, AddressVector
from aiordma.verbs.completion import CompletionQueue
from aiordma.verbs.device import Context, ProtectionDomain
from aiordma.verbs.memory import MemorySlice
from aiordma.verbs.memory_window import MemoryWindow
from aiordma.verbs.raw_parts import RawPart, packed_parts
from aiordma.verbs.resource import Resource
from aiordma.verbs.send_work import (
    RECEIVE_REQUEST,
    UNFIT,
    SendWork,
    pack_chain,
    raise_named,
)
from aiordma.verbs.shared_receive import RawSharedReceiveQueue

__all__ = ("Capacity", "QueuePair", "QueuePairAttributes", "checked_service", "modify_arguments")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of a queue pair (`ibv_qp_cap`): requests, sges per request, inline bytes.

    Attributes:
        max_send_wr, max_recv_wr: requests in flight on the send queue, and on the receive queue.
        max_send_sge, max_recv_sge: parts of one request.
        max_inline_data: bytes of a request that can be copied at the post.
    """

    max_send_wr: int = 64
    max_recv_wr: int = 64
    max_send_sge: int = 4
    max_recv_sge: int = 4
    max_inline_data: int = 64

    def _check(self, context: Context) -> None:
        """Check the sizes against the device's limits.

        Raises:
            ValueError: a size is out of range. The text has the attribute, its value and the limit.
        """
        device = context._attributes or context.query()
        for name, value, limit in (
            ("max_send_wr", self.max_send_wr, device.max_qp_wr),
            ("max_recv_wr", self.max_recv_wr, device.max_qp_wr),
            ("max_send_sge", self.max_send_sge, device.max_sge),
            ("max_recv_sge", self.max_recv_sge, device.max_sge),
        ):
            if type(value) is not int or not 0 <= value <= limit:
                value = whole_number(value, name, -(2**63), 2**63)
                within_device(value, name, 0, limit, context.device_name)
        if type(self.max_inline_data) is not int or not 0 <= self.max_inline_data < 2**32:
            whole_number(self.max_inline_data, "max_inline_data", 0, 2**32 - 1)

    @classmethod
    def _read(cls, raw: Any) -> "Capacity":
        """Read a struct ibv_qp_cap."""
        return cls(
            raw.max_send_wr,
            raw.max_recv_wr,
            raw.max_send_sge,
            raw.max_recv_sge,
            raw.max_inline_data,
        )


@dataclass(frozen=True, slots=True)
class QueuePairAttributes:
    """Current attributes of a queue pair, under the names of struct ibv_qp_attr (man ibv_query_qp).

    For a connection, these are options of ConnectionOptions under other names: `timeout` is
    ack_timeout, `retry_cnt` is retry_count, `max_rd_atomic` is initiator_depth, and
    `max_dest_rd_atomic` is responder_resources. `rnr_retry` is how often this side resends a
    message for which the peer has no receive. `min_rnr_timer` is the delay that this side asks of
    the peer in the opposite case. `cap` has the sizes, and `dest_qp_num` is the peer's queue pair
    number. `ah_attr` is the path to the peer: the GID index, the service level, the traffic class
    and others. A value that the device does not have or report is 0: on iWARP, the timeout and the
    retries, because TCP retransmits.
    """

    qp_state: QueuePairState
    path_mtu: Mtu
    dest_qp_num: int
    qp_access_flags: Access
    cap: Capacity
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    min_rnr_timer: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    pkey_index: int
    ah_attr: AddressVector


_QUERIED = (
    QueuePairAttribute.STATE
    | QueuePairAttribute.PATH_MTU
    | QueuePairAttribute.DEST_QPN
    | QueuePairAttribute.ACCESS_FLAGS
    | QueuePairAttribute.CAP
    | QueuePairAttribute.PORT
    | QueuePairAttribute.TIMEOUT
    | QueuePairAttribute.RETRY_CNT
    | QueuePairAttribute.RNR_RETRY
    | QueuePairAttribute.MIN_RNR_TIMER
    | QueuePairAttribute.MAX_QP_RD_ATOMIC
    | QueuePairAttribute.MAX_DEST_RD_ATOMIC
    | QueuePairAttribute.PKEY_INDEX
    | QueuePairAttribute.AV
)

_FIELDS: dict[str, tuple[QueuePairAttribute, str]] = {
    "current_state": (QueuePairAttribute.CUR_STATE, "cur_qp_state"),
    "access": (QueuePairAttribute.ACCESS_FLAGS, "qp_access_flags"),
    "pkey_index": (QueuePairAttribute.PKEY_INDEX, "pkey_index"),
    "port": (QueuePairAttribute.PORT, "port_num"),
    "qkey": (QueuePairAttribute.QKEY, "qkey"),
    "path_mtu": (QueuePairAttribute.PATH_MTU, "path_mtu"),
    "timeout": (QueuePairAttribute.TIMEOUT, "timeout"),
    "retry_cnt": (QueuePairAttribute.RETRY_CNT, "retry_cnt"),
    "rnr_retry": (QueuePairAttribute.RNR_RETRY, "rnr_retry"),
    "rq_psn": (QueuePairAttribute.RQ_PSN, "rq_psn"),
    "sq_psn": (QueuePairAttribute.SQ_PSN, "sq_psn"),
    "max_rd_atomic": (QueuePairAttribute.MAX_QP_RD_ATOMIC, "max_rd_atomic"),
    "max_dest_rd_atomic": (QueuePairAttribute.MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic"),
    "min_rnr_timer": (QueuePairAttribute.MIN_RNR_TIMER, "min_rnr_timer"),
    "dest_qp_num": (QueuePairAttribute.DEST_QPN, "dest_qp_num"),
    "en_sqd_async_notify": (QueuePairAttribute.EN_SQD_ASYNC_NOTIFY, "en_sqd_async_notify"),
}


_STATE, _AV = int(QueuePairAttribute.STATE), int(QueuePairAttribute.AV)
"""Numbers, because operations of an IntFlag take long."""


def modify_arguments(raw: Any, mask: int) -> dict[str, Any]:
    """Return the arguments of `QueuePair.modify` for the attributes in mask of a struct
    ibv_qp_attr."""
    mask = int(mask)
    arguments: dict[str, Any] = {
        name: getattr(raw, field) for name, (flag, field) in _FIELDS.items() if int(flag) & mask
    }
    if mask & _STATE:
        arguments["state"] = QueuePairState(raw.qp_state)
    if mask & _AV:
        arguments["address"] = AddressVector._read(raw.ah_attr)
    return arguments


def _group(gid: bytes, lid: int, call: str) -> tuple[bytes, int]:
    return checked_gid(gid, call), whole_number(lid, "lid", 0, MOST_LID, call)


def _raw_gid(gid: bytes) -> Any:
    raw = ffi.new("union ibv_gid *")
    raw.raw = gid
    return raw


_PLAIN_OPCODES = (
    WorkRequestOpcode.SEND,
    WorkRequestOpcode.SEND_WITH_IMM,
    WorkRequestOpcode.RDMA_READ,
    WorkRequestOpcode.RDMA_WRITE,
    WorkRequestOpcode.RDMA_WRITE_WITH_IMM,
)
_ATOMIC_OPCODES = (WorkRequestOpcode.ATOMIC_CMP_AND_SWP, WorkRequestOpcode.ATOMIC_FETCH_AND_ADD)
_ATOMIC_BYTES = 8


def checked_service(
    domain: ProtectionDomain,
    send_queue: CompletionQueue,
    receive_queue: CompletionQueue,
    service: QueuePairType,
    capacity: Capacity,
    shared_receive: RawSharedReceiveQueue | None,
    call: str,
) -> QueuePairType:
    """Check the arguments of a call that creates a queue pair, and return the service.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the service is none, or the capacity exceeds the device's limits.
    """
    used: list[tuple[object, str, str]] = [
        (domain, "domain", "a ProtectionDomain"),
        (send_queue, "send_queue", "a CompletionQueue"),
        (receive_queue, "receive_queue", "a CompletionQueue"),
    ]
    if shared_receive is not None:
        used.append((shared_receive, "shared_receive", "a RawSharedReceiveQueue"))
    for value, name, expected in used:
        if not hasattr(value, "pointer"):
            raise wrong_type(value, name, expected, call)
    if not isinstance(capacity, Capacity):
        raise wrong_type(capacity, "capacity", "a Capacity", call)
    if type(service) is not QueuePairType:
        service = member(service, "service", QueuePairType, call)
    capacity._check(domain.context)
    return service


_memberships = reentrant_lock()
"""Held while a queue pair is attached to a multicast group, or leaves its groups to be closed."""


class _Manager(Protocol):
    """The part of Identifier that its queue pair uses."""

    pointer: Any
    queue_pair: "QueuePair | None"
    _groups: list[bytes]

    def _leave_groups(self) -> None:
        """Leave the groups to which librdmacm attaches the queue pair."""


class QueuePair(Resource):
    """A send queue and a receive queue of a protection domain.

    Create it with `QueuePair.create`, or with an Identifier of the connection manager, which then
    does the transitions. `capacity` has the actual sizes, which are at least those requested. Its
    post methods are for programs that poll: keep the memory alive until the request's completion.
    `aiordma.Connection` does this for you.
    """

    # The arguments are checked: see `checked_service`.
    def __init__(
        self,
        domain: ProtectionDomain,
        send_queue: CompletionQueue,
        receive_queue: CompletionQueue,
        service: QueuePairType,
        capacity: Capacity,
        shared_receive: RawSharedReceiveQueue | None = None,
        *,
        manager: _Manager | None = None,
    ) -> None:
        used: list[Any] = [domain, send_queue]
        if receive_queue is not send_queue:
            used.append(receive_queue)
        if shared_receive is not None:
            used.append(shared_receive)
        if manager is not None:
            used.append(manager)
        super().__init__(*used)
        try:
            self.provider: Provider = domain.provider
            self.domain = domain
            self.service = service
            self.has_shared_receive: bool = shared_receive is not None
            self._manager = manager
            self._groups: set[tuple[bytes, int]] = set()
            shared = ffi.NULL if shared_receive is None else shared_receive.pointer
            queues = ffi.NULL, send_queue.pointer, receive_queue.pointer, shared
            sizes = (
                capacity.max_send_wr,
                capacity.max_recv_wr,
                capacity.max_send_sge,
                capacity.max_recv_sge,
                capacity.max_inline_data,
            )
            request = ffi.new("struct ibv_qp_init_attr *", (*queues, sizes, service))
            if manager is None:
                pointer = self.provider.create_qp(domain.pointer, request)
                self.pointer: Any = check_pointer(pointer, "ibv_create_qp")
            else:
                if self.provider.cm_create_qp(manager.pointer, domain.pointer, request):
                    hint = "of these, devices do not announce their most for max_inline_data"
                    asked = f"Asked for {Capacity._read(request.cap)} ({hint}: try less)"
                    check_minus_one(-1, "rdma_create_qp", asked)
                self.pointer = manager.pointer.qp
            self._made = request
            self.qp_num: int = self.pointer.qp_num
            self.key: int = int(ffi.cast("uintptr_t", self.pointer))
            if manager is not None:
                manager.queue_pair = self
        except BaseException:
            self._give_up()
            raise

    @classmethod
    def create(
        cls,
        domain: ProtectionDomain,
        send_queue: CompletionQueue,
        receive_queue: CompletionQueue,
        *,
        service: QueuePairType = QueuePairType.RC,
        capacity: Capacity | None = None,
        shared_receive: RawSharedReceiveQueue | None = None,
    ) -> "QueuePair":
        """Create a queue pair in RESET, without the connection manager.

        Args:
            domain: the protection domain.
            send_queue, receive_queue: the queues that get the completions of its requests.
            service: RC, UC or UD.
            capacity: its sizes; None: `Capacity()`.
            shared_receive: the shared receive queue that it takes receives from; None: its own.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the capacity exceeds the device's limits; the message names the attribute.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: the domain or a queue is closed, or was opened by the parent of
                this process.

        See: man ibv_create_qp.
        """
        capacity = Capacity() if capacity is None else capacity
        service = checked_service(
            domain, send_queue, receive_queue, service, capacity, shared_receive, "create"
        )
        return cls(domain, send_queue, receive_queue, service, capacity, shared_receive)

    @cached_property
    def capacity(self) -> Capacity:
        """The actual sizes."""
        return Capacity._read(self._made.cap)

    def __repr__(self) -> str:
        return (
            f"<QueuePair {self.qp_num:#x} {self.service.name} of {self.domain.context.device_name}>"
        )

    def query(self, attributes: QueuePairAttribute = QueuePairAttribute.STATE) -> Any:
        """Return a struct ibv_qp_attr that has the given attributes.

        Args:
            attributes: the mask of the wanted ones (enum ibv_qp_attr_mask).

        Raises:
            TypeError, ValueError: `attributes` is not a number.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_qp.
        """
        self._require_open()
        whole_number(attributes, "attributes", 0, 2**31 - 1, "query")
        raw, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        check_positive_errno(
            self.provider.query_qp(self.pointer, raw, attributes, init), "ibv_query_qp"
        )
        return raw

    def attributes(self) -> QueuePairAttributes:
        """Query the current attributes of the queue pair.

        Raises: as `QueuePair.query`.

        See: man ibv_query_qp.
        """
        raw = self.query(_QUERIED)
        return QueuePairAttributes(
            qp_state=QueuePairState(raw.qp_state),
            path_mtu=Mtu(raw.path_mtu),
            dest_qp_num=raw.dest_qp_num,
            qp_access_flags=Access(raw.qp_access_flags),
            cap=Capacity._read(raw.cap),
            port_num=raw.port_num,
            timeout=raw.timeout,
            retry_cnt=raw.retry_cnt,
            rnr_retry=raw.rnr_retry,
            min_rnr_timer=raw.min_rnr_timer,
            max_rd_atomic=raw.max_rd_atomic,
            max_dest_rd_atomic=raw.max_dest_rd_atomic,
            pkey_index=raw.pkey_index,
            ah_attr=AddressVector._read(raw.ah_attr),
        )

    @property
    def state(self) -> QueuePairState:
        """The queue pair's state, queried from the device."""
        return QueuePairState(self.query().qp_state)

    def modify(
        self,
        state: QueuePairState | None = None,
        *,
        address: AddressVector | None = None,
        **attributes: int | Access | Mtu | QueuePairState,
    ) -> None:
        """Move to a state, and set attributes. They have their C names, except `address` (ah_attr),
        `access` (qp_access_flags), `port` (port_num) and `current_state` (cur_qp_state).

        Args:
            state: the new state; None: stay in the current state.
            address: the path to the peer; None: no change.
            attributes: access, current_state, dest_qp_num, en_sqd_async_notify (1: SQ_DRAINED
                follows a move to SQD), max_dest_rd_atomic, max_rd_atomic, min_rnr_timer, path_mtu,
                pkey_index, port, qkey, retry_cnt, rnr_retry, rq_psn, sq_psn, timeout. The sizes
                (cap) and an alternate path (alt_*, path_mig_state) cannot be set.

        Raises:
            ValueError: an attribute is missing or not allowed; the message names it.
            TypeError: an attribute is unknown.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_modify_qp.
        """
        self._modify(self.state, state, address, attributes)

    def _modify(
        self,
        current: QueuePairState,
        state: QueuePairState | None,
        address: AddressVector | None,
        attributes: Mapping[str, int],
    ) -> None:
        """Do the work of `modify`, in the current state."""
        raw = ffi.new("struct ibv_qp_attr *")
        mask = 0
        if state is not None:
            state = member(state, "state", QueuePairState, "modify")
            mask |= _STATE
            raw.qp_state = state
        if address is not None:
            instance(address, "address", AddressVector, "modify")
            mask |= _AV
            address._fill(raw.ah_attr)
        for name, value in attributes.items():
            if name not in _FIELDS:
                raise TypeError(f"modify(): {name!r} is no attribute: {nearest(name, _FIELDS)}")
            flag, field = _FIELDS[name]
            mask |= int(flag)
            number = whole_number(value, name, 0, 2**32 - 1, "modify")
            try:
                setattr(raw, field, number)
            except OverflowError as error:
                raise ValueError(f"modify(): {name}={number}: {error}") from None
        check_transition(self.service, current, state if state is not None else current, mask)
        result = self.provider.modify_qp(self.pointer, raw, mask)
        if result:
            move = f"{current.name} to {(state or current).name}"
            hint = f"{move} with {QueuePairAttribute(mask)!r}"
            check_positive_errno(result, "ibv_modify_qp", hint)

    def query_data_in_order(self, opcode: WorkRequestOpcode) -> bool:
        """Return whether the bytes of an operation's data arrive in memory in order, so that a
        program may wait for the last byte instead of the completion. Says nothing about different
        operations. True holds only if the CPU reads the data, and if the region was not registered
        with Access.RELAXED_ORDERING.

        Args:
            opcode: RDMA_READ: of READs that are posted to this queue pair. SEND, RDMA_WRITE: of the
                peer's, at this side. For other opcodes the result has no meaning.

        Raises:
            TypeError, ValueError: `opcode` is no WorkRequestOpcode.
            NotSupportedError: the installed rdma-core is older than 41.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_qp_data_in_order.
        """
        self._require_open()
        opcode = member(opcode, "opcode", WorkRequestOpcode, "query_data_in_order")
        return bool(self.provider.query_qp_data_in_order(self.pointer, opcode, 0))

    def post_send(
        self,
        wr_id: int,
        parts: Sequence[RawPart],
        *,
        opcode: WorkRequestOpcode = WorkRequestOpcode.SEND,
        flags: SendFlag = SendFlag.SIGNALED,
        remote: RemoteMemory | None = None,
        immediate: int = 0,
        compare_add: int = 0,
        swap: int = 0,
    ) -> None:
        """Post one request to the send queue: SEND, RDMA READ and WRITE, SEND and WRITE with
        immediate data, and the atomic operations. A datagram, which has an address, is posted with
        `post_send_chain`.

        Args:
            wr_id: a number of 64 bits, for the completion.
            parts: slices of registered memory, whole regions, or `Sge`. Keep them alive until the
                completion. With SendFlag.INLINE also any buffer: the post copies it. Of an atomic
                operation: the 8 bytes for the value that the peer's memory had.
            opcode: the opcode of one of these operations.
            flags: such as SIGNALED. Without it, the request has a completion only if it fails.
            remote: the peer's memory, for a READ, a WRITE or an atomic operation; None for others.
            immediate: 32 bits, for an operation with immediate data.
            compare_add: 64 bits: the value to add, or to compare with.
            swap: 64 bits: the value to write if the comparison succeeds.

        Raises:
            TypeError, ValueError: an argument is invalid; the message names it. Or this is a queue
                pair of datagrams (UD).
            NotSupportedError: the opcode needs other arguments.
            VerbsCallError: the device refused the request. With `was_taken`, the request is in the
                queue, but the device could not be notified: it may still execute the request.
            ClosedError, ForkError: it or a region is closed, or was opened by the parent of this
                process.

        See: man ibv_post_send.
        """
        call = "post_send"
        wr_id = whole_number(wr_id, "wr_id", 0, 2**64 - 1, call)
        opcode = member(opcode, "opcode", WorkRequestOpcode, call)
        flags = SendFlag(whole_number(flags, "flags", 0, 2**31 - 1, call))
        if remote is not None:
            instance(remote, "remote", RemoteMemory, call)
        immediate = whole_number(immediate, "immediate", 0, 2**32 - 1, call)
        compare_add = whole_number(compare_add, "compare_add", 0, 2**64 - 1, call)
        swap = whole_number(swap, "swap", 0, 2**64 - 1, call)
        if opcode not in _PLAIN_OPCODES + _ATOMIC_OPCODES:
            raise NotSupportedError(f"{opcode.name} cannot be posted with these arguments")
        if self.service == QueuePairType.UD:  # not every driver checks for the address
            raise ValueError(
                f"{call}(): {self!r} sends datagrams, and this has no address: "
                "post_send_chain([SendWork(..., address=AddressHandle(...))], ...)"
            )
        sges, length, kept = packed_parts(parts, call, inline=bool(flags & SendFlag.INLINE))
        if opcode in _ATOMIC_OPCODES and (remote is None or length != _ATOMIC_BYTES):
            raise ValueError(
                f"post_send(): {opcode.name} needs remote= and parts of {_ATOMIC_BYTES} bytes "
                f"together; these have {length}"
            )
        work = SendWork(
            opcode.name,
            opcode,
            sges,
            len(parts),
            remote=remote,
            immediate=immediate,
            compare_add=compare_add,
            swap=swap,
        )
        error, _ = self.post_send_chain([work], [wr_id], [flags])
        del kept  # the post has copied the inline buffers
        if error < 0:
            raise self._not_notified(-error, len(parts))
        if error:
            check_positive_errno(error, "ibv_post_send", self._explain(len(parts)))

    def post_recv(self, wr_id: int, parts: Sequence[RawPart]) -> None:
        """Post one receive.

        Args:
            wr_id: a number of 64 bits, for the completion.
            parts: slices of registered memory, whole regions, or `Sge`. Keep them alive until the
                completion.

        Raises:
            TypeError, ValueError: an argument is invalid; the message names it. Or the queue pair
                has a shared receive queue.
            VerbsCallError: the device refused the receive.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_post_recv.
        """
        wr_id = whole_number(wr_id, "wr_id", 0, 2**64 - 1, "post_recv")
        if self.has_shared_receive:  # not every driver checks this
            raise ValueError(
                f"post_recv(): {self!r} takes receives from its shared receive queue: post them "
                "with RawSharedReceiveQueue.post_srq_recv"
            )
        sges, _, _ = packed_parts(parts, "post_recv")
        self._post_recv_raw(wr_id, sges, len(parts))

    def _not_notified(self, error: int, count: int) -> VerbsCallError:
        """Return the error of a doorbell that failed."""
        failure = VerbsCallError(error, "ibv_post_send", self._explain(count))
        failure.was_taken = True
        return failure

    def _post_recv_raw(self, wr_id: int, sges: bytes, count: int) -> None:
        """Post a receive whose sges are packed."""
        request = RECEIVE_REQUEST.pack(wr_id, count, 0)
        posted = ffi.new("uint32_t *")
        self._require_open()
        error = lib.aiordma_post_recv_chain(
            self.pointer, ffi.NULL, request, 1, sges, len(sges), posted
        )
        if error:
            check_positive_errno(abs(error), "ibv_post_recv", self._explain(count))

    def post_send_chain(
        self, works: Sequence[SendWork], wr_ids: Sequence[int], flags: Sequence[int]
    ) -> tuple[int, int]:
        """Post requests of any kind in one call, in order, up to the first that the device refuses.

        Args:
            works: the requests.
            wr_ids: a number of 64 bits for each request.
            flags: SendFlag for each request; the flags of `works` are not used.

        Returns:
            C's errno, or 0 if the device accepted all; and the number of accepted requests, which
                is the index of the refused one. A negative errno: all requests are in the queue,
                but the device could not be notified (see `post_send`).

        Raises:
            TypeError, ValueError: a field of a request is invalid; the message names both. Nothing
                was posted.
            ValueError: an opcode is unknown; a BIND_MW has no window or no memory; or, on a UD
                queue pair, a request has no address, or is no SEND. Nothing was posted.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_post_send.
        """
        try:
            sges = b"".join([work.sges for work in works])
            packed = pack_chain(works, wr_ids, flags, self.service)
        except UNFIT as unfit:
            raise_named(works, wr_ids, flags, unfit)
        posted = ffi.new("uint32_t *")
        self._require_open()  # checked after pack_chain, which may run the program's code
        error = lib.aiordma_post_send_chain(
            self.pointer, packed, len(works), sges, len(sges), posted
        )
        return (error, posted[0]) if error else (0, len(works))

    def bind_window(
        self, wr_id: int, window: MemoryWindow, bound: MemorySlice, access: int, flags: int
    ) -> None:
        """Bind a window of type 1 to memory; a length of 0 unbinds it.

        The call changes the window's `rkey`, before the bind completes. If the completion is a
        failure, the old rkey still counts: keep it, and set `window.rkey` to it.

        Args:
            wr_id: a number of 64 bits, for the completion.
            window: the window.
            bound: a slice of a region that was registered with Access.MW_BIND.
            access: the access that the window permits.
            flags: SendFlag.

        Raises:
            TypeError, ValueError: an argument is invalid; the message names it.
            VerbsCallError: the device refused the bind.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_bind_mw.
        """
        call = "bind_window"
        wr_id = whole_number(wr_id, "wr_id", 0, 2**64 - 1, call)
        instance(window, "window", MemoryWindow, call)
        instance(bound, "bound", MemorySlice, call)
        access = whole_number(access, "access", 0, 2**32 - 1, call)
        flags = whole_number(flags, "flags", 0, 2**32 - 1, call)
        for used in (window, bound.region, self):
            used._require_open()
        # Always with a region: the man page allows to unbind without one, but rxe's library then
        # follows a null pointer.
        error = lib.aiordma_bind_window(
            self.pointer,
            window.pointer,
            wr_id,
            flags,
            bound.region.pointer,
            bound.address,
            bound.length,
            access,
        )
        check_positive_errno(error, "ibv_bind_mw")

    def attach_multicast(self, gid: bytes, lid: int = 0) -> None:
        """Receive the datagrams that are sent to a multicast group; UD only.

        Args:
            gid: the group's GID, 16 bytes.
            lid: the group's LID, on InfiniBand.

        Raises:
            TypeError, ValueError: the GID is not 16 bytes long, or the LID is out of range.
            VerbsCallError: the device refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_attach_mcast.
        """
        group = _group(gid, lid, "attach_multicast")
        with _memberships:
            is_new = group not in self._groups
            self._groups.add(group)  # first: after the call, a finalizer could close too early
            self._require_open()
            error = self.provider.attach_mcast(self.pointer, _raw_gid(group[0]), group[1])
            if error and is_new:
                self._groups.discard(group)
        check_positive_errno(error, "ibv_attach_mcast")

    def detach_multicast(self, gid: bytes, lid: int = 0) -> None:
        """Stop receiving from a multicast group. `close` does this for all remaining groups.

        Args:
            gid, lid: as in `attach_multicast`.

        Raises: as `QueuePair.attach_multicast`.

        See: man ibv_detach_mcast.
        """
        group = _group(gid, lid, "detach_multicast")
        with _memberships:
            self._require_open()
            self._detach(*group)

    def _detach(self, gid: bytes, lid: int) -> None:
        error = self.provider.detach_mcast(self.pointer, _raw_gid(gid), lid)
        check_positive_errno(error, "ibv_detach_mcast")
        self._groups.discard((gid, lid))

    def _explain(self, count: int) -> str:
        """Return the sizes of the post and the queue pair, for the error of a refused post."""
        return f"posted {count} sges to a queue pair of {self.capacity}"

    def _destroy(self) -> None:
        manager = self._manager
        # The kernel refuses to destroy a queue pair that is attached to a group.
        with _memberships:
            for group in list(self._groups):
                with suppress(VerbsCallError):
                    self._detach(*group)
            if manager is not None and manager._groups:
                manager._leave_groups()
        # Not rdma_destroy_qp, which does not report that the driver refuses. Besides, it would
        # destroy only the completion queues that librdmacm has created, and there are none.
        error = self.provider.destroy_qp(self.pointer)
        if error:
            check_positive_errno(error, "ibv_destroy_qp")
        if manager is not None:
            manager.pointer.qp = ffi.NULL
