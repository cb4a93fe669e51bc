"""Tables of the transitions of queue pairs, and of a connection's states by CM event (pure).

The transitions come from man ibv_modify_qp (InfiniBand spec vol. 1, 11.2.5.2, table 91). With them,
the error of a wrong modify names the attribute, where C returns EINVAL.
"""

from collections.abc import Callable
from enum import Enum

from aiordma._base.enums import CmEventType, QueuePairState, QueuePairType
from aiordma._base.enums import QueuePairAttribute as Attribute

_S = QueuePairState
_Transition = tuple[QueuePairState, QueuePairState]
_Sets = tuple[Attribute, Attribute]

_RC, _UC, _UD = QueuePairType.RC, QueuePairType.UC, QueuePairType.UD
_NONE = Attribute(0)
_STATE = int(Attribute.STATE)
_INIT = Attribute.PKEY_INDEX | Attribute.PORT
_ALT = Attribute.ALT_PATH
_PATH = Attribute.AV | Attribute.PATH_MTU | Attribute.DEST_QPN | Attribute.RQ_PSN
_RESPONDER = Attribute.MAX_DEST_RD_ATOMIC | Attribute.MIN_RNR_TIMER
_REQUESTER = (
    Attribute.TIMEOUT | Attribute.RETRY_CNT | Attribute.RNR_RETRY | Attribute.MAX_QP_RD_ATOMIC
)
_CUR, _ACCESS, _QKEY = Attribute.CUR_STATE, Attribute.ACCESS_FLAGS, Attribute.QKEY
_MIG = Attribute.PATH_MIG_STATE
_RNR = Attribute.MIN_RNR_TIMER
_DRAINED = Attribute.AV | Attribute.PKEY_INDEX | _ALT | _ACCESS | _MIG

# (from, to) -> service -> (required, optional). STATE is always required.
_TABLE: dict[_Transition, dict[QueuePairType, _Sets]] = {
    (_S.RESET, _S.INIT): {
        _RC: (_INIT | _ACCESS, _NONE),
        _UC: (_INIT | _ACCESS, _NONE),
        _UD: (_INIT | _QKEY, _NONE),
    },
    (_S.INIT, _S.INIT): {
        _RC: (_NONE, _INIT | _ACCESS),
        _UC: (_NONE, _INIT | _ACCESS),
        _UD: (_NONE, _INIT | _QKEY),
    },
    (_S.INIT, _S.RTR): {
        _RC: (_PATH | _RESPONDER, _ALT | _ACCESS | Attribute.PKEY_INDEX),
        _UC: (_PATH, _ALT | _ACCESS | Attribute.PKEY_INDEX),
        _UD: (_NONE, Attribute.PKEY_INDEX | _QKEY),
    },
    (_S.RTR, _S.RTS): {
        _RC: (Attribute.SQ_PSN | _REQUESTER, _CUR | _ACCESS | _RNR | _ALT | _MIG),
        _UC: (Attribute.SQ_PSN, _CUR | _ACCESS | _ALT | _MIG),
        _UD: (Attribute.SQ_PSN, _CUR | _QKEY),
    },
    (_S.RTS, _S.RTS): {
        _RC: (_NONE, _CUR | _ACCESS | _RNR | _ALT | _MIG),
        _UC: (_NONE, _CUR | _ACCESS | _ALT | _MIG),
        _UD: (_NONE, _CUR | _QKEY),
    },
    (_S.RTS, _S.SQD): {
        _RC: (_NONE, Attribute.EN_SQD_ASYNC_NOTIFY),
        _UC: (_NONE, Attribute.EN_SQD_ASYNC_NOTIFY),
        _UD: (_NONE, Attribute.EN_SQD_ASYNC_NOTIFY),
    },
    (_S.SQD, _S.RTS): {
        _RC: (_NONE, _CUR | _ACCESS | _RNR | _ALT | _MIG),
        _UC: (_NONE, _CUR | _ACCESS | _ALT | _MIG),
        _UD: (_NONE, _CUR | _QKEY),
    },
    (_S.SQD, _S.SQD): {
        _RC: (_NONE, _DRAINED | Attribute.PORT | _REQUESTER | _RESPONDER),
        _UC: (_NONE, _DRAINED),
        _UD: (_NONE, Attribute.PKEY_INDEX | _QKEY),
    },
    (_S.SQE, _S.RTS): {
        _UC: (_NONE, _CUR | _ACCESS),
        _UD: (_NONE, _CUR | _QKEY),
    },
}


def _always(current: QueuePairState) -> tuple[QueuePairState, ...]:
    """Return the states to which every queue pair can move from a state: RESET, and ERR if it is
    not in RESET."""
    return (_S.RESET,) if current is _S.RESET else (_S.RESET, _S.ERR)


