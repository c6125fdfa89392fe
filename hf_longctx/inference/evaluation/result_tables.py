"""evaluation.json -> tables for the terminal: losses by position and length, what was found where, two models compared."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(results: Mapping[str, Any], console: Console) -> None:
    """Prints all that there is, on a console that shows text as it is."""
    other: Mapping[str, Any] = results.get("against") or {}
    if "loss" in results:
        console.print(f"Documents: {results['environment']['data']}", soft_wrap=True)
        summary = (
            f"{results['documents']:,} documents, {results['tokens']:,} tokens predicted: loss {results['loss']:.4f}"
        )
        if "loss" in other:
            summary += f"; {other['model']} {other['loss']:.4f}"
        console.print(Text.assemble((results["model"], "bold"), f": {summary}"), soft_wrap=True)
    for key, first in (("by_position", "positions"), ("by_length", "documents up to")):
        if results.get(key):
            console.print(_losses(results, key, first))
    if "difference" in results:
        overall = results["difference"]["overall"]
        console.print(
            f"Difference {overall['difference']:+.4f} nats per token, {_between(overall)} (95 %, paired by document). Below 0: "
            f"{results['model']} is better.",
            soft_wrap=True,
        )
    for model_results in (results, other):
        cells = model_results.get("retrieval") or []
        for task in dict.fromkeys(cell["task"] for cell in cells):
            console.print(Text.assemble((task, "bold"), f", found by {model_results['model']}:"), soft_wrap=True)
            console.print(_found([cell for cell in cells if cell["task"] == task]))


def _losses(results: Mapping[str, Any], key: str, first: str) -> Table:
    """A row for each bucket; with another model, its loss and the difference."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    differences = {bucket["from"]: bucket for bucket in results.get("difference", {}).get(key, [])}
    others = {bucket["from"]: bucket for bucket in results.get("against", {}).get(key, [])}
    near = any("near_loss" in bucket for bucket in results[key])
    headers = [first, "documents", "tokens", "loss", "perplexity", *(["near loss", "far context"] if near else [])]
    headers += ["other's loss", "difference", "95 %"] if differences else []
    for header in headers:
        table.add_column(header, justify="right")
    for bucket in results[key]:
        place = f"{bucket['from']:,}-{bucket['to'] - 1:,}" if key == "by_position" else f"{bucket['to']:,}"
        cells = [
            place,
            f"{bucket['documents']:,}",
            f"{bucket['tokens']:,}",
            f"{bucket['loss']:.4f}",
            _perplexity(bucket["loss"]),
        ]
        if near:
            cells += [f"{bucket['near_loss']:.4f}", f"{bucket['loss'] - bucket['near_loss']:+.4f}"]
        if bucket["from"] in differences:
            other, difference = others[bucket["from"]], differences[bucket["from"]]
            cells += [f"{other['loss']:.4f}", f"{difference['difference']:+.4f}", _between(difference)]
        table.add_row(*cells)
    return table


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.3g}" if loss < 700 else "inf"


def _between(difference: Mapping[str, Any]) -> str:
    interval = difference["interval"]
    return "of one document" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def _found(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Lengths across, depths down."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    counts = {(cell["depth"], cell["length"]): f"{cell['found']}/{cell['trials']}" for cell in cells}
    table.add_column("depth", justify="right")
    for length in lengths:
        table.add_column(f"{length:,} tokens", justify="right")
    for depth in depths:
        table.add_row(f"{depth:.0%}", *(counts[depth, length] for length in lengths))
    return table
