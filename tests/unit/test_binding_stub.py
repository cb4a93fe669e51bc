"""The stub of the compiled binding says what the binding has."""

from tests.binding_stub import STUB, stub


def test_binding_stub_matches_the_binding() -> None:
    assert STUB.read_text() == stub(), "`python -m tests.binding_stub` writes it anew"
