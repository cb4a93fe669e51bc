"""Measurements as a table."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from aiordma.bench.meter import PERCENTILES, Measurement

__all__ = ("Failure", "print_table")

Failure = tuple[str, str]
"""A workload that could not be measured: its name, and the error."""

WIDEST = 1000


def print_table(console: Console, title: str, found: Sequence[Measurement | Failure]) -> None:
    """Print the measurements as a table. The row of a failure has only its name. A terminal that is
    narrower than the table wraps its lines: no digit is lost."""
    table = _table_of(title, found)
    needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _five(number: float) -> str:
    """Return a number with one decimal, or none if that would take more than five places."""
    return f"{number:.1f}" if number < 999.95 else f"{number:.0f}"


def _table_of(title: str, found: Sequence[Measurement | Failure]) -> Table:
    # Fits 80 columns with usual numbers.
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    table.add_column("", no_wrap=True)
    percentiles = (f"p{percent:g}\nus" for percent in PERCENTILES)
    for heading in (*percentiles, "per\nsecond", "MB/s", "CPU\nus", "wake-\nups"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        if isinstance(row, tuple):
            table.add_row(row[0])
            continue
        times = [
            _five(row.percentile_us(percent)) if row.samples else "" for percent in PERCENTILES
        ]
        table.add_row(
            row.name + (f" ({row.lost} lost)" if row.lost else ""),
            *times,
            f"{row.rate:,.0f}",
            _five(row.megabytes_per_second),
            _five(row.cpu_us),
            f"{row.wake_ups_each:.3f}",
        )
    return table
