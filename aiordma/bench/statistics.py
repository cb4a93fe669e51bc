"""Percentiles of samples (pure)."""

import math
from collections.abc import Sequence

__all__ = ("percentile",)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest sample that `percent` of all samples do not exceed (nearest rank). The
    result is always one of the samples, never interpolated.

    Args:
        ordered: the samples, in ascending order.
        percent: above 0, up to 100.

    Raises:
        ValueError: there are no samples, or `percent` is out of range.
    """
    if not ordered:
        raise ValueError("no samples: nothing was measured")
    if not 0 < percent <= 100:
        raise ValueError(f"percent={percent} is not above 0 and up to 100")
    # Rounded first: 99.9 % of 1000 is 999, and 999.0000000000001 in floating point.
    return ordered[math.ceil(round(percent * len(ordered) / 100, 9)) - 1]
