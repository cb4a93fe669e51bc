"""What `make fuzz` does with an rsocket, with fewer inputs: a peer, a device and a program that do
anything, see tests.fuzz.rsocket_driver. The engine does what the model in Python does."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.rsocket_driver import run_both

READS_NOTHING = bytes.fromhex("000900bd0001a3000600450001a300363e54")
"""The whole ring is read, and then nothing: both halves of it are due, and one was granted."""


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=400))
def test_an_rsocket_survives_any_input(data: bytes) -> None:
    run_both(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=200, max_size=800))
@example(READS_NOTHING.ljust(200, b"\0"))
def test_an_rsocket_survives_long_inputs_of_a_usual_peer(data: bytes) -> None:
    run_both(bytes([data[0] & 1]) + data[1:])
