"""Rows of every kind become documents with the tokenizer's own ids and the right labels, or a reason why not; nothing that a
row holds raises."""

import hashlib
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_longctx.data.tokenisation import EMPTY, Document, Tokenisation, learned_tokens
from hf_longctx.data.tokenizer_state import tokenizer_state
from tests.builders.chat_templates import CHATML, tokenizers, with_template
from tests.builders.tokenised_rows import contents, document, learned, refusal

SMOLLM2 = tokenizers()["own"]
VOCABULARY = len(SMOLLM2)


def with_ends(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """One that writes a first and a last token itself."""
    other = with_template(tokenizer, CHATML)
    special = [("<|im_start|>", other.convert_tokens_to_ids("<|im_start|>")), ("<|im_end|>", other.eos_token_id)]
    ends = processors.TemplateProcessing("<|im_start|> $A <|im_end|>", special_tokens=special)
    other.backend_tokenizer.post_processor = ends
    return other


def like_llama2() -> PreTrainedTokenizerBase:
    """Spaces are letters of their own, one is put before a text, and unknown letters are bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    tokenizer.train_from_iterator([__doc__ or "", CHATML], trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def like_bert() -> PreTrainedTokenizerBase:
    """Drops white space, and folds capitals and accents."""
    tokenizer = Tokenizer(
        models.WordPiece({"[UNK]": 0, "[SEP]": 1, "hello": 2, "world": 3, "##s": 4}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", unk_token="[UNK]")


def with_trimmed_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """One whose offsets leave out the spaces around words."""
    other = with_template(tokenizer, CHATML)
    other.backend_tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    return other


TOKENIZERS = {
    "smollm2": SMOLLM2,
    "trimmed": with_trimmed_offsets(SMOLLM2),
    "ends": with_ends(SMOLLM2),
    "llama2": like_llama2(),
    "bert": like_bert(),
}


# Text


@given(texts=st.lists(contents, max_size=6), add_eos=st.sampled_from([None, True, False]))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_has_the_ids_of_the_tokenizer_and_one_end_token(name: str, texts: list[str], add_eos: bool | None):
    tokenizer = TOKENIZERS[name]
    rows = [{"text": text} for text in texts]
    for text, result in zip(texts, Tokenisation(tokenizer, add_eos=add_eos)(rows), strict=True):
        ids, end = tokenizer(text)["input_ids"], [tokenizer.eos_token_id]
        if (
            add_eos is not False and ids[-1:] != end
        ):  # the tokenizer "ends" writes it itself, and a text may end with it
            ids += end
        if not text or len(ids) < 2:
            assert isinstance(result, str)
            assert result.startswith(EMPTY)
        else:
            assert isinstance(result, Document)
            assert (result.input_ids.tolist(), result.input_ids.dtype, result.labels) == (ids, np.int32, None)


def test_a_batch_of_all_kinds_stays_in_order_and_a_text_column_may_have_any_name():
    rows = [
        {"text": "one two three"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"text": 5},
        {"input_ids": [4, 5, 6], "text": "unused"},
        {"prompt": "a b", "completion": " c d"},
        {"text": "four five six"},
    ]
    batch = Tokenisation(SMOLLM2)(rows)
    for row, result in zip(rows, batch, strict=True):
        (alone,) = Tokenisation(SMOLLM2)([row])
        if isinstance(alone, str):
            assert (result, row) == (alone, {"text": 5})
        else:
            assert isinstance(result, Document)
            np.testing.assert_array_equal(result.input_ids, alone.input_ids)
            np.testing.assert_array_equal(result.labels, alone.labels)
    (renamed,) = Tokenisation(SMOLLM2, text_column="body")([{"body": "one two three"}])
    assert isinstance(renamed, Document)
    np.testing.assert_array_equal(renamed.input_ids, batch[0].input_ids)  # type: ignore[union-attr]
    assert Tokenisation(SMOLLM2)([]) == []


# Prompts and completions


@given(prompt=contents, completion=contents)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_completion_is_learned_and_ends_with_one_end_token(name: str, prompt: str, completion: str):
    tokenizer = TOKENIZERS[name]
    row = {"prompt": prompt, "completion": completion}
    (result,) = Tokenisation(tokenizer)([row])
    encoded = tokenizer(prompt + completion)
    ids, end = encoded["input_ids"], [tokenizer.eos_token_id]
    expected = ids if ids[-1:] == end else ids + end
    if isinstance(result, str):
        assert result.startswith(EMPTY)
        assert not completion or len(expected) < 2
        return
    assert result.input_ids.tolist() == expected
    assert result.labels is not None
    assert result.labels.tolist()[-1:] == end
    for token, (start, stop) in enumerate(encoded.encodings[0].offsets):
        if start < stop or 0 < token < len(ids) - 1:  # not written by the tokenizer itself
            assert (result.labels[token] != -100) == (stop > len(prompt))
    everything = document(tokenizer, row, train_on="all")
    assert (everything.input_ids.tolist(), everything.labels) == (expected, None)


def test_prompt_and_completion_are_one_text():
    tokenised = document(SMOLLM2, {"prompt": "The capital of France is", "completion": " Paris"})
    assert learned(SMOLLM2, tokenised) == [" Paris<|im_end|>"]
    together = document(SMOLLM2, {"prompt": "The capital of Fr", "completion": "ance<|im_end|>"})
    assert together.input_ids.tolist() == SMOLLM2("The capital of France")["input_ids"] + [SMOLLM2.eos_token_id]
    assert learned(SMOLLM2, together) == [" France<|im_end|>"]
    without_end = with_template(SMOLLM2, None)
    without_end.eos_token = None
    assert learned(SMOLLM2, document(without_end, {"prompt": "One,", "completion": " two"})) == [" two"]


@given(text=contents, cuts=st.lists(st.integers(0, 40), max_size=6))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_that_hold_a_learned_character_are_found(name: str, text: str, cuts: list[int]):
    """Character by character; tokens of which offsets leave out everything stand for the character before them."""
    bounds = sorted(min(cut, len(text)) for cut in cuts[: len(cuts) // 2 * 2])
    spans = list(zip(bounds[::2], bounds[1::2]))
    characters = {character for start, stop in spans for character in range(start, stop)}
    offsets = TOKENIZERS[name](text, add_special_tokens=False).encodings[0].offsets
    expected = [bool(characters & set(range(start - (start == stop), stop))) for start, stop in offsets]
    assert learned_tokens(np.array(offsets, np.int64).reshape(-1, 2), spans).tolist() == expected


# Tokens


@pytest.mark.parametrize("sequence", [list, tuple, np.array, lambda values: np.array(values, np.uint16)])
def test_tokens_are_taken_as_they_are(sequence: Any):
    tokenised = document(SMOLLM2, {"input_ids": sequence([5, VOCABULARY - 1, 0])})
    assert (tokenised.input_ids.tolist(), tokenised.input_ids.dtype, tokenised.labels) == (
        [5, VOCABULARY - 1, 0],
        np.int32,
        None,
    )
    tokenised = document(
        SMOLLM2, {"input_ids": sequence([5, 6, 0]), "labels": [-100, 3, -100], "attention_mask": [1, 1, 0]}
    )
    assert tokenised.labels is not None
    assert (tokenised.labels.tolist(), tokenised.labels.dtype) == ([-100, 3, -100], np.int32)
    (found_without,) = Tokenisation(None, "tokens")([{"input_ids": sequence([5, 6, 2**15])}])
    assert isinstance(found_without, Document)


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {},
        "the columns are none; valid for kind='auto': 'input_ids', or 'messages', or 'prompt' and 'completion', or 'text', "
        "or 'conversations', "
        "or 'instruction' and 'output' (",
    ),
    (
        {"prompt": "a", "body": "b"},
        "the columns are 'prompt', 'body'; it looks like texts: columns {text: body}; valid for kind='auto'",
    ),
    ({"text": None}, "column 'text' holds None; valid: a string"),
    ({"text": b"abc"}, "column 'text' holds b'abc' (bytes); valid: a string"),
    ({"text": ""}, EMPTY + "column 'text' holds an empty string"),
    ({"text": "half \udc80"}, "column 'text' holds a character that is not Unicode"),
    (
        {"prompt": "a", "completion": None},
        "column 'completion' holds None; valid: a string, or lists of messages in both",
    ),
    ({"prompt": "a", "completion": ""}, EMPTY + "column 'completion' holds an empty string"),
    ({"input_ids": None}, "column 'input_ids' holds None; valid: a list of integers"),
    ({"input_ids": []}, EMPTY + "it has 0 tokens"),
    ({"input_ids": [3]}, EMPTY + "it has 1 tokens"),
    ({"input_ids": "123"}, "column 'input_ids' holds '123' (str); valid: a list of integers"),
    ({"input_ids": [1, 2.5]}, "column 'input_ids' holds [1, 2.5] (list); valid: a list of integers"),
    ({"input_ids": [True, False]}, "column 'input_ids' holds [True, False] (list); valid"),
    ({"input_ids": [1, None]}, "column 'input_ids' holds [1, None] (list); valid"),
    ({"input_ids": [[1, 2], [3]]}, "column 'input_ids' holds [[1, 2], [3]] (list); valid"),
    ({"input_ids": {"a": 1}}, "column 'input_ids' holds {'a': 1} (dict); valid"),
    ({"input_ids": [True, False, 3]}, "column 'input_ids' holds [True, False, 3] (list); valid: a list of integers"),
    ({"input_ids": [1, 2**70]}, "valid: a list of integers that int32 can hold"),
    ({"input_ids": [1, 2**31]}, f"column 'input_ids' holds values from 1 to {2**31}; valid: 0 to {VOCABULARY - 1}"),
    (
        {"input_ids": [1, -3]},
        f"column 'input_ids' holds values from -3 to 1; valid: 0 to {VOCABULARY - 1}, the vocabulary",
    ),
    ({"input_ids": [1, VOCABULARY]}, f"holds values from 1 to {VOCABULARY}; valid: 0 to {VOCABULARY - 1}"),
    ({"input_ids": [1, 2], "labels": None}, "column 'labels' holds None"),
    ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, but 1 labels; valid: a label for every token, -100 where"),
    (
        {"input_ids": [1, 2], "labels": [1, -1]},
        f"column 'labels' holds values from -1 to 1; valid: 0 to {VOCABULARY - 1}",
    ),
    ({"input_ids": [1, 2], "labels": [2, -100]}, EMPTY + "none of its 2 tokens after the first is learned"),
    (
        {"input_ids": [1, 2], "attention_mask": [1, 0]},
        "column 'attention_mask' leaves tokens out, and there is no column",
    ),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "column 'completion_mask' leaves tokens out"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_bad_rows_are_refused_with_what_was_found_and_what_is_valid(row: dict[str, Any], reason: str):
    message = refusal(SMOLLM2, row)
    assert reason in message
    assert message.startswith(EMPTY) == reason.startswith(EMPTY)


def test_a_missing_column_of_the_kind_that_was_asked_for_is_named():
    assert (
        "the columns are 'body'; it looks like texts: columns {text: body}; valid for kind='text': 'text' (text_column names"
        in refusal(SMOLLM2, {"body": "some text"}, kind="text")
    )
    expected = "the columns are 'prompt'; valid for kind='prompt_completion': 'prompt' and 'completion'"
    with pytest.raises(ValueError, match=expected):
        Tokenisation(SMOLLM2, "prompt_completion").kind_of(["prompt"])
    kinds = [
        Tokenisation(SMOLLM2).kind_of([*names, "text"])
        for names in (["input_ids"], ["messages"], ["completion", "prompt"], [])
    ]
    assert kinds == ["tokens", "messages", "prompt_completion", "text"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
COLUMNS = [
    "text",
    "messages",
    "prompt",
    "completion",
    "input_ids",
    "labels",
    "attention_mask",
    "tools",
    "chat_template_kwargs",
]


@given(rows=st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=4), max_size=6), data=st.data())
def test_nothing_that_a_row_holds_raises(rows: list[dict[str, Any]], data: st.DataObject):
    results = Tokenisation(SMOLLM2, train_on=data.draw(st.sampled_from(["assistant", "all"])))(rows)
    assert len(results) == len(rows)
    for result in results:
        if isinstance(result, str):
            assert result
        else:
            assert result.input_ids.dtype == np.int32
            assert len(result.input_ids) > 1
            assert result.labels is None or (result.labels[1:] != -100).any()


def test_values_that_are_nested_too_deeply_are_refused():
    deep: Any = "Hi"
    for _ in range(100_000):
        deep = [deep]
    row = {"messages": [{"role": "user", "content": deep}]}
    assert refusal(SMOLLM2, row) == "its values are nested too deeply; valid: what json can write and read"
    while isinstance(deep, list):  # taken apart here: Python's own way is recursive
        deep = deep.pop()


# Settings and tokenizers


def test_a_slow_tokenizer_is_refused_where_offsets_are_needed():
    slow = ByT5Tokenizer()
    slow.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert document(slow, {"text": "Hello"}).input_ids.tolist() == slow("Hello")["input_ids"]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    tokenised = document(slow, {"messages": messages}, train_on="all")
    assert tokenised.input_ids.tolist() == slow.apply_chat_template(messages)["input_ids"]
    for kind in ("messages", "prompt_completion"):
        with pytest.raises(
            ValueError, match=r"ByT5Tokenizer cannot say it: it is not a fast tokenizer .* train_on='all'"
        ):
            Tokenisation(slow, kind)
    with pytest.raises(ValueError, match="not a fast tokenizer"):
        Tokenisation(slow)([{"messages": messages}])
    assert Tokenisation(slow).fingerprint == Tokenisation(ByT5Tokenizer(chat_template=slow.chat_template)).fingerprint
    assert Tokenisation(slow).fingerprint != Tokenisation(ByT5Tokenizer(extra_ids=3)).fingerprint


def test_texts_without_an_end_token_are_refused_if_one_is_asked_for_and_else_mentioned():
    without = with_template(SMOLLM2, None)
    without.eos_token = None
    with pytest.raises(ValueError, match=r"add_eos=True, and \w+ has no end token. Valid: .* add_eos=False"):
        Tokenisation(without, add_eos=True)([{"text": "some text"}])
    with pytest.warns(UserWarning, match="has no end token: texts get none"):
        Tokenisation(without).warn_of_missing_end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tokenisation(without, add_eos=False).warn_of_missing_end()
        Tokenisation(SMOLLM2).warn_of_missing_end()
    assert document(without, {"text": "some text"}).input_ids.tolist() == SMOLLM2("some text")["input_ids"]


def test_documents_of_version_1_have_no_ends_and_the_name_of_then():
    row = {"text": "some text"}
    assert (
        document(TOKENIZERS["llama2"], row, version=1).input_ids.tolist()
        == TOKENIZERS["llama2"]("some text")["input_ids"]
    )
    digest = hashlib.blake2b(json.dumps([1, "auto", "text", "assistant"]).encode(), digest_size=16)
    for part in tokenizer_state(TOKENIZERS["llama2"]):
        digest.update(hashlib.blake2b(part).digest())
    assert Tokenisation(TOKENIZERS["llama2"], version=1).fingerprint == digest.hexdigest()
    with pytest.raises(ValueError, match="add_eos=True with documents of version 1"):
        Tokenisation(TOKENIZERS["llama2"], add_eos=True, version=1)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(
        ValueError, match="kind='chat' is unknown; valid: auto, tokens, messages, prompt_completion, text"
    ):
        Tokenisation(SMOLLM2, "chat")
    with pytest.raises(ValueError, match="train_on='user' is unknown; valid: assistant, all"):
        Tokenisation(SMOLLM2, train_on="user")
    with pytest.raises(ValueError, match=r"kind='text' needs a tokenizer; valid without one: rows with input_ids"):
        Tokenisation(None)([{"text": "some text"}])


def test_the_fingerprint_is_that_of_settings_tokenizer_and_template(tmp_path: Path):
    tokenizer = with_template(TOKENIZERS["llama2"], CHATML)
    plain = Tokenisation(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    truncating = with_template(tokenizer, CHATML)
    truncating.backend_tokenizer.enable_truncation(7)
    truncating.backend_tokenizer.enable_padding()
    copied = pickle.loads(pickle.dumps(plain))
    same = {Tokenisation(variant).fingerprint for variant in (tokenizer, loaded, truncating)} | {copied.fingerprint}
    assert same == {plain.fingerprint}
    row = {"text": "a text of more than seven tokens, by far"}
    np.testing.assert_array_equal(document(truncating, row).input_ids, copied([row])[0].input_ids)
    other_end = with_template(tokenizer, CHATML)
    other_end.eos_token = "<s>"
    split = with_template(tokenizer, CHATML)
    split.split_special_tokens = True
    others = [
        Tokenisation(None),
        Tokenisation(tokenizer, "text"),
        Tokenisation(tokenizer, text_column="body"),
        Tokenisation(tokenizer, train_on="all"),
        Tokenisation(tokenizer, add_eos=False),
        Tokenisation(tokenizer, version=1),
        *map(
            Tokenisation, (with_template(tokenizer, "{{ messages }}"), with_template(tokenizer, None), other_end, split)
        ),
        *map(Tokenisation, (SMOLLM2, TOKENIZERS["bert"])),
    ]
    assert len({other.fingerprint for other in others} | same) == len(others) + 1
