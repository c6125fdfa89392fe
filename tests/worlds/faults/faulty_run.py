"""A program of one rank that trains a tiny Llama, meets the fault that it is told to meet, and writes down what it did.

Runs in a process of a fault trial (fault_trials.py), or launched: `torchrun tests/worlds/faults/faulty_run.py SETTINGS_AS_JSON`.

A fault strikes at a phase of a step: hooks count how often the rank reaches each phase, and at the right time the rank kills
itself, stops, sleeps, raises, or finds its disk full. Phases of a checkpoint are seen through Python's audit events (a file
is opened or renamed), so nothing here knows how checkpoints are written.

Written into output_dir/ledger: a file per rank and start, with one line per step (what the rank held, the step's loss) after
a first one that says which step was resumed from; faults.jsonl, one line per fault met; and at the end, by rank 0, result.json.
"""

import json
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import errors as elastic
from transformers import TrainerCallback

from hf_longctx import LongContextPlugin
from hf_longctx.supervision.progress import Progress
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import RecordingTrainer, arguments, documents, held_segments, plugin_with
from tests.worlds.faults.counting_watchdog import CountingWatchdog

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 180, 2, 14, 30]
LONGEST = max(LENGTHS)
DOCUMENTS = 5
"""of a global batch"""
EPOCHS = 2
STEPS = EPOCHS * len(LENGTHS) // DOCUMENTS
TRAINING: dict[str, Any] = {"num_train_epochs": EPOCHS, "warmup_steps": 2, "max_grad_norm": 0.5}

PHASES = ("forward", "backward", "exchange", "collective", "before the optimizer", "after the optimizer")
"""of a training step"""
SAVING = ("saving", "renaming", "removing")
"""of a checkpoint: a file opened in the folder being written; the folder renamed; an old one removed"""
STARTING = ("start-up", "before training", "resuming")
"""of a start: before there is a trainer; before it trains; a file of a checkpoint opened"""
SETTING_UP = (
    "making the trainer",
    "making process groups",
    "patching the model",
    "starting",
    "preparing the model and its optimizer",
)
"""activities of a trainer before the first step, as it notes them itself"""
ACTIONS = ("kill", "stop", "sleep", "terminate", "raise", "out of memory", "full disk")

FAULTS = "faults.jsonl"
"""Of the ledger."""
FULL_DISK_BYTES = 50_000
"""What a file may hold on a full disk: enough for the ledger, too little for the model's 300 KB."""


@dataclass(frozen=True)
class Fault:
    """What one rank meets, at the `count`-th time that it reaches a phase, counted from the beginning of a step on."""

    action: str
    """one of ACTIONS"""
    rank: int
    phase: str
    step: int = 0
    """1, 2, ...; 0: before the first"""
    count: int = 1
    steps: int = STEPS
    """for so many steps the disk stays full"""


