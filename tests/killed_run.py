"""A program of a launched rank, which tests interrupt and resume: `torchrun tests/killed_run.py OUTPUT_DIR [CHECKPOINT]`.

Trains a tiny Llama and writes, while it runs, one line per step and rank: what the rank holds, and the step's loss.
With KILLED_STEP set, rank 1 kills itself with SIGKILL when that step begins; with RAISING_STEP, it raises, and so it does
before it has a trainer where that is 0.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import errors as elastic
from transformers import TrainerCallback

from hf_longctx import LongContextPlugin
from tests.tiny_models import tiny_llama
from tests.training_runs import RecordingTrainer, arguments, documents

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 200, 2, 14, 30]
SAVED_STEP = 3
KILLED_STEP = 5
STEPS = 8


class KilledTrainer(RecordingTrainer):
    """Writes each step down; dies where it is told to."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        step = self.state.global_step + 1
        if os.environ.get("KILLED_STEP") == str(step) and self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise_at(step, self.args.process_index)
        loss = super().training_step(model, inputs, *args)
        with record(Path(self.args.output_dir), self.args.process_index).open("a") as file:
            print(json.dumps({"step": step, "loss": float(loss), "held": self.held[-1]}), file=file)
        return loss


class LeavesOrStops(TrainerCallback):
    """On rank 1 alone, at the end of a step: leaves the program, or asks training to stop."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and os.environ.get("LEAVING_STEP") == str(state.global_step):
            sys.exit(0)
        if args.process_index == 1 and os.environ.get("STOPPING_STEP") == str(state.global_step):
            control.should_training_stop = True


def raise_at(step: int, rank: int) -> None:
    if os.environ.get("RAISING_STEP") == str(step) and rank == 1:
        raise OSError(f"the disk of rank 1 is broken at step {step}")


def record(output_dir: Path, rank: int) -> Path:
    return output_dir / f"steps_of_rank_{rank}.jsonl"


@elastic.record
def main(output_dir: str, checkpoint: str | None = None) -> None:
    torch.set_num_threads(1)
    raise_at(0, int(os.environ["RANK"]))
    world_size = int(os.environ["WORLD_SIZE"])
    trainer = KilledTrainer(
        model=tiny_llama(),
        args=arguments(output_dir, num_train_epochs=2, save_strategy="steps", save_steps=SAVED_STEP, logging_steps=2),
        train_dataset=documents(LENGTHS),
        plugin=LongContextPlugin(capacity=200 // world_size, global_batch_documents=5),
        callbacks=[LeavesOrStops()],
    )
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
