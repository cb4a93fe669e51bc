"""Options: each has a range, and a value outside is refused by name."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import ConnectionOptions
from tests.internals import retry_seconds

# Where a range comes from C: the width of the field that carries the value.
RANGES = {
    "receive_buffers": (0, 1 << 16),
    "receive_size": (1, 1 << 30),
    "max_send_wr": (1, 1 << 16),
    "send_ahead": (0, 1 << 16),
    "max_recv_wr": (1, 1 << 16),
    "max_recv_sge": (1, 64),
    "max_send_sge": (1, 64),  # data_path.c posts from an array of so many
    "max_inline_data": (0, 1 << 12),
    "responder_resources": (0, 255),  # uint8_t of rdma_conn_param
    "initiator_depth": (0, 255),
    "retry_count": (0, 7),  # 3 bits on the wire
    "rnr_retry_count": (0, 7),
    "ack_timeout": (0, 31),  # 5 bits on the wire
    "min_rnr_timer": (0, 31),
    "tos": (0, 255),  # a byte of the IP header
    "linger": (0, 3600),
    "flush_timeout": (0, 3600),
    "peer_timeout": (0.001, 3600),
    "keepalive": (0.01, 86400),
    "comp_vector": (0, 2**31 - 1),  # int of ibv_create_cq
    "cqe": (1, 2**31 - 1),
}
FLAGS = ["reuse_address"]
NAMES = [field.name for field in dataclasses.fields(ConnectionOptions)]


def test_every_option_has_a_range() -> None:
    assert sorted([*RANGES, *FLAGS]) == sorted(NAMES)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_takes_true_and_false_only(name: str) -> None:
    for value in (True, False):
        given: dict[str, Any] = {name: value}
        assert getattr(ConnectionOptions(**given), name) is value
    number: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=rf"^{name}=1 \(int\): expected True or False$"):
        ConnectionOptions(**number)


@pytest.mark.parametrize("name", RANGES)
def test_an_option_takes_its_range_and_nothing_beyond(name: str) -> None:
    least, most = RANGES[name]
    given: dict[str, Any]
    for value in (least, most):
        given = {name: value}
        assert getattr(ConnectionOptions(**given), name) == value
    for value in (least - 1, most + 1):
        given = {name: value}
        with pytest.raises(ValueError, match=rf"^{name}={value} is not in {least}\.\.{most}$"):
            ConnectionOptions(**given)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_is_explained(name: str) -> None:
    assert f" {name}: " in (ConnectionOptions.__doc__ or "")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="recieve_size"):
        ConnectionOptions(recieve_size=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("buffers", "depth"), [(16, 16), (1, 1), (0, 64)])
def test_receive_queue_depth_follows_the_options(buffers: int, depth: int) -> None:
    assert ConnectionOptions(receive_buffers=buffers, max_recv_wr=64).receive_queue == depth


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@given(st.floats(min_value=0.001, max_value=3600))
def test_peer_timeout_chooses_retries_within_a_fifth(seconds: float) -> None:
    options = ConnectionOptions(peer_timeout=seconds)
    assert 0.8 * seconds <= retry_seconds(options.retry_count, options.ack_timeout) <= seconds
    assert 3 <= options.retry_count <= 6  # with 7, rxe retries without limit
    assert dataclasses.replace(options, max_send_wr=3).peer_timeout == seconds


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_default_retries_are_a_peer_timeout_of_two_seconds() -> None:
    both = ConnectionOptions(), ConnectionOptions(peer_timeout=2)
    assert {(each.retry_count, each.ack_timeout) for each in both} == {(6, 16)}


@pytest.mark.parametrize("name", ["retry_count", "ack_timeout"])
def test_peer_timeout_excludes_its_parts(name: str) -> None:
    part: dict[str, Any] = {name: 2}
    with pytest.raises(ValueError, match=rf"^peer_timeout=10 and {name}=2: .*either it or them"):
        ConnectionOptions(peer_timeout=10, **part)


def test_keepalive_needs_an_ack_timeout() -> None:
    with pytest.raises(ValueError, match=r"^keepalive=5: with ack_timeout=0 .*no dead peer"):
        ConnectionOptions(keepalive=5, ack_timeout=0)


def test_options_are_a_value() -> None:
    assert ConnectionOptions(max_send_wr=3) == ConnectionOptions(max_send_wr=3)
    with pytest.raises(AttributeError):
        ConnectionOptions().max_send_wr = 3  # type: ignore[misc]


def opener(**keywords: Any) -> None:
    """Stand for a function with options."""


def test_keywords_take_precedence_over_options() -> None:
    options = ConnectionOptions(receive_buffers=3, max_send_wr=4, peer_timeout=9)
    chosen = ConnectionOptions._chosen(opener, options, {"receive_buffers": 0, "peer_timeout": 2})
    expected = ConnectionOptions(receive_buffers=0, max_send_wr=4, peer_timeout=2)
    assert chosen == expected
    assert ConnectionOptions._chosen(opener, None, {}, options) is options
    assert ConnectionOptions._chosen(opener, None, {"keepalive": 5}).keepalive == 5


def test_keyword_that_belongs_to_options_is_named() -> None:
    wrong: Any = {"max_send_wr": 4}
    said = r"^opener\(\) has no parameter 'max_send_wr': give it as options=ConnectionOptions\("
    with pytest.raises(TypeError, match=said):
        ConnectionOptions._chosen(opener, None, wrong)
    with pytest.raises(TypeError, match=r"^opener\(\): options=\{"):
        ConnectionOptions._chosen(opener, wrong, {})
