"""Randomised trials of faults: killed, stopped and slow ranks, damaged checkpoints, full disks, signals, bad gradients.

    python benchmarks/faults.py --json benchmarks/results/faults.json --check       # 200 trials: 15 minutes
    python benchmarks/faults.py --trials 20 --seed 1000                               # others, a quick look
    python benchmarks/faults.py --only 17                                             # one again, with all that ranks printed

Each trial disturbs a small training run and starts it again, on other ranks and with another sharding, until it is complete;
tests/worlds/faults/fault_trials.py says what is checked. `problems` counts trials in which anything of it did not hold: each is
explained on standard error, and what its ranks printed is kept in the folder named there.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from report import conclude, parser

os.environ.setdefault("LONGCTX_TEST_PATIENCE", "60")  # what ends later counts as hung
sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.worlds.faults.drawn_faults import KINDS
from tests.worlds.faults.fault_trials import Outcome, trial


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trials", type=int, default=200, help="run so many trials (default: %(default)s)")
    options.add_argument(
        "--seed", type=int, default=0, help="draw the first trial by this seed, the second by the next (default: 0)"
    )
    options.add_argument(
        "--seconds", type=float, default=1800.0, help="begin no trial later than this (default: %(default)s)"
    )
    options.add_argument(
        "--at-once", type=int, default=2, help="run so many trials side by side (default: %(default)s)"
    )
    options.add_argument(
        "--only", type=int, metavar="SEED", help="run this trial alone, and show all that its ranks print"
    )
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    if given.only is not None:
        return one(given.only, folder)
    load, began = os.getloadavg()[0], time.monotonic()

    def run(seed: int) -> Outcome | None:
        if time.monotonic() - began > given.seconds:
            return None
        outcome = trial(seed, folder / str(seed))
        if outcome.problems:
            print("\n".join([f"FAILED  {folder / str(seed)}", *outcome.story, *outcome.problems]), file=sys.stderr)
        else:
            shutil.rmtree(folder / str(seed))
        return outcome

    with ThreadPoolExecutor(given.at_once) as pool:
        ended = list(pool.map(run, range(given.seed, given.seed + given.trials)))
    outcomes = [outcome for outcome in ended if outcome is not None]
    figures = summarise(outcomes) | {"seconds": time.monotonic() - began}
    if not any(outcome.problems for outcome in outcomes):
        shutil.rmtree(folder)
    seeds = {"first seed": given.seed, "trials": [asdict(outcome) for outcome in outcomes]}
    return conclude(given, rows(outcomes), figures, load, **seeds)


def one(seed: int, folder: Path) -> int:
    """Runs a trial and prints everything; the exit status."""
    outcome = trial(seed, folder)
    for log in sorted(folder.glob("start-*/*.log")):
        print(f"--- {log.relative_to(folder)}\n{log.read_text(errors='replace')}")
    print("\n".join([*outcome.story, *outcome.problems, f"in {folder}"]))
    return 1 if outcome.problems else 0


def summarise(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Name -> figure."""
    return {
        "trials": len(outcomes),
        "faults": sum(sum(outcome.faults.values()) for outcome in outcomes),
        "resumes": sum(outcome.resumes for outcome in outcomes),
        "trials with a problem": sum(bool(outcome.problems) for outcome in outcomes),
        "documents lost or repeated": sum(outcome.lost_or_repeated for outcome in outcomes),
        "hangs over 60 s": sum(outcome.hangs for outcome in outcomes),
        "slowest end after a fault, seconds": max((outcome.slowest_end for outcome in outcomes), default=0.0),
    }


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """A row per kind of the first fault, and one for all."""
    cells = []
    for kind in (*KINDS, "all"):
        of_kind = [outcome for outcome in outcomes if kind in (outcome.kind, "all")]
        cells.append(
            {
                "first fault": kind,
                "trials": str(len(of_kind)),
                "faults of this kind": str(
                    sum(
                        count for outcome in outcomes for name, count in outcome.faults.items() if kind in (name, "all")
                    )
                ),
                "resumes": str(sum(outcome.resumes for outcome in of_kind)),
                "steps redone": str(sum(outcome.redone for outcome in of_kind)),
                "slowest end, s": f"{max((outcome.slowest_end for outcome in of_kind), default=0.0):.1f}",
                "lost or repeated": str(sum(outcome.lost_or_repeated for outcome in of_kind)),
                "hangs": str(sum(outcome.hangs for outcome in of_kind)),
                "problems": str(sum(bool(outcome.problems) for outcome in of_kind)),
            }
        )
    return cells


if __name__ == "__main__":
    sys.exit(main())
