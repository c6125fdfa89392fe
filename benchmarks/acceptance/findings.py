"""The twenty findings of the review of the GPU path, each with the rule that a run's figures judge it by.

A rule names a figure, a comparison under which the finding is confirmed, and words for both outcomes, into which `{x}` puts the
figure. Where the figure was not measured, the verdict says why: a part that measures it failed, was not possible, has not run, or
did not come to it. Figures of a CPU, and of tiny shapes, judge no finding about GPUs: the verdict says what they would.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from acceptance.record import DONE, NOT_POSSIBLE, RUNNING, Record, Shown

CONFIRMED, REFUTED, NOT_MEASURED = "confirmed", "refuted", "not measured here"
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
OF_RANKS = ("several", "shared")


@dataclass(frozen=True)
class Finding:
    """One finding, and how it is judged."""

    number: int
    title: str
    parts: tuple[str, ...] = ()
    """that may measure it; (): none does"""
    figure: str = ""
    """its name, or a pattern (`*` matches anything): the largest of those that match counts"""
    confirmed_if: tuple[str, float] = (">=", 0.0)
    """comparison of the figure with a number"""
    confirmed: str = ""
    refuted: str = ""
    also: tuple[str, str] = ("", "")
    """a second figure, and words that follow, with `{y}` for it, where it was measured"""
    because: str = ""
    """why it may not have been measured although its part has run, or why no part does"""


FINDINGS = (
    Finding(
        1,
        "A deterministic backward is slow",
        parts=("order",),
        figure="order/*/ours",
        confirmed_if=(">=", 1.3),
        confirmed="x{x:.2f} at worst; setting kept off",
        refuted="x{x:.2f} at worst: the setting may be on",
    ),
    Finding(
        2,
        "Few NCCL channels for each peer in a group over several nodes",
        because="it takes GPUs on two machines: hf-longctx doctor under torchrun measures it there",
    ),
    Finding(
        3,
        "The exchange does not overlap at default priority",
        parts=("overlap",),
        figure="overlap/attention forward/priority 0/wait",
        confirmed_if=(">=", 0.5),
        confirmed="a small kernel waits for {x:.0%} of attention at priority 0",
        refuted="a small kernel waits for {x:.0%} of attention at priority 0: priority need not be raised",
        also=("overlap/attention forward/priority -1/wait", ", for {y:.0%} at priority -1, which exchange groups have"),
    ),
    Finding(
        4,
        "NCCL's own memory is in no budget",
        parts=("several",),
        figure="several/GiB that NCCL takes",
        confirmed_if=(">=", 0.5),
        confirmed="{x:.2f} GiB a rank: capacity has to leave that much",
        refuted="{x:.2f} GiB a rank",
    ),
    Finding(
        5,
        "Received slices cannot be reused while the host runs ahead",
        parts=OF_RANKS,
        figure="*/slices reserved by 32 rounds",
        confirmed_if=(">=", 8.0),
        confirmed="32 rounds into new buffers reserve {x:.0f} slices; buffers stay kept",
        refuted="32 rounds into new buffers reserve {x:.0f} slices: kept buffers are not needed",
    ),
    Finding(
        6,
        "The host waits inside a step",
        parts=("syncs",),
        figure="syncs/in a planned step",
        confirmed_if=(">", 0.0),
        confirmed="{x:.0f} synchronisations, on the lines in the table",
        refuted="no synchronisation: mended",
        also=("syncs/micro-batches", ", in {y:.0f} micro-batches"),
    ),
    Finding(
        7,
        "The memory model misses the kernels' scratch",
        parts=("memory",),
        figure="memory/offload 0, measured over estimated",
        confirmed_if=(">", 1.1),
        confirmed="a step takes x{x:.2f} of its estimate: MemoryModel is to be mended",
        refuted="a step takes x{x:.2f} of its estimate",
    ),
    Finding(
        8,
        "Bound by the host below 4K to 6K tokens per rank",
        parts=("host",),
        figure="host/4096 tokens per rank",
        confirmed_if=(">=", 1.0),
        confirmed="at 4,096 tokens the host takes x{x:.2f} of the device's time",
        refuted="at 4,096 tokens the host takes x{x:.2f} of the device's time",
        also=("host/tokens from which it is quicker", "; it is quicker from {y:,.0f} tokens on"),
    ),
    Finding(
        9,
        "The first message to a new peer is slow",
        parts=OF_RANKS,
        figure="*/first message over later ones",
        confirmed_if=(">=", 10.0),
        confirmed="the first takes x{x:.0f} of later ones: peers should meet at set-up",
        refuted="the first takes x{x:.1f} of later ones",
    ),
    Finding(
        10,
        "Streams come from a pool of 32",
        parts=("environment",),
        figure="streams/different ones of 100",
        confirmed_if=("<=", 32.0),
        confirmed="{x:.0f} different ones of 100; the checkpoint writer keeps the one it has",
        refuted="{x:.0f} different ones of 100",
    ),
    Finding(
        11,
        "Offload frees less than the planner thinks",
        parts=("memory",),
        figure="memory/freed by full offload over what was predicted",
        confirmed_if=("<", 0.8),
        confirmed="it frees {x:.0%} of what is predicted",
        refuted="it frees {x:.0%} of what is predicted: mended",
        because="a step without offload, or one with all of it, did not fit",
    ),
    Finding(
        12,
        "Waiting for a message does not hold the host",
        parts=OF_RANKS,
        figure="*/share of a message that the host waits for",
        confirmed_if=("<=", 0.2),
        confirmed="the host waits for {x:.0%} of a message: the watchdog has to ask the device",
        refuted="the host waits for {x:.0%} of a message",
    ),
    Finding(
        13,
        "flash-attn 4 compiles in the middle of training",
        parts=("kernels",),
        figure="kernels/first call of flash_attn_4 over later ones, *",
        confirmed_if=(">=", 100.0),
        confirmed="a first call takes x{x:.0f} of later ones: it is to be warmed at set-up",
        refuted="a first call takes x{x:.0f} of later ones",
        because="flash-attn 4 is not installed, or cannot run here: the notes of its part say which",
    ),
    Finding(
        14,
        "Exchange() puts every rank on the first GPU",
        parts=("several",),
        figure="several/devices over ranks",
        confirmed_if=("<", 1.0),
        confirmed="ranks hold {x:.0%} of their GPUs",
        refuted="every rank has its own GPU: mended",
    ),
    Finding(
        15,
        "The loss head costs more than its products",
        parts=("head",),
        figure="head/chunk of the default, over its products",
        confirmed_if=(">=", 1.3),
        confirmed="x{x:.2f} of its matrix products by chunks of 1,024 rows",
        refuted="x{x:.2f} of its matrix products by chunks of 1,024 rows",
        also=("head/least over its products", ", x{y:.2f} by the best number of rows"),
    ),
    Finding(
        16,
        "Settings that NCCL and CUDA want, set by nobody",
        parts=("environment",),
        figure="environment/wanted variables that a run does not set",
        confirmed_if=(">", 0.0),
        confirmed="a run leaves {x:.0f} of three unset",
        refuted="a run sets them: mended",
    ),
    Finding(
        17,
        "A receive that waits takes multiprocessors",
        parts=OF_RANKS,
        figure="*/products beside a receive that waits, over alone",
        confirmed_if=(">=", 1.1),
        confirmed="products take x{x:.2f} as long beside one: links between stages should post late, or with few blocks",
        refuted="products take x{x:.2f} as long beside one",
    ),
    Finding(
        18,
        "Long set-ups wait inside NCCL collectives",
        because="it shows only where one process prepares data for longer than ddp_timeout, 30 minutes",
    ),
    Finding(19, "A gloo group over all ranks for checkpoints", because="it takes hundreds of ranks"),
    Finding(
        20,
        "Smaller ones, of which rows in another order are measured",
        parts=("head",),
        figure="rows/backward by index over a gather",
        confirmed_if=(">=", 1.5),
        confirmed="backward of x[rows] takes x{x:.2f} of a gather by the inverse",
        refuted="backward of x[rows] takes x{x:.2f} of a gather by the inverse: it may stay",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run for one finding."""

    finding: Finding
    kind: str
    """CONFIRMED, REFUTED or NOT_MEASURED"""
    words: str

    def __str__(self) -> str:
        joint = ", because " if self.kind == NOT_MEASURED else ", "
        return f"{self.finding.number}: {self.kind}{joint}{self.words}"


