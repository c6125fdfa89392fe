"""Training runs in which one rank stands still for a while, somewhere; and what each rank says of it on standard error.

`stalled_run` runs in a worker of a rank pool. `python tests/worlds/faults/stalled_runs.py FOLDER` runs jobs without a launcher,
whose rank 0 stops for good in step 2, with the store of the job where it keeps that.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_longctx import LongContextPlugin
from hf_longctx.supervision.watchdog import Watchdog
from tests.builders.training_runs import MODELS, RecordingTrainer, arguments, documents, fresh_accelerator_state
from tests.worlds.faults.counting_watchdog import CountingWatchdog

EVERY = 0.15
"""Seconds from look to look of the watchdog here."""
STALL_SECONDS = 12.0
"""What a rank of `main` may stand still. Whatever is not stopped must move more often, on a busy machine too."""
LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 200, 2, 14, 30]


@dataclass(frozen=True)
class Stall:
    """One rank stands still, once."""

    rank: int
    step: int
    where: str
    """callback, forward, backward, loader; or stopped: the process, by SIGSTOP"""
    place: str = "loading data"
    """where its rank is said to be then: a pattern"""
    layer: int = 0
    until: str = "said"
    """what ends it. said: all ranks that live have said it; stack: this rank has shown its stack, too; or never"""

    @property
    def said(self) -> str:
        """Return what every rank that lives says of it: a pattern, of Python and of grep -E."""
        who = rf"rank {self.rank} \(host [^ ]+, pid [0-9]+\)"
        if self.where == "stopped":
            last = f"last seen at step {self.step}, {self.place}"
            return rf"no sign of life for [0-9]+ s \(its process is stopped, [^)]*\) of {who}, {last}"
        still = f"step {self.step} has not moved for [0-9]+ s: everyone waits for"
        return rf"hf_longctx: watchdog: {still} {who}: step {self.step}, {self.place} for [0-9]+ s"

    def __call__(self, logs: Sequence[Path], watching: CountingWatchdog) -> None:
        """Stands still until what ranks have said (`logs`, by rank) names this one."""
        others = [str(log) for rank, log in enumerate(logs) if rank != self.rank]
        if self.where == "stopped":
            watching.be_seen()  # so that the place is known where it stops
            waiting = " || ".join(f"! grep -qE '{self.said}' '{log}'" for log in others)
            if self.until != "never":
                subprocess.Popen(["sh", "-c", f"while {waiting}; do sleep 0.1; done; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        while not all(re.search(self.said, Path(log).read_text()) for log in others):
            time.sleep(0.05)
        while self.until == "stack" and "What its main thread is doing" not in logs[self.rank].read_text():
            time.sleep(0.05)


class StallingTrainer(RecordingTrainer):
    """Stands still where it is told to, with a watchdog that speaks soon."""

    stalls: tuple[Stall, ...] = ()
    logs: Sequence[Path] = ()
    """[rank]: what it writes to standard error"""

    def __init__(self, *args: Any, report_after: float = 0.6, **kwargs: Any) -> None:
        self._report_after = report_after
        super().__init__(*args, **kwargs)

    def watchdog(self) -> Watchdog:
        limit = self.plugin.stall_timeout_seconds
        return CountingWatchdog(self.progress, limit, report_after=self._report_after, every=EVERY)

    def stand_still(self, where: str, step: int, layer: int = 0) -> None:
        """If this is the place where this rank is to, for the first time."""
        here = (self.args.process_index, step, where, layer)
        due = [stall for stall in self.stalls if (stall.rank, stall.step, stall.where, stall.layer) == here]
        self.stalls = tuple(stall for stall in self.stalls if stall not in due)
        for stall in due:
            stall(self.logs, self._watching)

    def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
        def slow() -> Iterator[Any]:
            self.stand_still("loader", self.state.global_step + 1)
            yield from epoch_iterator

        return super().get_batch_samples(slow(), *args)

    def training_step(self, model: Any, *args: Any) -> torch.Tensor:
        step, handles = self.state.global_step + 1, []
        for number, layer in enumerate(model.model.layers):

            def stand_still(*_: Any, where: str, number: int = number) -> None:
                self.stand_still(where, step, number)

            handles.append(layer.mlp.register_forward_hook(partial(stand_still, where="forward")))
            handles.append(layer.mlp.register_full_backward_hook(partial(stand_still, where="backward")))
        loss = super().training_step(model, *args)
        for handle in handles:
            handle.remove()
        return loss


class Callback(TrainerCallback):
    """Stands still between steps."""

    trainer: StallingTrainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.stand_still("stopped", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.stand_still("callback", state.global_step)


def trainer_with(
    stalls: tuple[Stall, ...],
    logs: Sequence[Path],
    output_dir: Any,
    plugin: dict[str, Any],
    settings: dict[str, Any],
    **watching: float,
) -> StallingTrainer:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    callback = Callback()
    trainer = StallingTrainer(
        MODELS["llama"](),
        arguments(output_dir, **settings),
        train_dataset=documents(LENGTHS),
        plugin=LongContextPlugin(capacity=200 // world_size, global_batch_documents=5, **plugin),
        callbacks=[callback],
        **watching,
    )
    trainer.stalls, trainer.logs, callback.trainer = stalls, logs, trainer
    return trainer


def stalled_run(
    stalls: tuple[Stall, ...],
    output_dir: Any,
    plugin: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    report_after: float = 0.6,
) -> tuple[str, list[str]]:
    """Return what this rank wrote to standard error, and the watchdog's threads that are left after training."""
    fresh_accelerator_state()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    logs = [Path(output_dir) / f"said by rank {number}.log" for number in range(world_size)]
    with logs[rank].open("wb") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            if world_size > 1:
                dist.barrier()  # all logs are there
            settings = {"num_train_epochs": 2} | (settings or {})
            trainer = trainer_with(stalls, logs, output_dir, plugin or {}, settings, report_after=report_after)
            trainer.train()
        finally:
            os.dup2(before, 2)
            os.close(before)
    log = logs[rank].read_text()
    return log, [thread.name for thread in threading.enumerate() if "watchdog" in thread.name]


