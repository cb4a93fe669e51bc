"""What is shown and kept: a progress bar meanwhile, then a table, and build/bench.json."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .place import words as place_words
from .rounds import Step


@contextmanager
def bar(total: int) -> Iterator[Step]:
    """Show how far the measurements are; yields what to call before each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        begun = 0

        def step(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what, completed=begun)
            begun += 1
            if not console.is_terminal:
                print(f"{begun}/{total} {what}", file=sys.stderr, flush=True)

        yield step


def number(value: float | None) -> str:
    """Return a number as a table has it."""
    if value is None:
        return "-"
    if value and abs(value) < 10:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def processor(row: dict[str, Any]) -> str:
    """Return the processor times of both sides for one operation, ours and the reference's."""
    if row["cpu_us"] is None or row["reference_cpu_us"] is None:
        return ""
    return f"{number(row['cpu_us'])} / {number(row['reference_cpu_us'])}"


def goal(row: dict[str, Any]) -> str:
    """Return what the ratio has to be."""
    if row["limit"] is None:
        return ""
    return f"{'<=' if row['better'] == 'less' else '>='} {row['limit']:g}"


def spread(row: dict[str, Any]) -> str:
    """Return the smallest and the largest ratio of the rounds."""
    ratios = [sample["ratio"] for sample in row["samples"] if sample["ratio"] is not None]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    shown = Table(title="aiordma beside its references, medians", title_justify="left")
    shown.add_column("row", no_wrap=True)
    for heading in ("value", "unit", "reference", "", "ratio", "goal", "met", "us CPU"):
        right = heading in ("value", "", "ratio")
        shown.add_column(heading, justify="right" if right else "left")
    words = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for row in rows:
        shown.add_row(
            row["name"],
            number(row["value"]),
            row["unit"],
            row["reference"],
            number(row["reference_value"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            goal(row),
            words[row["met"]],
            processor(row),
        )
    return shown


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table, and below it what is to be known of some rows."""
    console = Console()
    if not console.is_terminal:
        console.width = 150
    console.print(table(rows))
    for row in rows:
        if row["note"]:
            console.print(f"{row['name']}: {row['note']}", highlight=False, markup=False)
    for line in places(rows):
        console.print(line, highlight=False, markup=False)


def places(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each place at which rows were measured."""
    counted = Counter(place_words(row) for row in rows)
    return [f"{count} rows on {where}" for where, count in counted.items()]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of bench.md."""
    words = {True: "yes", False: "**no**", None: ""}
    lines = [
        "| row | value | reference | ratio | ratios of the rounds | goal | met | us CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        reference = f"{row['reference']}: {number(row['reference_value'])}"
        lines.append(
            f"| `{row['name']}` | {number(row['value'])} {row['unit']} | {reference} | {ratio} "
            f"| {spread(row)} | {goal(row)} | {words[row['met']]} | {processor(row)} |"
        )
    return "\n".join([*lines, "", *(f"{line}." for line in places(rows))]) + "\n"


def keep(rows: Sequence[dict[str, Any]], folder: Path, name: str = "bench") -> None:
    """Write bench.json and bench.md, or so with another name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown(rows))
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
