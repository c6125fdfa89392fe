"""The twenty findings of the review of the GPU path, each with the rule that a run's figures judge it by.

A rule names a figure, a comparison under which the finding is confirmed, and words for both outcomes, into which `{x}` puts the
figure, and `{y}` what `also` names. Where the figure was not measured, the verdict says why: the part that measures it failed, was
not possible, has not run, or did not come to it. Figures of a CPU judge no finding about GPUs: the verdict says what they would.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from acceptance.record import DONE, NOT_POSSIBLE, Record

CONFIRMED, REFUTED, NOT_MEASURED = "confirmed", "refuted", "not measured here"
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Finding:
    """One finding, and how it is judged."""

    number: int
    title: str
    part: str = ""
    """that measures it; "": none does"""
    figure: str = ""
    """its name, or a pattern: of those that match, the largest"""
    confirmed_if: tuple[str, float] = (">=", 0.0)
    """comparison of the figure with a number"""
    confirmed: str = ""
    refuted: str = ""
    also: str = ""
    """a second figure, for the words"""
    because: str = ""
    """why it may not have been measured although its part has run, or why no part does"""


FINDINGS = (
    Finding(
        *(1, "A deterministic backward is slow", "order", "order/*/ours", (">=", 1.3)),
        confirmed="x{x:.2f} at worst; the switch stays off",
        refuted="x{x:.2f} at worst: the switch may be on",
    ),
    Finding(
        *(2, "Few NCCL channels between nodes"),
        because="it takes GPUs on two machines: hf-longctx doctor under torchrun measures it there",
    ),
    Finding(
        *(3, "The exchange does not overlap at default priority", "overlap"),
        *("overlap/attention forward/priority 0/wait", (">=", 0.5)),
        confirmed="a small kernel waits for {x:.0%} of attention at priority 0, {y:.0%} at -1; exchange groups keep priority -1",
        refuted="a small kernel waits for {x:.0%} of attention at priority 0, {y:.0%} at -1: priority may be left as it is",
        also="overlap/attention forward/priority -1/wait",
    ),
    Finding(
        *(4, "NCCL's own memory is in no budget", "several", "several/GiB that NCCL takes", (">=", 0.5)),
        confirmed="{x:.2f} GiB a rank; capacity is planned with what is left after ranks have met",
        refuted="{x:.2f} GiB a rank",
    ),
    Finding(
        *(5, "Received slices cannot be reused while the host runs ahead", "s*", "s*/slices reserved by 32 rounds"),
        confirmed_if=(">=", 8.0),
        confirmed="32 rounds into new buffers reserve {x:.0f} slices; buffers stay kept",
        refuted="32 rounds into new buffers reserve {x:.0f} slices: kept buffers are not needed",
    ),
    Finding(
        *(6, "The host waits inside a step", "syncs", "syncs/in a planned step", (">", 0.0)),
        confirmed="{x:.0f} synchronisations in {y:.0f} micro-batches; their lines are in the table",
        refuted="no synchronisation in {y:.0f} micro-batches: mended",
        also="syncs/micro-batches",
    ),
    Finding(
        *(7, "The memory model misses the kernels' scratch", "memory", "memory/offload 0, measured over estimated"),
        confirmed_if=(">", 1.1),
        confirmed="a step takes {x:.2f} of its estimate; MemoryModel is to be mended",
        refuted="a step takes {x:.2f} of its estimate",
    ),
    Finding(
        *(8, "Bound by the host below 4K to 6K tokens per rank", "host", "host/4096 tokens per rank", (">=", 1.0)),
        confirmed="at 4,096 tokens the host takes {x:.2f} of the device's time, and is quicker from {y:,.0f}",
        refuted="at 4,096 tokens the host takes {x:.2f} of the device's time",
        also="host/tokens from which it is quicker",
    ),
    Finding(
        *(9, "The first message to a new peer is slow", "s*", "s*/first message over later ones", (">=", 10.0)),
        confirmed="the first message takes x{x:.0f} as long as later ones; peers should meet at set-up",
        refuted="the first message takes x{x:.1f} as long as later ones",
    ),
    Finding(
        *(10, "Streams come from a pool of 32", "environment", "streams/different ones of 100", ("<=", 32.0)),
        confirmed="{x:.0f} different ones of 100; the checkpoint writer keeps the one it has",
        refuted="{x:.0f} different ones of 100",
    ),
    Finding(
        *(11, "Offload frees less than the planner thinks", "memory"),
        *("memory/freed by full offload over what was predicted", ("<", 0.8)),
        confirmed="it frees {x:.0%} of what is predicted",
        refuted="it frees {x:.0%} of what is predicted: mended",
    ),
    Finding(
        *(12, "Waiting for a message does not hold the host", "s*", "s*/share of a message that the host waits for"),
        confirmed_if=("<=", 0.2),
        confirmed="the host waits for {x:.0%} of a message: the watchdog must ask the device",
        refuted="the host waits for {x:.0%} of a message",
    ),
    Finding(
        *(13, "flash-attn 4 compiles in the middle of training", "kernels"),
        *("kernels/first call of flash_attn_4 over later ones, *", (">=", 100.0)),
        confirmed="a first call takes x{x:.0f} as long as later ones; it is to be warmed at set-up",
        refuted="a first call takes x{x:.0f} as long as later ones",
        because="flash-attn 4 is not installed or cannot run on this GPU (kernels says why)",
    ),
    Finding(
        *(14, "Exchange() puts every rank on the first GPU", "several", "several/devices over ranks", ("<", 1.0)),
        confirmed="ranks have {x:.0%} of their GPUs",
        refuted="every rank has its own GPU: mended",
    ),
    Finding(
        *(15, "The loss head costs more than its products", "head", "head/chunk of the default, over its products"),
        confirmed_if=(">=", 1.3),
        confirmed="x{x:.2f} of its matrix products by chunks of 1,024 rows, x{y:.2f} by the best: change loss_chunk_tokens",
        refuted="x{x:.2f} of its matrix products by chunks of 1,024 rows, x{y:.2f} by the best",
        also="head/least over its products",
    ),
    Finding(
        *(16, "Settings that NCCL and CUDA want, set by nobody", "environment"),
        *("environment/wanted variables that a run does not set", (">", 0.0)),
        confirmed="{x:.0f} of three are not set by a run",
        refuted="a run sets them: mended",
    ),
    Finding(
        *(17, "A receive that waits takes multiprocessors", "s*"),
        *("s*/products beside a receive that waits, over alone", (">=", 1.1)),
        confirmed="products take x{x:.2f} as long beside one; links between stages should post late or with few blocks",
        refuted="products take x{x:.2f} as long beside one",
    ),
    Finding(
        *(18, "Long set-ups wait inside NCCL collectives"),
        because="it shows only where one process prepares data for longer than ddp_timeout, 30 minutes",
    ),
    Finding(
        *(19, "A gloo group over all ranks for checkpoints"),
        because="it takes hundreds of ranks",
    ),
    Finding(
        *(20, "Smaller ones: rows in another order", "head", "rows/backward by index over a gather", (">=", 1.5)),
        confirmed="backward of x[rows] takes x{x:.2f} as long as a gather; gather by the inverse where rows are permuted",
        refuted="backward of x[rows] takes x{x:.2f} as long as a gather",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What a run says about a finding."""

    finding: Finding
    kind: str
    """CONFIRMED, REFUTED or NOT_MEASURED"""
    words: str

    def __str__(self) -> str:
        joint = ", because " if self.kind == NOT_MEASURED else ", "
        return f"{self.finding.number}: {self.kind}{joint}{self.words}"


