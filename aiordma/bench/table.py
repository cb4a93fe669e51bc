"""Measurements as a table."""

from collections.abc import Sequence

from rich.table import Table

from aiordma.bench.meter import PERCENTILES, Measurement

__all__ = ("Failure", "table_of")

Failure = tuple[str, str]
"""A workload that could not be measured: its name, and the error."""


def table_of(title: str, found: Sequence[Measurement | Failure]) -> Table:
    """Return the measurements as a table. The row of a failure has only its name."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in (*(f"p{percent:g} us" for percent in PERCENTILES), "per second", "MB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("CPU us", justify="right", no_wrap=True)
    table.add_column("wake-ups", justify="right", no_wrap=True)
    for row in found:
        if isinstance(row, tuple):
            table.add_row(row[0])
            continue
        times = [
            f"{row.percentile_us(percent):.1f}" if row.samples else "" for percent in PERCENTILES
        ]
        table.add_row(
            row.name + (f" ({row.lost} lost)" if row.lost else ""),
            *times,
            f"{row.rate:,.0f}",
            f"{row.megabytes_per_second:,.1f}",
            f"{row.cpu_us:.1f}",
            f"{row.wake_ups_each:.3f}",
        )
    return table
