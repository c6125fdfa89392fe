"""A model, a tokenizer and documents small enough for every example to run on a CPU in seconds. Put yours in their place."""

from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

VOCABULARY = 128


def model() -> Qwen3ForCausalLM:
    """Yours: AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="float32")."""
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, **sizes))


def documents(count: int = 24, seed: int = 0) -> Dataset:
    """Yours: one row for each document, of any length. These count in steps of their own, so there is something to learn."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.5, 1.2, count).astype(int), 4, 500)
    steps = rng.integers(1, 4, count)
    rows = [{"input_ids": (np.arange(n) * step % VOCABULARY).tolist()} for n, step in zip(lengths, steps)]
    return Dataset.from_list(rows)


def conversations(count: int = 12) -> Dataset:
    """Yours: messages as you have them; the tokenizer's chat template writes them."""

    def turn(role: str, start: int, length: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(str(5 + (start + i) % 100) for i in range(length))}

    rows: list[Any] = [
        {"messages": [turn("user", i, 4 + i), turn("assistant", 2 * i, 6 * (1 + i % 4) ** 3)]} for i in range(count)
    ]
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """Yours: AutoTokenizer.from_pretrained(...). This one has a token for each number."""
    special = ["<unk>", "<user>", "<assistant>", "<end>", "<pad>"]
    names = [*special, *(str(number) for number in range(len(special), VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    template = (
        "{% for m in messages %}{{ '<' + m.role + '> ' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + ' <end> ' }}{% endgeneration %}{% else %}{{ m.content + ' <end> ' }}{% endif %}{% endfor %}"
    )
    named = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **named)
