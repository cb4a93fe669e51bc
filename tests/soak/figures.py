"""What a part of the soak found, and what it has to be."""

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass

AT_MOST = "<="
AT_LEAST = ">="
EQUAL = "="

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    AT_MOST: operator.le,
    AT_LEAST: operator.ge,
    EQUAL: operator.eq,
}

SCALE = float(os.environ.get("SOAK_SCALE", "1"))
"""Factor of all sizes."""


def scaled(size: int, least: int = 1) -> int:
    """Return a size at this run's scale."""
    return max(round(size * SCALE), least)


@dataclass(frozen=True)
class Figure:
    """A number that a part found.

    Attributes:
        name: what it is.
        value: the number.
        goal: a comparison and its number, such as ("<=", 64), or None: for information.
        counted: whether it is a count, which has to meet its goal at every scale. The others are
            measured (memory, rates), and say little where the sizes are small.
    """

    name: str
    value: float
    goal: tuple[str, float] | None = None
    counted: bool = False

    @property
    def met(self) -> bool:
        """Whether the goal is met; always at a small scale if it is not counted."""
        if self.goal is None or (SCALE < 1 and not self.counted):
            return True
        comparison, number = self.goal
        return _COMPARISONS[comparison](self.value, number)


def count(name: str, value: int, expected: int = 0) -> Figure:
    """Return a figure that has to be exact."""
    return Figure(name, value, (EQUAL, expected), counted=True)
