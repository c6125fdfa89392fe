"""Trainer as you know it: a subclass of your own, evaluation, a checkpoint that is gone on from.

python examples/trainer.py                                                                    # one process
ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/trainer.py   # two CPU processes
"""

from typing import Any

import stand_ins
import torch
from transformers import TrainingArguments

from hf_longctx import LongContextPlugin, LongContextTrainer


class MyTrainer(LongContextTrainer):
    """What you override in Trainer, you override here."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.args.learning_rate, betas=(0.9, 0.98))
        return self.optimizer


def main() -> list[float]:
    trainer = MyTrainer(
        model=stand_ins.model(),
        args=TrainingArguments(
            "runs/example-trainer",
            num_train_epochs=2,
            learning_rate=5e-3,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            report_to=[],
        ),
        train_dataset=stand_ins.documents(),
        eval_dataset=stand_ins.documents(6, seed=1),
        plugin=LongContextPlugin(capacity=512, global_batch_documents=8),
    )
    trainer.train(resume_from_checkpoint="auto")  # from the newest checkpoint, where there is one
    trainer.save_model()  # a plain transformers checkpoint
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
