"""Damaged files of every kind that is read: no error but our own, nothing lost silently, and never a dead process.

    python benchmarks/fuzz_reading.py --files 10000 --seed 0 --check       # 3 minutes on two busy cores
    python benchmarks/fuzz_reading.py --kinds parquet arrow --files 1000     # a quick look
    python benchmarks/fuzz_reading.py --kinds csv --only 17                  # one again, with what was done and read

File number n is of the n-th kind, round and round, and what is done to it follows from its kind, the seed and n.
tests/data/reading/damaged_sources.py makes, damages and checks it, by readers that are not ours. `problems` counts files that
were read wrongly, in which an error escaped, or that ended the process that read them; each is explained on standard error.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import datasets
from report import conclude, parser

sys.path.insert(0, str(Path(__file__).parents[1]))
from hf_longctx.data.reading import Refused
from tests.data.reading.damaged_sources import KINDS, trial

CHUNK = 50
"""Files that a process is given at once."""
DIED = "the process that read it died, or read it for longer than a minute"


@dataclass
class Outcome:
    """What became of one file."""

    kind: str
    number: int
    story: list[str]
    problems: list[str]
    rows: int = 0
    refused: int = 0
    seconds: float = 0.0
    """processor time of reading it five times over: whole, in small units, for fingerprints, and sent to itself"""


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--files", type=int, default=10_000, help="read so many files (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0, help="draw files by this seed (default: %(default)s)")
    options.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        metavar="KIND",
        help=f"draw these kinds of files: {', '.join(KINDS)}",
    )
    options.add_argument("--only", type=int, metavar="N", help="read only the file of this number")
    given = options.parse_args()
    load, began = os.getloadavg()[0], time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-reading-"))
    if given.only is not None:
        return one(given.kinds[given.only % len(given.kinds)], given.seed, given.only, folder)
    files = [(given.kinds[number % len(given.kinds)], number) for number in range(given.files)]
    outcomes = list(run(files, given.seed, folder))
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"FAILED  {outcome.kind} {outcome.number} {outcome.story}: {problem}", file=sys.stderr)
    shutil.rmtree(folder)
    figures = {
        "files": float(len(outcomes)),
        "problems": float(sum(bool(outcome.problems) for outcome in outcomes)),
        "dead processes": float(sum(DIED in outcome.problems for outcome in outcomes)),
        "slowest file, seconds": max(outcome.seconds for outcome in outcomes),
        "most memory, bytes": float(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024),
        "seconds": time.monotonic() - began,
    }
    return conclude(given, rows(outcomes), figures, load, kinds=given.kinds)


def run(files: Sequence[tuple[str, int]], seed: int, folder: Path) -> Iterator[Outcome]:
    """Reads files in a process of its own, and in a new one after each that ended it."""
    pool = _pool()
    for at in range(0, len(files), CHUNK):
        waiting = [files[at : at + CHUNK]]
        while waiting:
            chunk = waiting.pop(0)
            try:
                yield from pool.submit(_chunk, chunk, seed, folder).result()
            except BrokenProcessPool:
                pool = _pool()
                if len(chunk) == 1:
                    ((kind, number),) = chunk
                    yield Outcome(kind, number, [], [DIED])
                else:
                    waiting = [[file] for file in chunk]
    pool.shutdown()


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _chunk(files: Sequence[tuple[str, int]], seed: int, folder: Path) -> list[Outcome]:
    datasets.disable_progress_bars()
    outcomes = []
    for kind, number in files:
        signal.alarm(60)  # ends the process
        case, problems, read, seconds = trial(kind, _rng(kind, seed, number), folder / "file")
        signal.alarm(0)
        refused = sum(isinstance(row, Refused) for row in read)
        outcomes.append(Outcome(kind, number, case.story, problems, len(read) - refused, refused, seconds))
    return outcomes


def _rng(kind: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{kind} {seed} {number}")


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    made = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        made.append(
            {
                "kind": kind,
                "files": str(len(of_kind)),
                "with a refusal": str(sum(bool(outcome.refused) for outcome in of_kind)),
                "rows": str(sum(outcome.rows for outcome in of_kind)),
                "refusals": str(sum(outcome.refused for outcome in of_kind)),
                "problems": str(sum(bool(outcome.problems) for outcome in of_kind)),
                "slowest, ms": f"{1000 * max(outcome.seconds for outcome in of_kind):.0f}",
            }
        )
    return made


def one(kind: str, seed: int, number: int, folder: Path) -> int:
    case, problems, read, seconds = trial(kind, _rng(kind, seed, number), folder / "file")
    print(f"{case.file}: {', '.join(case.story)}; {seconds:.3f} s", *read, *problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
