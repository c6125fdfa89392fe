"""What the ranks measured -> figures per implementation, and rows of the table.

*The limit*, for time: what one process needs for the whole case with one call of torch's attention per document,
divided by the ranks; for memory: what that process holds, divided by the ranks. *A zigzag ring*: each rank passes all
keys and values on, ranks - 1 times in the forward pass, as often again in the backward pass, and their gradients, ranks
times (they come home); so (3 ranks - 2) times all keys and values.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attention_cases import Case
from attention_runs import ONE_PROCESS, Measured

RINGS = ("ring-flash-attn zigzag", "yunchang ring", "torch context_parallel ring")
HYBRIDS = ("yunchang Ulysses 2 x ring",)

Figures = dict[str, float]
"""Name -> number, of one implementation of one case."""

Found = Mapping[tuple[str, int, str], Figures | str]
"""Case, ranks, implementation -> its figures, or why it cannot do the case."""

WRONG = 1e-2
"""A gradient that is off by more is not a matter of rounding. Both ring packages turn a buffer into float32 to keep it
and then write the next block's gradients into the buffer: right in bfloat16, where that copies, and wrong in float32,
where it does not. Their times are not affected."""

COLUMNS = {
    "slowest rank / limit": ("slowest rank over the limit", "{:.2f}"),
    "CPU of all / one process": ("CPU of all ranks over one process", "{:.2f}"),
    "bytes / zigzag ring": ("bytes over a zigzag ring's", "{:.2f}"),
    "MiB sent": ("bytes, all ranks", "{:.0f}"),
    "by busiest": ("bytes, busiest rank", "{:.0f}"),
    "peak MiB": ("peak bytes, worst rank", "{:.0f}"),
    "peak / limit": ("peak memory over the limit", "{:.2f}"),
    "error of out": ("error of out", "{:.0e}"),
    "of gradients": ("error of gradients", "{:.0e}"),
}
"""Column of the table -> its figure and format; bytes are shown in MiB."""


def summarise(case: Case, ranks: int, measured: Sequence[dict[str, Measured | str]]) -> dict[str, Figures | str]:
    """Implementation -> its figures over all ranks, or why it cannot do the case."""
    alone = measured[0][ONE_PROCESS]
    assert isinstance(alone, Measured)
    seconds, peak_bytes = statistics.median(alone.thread_seconds), alone.peak_bytes
    forward_ring, ring = (case.kv_bytes * times for times in (ranks - 1, 3 * ranks - 2))
    summaries: dict[str, Figures | str] = {}
    for name in measured[0].keys() - {ONE_PROCESS}:
        of_ranks: list[Any] = [on_rank[name] for on_rank in measured]
        if any(isinstance(one, str) for one in of_ranks):
            summaries[name] = next(one for one in of_ranks if isinstance(one, str))
            continue
        slowest = max(statistics.median(one.thread_seconds) for one in of_ranks)
        sent = sum(one.bytes for one in of_ranks)
        worst_peak = max(one.peak_bytes for one in of_ranks)
        summaries[name] = {
            "slowest rank, CPU seconds": slowest,
            "slowest rank over the limit": slowest / seconds * ranks,
            "CPU of all ranks over one process": sum(statistics.median(one.process_seconds) for one in of_ranks)
            / seconds,
            "forward bytes over a zigzag ring's": sum(one.forward_bytes for one in of_ranks) / forward_ring,
            "bytes over a zigzag ring's": sent / ring,
            "bytes, all ranks": sent,
            "bytes, mean of the ranks": sent / ranks,
            "bytes, busiest rank": max(one.bytes for one in of_ranks),
            "peak bytes, worst rank": worst_peak,
            "peak memory over the limit": worst_peak / peak_bytes * ranks,
            "error of out": max(one.errors[0] for one in of_ranks),
            "error of gradients": max(max(one.errors[1:]) for one in of_ranks),
        }
    in_order = {name: summaries[name] for name in measured[0] if name in summaries}
    _compare_with_peers(in_order)
    return in_order


def _compare_with_peers(summaries: dict[str, Figures | str]) -> None:
    """Adds to each way of ours what it is of the best ring, of the best hybrid, and of the best of all peers."""
    peers = {name: summary for name, summary in summaries.items() if not is_ours(name) and isinstance(summary, dict)}
    rings, hybrids = ([summary for name, summary in peers.items() if name in kind] for kind in (RINGS, HYBRIDS))
    for ours in [summary for name, summary in summaries.items() if is_ours(name) and isinstance(summary, dict)]:
        for label, figure, others in (
            ("CPU of all ranks over the best ring's", "CPU of all ranks over one process", rings),
            ("bytes over the best ring's", "bytes, all ranks", rings),
            ("bytes over the best hybrid peer's", "bytes, all ranks", hybrids),
            ("bytes over the best peer's", "bytes, all ranks", list(peers.values())),
            ("peak memory over the best peer's", "peak bytes, worst rank", list(peers.values())),
        ):
            if others:
                ours[label] = ours[figure] / min(peer[figure] for peer in others)


def is_ours(implementation: str) -> bool:
    """Whether an implementation is this project's, in one of its modes."""
    return implementation.startswith("ours")


def rows(results: Found) -> list[dict[str, str]]:
    """The table: a row for each result, case by case; one row for all ranks on which an implementation cannot do a case
    for the same reason."""
    table: list[dict[str, str]] = []
    unable: dict[tuple[str, str, str], dict[str, str]] = {}
    cases = list(dict.fromkeys(case for case, _, _ in results))
    for (case, ranks, name), summary in sorted(results.items(), key=lambda item: cases.index(item[0][0])):
        row = {"case": case, "implementation": name, "ranks": str(ranks)}
        if isinstance(summary, str):
            row |= dict.fromkeys(COLUMNS, "-") | {"remark": f"cannot: {summary}"}
            first = unable.setdefault((case, name, summary), row)
            if first is not row:
                first["ranks"] += f", {ranks}"
                continue
        else:
            for column, (figure, form) in COLUMNS.items():
                row[column] = form.format(summary[figure] / 2**20 if "bytes, " in figure else summary[figure])
            row["remark"] = "" if summary["error of gradients"] < WRONG else "wrong gradients in float32"
        table.append(row)
    return table