def verdicts(records: Mapping[str, Record]) -> list[Verdict]:
    """The verdict on each finding, by number. `records`: part -> its record, of those that were begun."""
    return [verdict(finding, records) for finding in FINDINGS]


def verdict(finding: Finding, records: Mapping[str, Record]) -> Verdict:
    """Judge one finding by what its parts measured."""
    figures = {
        name: (value, records[part].judges)
        for part in finding.parts
        if part in records
        for name, value in records[part].figures.items()
    }
    matching = [figure for name, figure in figures.items() if fnmatch(name, finding.figure)]
    if not matching:
        return Verdict(finding, NOT_MEASURED, _why_not(finding, records))
    value, judges = max(matching)
    sign, bound = finding.confirmed_if
    confirmed = COMPARISONS[sign](value, bound)
    kind = CONFIRMED if confirmed else REFUTED
    words = (finding.confirmed if confirmed else finding.refuted).format(x=Shown(value))
    name, more = finding.also
    if name in figures:
        words += more.format(y=Shown(figures[name][0]))
    if not judges:
        seen = "these are figures of a CPU or of tiny shapes"
        return Verdict(finding, NOT_MEASURED, f"{seen}, by which it would be {kind}: {words}")
    return Verdict(finding, kind, words)


def _why_not(finding: Finding, records: Mapping[str, Record]) -> str:
    """Why its figure is not there."""
    if not finding.parts:
        return finding.because
    begun = [records[part] for part in finding.parts if part in records]
    if not begun:
        return f"the part {' or '.join(finding.parts)} has not run yet"
    for record in begun:
        if record.status == RUNNING:
            return f"the part {record.part} has not ended"
        if record.status not in (DONE, NOT_POSSIBLE):
            return f"the part {record.part} {record.status}: {record.why}"
    reasons = list(dict.fromkeys(record.why for record in begun if record.status == NOT_POSSIBLE))
    if reasons:
        return "; ".join(reasons)
    if all(record.device != "cuda" for record in begun):
        return "this is a CPU"
    return finding.because or f"the part {begun[0].part} did not come to it in its time"
