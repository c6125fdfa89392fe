"""Rows tokenised alone: a document or the reason why it is refused, and the texts that are learned of it."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from hf_longctx.data.tokenisation import Document, Tokenisation
from tests.builders.chat_templates import tokenizers

TOKENIZERS = tokenizers()

# What templates and tokenizers trip over: special tokens inside a text, letters of several tokens, white space, nothing.
PIECES = [
    "",
    " ",
    "\n",
    "\n\n",
    "Hello",
    " world",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "👩‍👩‍👧",
    "汉字",
    "é",
    "[INST]",
    "\u00a0",
    "1234",
]
# SmolLM2's vocabulary lacks some bytes of UTF-8: a letter with one is lost in tokenising, whoever does it.
letters = st.text(max_size=6).filter(lambda text: TOKENIZERS["own"].decode(TOKENIZERS["own"].encode(text)) == text)
contents = st.lists(st.sampled_from(PIECES) | letters, max_size=5).map("".join)


def document(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **settings: Any) -> Document:
    (result,) = Tokenisation(tokenizer, **settings)([row])
    assert isinstance(result, Document), result
    return result


def refusal(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **settings: Any) -> str:
    (result,) = Tokenisation(tokenizer, **settings)([row])
    assert isinstance(result, str)
    return result


def learned(tokenizer: PreTrainedTokenizerBase, tokenised: Document) -> list[str]:
    """The text of each run of tokens that are learned."""
    assert tokenised.labels is not None
    is_learned = tokenised.labels != -100
    np.testing.assert_array_equal(tokenised.labels[is_learned], tokenised.input_ids[is_learned])
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], is_learned, [False]])))
    return [tokenizer.decode(tokenised.input_ids[start:stop]) for start, stop in bounds.reshape(-1, 2)]