def verdicts(records: Mapping[str, Record]) -> list[Verdict]:
    """The verdict on each finding, by number. `records`: part -> its record, of those that were begun."""
    figures = {name: (value, record.device) for record in records.values() for name, value in record.figures.items()}
    return [verdict(finding, records, figures) for finding in FINDINGS]


def verdict(
    finding: Finding, records: Mapping[str, Record], figures: Mapping[str, tuple[float, str]]
) -> Verdict:
    """Judge one finding. `figures`: name -> value, and the device it was measured on."""
    matching = [figures[name] for name in figures if finding.figure and fnmatch(name, finding.figure)]
    if not matching:
        return Verdict(finding, NOT_MEASURED, _why_not(finding, records))
    value, device = max(matching)
    sign, bound = finding.confirmed_if
    confirmed = COMPARISONS[sign](value, bound)
    other = figures.get(finding.also, (float("nan"), ""))[0]
    words = (finding.confirmed if confirmed else finding.refuted).format(x=value, y=other)
    kind = CONFIRMED if confirmed else REFUTED
    if device != "cuda":
        return Verdict(finding, NOT_MEASURED, f"these are figures of a CPU, by which it would be {kind}: {words}")
    return Verdict(finding, kind, words)


def _why_not(finding: Finding, records: Mapping[str, Record]) -> str:
    """Why its figure is not there."""
    if not finding.part:
        return finding.because
    parts = [record for name, record in records.items() if fnmatch(name, finding.part) and _may_measure(finding, name)]
    for record in parts:
        if record.status not in (DONE, NOT_POSSIBLE):
            return f"the part {record.part} {'is running' if record.status == 'running' else record.status}: {record.why}".rstrip(": ")
    reasons = [record.why for record in parts if record.status == NOT_POSSIBLE]
    if reasons:
        return "; ".join(reasons)
    if not parts:
        return f"the part {finding.part.replace('s*', 'shared')} has not run yet"
    if all(record.device != "cuda" for record in parts):
        return "this is a CPU"
    return finding.because or f"the part {parts[0].part} had no time for it"


def _may_measure(finding: Finding, part: str) -> bool:
    """Whether a part is one of those that a pattern of parts stands for."""
    return finding.part != "s*" or part in ("shared", "several")
