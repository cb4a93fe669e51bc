"""The state tables: the queue pair's are those of the man page and the kernel; a connection's life
only ever moves on."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._base.states import NEXT_STATES, ConnectionState, allowed_attributes, check_transition
from aiordma.verbs import CmEventType, QueuePairState, QueuePairType
from tests.internals import QueuePairAttribute as Attribute

# -- the queue pair -------------------------------------------------------------------------------

# man ibv_modify_qp, NOTES: the minimum that must be given on the way to RTS, word for word but for
# IBV_QP_ and IBV_QP_STATE.
MAN_PAGE = {
    ("UD", "RESET", "INIT"): "PKEY_INDEX PORT QKEY",
    ("UD", "INIT", "RTR"): "",
    ("UD", "RTR", "RTS"): "SQ_PSN",
    ("UC", "RESET", "INIT"): "PKEY_INDEX PORT ACCESS_FLAGS",
    ("UC", "INIT", "RTR"): "AV PATH_MTU DEST_QPN RQ_PSN",
    ("UC", "RTR", "RTS"): "SQ_PSN",
    ("RC", "RESET", "INIT"): "PKEY_INDEX PORT ACCESS_FLAGS",
    ("RC", "INIT", "RTR"): "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER",
    ("RC", "RTR", "RTS"): "SQ_PSN MAX_QP_RD_ATOMIC RETRY_CNT RNR_RETRY TIMEOUT",
}

# What may be given besides (InfiniBand spec vol. 1, table 91, as Linux checks it in
# ib_modify_qp_is_ok), and the transitions that the man page does not list.
_INIT, _DATAGRAM = "PKEY_INDEX PORT ACCESS_FLAGS", "CUR_STATE QKEY"
_UC, _RC = "CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE", "MIN_RNR_TIMER"
_DRAINED = "AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE"
OPTIONAL = {
    ("RESET", "INIT"): {"UD": "", "UC": "", "RC": ""},
    ("INIT", "INIT"): {"UD": "PKEY_INDEX PORT QKEY", "UC": _INIT, "RC": _INIT},
    ("INIT", "RTR"): {
        "UD": "PKEY_INDEX QKEY",
        "UC": "ALT_PATH ACCESS_FLAGS PKEY_INDEX",
        "RC": "ALT_PATH ACCESS_FLAGS PKEY_INDEX",
    },
    ("RTR", "RTS"): {"UD": _DATAGRAM, "UC": _UC, "RC": f"{_UC} {_RC}"},
    ("RTS", "RTS"): {"UD": _DATAGRAM, "UC": _UC, "RC": f"{_UC} {_RC}"},
    ("RTS", "SQD"): dict.fromkeys(("UD", "UC", "RC"), "EN_SQD_ASYNC_NOTIFY"),
    ("SQD", "RTS"): {"UD": _DATAGRAM, "UC": _UC, "RC": f"{_UC} {_RC}"},
    ("SQD", "SQD"): {
        "UD": "PKEY_INDEX QKEY",
        "UC": _DRAINED,
        "RC": f"{_DRAINED} PORT TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC "
        "MIN_RNR_TIMER",
    },
    # Only the unreliable services have a send queue error.
    ("SQE", "RTS"): {"UD": _DATAGRAM, "UC": "CUR_STATE ACCESS_FLAGS"},
}


def flags(names: str) -> Attribute:
    result = Attribute(0)
    for name in names.split():
        result |= Attribute[name]
    return result


def facts(
    service: QueuePairType, current: QueuePairState, target: QueuePairState
) -> tuple[Attribute, Attribute] | None:
    if target is QueuePairState.RESET:
        return Attribute(0), Attribute(0)
    if target is QueuePairState.ERR:
        return (Attribute(0), Attribute(0)) if current is not QueuePairState.RESET else None
    optional = OPTIONAL.get((current.name, target.name), {}).get(service.name)
    if optional is None:
        return None
    required = MAN_PAGE.get((service.name, current.name, target.name), "")
    return flags(required), flags(optional)


EVERY = list(itertools.product(QueuePairType, QueuePairState, QueuePairState))
EXISTING = [transition for transition in EVERY if facts(*transition)]


def _named(transition: tuple[QueuePairType, QueuePairState, QueuePairState]) -> str:
    return "-".join(part.name for part in transition)


@pytest.mark.parametrize("transition", EVERY, ids=_named)
def test_a_transition_takes_what_the_man_page_says(
    transition: tuple[QueuePairType, QueuePairState, QueuePairState],
) -> None:
    service, current, target = transition
    expected = facts(*transition)
    if expected is not None:
        assert allowed_attributes(*transition) == expected
        return
    with pytest.raises(ValueError, match="does not go from") as caught:
        allowed_attributes(*transition)
    said, _, ways = str(caught.value).partition("; ")
    assert said == f"a {service.name} queue pair does not go from {current.name} to {target.name}"
    # The message names every way that there is, and no other.
    there_is = [state.name for state in QueuePairState if facts(service, current, state)]
    assert sorted(ways.removeprefix(f"from {current.name} it goes to ").split(", ")) == sorted(
        there_is
    )


@pytest.mark.parametrize("transition", EXISTING, ids=_named)
def test_what_is_missing_or_too_much_is_named(
    transition: tuple[QueuePairType, QueuePairState, QueuePairState],
) -> None:
    required, optional = facts(*transition) or pytest.fail("no such transition")
    check_transition(*transition, required | Attribute.STATE)
    check_transition(*transition, required | optional | Attribute.STATE)
    for flag in required:
        with pytest.raises(ValueError, match=rf"queue pair needs {flag.name}$"):
            check_transition(*transition, required & ~flag | optional)
    for flag in set(Attribute) - set(required | optional) - {Attribute.STATE}:
        with pytest.raises(ValueError, match=rf"queue pair does not take {flag.name}$"):
            check_transition(*transition, required | optional | flag)


@given(st.sampled_from(EXISTING), st.sets(st.sampled_from(list(Attribute))))
def test_every_attribute_at_fault_is_in_the_message(
    transition: tuple[QueuePairType, QueuePairState, QueuePairState], given_flags: set[Attribute]
) -> None:
    required, optional = facts(*transition) or pytest.fail("no such transition")
    missing = set(required) - given_flags
    extra = given_flags - set(required | optional) - {Attribute.STATE}
    mask = Attribute(sum(given_flags))
    if not missing and not extra:
        check_transition(*transition, mask)
        return
    with pytest.raises(ValueError, match=r"needs|does not take") as caught:
        check_transition(*transition, mask)
    named = set(str(caught.value).partition("needs " if missing else "take ")[2].split(", "))
    assert named == {flag.name for flag in missing or extra}


# -- the connection -------------------------------------------------------------------------------

ORDER = list(ConnectionState)
S, E = ConnectionState, CmEventType

# man rdma_get_cm_event: what ends the step that waits for it, and how.
MOVES = {
    (S.RESOLVING_ADDRESS, E.ADDR_RESOLVED): S.RESOLVING_ROUTE,
    (S.RESOLVING_ADDRESS, E.ADDR_ERROR): S.BROKEN,
    (S.RESOLVING_ROUTE, E.ROUTE_RESOLVED): S.CONNECTING,
    (S.RESOLVING_ROUTE, E.ROUTE_ERROR): S.BROKEN,
    (S.ESTABLISHED, E.DISCONNECTED): S.DISCONNECTED,
}
for waiting in (S.CONNECTING, S.ACCEPTING):
    MOVES[waiting, E.ESTABLISHED] = S.ESTABLISHED
    MOVES[waiting, E.CONNECT_ERROR] = S.BROKEN
    MOVES[waiting, E.UNREACHABLE] = S.BROKEN
    MOVES[waiting, E.REJECTED] = S.BROKEN
    MOVES[waiting, E.DISCONNECTED] = S.DISCONNECTED
ALIVE = (
    S.RESOLVING_ADDRESS,
    S.RESOLVING_ROUTE,
    S.CONNECTING,
    S.ACCEPTING,
    S.ESTABLISHED,
)
for alive in ALIVE:
    MOVES[alive, E.DEVICE_REMOVAL] = S.BROKEN


@pytest.mark.parametrize("state", ConnectionState, ids=lambda state: state.name)
@pytest.mark.parametrize("event", CmEventType, ids=lambda event: event.name)
def test_an_event_leads_where_the_man_page_says_and_never_back(
    state: ConnectionState, event: CmEventType
) -> None:
    after = NEXT_STATES.get((state, event), state)
    assert after is MOVES.get((state, event), state)
    assert ORDER.index(after) >= ORDER.index(state)


@given(st.lists(st.sampled_from(CmEventType), max_size=30))
def test_a_life_moves_on_and_stays_ended(events: list[CmEventType]) -> None:
    state, ended = ConnectionState.RESOLVING_ADDRESS, False
    for event in events:
        after = NEXT_STATES.get((state, event), state)
        assert ORDER.index(after) >= ORDER.index(state)
        assert not ended or after is state
        state = after
        ended = state in (ConnectionState.DISCONNECTED, ConnectionState.BROKEN)


@pytest.mark.parametrize("state", ALIVE, ids=lambda state: state.name)
def test_nothing_that_lives_waits_for_ever(state: ConnectionState) -> None:
    # From every state that is alive some event leads to an end.
    assert any(
        NEXT_STATES.get((state, event), state) is ConnectionState.BROKEN for event in CmEventType
    )


def test_events_have_words_for_messages() -> None:
    assert CmEventType.ADDR_RESOLVED.label == "addr resolved"
    assert len({event.label for event in CmEventType}) == len(CmEventType)