@dataclass(frozen=True)
class Settings:
    """One start of the program, the same on all of its ranks."""

    output_dir: str
    faults: tuple[Fault, ...] = ()
    sharding: str = "ddp"
    planner: str = "hdp"
    split: bool = True
    """documents of which a rank holds only its part; else every rank can hold the longest"""
    save_steps: int = 1
    keep: int | None = None
    """checkpoints"""
    nan_step: int = 0
    """the step whose first document has gradients that are not finite, whoever holds it; 0: none"""
    stall_timeout_seconds: float = 15.0
    grace_seconds: float = 20.0
    join_seconds: float = 30.0
    """how long ranks wait for each other where what they do may take any time"""
    first_start_only: bool = True
    """a launcher's restart meets no fault"""

    def capacity(self, world_size: int) -> int:
        """Tokens."""
        return -(-LONGEST // world_size) if self.split else LONGEST

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        content = json.loads(text)
        return cls(**content | {"faults": tuple(Fault(**fault) for fault in content.get("faults", ()))})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Faults:
    """Counts how often this rank reaches each phase, and lets its faults happen."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._waiting = {fault: fault.count for fault in settings.faults if fault.rank == rank}
        self._record = ledger(settings.output_dir) / FAULTS
        self._disk_is_full_until: int | None = None
        self.step = 0
        self.training = False
        self.watching: CountingWatchdog | None = None
        """tells the others what this rank is doing, before it is stopped while the run is set up"""

    def reached(self, phase: str) -> None:
        for fault in [waiting for waiting in self._waiting if waiting.phase == phase and self.step >= waiting.step]:
            self._waiting[fault] -= 1
            if self._waiting[fault] == 0:
                del self._waiting[fault]
                self._strike(fault)

    def begin_step(self, step: int) -> None:
        self.step, self.training = step, True
        if self._disk_is_full_until is not None and step >= self._disk_is_full_until:
            self._limit_files(resource.RLIM_INFINITY)
            self._disk_is_full_until = None
        self.reached("step")

    def audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook: sees every file that Python opens, renames or removes, in any thread."""
        if not self._waiting or event not in ("open", "os.rename", "shutil.rmtree"):
            return
        path = str(arguments[0])
        if event == "open" and ".writing-checkpoint-" in path:
            self.reached("saving")
        elif event == "open" and "checkpoint-" in path and not self.training:
            self.reached("resuming")
        elif event == "os.rename" and "checkpoint-" in path:
            self.reached("renaming")
        elif event == "shutil.rmtree" and "checkpoint-" in path:
            self.reached("removing")

    def _strike(self, fault: Fault) -> None:
        with self._record.open("a") as file:
            print(json.dumps(asdict(fault) | {"met in": self.step, "time": time.monotonic()}), file=file)
        where = f"rank {fault.rank} at step {self.step} ({fault.phase})"
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            if fault.phase in (*SETTING_UP, "start-up", "before training") and self.watching is not None:
                self.watching.be_seen()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "sleep":
            time.sleep(3600)
        elif fault.action == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.action == "raise":
            raise LookupError(f"the dictionary of {where} is torn")
        elif fault.action == "out of memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        elif fault.action == "full disk":
            self._disk_is_full_until = self.step + fault.steps
            self._limit_files(FULL_DISK_BYTES)

    @staticmethod
    def _limit_files(most: int) -> None:
        """Writing more fails with EFBIG, also outside Python; Python ignores the signal that comes with it."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@dataclass
class FaultyProgress(Progress):
    """Lets the activities of a run's set-up tell that they are reached."""

    faults: Any = None

    def begin(self, activity: str, *, collective: bool = False, unbounded: bool = False) -> None:
        super().begin(activity, collective=collective, unbounded=unbounded)
        if self.step == 0 and self.faults is not None:
            self.faults.reached(activity)


def watchdog(faults: Faults, limit: float) -> CountingWatchdog:
    """One that looks more often, since it has less time."""
    return CountingWatchdog(FaultyProgress(faults=faults), limit, report_after=limit / 3, every=limit / 12)


class FaultyTrainer(RecordingTrainer):
    """Writes each step down, and has a document whose gradients are not finite."""

    faults: Faults
    book: Path
    nan_step: int

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        held_before = len(self.held)
        poisoned = any(document == 0 for document, _, _ in held_segments(inputs, self.hdp_rank))
        bare = self.accelerator.unwrap_model(model)
        handle = bare.register_forward_hook(_not_finite) if poisoned and self.faults.step == self.nan_step else None
        loss = super().training_step(model, inputs, *args)
        if handle is not None:
            handle.remove()
        line = {"step": self.faults.step, "loss": float(loss), "held": self.held[held_before]}
        with self.book.open("a") as file:
            print(json.dumps(line), file=file)
        return loss


def _not_finite(module: Any, inputs: Any, output: Any) -> None:
    if output.loss.requires_grad:
        output.loss.register_hook(lambda gradient: gradient * torch.nan)


class Phases(TrainerCallback):
    """Tells a Faults which phase training has reached."""

    def __init__(self, faults: Faults, book: Path) -> None:
        self.faults, self.book = faults, book

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.book.open("a") as file:
            print(json.dumps({"resumed": state.global_step, "ranks": args.world_size}), file=file)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.faults.begin_step(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.faults.reached("before the optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.faults.reached("after the optimizer")


def watch(trainer: Any, faults: Faults) -> None:
    """Lets the layers, the exchange and the collectives of a trainer tell that they are reached."""

    def forward(module: Any, inputs: Any, output: Any) -> None:
        faults.reached("forward")
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: faults.reached("backward"))

    def announced(function: Any, phase: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if faults.training:
                faults.reached(phase)
            return function(*args, **kwargs)

        return call

    for layer in trainer.model.model.layers:
        layer.register_forward_hook(forward)
    if trainer.exchange is not None:
        trainer.exchange.start = announced(trainer.exchange.start, "exchange")
    dist.all_reduce = announced(dist.all_reduce, "collective")


def ledger(output_dir: str | Path) -> Path:
    folder = Path(output_dir) / "ledger"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def time_of_start() -> int:
    """Nanoseconds, the same on all ranks: names one start of the program."""
    now = torch.tensor(time.time_ns())
    if dist.is_initialized():
        dist.broadcast(now, src=0)
    return int(now)


def plugin(settings: Settings, world_size: int) -> LongContextPlugin:
    return plugin_with(
        capacity=settings.capacity(world_size),
        global_batch_documents=DOCUMENTS,
        sharding=settings.sharding,
        planner=settings.planner,
        recalibrate_steps=3,
        stall_timeout_seconds=settings.stall_timeout_seconds,
        grace_seconds=settings.grace_seconds,
    )


@elastic.record
def train(settings: Settings) -> None:
    """Trains to the end, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if settings.first_start_only and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        settings = replace(settings, faults=())
    faults = Faults(settings, rank)
    sys.addaudithook(faults.audited)
    watching = watchdog(faults, settings.stall_timeout_seconds)
    faults.watching = watching
    watching.progress.begin("joining the other ranks", unbounded=True)
    watching.start()
    faults.reached("start-up")
    if world_size > 1:  # TrainingArguments' ddp_timeout is not taken over on CPUs
        dist.init_process_group("gloo", timeout=timedelta(seconds=settings.join_seconds))
    trainer = FaultyTrainer(
        model=tiny_llama(),
        args=arguments(
            settings.output_dir,
            save_strategy="steps",
            save_steps=settings.save_steps,
            save_total_limit=settings.keep,
            **TRAINING,
        ),
        train_dataset=documents(LENGTHS),
        plugin=plugin(settings, world_size),
        watching=watching,
    )
    book = ledger(settings.output_dir) / f"{time_of_start()}-rank-{rank}.jsonl"
    trainer.faults, trainer.book, trainer.nan_step = faults, book, settings.nan_step
    trainer.add_callback(Phases(faults, book))
    watch(trainer, faults)
    faults.reached("before training")
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model()
    if rank == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (ledger(settings.output_dir) / "result.json").write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    train(Settings.from_json(sys.argv[1]))
