"""Rows of the virtual machine: perftest by `aiordma exec`, beside perftest on the kernel's siw."""

from collections.abc import Callable
from functools import partial

from . import perftest
from .candidates import Candidates
from .rows import MORE, Reading, Row
from .software_roce import on_exported

WINDOW = 64
DEPTH = 16
MESSAGES, BYTES = 5_000, 30_000_000
"""Of one measurement. The guest counts its instructions for its time, so that few are enough."""


def rows(here: Candidates) -> list[Row]:
    """WRITE, READ and SEND: the rate of small messages, and the bandwidth."""
    return [
        row
        for operation in ("write", "read", "send")
        for row in (
            _row(here, f"{operation}/64/window64", "per second", partial(_rate, operation)),
            *(
                _row(here, f"{operation}/{size}", "MB/s", partial(_bulk, operation, size))
                for size in (65536, 1048576)
            ),
        )
    ]


def _row(here: Candidates, name: str, unit: str, measure: Callable[..., Reading]) -> Row:
    return Row(
        f"siw/{name}",
        unit,
        partial(measure, here.host, within=on_exported("software")),
        "the same on siw",
        partial(measure, here.host),
        limit=1.0,
        better=MORE,
    )


def _rate(operation: str, host: str, within: tuple[str, ...] = ()) -> Reading:
    return perftest.rate_of(f"ib_{operation}_bw", host, 64, MESSAGES, WINDOW, within)


def _bulk(operation: str, size: int, host: str, within: tuple[str, ...] = ()) -> Reading:
    rounds = BYTES // size
    return perftest.bandwidth_of(f"ib_{operation}_bw", host, size, rounds, DEPTH, within)
