"""A tokenizer as bytes: all that decides which tokens it makes, wherever it was loaded from; and what a prepared folder keeps
of the one that it was prepared with."""

import copy
import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
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


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that documents were prepared with, as their folder remembers it."""

    name: str
    """where it was loaded from; else its class"""
    fingerprint: str
    """of its state but for the chat template"""
    template: str | None
    """fingerprint of its chat template; None: it decided no token"""
    libraries: str
    """whose versions may write the same state otherwise"""

    @classmethod
    def of(cls, tokenizer: Any, rendered: bool) -> "TokenizerRecord":
        """Record a tokenizer; `rendered`: whether its chat template decided tokens."""
        plain = copy.copy(tokenizer)
        plain.chat_template = None
        template = _digest([json.dumps(tokenizer.chat_template, sort_keys=True).encode()]) if rendered else None
        libraries = ", ".join(f"{name} {version(name)}" for name in ("transformers", "tokenizers"))
        return cls(tokenizer_name(tokenizer), _digest(tokenizer_state(plain)), template, libraries)


def tokenizer_name(tokenizer: Any) -> str:
    """Name where a tokenizer was loaded from; its class, where it was made in Python."""
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(hashlib.blake2b(part).digest())
    return digest.hexdigest()
