"""Percentiles and medians of samples (pure)."""

import math
from collections.abc import Sequence

__all__ = ("median", "percentile", "ratio")


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


def median(values: Sequence[float]) -> float:
    """Return the median: for an even number of values, the mean of the two in the middle.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values: nothing was measured")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def ratio(value: float | None, reference: float | None) -> float | None:
    """Return value / reference; None if either is None, or the reference is 0."""
    if value is None or not reference:
        return None
    return value / reference
