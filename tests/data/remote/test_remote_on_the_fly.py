"""Rows that are tokenised when they are read train as the documents that they become."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedSteps
from hf_longctx.data.remote import on_the_fly
from hf_longctx.data.remote.client import RemoteSteps
from hf_longctx.data.remote.cluster import connect, disconnect
from hf_longctx.data.remote.on_the_fly import RawDocuments, measure, raw_documents
from hf_longctx.data.tokenisation import Document, Tokenisation
from tests.builders.chat_templates import tokenizers
from tests.data.remote.remote_steps import assert_same, epoch_of, every_document_once, settings

TOKENIZER = tokenizers()["own"]
TEXTS = ["Once upon a time " * times for times in (3, 1, 9, 22, 14, 5, 2, 30, 7, 11)]


@pytest.fixture(scope="module", autouse=True)
def _ray(starts_processes: None) -> Iterator[None]:
    connect(store_bytes=100 << 20)
    yield
    disconnect()


def completions() -> Dataset:
    rows = [{"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]} for text in TEXTS]
    return Dataset.from_list(rows)


def documents(rows: Any, tokenisation: Tokenisation) -> list[dict[str, list[int]]]:
    """All of them, tokenised at once."""
    rows_of_tokens = []
    for document in tokenisation(list(rows)):
        assert isinstance(document, Document)
        labels = {} if document.labels is None else {"labels": document.labels.tolist()}
        rows_of_tokens.append({"input_ids": document.input_ids.tolist()} | labels)
    return rows_of_tokens


def test_both_loaders_give_the_steps_of_the_documents_that_rows_become(monkeypatch):
    monkeypatch.setattr(on_the_fly, "ROWS_PER_TASK", 3)
    rows, tokenisation = completions(), Tokenisation(TOKENIZER)
    stored = documents(rows, tokenisation)
    raw = raw_documents(rows, tokenisation, workers=2)
    known = LengthIndex.from_dataset(stored)
    assert LengthIndex.from_dataset(raw) is raw.index
    np.testing.assert_array_equal(raw.index.lengths, known.lengths)
    np.testing.assert_array_equal(raw.index.label_tokens, known.label_tokens)
    assert raw.index.fingerprint != known.fingerprint, "other tokens may have the same lengths"

    local = epoch_of([PlannedSteps(*settings(raw, 2, rank, capacity=100)) for rank in range(2)])
    every_document_once(local, stored)
    expected = epoch_of([PlannedSteps(*settings(stored, 2, rank, capacity=100)) for rank in range(2)])
    for step, theirs in zip(local, expected, strict=True):
        assert [of_rank.plan.digest() for of_rank in step] == [of_rank.plan.digest() for of_rank in theirs]
        for mine, other in zip(step, theirs):
            ours = [(part.input_ids.tolist(), part.shift_labels.tolist()) for part in mine.micro_batches]
            assert ours == [(part.input_ids.tolist(), part.shift_labels.tolist()) for part in other.micro_batches]
    remote = [RemoteSteps(*settings(raw, 2, rank, capacity=100), job="tests", name="raw") for rank in range(2)]
    assert_same(epoch_of(remote), local)
    for source in remote:
        source.close()


def test_bad_rows_are_an_error_or_counted(tmp_path):
    rows = [{"text": text} for text in TEXTS]
    rows[3], rows[5], rows[7] = {"text": 5}, {"text": ""}, {"title": "?"}
    with pytest.raises(
        ValueError, match=r"2 of 10 rows cannot be tokenised: row 3: column 'text' .*; row 7: .*'title'"
    ):
        raw_documents(rows, Tokenisation(TOKENIZER))
    with pytest.warns(UserWarning, match="of 10") as warned:
        raw = raw_documents(rows, Tokenisation(TOKENIZER), bad_rows="skip")
    assert [str(warning.message)[:30] for warning in warned] == [
        "2 of 10 rows cannot be tokenis",
        "3 of 10 documents are dropped:",
    ]
    assert raw.index.usable.tolist() == [0, 1, 2, 4, 6, 8, 9]
    with pytest.raises(ValueError, match="row 5 is no document: teaches nothing"):
        raw[5]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        raw_documents(rows, Tokenisation(None))


def test_lengths_are_measured_once_for_the_same_rows_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Dataset.from_list([{"text": text} for text in TEXTS]).save_to_disk(tmp_path / "rows")
    rows = Dataset.load_from_disk(str(tmp_path / "rows"))
    first = raw_documents(rows, Tokenisation(TOKENIZER), cache_dir=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(on_the_fly, "_measured", None)
        again = raw_documents(rows, Tokenisation(TOKENIZER), cache_dir=tmp_path)
        for other in (rows.select(range(5)), rows.with_transform(lambda batch: batch)):
            with pytest.raises(TypeError, match="'NoneType' object is not callable"):
                raw_documents(other, Tokenisation(TOKENIZER), cache_dir=tmp_path)
    assert again.index.fingerprint == first.index.fingerprint
    assert len(again) == len(TEXTS)


def test_what_several_ranks_share_is_tokenised_once_and_little_is_kept(monkeypatch: pytest.MonkeyPatch):
    class Counted:
        fingerprint = "counted"

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, rows: list[Any]) -> list[Document]:
            self.calls += len(rows)
            return [Document(np.arange(row["length"], dtype=np.int32), None) for row in rows]

    rows = [{"length": 10}, {"length": 20}, {"length": 30}]
    tokenisation: Any = Counted()
    measured = measure(rows, tokenisation, 1, 3)
    assert (measured.lengths.tolist(), measured.label_tokens.tolist()) == ([20, 30], [19, 29])
    raw = RawDocuments(rows, tokenisation, LengthIndex(np.array([10, 20, 30]), np.array([9, 19, 29])))
    tokenisation.calls = 0
    assert [len(raw[doc]["input_ids"]) for doc in (0, 1, 0, 1, 2)] == [10, 20, 10, 20, 30]
    assert tokenisation.calls == 3
    monkeypatch.setattr(on_the_fly, "KEPT_BYTES", 4 * 30)
    raw = RawDocuments(rows, tokenisation, raw.index)
    kept = [(len(raw[doc]["input_ids"]), list(raw._kept)) for doc in (0, 1, 2, 2)]
    assert kept == [(10, [0]), (20, [0, 1]), (30, [2]), (30, [2])]
    assert tokenisation.calls == 6