STORES = ("of rank 0", "in a file")


def one_rank(folder: Path, store: str, rank: int) -> None:
    """Run a rank of a job of two without a launcher, which meet in a file, or at rank 0's port written there."""
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    log = os.open(folder / f"{store}, rank {rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    place = folder / store
    kept: dist.Store
    if store == "in a file":
        kept = dist.FileStore(str(place), 2)
    else:
        while rank == 1 and not (place.exists() and place.read_text().endswith("\n")):
            time.sleep(0.05)
        port = int(place.read_text()) if rank else 0
        kept = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        if rank == 0:
            place.write_text(f"{kept.port}\n")
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=2)
    stall = Stall(rank=0, step=2, where="stopped", until="never")
    plugin, settings = {"stall_timeout_seconds": STALL_SECONDS}, {"max_steps": 4}
    trainer_with((stall,), (), folder / f"{store}, output", plugin, settings).train()


def main(folder: str) -> None:
    """A job of two ranks for each kind of store, all at once; prints the exit codes of their ranks 1."""
    ranks: dict[tuple[str, int], int] = {}
    warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on Python warns of forks beside threads
    for store in STORES:
        for rank in range(2):
            ranks[store, rank] = os.fork()
            if ranks[store, rank] == 0:
                try:
                    one_rank(Path(folder), store, rank)
                finally:
                    traceback.print_exc()
                    os._exit(1)
    for store in STORES:
        print(os.waitstatus_to_exitcode(os.waitpid(ranks[store, 1], 0)[1]), flush=True)
        os.kill(ranks[store, 0], signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
