"""Randomised trials of faults: a run is disturbed and started again, until it is complete; then it must have come to the
result of an undisturbed run.

    start 1   3 ranks, zero3     rank 1 is killed while it writes checkpoint-4
    start 2   1 rank             resumes from checkpoint-3; all power is lost in step 7, checkpoint-6 loses a bit
    start 3   2 ranks, zero1     resumes from checkpoint-5, ends

A trial follows from its seed: what happens, to which rank, when; on how many ranks each start runs, how they share the model, who
plans. Of each start it is checked that
- it ends, within HANG seconds of its first fault, and each rank with exit status 0 or the cause on its standard error;
- it resumed from the newest checkpoint that was neither incomplete nor damaged, and went on with the step after that;
- each step had the documents and the loss that this step has in a plain loop over documents in one process;
and of the whole run that each document was trained on once per epoch in the history that led to the final weights, and that
these are those of the plain loop.
"""

import random
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.worlds.faults.damage import Damaged, damage
from tests.worlds.faults.drawn_faults import KINDS, Disturbance, draw
from tests.worlds.faults.faulty_run import SETTING_UP, Settings
from tests.worlds.faults.run_ledger import Start, faults_met, lost_or_repeated, starts, wrong_result, wrong_steps
from tests.worlds.rank_launcher import HANG, Launched, launch

PLANNERS = ("hdp", "hdp", "static_cp", "bytescale_balanced")
SHARDINGS = ("ddp", "ddp", "zero1", "zero2", "zero3")
MOST_STARTS = 4
NOTICED_BY_OTHERS = ("stop a rank", "stall in Python")
"""Kinds for which it takes two ranks."""

EXPLAINED = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection was likely closed|clients joined|wait timeout after \d+ms, keys: "
    "|the dictionary of rank|can't allocate memory|[Oo]ut of memory|File too large|hf_longctx: watchdog: "
)
"""What a rank may say that ends with an error: what happened to it, or that a peer has gone."""


@dataclass
class Outcome:
    """What a trial came to."""

    seed: int
    kind: str
    """of the first disturbance"""
    problems: list[str] = field(default_factory=list)
    """what must not happen; empty if all is well"""
    faults: dict[str, int] = field(default_factory=dict)
    """those that really happened, by kind"""
    resumes: int = 0
    """starts from a checkpoint"""
    redone: int = 0
    """steps trained again after a fault"""
    slowest_end: float = 0.0
    """seconds from a fault to the end of all ranks"""
    lost_or_repeated: int = 0
    """documents, in the history of the final weights"""
    hangs: int = 0
    story: list[str] = field(default_factory=list)
    """one line for each start"""


def trial(seed: int, folder: Path) -> Outcome:
    """Runs the trial of a seed in a folder, which is left with what all ranks printed."""
    return _Trial(seed, folder).run()