def allowed_attributes(
    service: QueuePairType, current: QueuePairState, target: QueuePairState
) -> tuple[Attribute, Attribute]:
    """Return the (required, optional) attributes of a transition, without STATE.

    Raises:
        ValueError: the transition does not exist for this service.
    """
    if target in _always(current):
        return _NONE, _NONE
    try:
        return _TABLE[current, target][service]
    except KeyError:
        targets = [t.name for (c, t), by in _TABLE.items() if c is current and service in by]
        targets += [state.name for state in _always(current)]
        raise ValueError(
            f"a {service.name} queue pair does not go from {current.name} to {target.name}; from "
            f"{current.name} it goes to {', '.join(dict.fromkeys(targets))}"
        ) from None


def check_transition(
    service: QueuePairType,
    current: QueuePairState,
    target: QueuePairState,
    given: int,
) -> None:
    """Check that the attributes of a modify match the transition.

    Raises:
        ValueError: a required attribute is missing, or an attribute is not allowed. The text names
            it.
    """
    required, optional = map(int, allowed_attributes(service, current, target))
    given = int(given) & ~_STATE  # numbers, because operations of an IntFlag take long
    missing, extra = required & ~given, given & ~(required | optional)
    for problem, names in (("needs", missing), ("does not take", extra)):
        if names:
            raise ValueError(
                f"{current.name} to {target.name} of a {service.name} queue pair {problem} "
                + ", ".join(str(flag.name) for flag in Attribute(names))
            )


class ConnectionState(Enum):
    """The state of a connection. Every change is to a state further down this list."""

    __hash__: Callable[[object], int] = object.__hash__  # type: ignore[assignment]
    """Enum's is written in Python; members are compared by identity."""

    RESOLVING_ADDRESS = "resolving the address"
    RESOLVING_ROUTE = "resolving the route"
    CONNECTING = "connecting"
    ACCEPTING = "accepting"
    ESTABLISHED = "established"
    DISCONNECTED = "disconnected by the peer"
    BROKEN = "broken"
    CLOSED = "closed"


_C = ConnectionState
_E = CmEventType

NEXT_STATES: dict[tuple[ConnectionState, CmEventType], ConnectionState] = {
    (_C.RESOLVING_ADDRESS, _E.ADDR_RESOLVED): _C.RESOLVING_ROUTE,
    (_C.RESOLVING_ADDRESS, _E.ADDR_ERROR): _C.BROKEN,
    (_C.RESOLVING_ADDRESS, _E.DEVICE_REMOVAL): _C.BROKEN,
    (_C.RESOLVING_ROUTE, _E.ROUTE_RESOLVED): _C.CONNECTING,
    (_C.RESOLVING_ROUTE, _E.ROUTE_ERROR): _C.BROKEN,
    (_C.RESOLVING_ROUTE, _E.DEVICE_REMOVAL): _C.BROKEN,
    (_C.CONNECTING, _E.ESTABLISHED): _C.ESTABLISHED,
    (_C.CONNECTING, _E.CONNECT_ERROR): _C.BROKEN,
    (_C.CONNECTING, _E.UNREACHABLE): _C.BROKEN,
    (_C.CONNECTING, _E.REJECTED): _C.BROKEN,
    (_C.CONNECTING, _E.DISCONNECTED): _C.DISCONNECTED,
    (_C.CONNECTING, _E.DEVICE_REMOVAL): _C.BROKEN,
    (_C.ACCEPTING, _E.ESTABLISHED): _C.ESTABLISHED,
    (_C.ACCEPTING, _E.CONNECT_ERROR): _C.BROKEN,
    (_C.ACCEPTING, _E.UNREACHABLE): _C.BROKEN,
    (_C.ACCEPTING, _E.REJECTED): _C.BROKEN,
    (_C.ACCEPTING, _E.DISCONNECTED): _C.DISCONNECTED,
    (_C.ACCEPTING, _E.DEVICE_REMOVAL): _C.BROKEN,
    (_C.ESTABLISHED, _E.DISCONNECTED): _C.DISCONNECTED,
    (_C.ESTABLISHED, _E.DEVICE_REMOVAL): _C.BROKEN,
}
"""The state after a CM event. Other events have no effect; ADDR_CHANGE and TIMEWAIT_EXIT have none
in any state."""

ENDS_A_REQUEST = frozenset(
    {_E.DISCONNECTED, _E.UNREACHABLE, _E.CONNECT_ERROR, _E.REJECTED, _E.DEVICE_REMOVAL}
)
"""Events which mean that a peer no longer waits for its connection request to be accepted."""
