"""What `make fuzz` does with the calls of a stream, with fewer inputs: tasks that receive, send and
are cancelled, beside a peer and a device, see tests.fuzz.stream_calls. The engine's calls do what
the general path does on the model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.model_path import ModelPath
from tests.fuzz.stream_calls import run_calls

SETTLES = 16


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0, 1, SETTLES, SETTLES | 1]), st.binary(min_size=60, max_size=300))
def test_calls_lose_no_byte_and_end(first: int, data: bytes) -> None:
    run_calls(bytes([first]) + data)


def test_a_byte_that_a_call_loses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ModelPath.read

    def lose(path: ModelPath, limit: int) -> bytes:
        data = read(path, limit)
        return data[:-1] or data

    monkeypatch.setattr(ModelPath, "read", lose)
    data, receive, length = b"\0", b"\x0a", b"\x07"  # the steps' places, and a length
    steps = (data + length + b"\0" + receive + b"\x40") * 3
    with pytest.raises(AssertionError):
        run_calls(bytes([SETTLES]) + steps)
