"""docs/streams-suites.md: each failure has a reason, and each test that the page names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/streams-suites.md").read_text()


def test_each_failed_test_has_a_reason() -> None:
    rows = re.findall(r"^\| (.+) \| (\w*) \| (\w*) \| (.*) ?\|$", PAGE, re.MULTILINE)
    failed = [(test, why.strip()) for test, ours, _, why in rows if ours in ("failed", "crashed")]
    assert failed
    assert [test for test, why in failed if not why] == []


def test_each_named_test_exists() -> None:
    named = re.findall(r"(test_streams\w*\.py)::(test_\w+)", PAGE.partition("<!--")[0])
    assert named
    for file, test in named:
        assert f"async def {test}(" in (ROOT / "tests/device" / file).read_text(), (file, test)
