"""An SFTTrainer over conversations that a tiny tokenizer knows."""

import os
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hf_longctx import LongContextMixin, LongContextPlugin
from tests.builders.tiny_models import TINY
from tests.builders.training_runs import ANY_MODELS, fresh_accelerator_state

TURNS = [(3, 150), (17, 60), (9, 33), (40, 8), (21, 5), (90, 12), (6, 28), (50, 200), (14, 30)]
"""Tokens of each question and its answer."""
CAPACITY = 320
DOCUMENTS = 3
EPOCHS = 2
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "v_proj", "o_proj"]}
SPECIAL = ["<unk>", "<user>", "<assistant>", "<end>", "<pad>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '> ' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + ' <end> ' }}{% endgeneration %}"
    "{% else %}{{ message.content + ' <end> ' }}{% endif %}{% endfor %}{{ '<assistant> ' if add_generation_prompt }}"
)


class LongContextSFTTrainer(LongContextMixin, SFTTrainer):  # type: ignore[misc]
    """What the documentation tells users to write."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each number."""
    numbers = [str(number) for number in range(len(SPECIAL), TINY["vocab_size"])]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *numbers])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE
    )


def conversations() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)

    def words(count: int) -> str:
        return " ".join(map(str, rng.integers(len(SPECIAL), TINY["vocab_size"], count)))

    return [
        {
            "messages": [
                {"role": "user", "content": words(asked)},
                {"role": "assistant", "content": words(answered)},
            ]
        }
        for asked, answered in TURNS
    ]


def settings(output_dir: Any) -> dict[str, Any]:
    """Return settings of TrainingArguments; what training_runs.arguments adds is added for SFTConfig in `sft`."""
    return {"output_dir": str(output_dir), "num_train_epochs": EPOCHS}


def sft_trainer(
    output_dir: Any,
    lora: bool = False,
    capacity: int = CAPACITY,
    train_dataset: Any = None,
    family: str = "llama",
    **changed: Any,
) -> Any:
    fresh_accelerator_state()
    os.environ.setdefault("CI", "true")  # TRL then tells its makers nothing
    quiet = {
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 3,
    }
    same = {"learning_rate": 1e-2, "adam_epsilon": 1e-4, "bf16": False, "gradient_checkpointing": False}
    trl = {"max_length": None, "assistant_only_loss": True}
    return LongContextSFTTrainer(
        model=ANY_MODELS[family](),
        args=SFTConfig(**{**settings(output_dir), **quiet, **same, **trl, **changed}),
        train_dataset=train_dataset or Dataset.from_list(conversations()),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if lora else None,
        plugin=LongContextPlugin(capacity=capacity, global_batch_documents=DOCUMENTS),
    )
