"""A tokenizer as bytes: all that decides which tokens it makes, wherever it was loaded from."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def tokenizer_state(tokenizer: Any) -> Iterable[bytes]:
    """All that decides what a tokenizer makes of a text or of messages."""
    settings = [
        type(tokenizer).__name__,
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        bool(getattr(tokenizer, "split_special_tokens", False)),
    ]
    yield json.dumps(settings, sort_keys=True).encode()
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        for never_used in ("truncation", "padding"):  # transformers takes them away when it first tokenises
            state.pop(never_used, None)
        yield json.dumps(state, sort_keys=True).encode()
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                yield file.name.encode()
                yield file.read_bytes()
