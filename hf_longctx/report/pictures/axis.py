"""Marks of an axis: round numbers, where they lie, and a text that says exactly what its line is at.

    10.7 to 10.74   ->   10.7   10.71   10.72   10.73   10.74        at 0, 25, 50, 75 and 100 %

Nothing is sent.
"""

import math
from collections.abc import Sequence
from typing import Any

MOST_INTERVALS = 4
"""Between the marks of the values."""
MOST_PLACES = 5
"""Along the horizontal axis: five numbers fit beside each other on a telephone."""
LEAST_SPAN = 1e-9
"""Values that differ by a smaller share of themselves are marked as one: no round numbers lie between them."""
LEAST_VALUE = 1e-300
"""The least number that is not marked as zero."""
MOST_DECIMALS = 4
"""A smaller step is written with a power of ten."""


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, equally far from each other, the first at most `low`, the last at least `high`: three or more."""
    largest = max(abs(low), abs(high))
    span = high - low if high - low > LEAST_SPAN * largest else largest
    span = span if span > LEAST_VALUE else 1.0
    power = 10.0 ** math.floor(math.log10(span / MOST_INTERVALS))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * MOST_INTERVALS >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if last - first < 2:
        first, last = (first, first + 2) if low >= 0 or first > -1 else (first - 1, first + 1)
    return [_rounded(i * step, step) for i in range(first, last + 1)]


def _rounded(value: float, step: float) -> float:
    """Round away what sums of floats leave, far below the step between marks."""
    return round(value, 12 - math.floor(math.log10(step)))


def texts(marks: Sequence[float], unit: str = "") -> list[str]:
    """Each mark with the decimals that the distance between them needs, no more: 10.70, 10.72, 10.74 are 0.02 apart."""
    step = _rounded(marks[1] - marks[0], marks[1] - marks[0])
    decimals = next((n for n in range(MOST_DECIMALS + 1) if math.isclose(round(step, n), step, rel_tol=1e-9)), None)
    form = "{:.12g}".format if decimals is None else f"{{:,.{decimals}f}}".format
    return [f"{form(mark)} {unit}".rstrip() for mark in marks]


def value_marks(marks: Sequence[float], unit: str = "") -> list[dict[str, Any]]:
    """Marks of the vertical axis from the first to the last of them: per cent from the top, and text."""
    low, high = marks[0], marks[-1]
    places = [round(100 * (high - mark) / (high - low), 3) for mark in marks]
    return [{"at": at, "text": text} for at, text in zip(places, texts(marks, unit))]


def whole_numbers(first: int, last: int, *, doubling: bool = False) -> list[int]:
    """Whole numbers from `first` to `last`, at most MOST_PLACES of them: the two ends, and round ones between.

    doubling: the round ones are multiples of a power of two, as ranks are counted; else of 1, 2, 3, 4, 5, 10, 20, ...
    """
    steps = (2**n for n in range(64)) if doubling else (base * 10**n for n in range(19) for base in (1, 2, 3, 4, 5))
    step = next(step for step in steps if last - first <= step * (MOST_PLACES - 1))
    between = range(math.ceil((first + 1) / step) * step, last, step)
    return sorted({first, last, *(n for n in between if 2 * min(n - first, last - n) >= step)})
