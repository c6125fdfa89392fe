"""Training steps: ours against plain Trainer, packing and context-parallel peers, on two gloo ranks of this machine.

    python benchmarks/training.py --json benchmarks/results/training.json --check          # half an hour
    python benchmarks/training.py --longest 2048 --steps 2 --repeats 1 --profile-seconds 5   # a quick look
    python benchmarks/training.py --cases "long documents" --only ours "one process"

Every way of training takes the same documents in the same optimizer steps, from the same weights, with the same optimizer:

    ours                      LongContextTrainer: documents whole or split, as the plan says; the machine is profiled first
    one process               Trainer without any parallelism, one document at a time
    single                    Trainer under DDP, one document at a time per rank
    padded                    Trainer under DDP, batches of up to 8 documents padded to the longest; in the first round only
    packed                    Trainer under DDP, documents packed by best fit decreasing and flattened (TRL's packing with
                              padding-free), for each length of --pack-lengths; attention is one call per document
    packed, dense mask        the same as transformers does it without flash-attn; only if asked for
    accelerate cp=2           context_parallel and FSDP2, one document at a time, all-gather
    accelerate cp=2, ring     the same with keys and values passed around a ring
    DeepSpeed Ulysses sp=2    ALST through Trainer, one document at a time
    ..., packed               those two on packs, which they train wrong: documents attend to each other; in the first round
                              only

training_cases.py says what the documents are. Each run is a fresh process for each rank, with one computing thread; rounds
are interleaved, medians reported. The first step of a run warms up and is not timed. The model is a Llama of random weights
with 4 layers of 256, in float32.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from report import conclude, parser
from training_cases import Case, long_documents, mixture
from training_peers import Settings
from training_ranks import ONE_PROCESS, RANKS, WAYS, Run, profile, run

CASES: dict[str, Callable[..., Case]] = {"mixture": mixture, "long documents": long_documents}
LONG_DOCUMENTS = ("ours", ONE_PROCESS, "accelerate cp=2", "accelerate cp=2, ring", "DeepSpeed Ulysses sp=2")
"""Ways that are not held up by a document that one rank cannot hold; one process, to be compared with, holds it."""
ONLY_IF_ASKED = ("packed, dense mask",)
WRONG = ("accelerate cp=2, packed", "DeepSpeed Ulysses sp=2, packed")
FIRST_ROUND_ONLY = ("padded", "packed, dense mask", *WRONG)
"""Several times as slow as the others, or wrong."""
PEERS = ("accelerate cp=2", "accelerate cp=2, ring", "DeepSpeed Ulysses sp=2")


@dataclass(frozen=True)
class Contender:
    """One row of a table."""

    name: str
    way: str
    settings: Settings
    rounds: int


def contenders(case: str, given: Any, profile: str | None = None) -> list[Contender]:
    """Return what runs on a case, in order."""
    ways = given.only or [way for way in WAYS if way not in ONLY_IF_ASKED]
    entered = []
    for way in ways:
        if case == "long documents" and way not in LONG_DOCUMENTS:
            continue
        rounds = 1 if way in FIRST_ROUND_ONLY else given.repeats
        capacity = given.longest // 2 if case == "long documents" else given.capacity or given.longest
        lengths = given.pack_lengths or [given.longest, 2 * given.longest]
        if way == "packed":
            entered += [Contender(f"packed to {length}", way, Settings(capacity, length), rounds) for length in lengths]
        else:
            name = f"{way} (wrong)" if way in WRONG else way
            entered.append(Contender(name, way, Settings(capacity, given.longest, profile=profile), rounds))
    return entered


def summarise(case: Case, runs: dict[str, list[list[Run]]]) -> dict[str, dict[str, float]]:
    """Name -> figures. `runs`: name -> rounds -> ranks."""
    timed = [document for step in case.steps[1:] for document in step]
    tokens, all_tokens = sum(case.lengths[document] for document in timed), sum(case.lengths)
    summaries: dict[str, dict[str, float]] = {}
    for name, rounds in runs.items():
        seconds = statistics.median(max(sum(run.seconds) for run in ranks) for ranks in rounds)
        busiest = statistics.median(max(run.cpu_seconds for run in ranks) for ranks in rounds)
        summaries[name] = {
            "tokens per second": tokens / seconds,
            "CPU seconds of the busier rank": busiest,
            "share of the time that ranks compute": statistics.median(
                sum(run.cpu_seconds for run in ranks) / len(ranks) / max(sum(run.seconds) for run in ranks)
                for ranks in rounds
            ),
            "padding share": 1 - all_tokens / (rounds[0][0].computed or all_tokens),
            "peak bytes of the larger rank": statistics.median(
                max(run.peak_bytes for run in ranks) for ranks in rounds
            ),
        }
    for name, figures in summaries.items():
        if "ours" in summaries:
            ours = summaries["ours"]
            figures["speed of ours over this"] = ours["tokens per second"] / figures["tokens per second"]
            figures["CPU over ours"] = (
                figures["CPU seconds of the busier rank"] / ours["CPU seconds of the busier rank"]
            )
            peak = "peak bytes of the larger rank"
            figures["memory over ours"] = figures[peak] / ours[peak]
        if ONE_PROCESS in runs:
            expected = runs[ONE_PROCESS][0][0]
            for what, got, exact in (
                ("loss", runs[name][0][0].losses, expected.losses),
                ("gradient norm", runs[name][0][0].gradient_norms, expected.gradient_norms),
            ):
                difference = np.abs(np.array(got) / np.array(exact) - 1)
                figures[f"difference of {what} from plain Trainer's"] = float(difference.max())
            alone = summaries[ONE_PROCESS]["tokens per second"] * RANKS
            figures["share of one process's speed times the ranks"] = figures["tokens per second"] / alone
    ours = summaries.get("ours", {})
    for against, names in (
        ("the best correct context-parallel peer's", PEERS),
        ("padding's", ("padded",)),
        ("the best packing's", [name for name in summaries if name.startswith("packed")]),
    ):
        speeds = [summaries[name]["tokens per second"] for name in names if name in summaries]
        if ours and speeds:
            ours[f"speed over {against}"] = ours["tokens per second"] / max(speeds)
    return summaries


COLUMNS = {
    "ours is faster by": ("speed of ours over this", "{:.2f}"),
    "of one process x ranks": ("share of one process's speed times the ranks", "{:.0%}"),
    "CPU / ours": ("CPU over ours", "{:.2f}"),
    "peak memory / ours": ("memory over ours", "{:.2f}"),
    "padding": ("padding share", "{:.0%}"),
    "ranks compute": ("share of the time that ranks compute", "{:.0%}"),
    "loss / exact - 1": ("difference of loss from plain Trainer's", "{:.0e}"),
    "gradient / exact - 1": ("difference of gradient norm from plain Trainer's", "{:.0e}"),
    "tokens/s": ("tokens per second", "{:.0f}"),
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=f"run these cases: {', '.join(CASES)}",
    )
    options.add_argument(
        "--only", nargs="+", choices=WAYS, metavar="WAY", help=f"train in these ways: {', '.join(WAYS)}"
    )
    options.add_argument(
        "--steps", type=int, default=2, help="run so many optimizer steps, at least 2 (default: %(default)s)"
    )
    options.add_argument(
        "--longest", type=int, default=8192, help="give the longest document so many tokens (default: %(default)s)"
    )
    options.add_argument(
        "--capacity",
        type=int,
        help="let ours hold so many tokens on a rank in the mixture (default: --longest; in other cases half of it)",
    )
    options.add_argument(
        "--pack-lengths", type=int, nargs="+", help="pack to so many tokens (default: --longest, and twice that)"
    )
    options.add_argument(
        "--vocabulary",
        type=int,
        default=1024,
        help="give the model a vocabulary of so many tokens (default: %(default)s)",
    )
    options.add_argument(
        "--repeats", type=int, default=3, help="take the median of so many rounds (default: %(default)s)"
    )
    options.add_argument(
        "--profile-seconds",
        type=float,
        default=60.0,
        help="measure this machine's speed for so many seconds first, for our plans; 0: take a preset (default: %(default)s)",
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(options, given, os.path.join(folder, "profile.json"))


def measure(options: argparse.ArgumentParser, given: argparse.Namespace, speeds: str) -> int:
    """Runs what is asked for and concludes; `speeds`: where a profile may be written."""
    if given.steps < 2 or given.longest < 2048:
        options.error(f"--steps {given.steps} must be at least 2, --longest {given.longest} at least 2048")
    load = os.getloadavg()[0]
    rows: list[dict[str, str]] = []
    figures: dict[str, float] = {}
    losses: dict[str, dict[str, list[float]]] = {}
    lengths: dict[str, list[list[int]]] = {}
    for title in given.cases:
        case = CASES[title](given.steps, given.longest, given.vocabulary)
        if given.profile_seconds and not os.path.exists(speeds):
            profile(case, given.profile_seconds, speeds)
        entered = contenders(title, given, speeds if given.profile_seconds else None)
        runs: dict[str, list[list[Run]]] = {}
        reasons: dict[str, str] = {}
        for count in range(given.repeats):
            for contender in entered:
                if count < contender.rounds and contender.name not in reasons:
                    result = run(contender.way, case, contender.settings)
                    if isinstance(result, str):
                        reasons[contender.name] = result
                    else:
                        runs.setdefault(contender.name, []).append(result)
        summaries = summarise(case, runs)
        for contender in entered:
            measured = summaries.get(contender.name, {})
            cells = {name: form.format(measured[what]) for name, (what, form) in COLUMNS.items() if what in measured}
            remark = f"cannot: {reasons[contender.name]}" if contender.name in reasons else ""
            rows.append(
                {"case": title, "way": contender.name} | dict.fromkeys(COLUMNS, "-") | cells | {"remark": remark}
            )
        prefix = "" if title == "mixture" else f"{title}/"
        figures |= {
            f"{prefix}{name}/{what}": value for name, values in summaries.items() for what, value in values.items()
        }
        losses[title] = {name: rounds[0][0].losses for name, rounds in runs.items()}
        lengths[title] = [[case.lengths[document] for document in step] for step in case.steps]
    return conclude(given, rows, figures, load, section="case", losses=losses, lengths_of_steps=lengths)


if __name__ == "__main__":
    sys.exit(main())
