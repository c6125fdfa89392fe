"""TRL's SFTTrainer: TRL makes documents of your conversations, planned steps train them.

    HF_HUB_DISABLE_TELEMETRY=1 python examples/sft_trainer.py
    HF_HUB_DISABLE_TELEMETRY=1 ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/sft_trainer.py

Needs the package trl (pip install 'hf_longctx[trl]'), which tells its makers that it is used unless told not to.
"""

import stand_ins
from trl import SFTConfig, SFTTrainer

from hf_longctx import LongContextMixin, LongContextPlugin


class LongContextSFTTrainer(LongContextMixin, SFTTrainer):
    """All of the mixin's planned steps, all of SFTTrainer's ways to prepare data."""


def main() -> list[float]:
    trainer = LongContextSFTTrainer(
        model=stand_ins.model(),
        args=SFTConfig(
            "runs/example-sft",
            num_train_epochs=2,
            learning_rate=5e-3,
            logging_steps=1,
            bf16=False,
            report_to=[],
            max_length=None,  # SFTConfig's default would cut every document after 1024 tokens
            assistant_only_loss=True,
        ),
        train_dataset=stand_ins.conversations(),
        processing_class=stand_ins.tokenizer(),
        plugin=LongContextPlugin(capacity=512, global_batch_documents=4),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
