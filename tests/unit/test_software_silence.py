"""The software device's peers that vanish while nothing waits for their confirmation."""

from aiordma._base.options import ConnectionOptions
from tests.device.test_dead_peers import check_times, cut_loopback


def test_silence_is_noticed_without_confirmations() -> None:
    # Without READs a request completes when TCP has it, as towards the kernel's siw.
    found = cut_loopback(initiator_depth=0)
    check_times(found, ConnectionOptions())
    for kind in ("SEND", "WRITE"):
        became, cause, _ = found.pop(kind)
        assert (became, cause) == ("done", "RetryExceededError")
    for kind in ("IDLE CLIENT", "IDLE SERVER"):
        became, text, _ = found.pop(kind)
        assert became == "RetryExceededError"
        assert "retry_count=6" in text
    assert {kind: became for kind, (became, _, _) in found.items()} == {
        "NO KEEPALIVE": "connected",
        "CLOSE": "closed",
    }
