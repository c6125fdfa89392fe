"""What tests do with sources: read them whole, and look at rows and refusals apart."""

from pathlib import Path
from typing import Any

from hf_longctx.data.reading import Refused, Row, Source


def read(source: Source | Path, unit_bytes: int = 1 << 20, **arguments: Any) -> list[Row | Refused]:
    """All that a source, or what is at a path, gives."""
    source = Source(str(source), **arguments) if isinstance(source, Path) else source
    return [row for unit in source.units(unit_bytes) for row in unit.rows()]


def values(rows: list[Row | Refused]) -> list[dict[str, Any]]:
    return [dict(row.values) for row in rows if isinstance(row, Row)]


def refusals(rows: list[Row | Refused]) -> list[str]:
    return [str(row) for row in rows if isinstance(row, Refused)]
