"""What goes to the peer with a connect or an accept: ranges, maxima, and C's struct."""

import re
from typing import Any

import pytest

from aiordma._base.connection_parameters import (
    MAX_ACCEPT_PRIVATE_DATA,
    MAX_CONNECT_PRIVATE_DATA,
    MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
    MAX_DATAGRAM_CONNECT_PRIVATE_DATA,
    MAX_REJECT_PRIVATE_DATA,
    check_private_data,
)
from aiordma.verbs import ConnectionParameters, Ece

# InfiniBand spec vol. 1, chapter 12: what a REQ, REP, REJ, SIDR_REQ and SIDR_REP leave to the
# consumer. The header of an IP port space (struct cma_hdr) takes 36 bytes of the two requests.
CMA_HEADER = 36


def test_the_maxima_are_those_of_the_messages() -> None:
    assert MAX_CONNECT_PRIVATE_DATA == 92 - CMA_HEADER
    assert MAX_ACCEPT_PRIVATE_DATA == 196
    assert MAX_REJECT_PRIVATE_DATA == 148
    assert MAX_DATAGRAM_CONNECT_PRIVATE_DATA == 216 - CMA_HEADER
    assert MAX_DATAGRAM_ACCEPT_PRIVATE_DATA == 136


@pytest.mark.parametrize(
    ("name", "most", "range_text"),
    [
        ("responder_resources", 255, "0..255"),
        ("initiator_depth", 255, "0..255"),
        ("retry_count", 7, "0..7"),
        ("rnr_retry_count", 7, "0..7"),
        ("qp_num", 0xFFFFFF, "0..16777215 (24 bits)"),  # 24 bits on the wire
    ],
)
def test_a_field_takes_its_range_and_nothing_beyond(name: str, most: int, range_text: str) -> None:
    def made(value: int) -> ConnectionParameters:
        changed: dict[str, Any] = {name: value}
        return ConnectionParameters(**changed)

    for value in (0, most):
        made(value)._check(56, "a connect")
    for value in (-1, most + 1):
        with pytest.raises(
            ValueError, match=rf"^{name}={value} is not in {re.escape(range_text)}$"
        ):
            made(value)._check(56, "a connect")


def test_private_data_that_does_not_fit_is_refused_with_the_limit() -> None:
    check_private_data(bytes(136), MAX_DATAGRAM_ACCEPT_PRIVATE_DATA, "an accept")
    ConnectionParameters(private_data=bytes(180))._check(180, "a connect")
    with pytest.raises(ValueError, match="181 bytes: a connect carries at most 180"):
        ConnectionParameters(private_data=bytes(181))._check(180, "a connect")


def test_c_gets_every_field() -> None:
    raw, data = ConnectionParameters(
        private_data=b"hello",
        responder_resources=1,
        initiator_depth=2,
        retry_count=3,
        rnr_retry_count=4,
        qp_num=5,
        shared_receive=True,
    )._to_c()
    assert bytes(data)[: raw.private_data_len] == b"hello"
    assert raw.private_data == data
    assert (raw.responder_resources, raw.initiator_depth) == (1, 2)
    assert (raw.retry_count, raw.rnr_retry_count) == (3, 4)
    assert (raw.qp_num, raw.srq) == (5, 1)


def test_no_private_data_is_no_pointer() -> None:
    raw, _ = ConnectionParameters()._to_c()
    assert not raw.private_data
    assert raw.private_data_len == 0


@pytest.mark.parametrize("name", ["vendor_id", "options"])
def test_the_options_of_a_vendor_are_32_bits(name: str) -> None:
    for value in (0, 2**32 - 1):
        Ece(**{"vendor_id": 1, "options": 1, name: value})
    for value in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"^{name}={value} is not in"):
            Ece(**{"vendor_id": 1, "options": 1, name: value})
