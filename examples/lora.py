"""LoRA adapters by PEFT: train, save, and load with PEFT alone.

    python examples/lora.py
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/lora.py

`hf-longctx merge runs/example-lora MERGED --base MODEL` makes one plain checkpoint of an adapter and its base.
"""

import stand_ins
from peft import PeftModel
from transformers import TrainingArguments

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.models.adapters.peft_adapters import add_lora


def main() -> list[float]:
    trainer = LongContextTrainer(
        model=add_lora(stand_ins.model(), r=8, alpha=16),  # or any get_peft_model(...) of yours
        args=TrainingArguments(
            "runs/example-lora",
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            gradient_checkpointing=True,
        ),
        train_dataset=stand_ins.documents(),
        plugin=LongContextPlugin(capacity=512, global_batch_documents=8),
    )
    trainer.train()
    trainer.save_model()  # adapter_model.safetensors and adapter_config.json

    trainer.accelerator.wait_for_everyone()
    plain = PeftModel.from_pretrained(stand_ins.model(), "runs/example-lora")  # nothing of hf_longctx
    trainer.accelerator.print(plain.get_nb_trainable_parameters())
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
