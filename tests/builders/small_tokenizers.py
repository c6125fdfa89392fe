"""Tokenizers that need no files: of bytes, and of words."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(*, bos: bool = False, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """A token for each byte, 257 in all with a beginning of text, and one for each merge. Any text, and back.

    Args:
        bos: every text begins with a token of its own.
        merges: pairs that become one token, in the letters of byte-level BPE, in which a space is Ġ.
    """
    alphabet = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    bytes_ = Tokenizer(BPE({token: number for number, token in enumerate(alphabet)}, list(merges)))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bytes_.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    if bos:
        bytes_.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, bos_token="<s>")


def word_tokenizer(words: int = 128) -> PreTrainedTokenizerFast:
    """A token for each of the words w0, w1, w2 ...; nothing else is known."""
    known = Tokenizer(WordLevel({f"w{number}": number for number in range(words)}, unk_token="w0"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=known, unk_token="w0")