class _Trial:
    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        more = self.rng.choices(KINDS, k=self.rng.choice([0, 0, 1, 1, 2]))
        self.kinds = [kind, *more]
        self.outcome = Outcome(seed, kind)
        self.folder, self.output_dir = folder, folder / "run"
        self.nan_step = self.rng.choice([3, 6]) if "NaN gradient" in self.kinds else 0
        self.save_steps, self.keep = self.rng.choice([1, 1, 2]), self.rng.choice([None, 2, 3])
        self.damaged: list[Damaged] = []
        self.last = 0
        """step that any start came to"""

    def run(self) -> Outcome:
        pending = list(self.kinds)
        for number in range(1, MOST_STARTS + 1):
            kind = pending.pop(0) if pending else None
            if self._start(number, kind) or self.outcome.problems:
                break
            if not newest_valid(self.output_dir, self.damaged):
                self._begin_anew(number)
        if not self.outcome.problems:
            self._check_result()
        return self.outcome

    def _start(self, number: int, kind: str | None) -> bool:
        """One start of the program; whether the run is complete."""
        rng, begins = self.rng, newest_valid(self.output_dir, self.damaged)
        ranks = rng.choice([1, 2, 2, 3])
        disturbance = Disturbance("nothing")
        if kind is not None:
            ranks = max(ranks, 2) if kind in NOTICED_BY_OTHERS else ranks
            disturbance = draw(kind, rng, ranks, begins + 1, removing=self.keep is not None)
        settings = Settings(
            str(self.output_dir),
            disturbance.faults,
            sharding=rng.choice(SHARDINGS),
            planner=rng.choice(PLANNERS),
            split=rng.random() < 0.7,
            save_steps=self.save_steps,
            keep=self.keep,
            nan_step=self.nan_step,
        )
        patient, store_of_rank_0 = rng.random() < 0.5, rng.random() < 0.3
        met_before, starts_before = len(faults_met(self.output_dir)), len(starts(self.output_dir))
        launched = launch(
            settings,
            ranks,
            self.folder / f"start-{number}",
            signals=disturbance.signals,
            patient=patient,
            store_of_rank_0=store_of_rank_0,
        )
        met = faults_met(self.output_dir)[met_before:]
        trained = starts(self.output_dir)[starts_before:]
        self._count(disturbance, met, launched, trained)
        codes = [ending.code for ending in launched.endings]
        settled = f"{ranks} ranks, {settings.sharding}, {settings.planner}, capacity {settings.capacity(ranks)}"
        settled += ", patient launcher" * patient + ", store of rank 0" * store_of_rank_0
        happened = [(fault["rank"], fault["met in"], fault["phase"]) for fault in met]
        self.outcome.story.append(
            f"start {number}: {settled}, from step {begins}: {disturbance}; met {happened}, "
            f"steps {[run.steps for run in trained]}, exit {codes}"
        )
        self._check_end(number, disturbance, met, launched, patient)
        for start in trained:
            self._check_steps(number, begins, start)
            left = 143 in codes and all(code in (143, -signal.SIGTERM) for code in codes)
            newest = newest_valid(self.output_dir, self.damaged)
            if left and newest != start.last:
                self._problem(
                    f"start {number} left on SIGTERM after step {start.last}, its last checkpoint is {newest}"
                )
            self.last = max(self.last, start.last)
        if disturbance.damage is not None and any(codes):
            done = damage(disturbance.damage, self.output_dir, self.rng)
            self.damaged += done
            self._count_faults(disturbance.kind, len(done))
            self.outcome.story.append(f"damage: {[str(damaged) for damaged in done]}")
        return not any(codes)

    def _begin_anew(self, number: int) -> None:
        """Begin anew where no checkpoint is valid any more. A start must say so and touch nothing; then they are removed, as it
        says."""
        checkpoints = list(self.output_dir.glob("checkpoint-*"))
        if not checkpoints:
            return
        launched = launch(Settings(str(self.output_dir)), 2, self.folder / f"refused-{number}")
        if not all("none of the" in ending.output and "is valid" in ending.output for ending in launched.endings):
            outputs = " | ".join(f"{ending.code}: ...{ending.output.strip()[-400:]}" for ending in launched.endings)
            self._problem(f"after start {number} no checkpoint is valid, and a start does not say so: {outputs}")
        for checkpoint in checkpoints:
            shutil.rmtree(checkpoint)

    def _count_faults(self, kind: str, number: int) -> None:
        self.outcome.faults[kind] = self.outcome.faults.get(kind, 0) + number

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(f"seed {self.outcome.seed}: {text}")

    def _count(
        self, disturbance: Disturbance, met: list[dict[str, Any]], launched: Launched, trained: list[Start]
    ) -> None:
        times = [fault["time"] for fault in met] + [at for _, at in launched.sent.values()]
        if times and disturbance.damage is None:
            self._count_faults(disturbance.kind, 1)
        if times and disturbance.ends_run:
            last = max(ending.time for ending in launched.endings)
            self.outcome.slowest_end = max(self.outcome.slowest_end, last - min(times))
        for start in trained:
            self._count_faults("NaN gradient", self.nan_step in start.steps)
            self.outcome.resumes += start.resumed > 0
            self.outcome.redone += max(0, self.last - start.resumed)

    def _check_end(
        self, number: int, disturbance: Disturbance, met: list[dict[str, Any]], launched: Launched, patient: bool
    ) -> None:
        if launched.hung:
            self.outcome.hangs += 1
            self._problem(f"start {number}: ranks {launched.hung} had not ended {HANG:g} s after the first fault")
        stopped = {fault["rank"] for fault in met if fault["action"] in ("stop", "kill")}
        stopped |= {rank for rank, (sent, _) in launched.sent.items() if sent != signal.SIGTERM}
        asked = {fault["rank"] for fault in met if fault["action"] == "terminate"}
        asked |= {rank for rank, (sent, _) in launched.sent.items() if sent == signal.SIGTERM}
        left = any(ending.code == 143 for ending in launched.endings) and bool(asked)
        signalled = asked | set(launched.told)
        for rank, ending in enumerate(launched.endings):
            if ending.code == 0 or (ending.code == -signal.SIGKILL and rank in stopped | set(launched.hung)):
                continue
            if (rank in signalled or left) and ending.code in (143, -signal.SIGTERM):
                continue
            if not EXPLAINED.search(ending.output):
                text = ending.output.strip()[-400:]
                self._problem(f"start {number}: rank {rank} ended with {ending.code} and no cause: ...{text}")
        for fault in met:
            if fault["action"] in ("raise", "out of memory"):
                text = "the dictionary of rank" if fault["action"] == "raise" else "can't allocate memory"
                if text not in launched.endings[fault["rank"]].output:
                    self._problem(f"start {number}: rank {fault['rank']} does not say {text!r}")
            watched = fault["met in"] > 0 or fault["phase"] in SETTING_UP
            if fault["action"] in ("stop", "sleep") and watched and patient:
                for rank, ending in enumerate(launched.endings):
                    if rank != fault["rank"] and ending.code and not _names(ending.output, fault["rank"]):
                        self._problem(
                            f"start {number}: rank {rank} does not name rank {fault['rank']}, which it waits for"
                        )
        undisturbed = not met and not launched.sent
        if undisturbed and any(ending.code for ending in launched.endings) and not launched.hung:
            self._problem(f"start {number} failed although nothing was done to it")

    def _check_steps(self, number: int, begins: int, start: Start) -> None:
        if start.resumed != begins:
            self._problem(f"start {number} resumed from step {start.resumed}; the newest valid checkpoint was {begins}")
        for wrong in wrong_steps(start, self.nan_step):
            self._problem(f"start {number} {wrong}")

    def _check_result(self) -> None:
        for wrong in wrong_result(self.output_dir, self.nan_step):
            self._problem(wrong)
        self.outcome.lost_or_repeated = lost_or_repeated(starts(self.output_dir))
        if self.outcome.lost_or_repeated:
            self._problem(f"{self.outcome.lost_or_repeated} documents are lost or repeated")


def _names(output: str, rank: int) -> bool:
    """Whether the watchdog has named a rank as one that is waited for."""
    return re.search(rf"watchdog: .*(waits for|sign of life|furthest behind).*\brank {rank}\b", output) is not None


def newest_valid(output_dir: Path, damaged: list[Damaged]) -> int:
    """The step of the newest checkpoint that was not damaged since it was written; 0 if there is none."""
    steps = [0]
    for folder in output_dir.glob("checkpoint-*"):
        if not any(broken.spoils(folder) for broken in damaged):
            steps.append(int(folder.name.removeprefix("checkpoint-")))
    return max(steps)
