"""The tests that the sanitizers leave out exist: a new name would bring one back unseen."""

import pytest

from tests.sanitizers.__main__ import MEASURED, SANITIZERS
from tests.unit.sources import ROOT

LEFT_OUT = {*MEASURED, *(name for each in SANITIZERS.values() for name in each.without)}


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_test_that_sanitizers_leave_out_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert f"def {function.partition('[')[0]}" in (ROOT / path).read_text()
