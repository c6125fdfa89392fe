"""A tiny model of random weights where the embedded SmolLM2-135M would lie, with a tokenizer of bytes and a chat template."""

from pathlib import Path
from typing import Any

from hf_longctx.data.embedded.embedded_model import WHEEL_SHA256
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import tiny_llama

TEMPLATE = "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} . {% endfor %}"


def write_embedded(cache: Path) -> Any:
    """Write the model into `cache`, the folder of HF_LONGCTX_CACHE. Returns its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    embedded = cache / f"smollm2-135m-{WHEEL_SHA256[:16]}"
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(embedded)
    tokenizer.save_pretrained(embedded)
    return tokenizer
