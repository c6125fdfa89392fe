"""Attention across ranks: ours and the real peers, side by side, on gloo ranks of this machine.

    python benchmarks/attention.py --json benchmarks/results/attention.json --plot benchmarks/results/attention.png --check
    python benchmarks/attention.py --tokens 1920 --repeats 1                              # a quick look
    python benchmarks/attention.py --cases "one document" "GitHub-like pack" --ranks 4

Every implementation computes the same cases (causal within documents, forward and backward, float32, one computing
thread per rank) in the same processes. Repetitions are interleaved: each round runs every implementation once, starting
with another one each time; medians are reported. The long document (four times the tokens, four heads) takes eight
times as long as one document: there each implementation runs once, unless --long-repeats says otherwise. Compared are

- time: CPU seconds of the computing thread, on the slowest rank, over *the limit*: what one process needs for the whole
  case with one call of torch's attention per document, divided by the ranks. 1.00 is perfect;
- CPU seconds of all ranks and all their threads, communication included, over that one process;
- bytes sent (traffic.py), over those of a zigzag ring;
- the most memory that the worst rank holds at once beyond its part of the inputs (peak_memory.py), over what that one
  process holds, divided by the ranks;
- the largest absolute difference from a float64 reference, inputs being standard normal.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from attention_cases import Case, cases
from attention_figures import Figures, rows, summarise
from attention_runs import measure
from ranks import on_ranks
from report import conclude, parser


def main() -> int:
    arguments, wanted, repeats = _arguments()
    load = os.getloadavg()[0]
    results: dict[tuple[str, int, str], Figures | str] = {}
    with tempfile.TemporaryDirectory() as references:
        for case in wanted:
            torch.save(case.reference(), f"{references}/{case.name}.pt")
        for ranks in arguments.ranks:
            measured = on_ranks(measure, ranks, wanted, references, repeats)
            for index, case in enumerate(wanted):
                for name, summary in summarise(case, ranks, [of_ranks[index] for of_ranks in measured]).items():
                    results[case.name, ranks, name] = summary
    if arguments.plot:
        from attention_plot import draw

        draw(results, arguments.plot)
    figures: Figures = {}
    unable: list[str] = []
    for (name, ranks, implementation), summary in results.items():
        place = f"{name}/{ranks} ranks/{implementation}"
        if isinstance(summary, str):
            unable.append(f"{place}: {summary}")
        else:
            figures |= {f"{place}/{figure}": value for figure, value in summary.items()}
    return conclude(arguments, rows(results), figures, load, section="case", cannot=unable)


def _arguments() -> tuple[argparse.Namespace, list[Case], list[int]]:
    """The arguments, the cases that they choose, and the timed repetitions of each."""
    options = parser(__doc__)
    options.add_argument(
        "--tokens",
        type=int,
        default=8192,
        help="take so many tokens in each case but the long one (default: %(default)s)",
    )
    options.add_argument("--cases", nargs="+", metavar="NAME", help="measure these cases (default: all)")
    options.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="run on worlds of so many ranks (default: 2 4)"
    )
    options.add_argument(
        "--repeats", type=int, default=3, help="take the median of so many runs (default: %(default)s)"
    )
    options.add_argument(
        "--long-repeats",
        type=int,
        default=0,
        help="time the long document so often; 0, the default: run it once, to check and time it",
    )
    options.add_argument("--plot", type=Path, metavar="PNG", help="draw the ratios (needs matplotlib)")
    arguments = options.parse_args()
    standard = {case.name: case for case in cases(arguments.tokens)}
    chosen = arguments.cases or list(standard)
    if unknown := [name for name in chosen if name not in standard]:
        options.error(f"--cases {unknown} are unknown; valid: {list(standard)}")
    if min(arguments.ranks) < 2 or arguments.repeats < 1 or arguments.long_repeats < 0:
        options.error("--ranks must be at least 2, --repeats at least 1, --long-repeats at least 0")
    wanted = [standard[name] for name in chosen]
    long = [case.tokens > arguments.tokens for case in wanted]
    return arguments, wanted, [arguments.long_repeats if is_long else arguments.repeats for is_long in long]


if __name__ == "__main__":
    sys.exit(main())
