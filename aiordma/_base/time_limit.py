"""The time limit of a call that takes several steps (pure)."""

from aiordma._base.system import system


class TimeLimit:
    """The seconds that the steps of a call may take together. They begin with the first `left`.

    Args:
        seconds: as the attribute.

    Attributes:
        seconds: how many; None: no limit. The errors name them.
    """

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        self.seconds: float | None = seconds
        self._end: float | None = None

    def left(self) -> float | None:
        """Return the seconds that remain, less than 0 after the end; None: no limit."""
        if self.seconds is None:
            return None
        now = system.now()
        if self._end is None:
            self._end = now + self.seconds
        return self._end - now

    def share(self, count: int) -> "TimeLimit":
        """Return the limit of one of `count` equal parts of what remains."""
        left = self.left()
        if left is None:
            return self
        return TimeLimit(float(f"{max(left, 0) / count:.3g}"))  # the errors have it
