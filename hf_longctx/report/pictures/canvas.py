"""Shared by all pictures: figures without a window or global state, colours, and short numbers.

matplotlib is imported when a picture is drawn, so that runs without pictures do without it. Nothing is sent between
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_INCHES = 10.0
DOTS_PER_INCH = 160

# Okabe and Ito's palette: distinct under all common kinds of colour blindness.
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, MUTED, PALE = "#222222", "#767676", (0.85, 0.85, 0.85, 1.0)


class PictureError(RuntimeError):
    """A picture cannot be drawn, for a reason outside the data."""


def new_figure(height_inches: float) -> Figure:
    """An empty figure that arranges itself. Raises PictureError if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PictureError(
            f"pictures need matplotlib, and {error.name} is not installed: pip install 'hf_longctx[report]'"
        ) from None
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the figure; the ending of `path` says in which format. Makes missing directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def short_tokens(tokens: int) -> str:
    """Word a length in at most five characters, as contexts are named, K is 1,024: 950, 4.9K, 128K, 2M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            value = tokens / size
            return f"{value:.0f}{unit}" if value >= 9.95 or value.is_integer() else f"{value:.1f}{unit}"
    return f"{tokens}"


def byte_unit(most: float) -> tuple[str, int]:
    """The unit in which so many bytes are below a thousand when rounded to three digits, and how many bytes it is."""
    names = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    return next(((name, 1024**n) for n, name in enumerate(names) if most < 999.5 * 1024**n), (names[-1], 1024**5))


def short_bytes(count: int) -> str:
    """A number of bytes with three digits and its unit: 950 bytes, 5.12 KiB, 131 MiB."""
    unit, size = byte_unit(count)
    return f"{count / size:.3g} {unit}"


def time_unit(nanoseconds: int) -> tuple[str, float]:
    """The unit in which a duration reads well, and its nanoseconds."""
    units = (("hours", 3.6e12), ("minutes", 6e10), ("seconds", 1e9), ("milliseconds", 1e6), ("microseconds", 1e3))
    return next(((name, size) for name, size in units if nanoseconds >= 2 * size), ("nanoseconds", 1.0))
