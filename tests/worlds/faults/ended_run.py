"""A program of a launched rank that ends before its time: `torchrun tests/worlds/faults/ended_run.py OUTPUT_DIR`.

Trains a tiny Llama. With RAISING_STEP set, rank 1 raises when that step begins; with LEAVING_STEP, it leaves after it.
"""

import os
import sys
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import errors as elastic
from transformers import TrainerCallback

from hf_longctx import LongContextPlugin, LongContextTrainer
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import arguments, documents

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 200, 2, 14, 30]


class EndedTrainer(LongContextTrainer):
    """Raises where it is told to."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        step = self.state.global_step + 1
        if os.environ.get("RAISING_STEP") == str(step) and self.args.process_index == 1:
            raise OSError(f"the disk of rank 1 is broken at step {step}")
        return super().training_step(model, inputs, *args)


class Leaves(TrainerCallback):
    """On rank 1 alone, at the end of a step: leaves the program."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and os.environ.get("LEAVING_STEP") == str(state.global_step):
            sys.exit(0)


@elastic.record
def main(output_dir: str) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    trainer = EndedTrainer(
        model=tiny_llama(),
        args=arguments(output_dir, num_train_epochs=2, logging_steps=2),
        train_dataset=documents(LENGTHS),
        plugin=LongContextPlugin(capacity=200 // world_size, global_batch_documents=5),
        callbacks=[Leaves()],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
