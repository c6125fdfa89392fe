"""A rank of a job in which memory is really exhausted, in a file of its own.

Started as `python -m tests.worlds.faults.exhausted_rank FOLDER`.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from hf_longctx import LongContextPlugin, LongContextTrainer
from tests.builders.training_runs import MODELS, arguments, documents, fresh_accelerator_state

LENGTHS = [40, 150, 17, 60, 200, 9, 33, 40]


def main(output_dir: str) -> None:
    """One rank of a job in which memory is really exhausted: rank 1 may have 256 MiB more than it has now."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    fresh_accelerator_state()
    trainer = LongContextTrainer(
        MODELS["llama"](),
        arguments(output_dir, max_steps=3),
        train_dataset=documents(LENGTHS),
        plugin=LongContextPlugin(capacity=100, global_batch_documents=4),
    )
    kept: list[torch.Tensor] = []

    def hold(*_: Any) -> None:
        if trainer.state.global_step == 1 and rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            if not kept:
                most = pages * resource.getpagesize() + 2**28
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            while True:
                kept.append(torch.zeros(2**24, dtype=torch.uint8))

    trainer.model.model.layers[0].register_forward_hook(hold)
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
