"""The memory of a rank by sharding, and a table of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Estimate:
    """One sharding."""

    sharding: str
    capacity: int
    """most tokens on a rank; 0: not one fits"""
    ranks: int
    """in all"""
    ranks_needed: int | None
    """by a document of --context; None: more than there are"""
    parts: dict[str, int]
    """of a rank that holds its share of that document"""
    host: int


def memory_table(results: list[Estimate], *, over_all: bool = True) -> Table:
    """GiB of a rank that holds its share of the document; the longest contexts on one, and where wanted over all ranks."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    with_host = any(result.host for result in results)
    with_outside = any(result.parts["outside"] for result in results)
    outside = ("outside",) if with_outside else ()
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", *outside, "total")
    columns = ("GiB per GPU", *parts, *(("host",) if with_host else ()), "fits a GPU")
    for column in (*columns, *(("fits all GPUs",) if over_all else ())):
        table.add_column(column, justify="left" if column == "GiB per GPU" else "right")
    for result in results:
        shown_parts = result.parts | {
            "activations": result.parts["activations"] + result.parts["working"],
            "total": sum(result.parts.values()),
        }
        table.add_row(
            result.sharding,
            *(f"{shown_parts[part] / 2**30:.2f}" for part in parts),
            *((f"{result.host / 2**30:.2f}",) if with_host else ()),
            f"{result.capacity:,}",
            *((f"{result.capacity * result.ranks:,}",) if over_all else ()),
        )
    return table
