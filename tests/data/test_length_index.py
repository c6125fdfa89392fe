"""The length index against counting by hand, for every way in which a data set may be stored."""

import re
import warnings
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Features, LargeList, List, Value
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.data.length_index import LengthIndex, sample_of

LABEL = st.sampled_from([-100, 0, 5])
DOCUMENTS = st.lists(st.lists(LABEL, max_size=6), min_size=1, max_size=12).filter(
    lambda documents: any(label != -100 for labels in documents for label in labels[1:])
)


def counted_by_hand(documents: list[list[int]]) -> tuple[list[int], list[int]]:
    return [len(labels) for labels in documents], [sum(label != -100 for label in labels[1:]) for labels in documents]


def rows(documents: list[list[int]]) -> list[dict]:
    return [{"input_ids": list(range(len(labels))), "labels": labels} for labels in documents]


def columns(documents: list[list[int]]) -> dict[str, list]:
    return {name: [row[name] for row in rows(documents)] for name in ("input_ids", "labels")}


def index_of(dataset) -> LengthIndex:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dropped documents have tests of their own
        return LengthIndex.from_dataset(dataset)


def check(dataset, documents: list[list[int]]) -> None:
    index = index_of(dataset)
    lengths, label_tokens = counted_by_hand(documents)
    assert index.lengths.dtype == index.label_tokens.dtype == index.usable.dtype == np.int64
    assert index.lengths.tolist() == lengths
    assert index.label_tokens.tolist() == label_tokens
    assert index.usable.tolist() == [doc for doc, tokens in enumerate(label_tokens) if tokens]


@given(DOCUMENTS, st.sampled_from([List, LargeList]), st.data())
def test_arrow_tables(documents, list_type, data):
    """Several chunks, and rows that `select` and slicing pick, in any order and more than once."""
    features = Features({name: list_type(Value("int64")) for name in ("input_ids", "labels")})
    cut = data.draw(st.integers(0, len(documents)))
    parts = [Dataset.from_dict(columns(part), features) for part in (documents[:cut], documents[cut:]) if part]
    dataset = datasets.concatenate_datasets(parts)
    check(dataset, documents)
    check(dataset.with_format("torch"), documents)
    teaching = next(doc for doc, labels in enumerate(documents) if any(label != -100 for label in labels[1:]))
    picked = [*data.draw(st.lists(st.integers(0, len(documents) - 1))), teaching]
    check(dataset.select(picked), [documents[doc] for doc in picked])
    check(dataset.select(range(teaching, len(documents))), documents[teaching:])


def test_shuffle_and_a_table_saved_to_disk(tmp_path):
    documents = [[5] * n for n in range(2, 50)]
    Dataset.from_dict(columns(documents)).save_to_disk(tmp_path, num_shards=3)
    dataset = datasets.load_from_disk(tmp_path)
    check(dataset, documents)
    shuffled = dataset.shuffle(seed=1)
    check(shuffled, [row["labels"] for row in shuffled])


def test_lists_of_fixed_size():
    documents = [[1, -100, 3], [5, 5, 5], [-100, -100, 7]]
    features = Features({name: List(Value("int32"), length=3) for name in ("input_ids", "labels")})
    dataset = Dataset.from_dict(columns(documents), features)
    assert pa.types.is_fixed_size_list(dataset.data.column("labels").type)
    check(dataset, documents)
    check(dataset.select(range(1, 3)), documents[1:])


def test_a_sliced_table_with_a_missing_row():
    """A missing list takes no room among the values, or does in lists of fixed size: either way it has no tokens."""
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)):
        column = pa.array([[9, 9], [1, 2], None, [-100, 4]], kind).slice(1)
        index = index_of(Dataset(pa.table({"input_ids": column, "labels": column})))
        assert index.lengths.tolist() == [2, 0, 2]
        assert index.label_tokens.tolist() == [1, 0, 1]


@given(DOCUMENTS, st.sampled_from([list, np.array, torch.tensor]))
def test_any_indexable_data_set(documents, sequence):
    check([{name: sequence(value) for name, value in row.items()} for row in rows(documents)], documents)


def test_a_custom_transform_is_asked_and_not_the_table():
    dataset = Dataset.from_dict({"text": ["aaaa", "bb"]})
    dataset.set_transform(lambda batch: {"input_ids": [list(range(len(text))) for text in batch["text"]]})
    assert index_of(dataset).lengths.tolist() == [4, 2]


def test_without_labels_every_token_but_the_first_is_one():
    ids = {"input_ids": [[1, 2, 3], [4, 5]]}
    assert LengthIndex.from_dataset(Dataset.from_dict(ids)).label_tokens.tolist() == [2, 1]
    assert LengthIndex.from_dataset([{"input_ids": value} for value in ids["input_ids"]]).label_tokens.tolist() == [
        2,
        1,
    ]


def test_one_warning_counts_the_documents_dropped():
    documents = [[], [3], [-100, -100], [7, -100], [1, 2], []]
    with pytest.warns(
        UserWarning, match="5 of 6 documents are dropped: 2 without any token, 3 without any label"
    ) as seen:
        index = LengthIndex.from_dataset(Dataset.from_dict(columns(documents)))
    assert len(seen) == 1
    assert index.usable.tolist() == [4]
    assert len(index) == 6


def as_table(rows_given: list[dict]) -> Dataset:
    return Dataset.from_list(rows_given)


@pytest.mark.parametrize("stored", [as_table, list], ids=["arrow", "list"])
@pytest.mark.parametrize(
    ("rows_given", "error", "message"),
    [
        ([], ValueError, "the data set is empty"),
        ([{"text": "a", "id": 1}], ValueError, "tokenised into 'input_ids'; .* 'text', 'id'"),
        ([{"input_ids": "abc"}], TypeError, "input_ids"),
        ([{"input_ids": [0.5, 1.0]}], TypeError, "integers, got .*(double|float64)"),
        ([{"input_ids": [[1, 2], [3, 4]]}], TypeError, "integers, got"),
        ([{"input_ids": [1, 2], "labels": [0.5, 1.0]}], TypeError, "labels"),
        ([{"input_ids": [1, 2], "labels": [5, None]}, {"input_ids": [1], "labels": [5]}], TypeError, "labels"),
        (
            [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2, 3], "labels": [1, 2]}],
            ValueError,
            "document 1 has 3 tokens but 2 labels.*1 of 2 documents differ",
        ),
        (
            [{"input_ids": []}, {"input_ids": [1]}],
            ValueError,
            "none of the 2 documents.*1 without any token, 1 without",
        ),
        ([{"input_ids": [1, 2], "labels": [7, -100]}], ValueError, "none of the 1 documents can be learned from"),
    ],
)
def test_bad_data_sets(stored, rows_given, error, message):
    with pytest.raises(error) as raised:
        LengthIndex.from_dataset(stored(rows_given))
    assert re.search(message, str(raised.value))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 99, 7]}, "document 1 holds 99 at position 1 of 'input_ids'; .* 64 tokens.* 0 to 63. Was"),
        ({"input_ids": [5, -1]}, "document 1 holds -1 at position 1 of 'input_ids'"),
        (
            {"input_ids": [5, 6], "labels": [-100, 64]},
            "document 1 holds 64 at position 1 of 'labels'; .* or -100 where",
        ),
    ],
)
def test_tokens_outside_the_vocabulary_are_found_as_lengths_are_read(row: dict[str, list[int]], message: str):
    """Lists are walked anyway; what is stored has a pass of its own."""
    rows = [{"input_ids": [0, 63], "labels": [-100, 63]}, row]
    with pytest.raises(ValueError, match=message):
        LengthIndex.from_dataset(rows, 64)
    assert LengthIndex.from_dataset(rows).lengths.tolist() == [2, len(row["input_ids"])]
    assert LengthIndex.from_dataset(rows[:1], 64).lengths.tolist() == [2]


def test_tokens_that_a_transform_makes_are_looked_at():
    dataset = Dataset.from_dict({"text": ["a", "bb"]}).with_transform(
        lambda batch: {"input_ids": [[len(text)] * 3 for text in batch["text"]]}
    )
    assert LengthIndex.from_dataset(dataset, 3).lengths.tolist() == [3, 3]
    with pytest.raises(ValueError, match="document 1 holds 2 at position 0 of 'input_ids'"):
        LengthIndex.from_dataset(dataset, 2)


def test_what_is_not_a_data_set():
    split = Dataset.from_dict({"input_ids": [[1, 2]]})
    with pytest.raises(TypeError, match="a mapping with the splits 'train', 'test'"):
        LengthIndex.from_dataset(datasets.DatasetDict(train=split, test=split))
    with pytest.raises(TypeError, match=r"IterableDataset has no len\(\)"):
        LengthIndex.from_dataset(split.to_iterable_dataset())
    stream = type("Stream", (torch.utils.data.IterableDataset,), {"__len__": lambda self: 2, "__iter__": iter})()
    with pytest.raises(TypeError, match=r"Stream has no len\(\) or no indexing"):
        LengthIndex.from_dataset(stream)
    with pytest.raises(TypeError, match=r"DataFrame has no document 0 .*Dataset\.from_pandas makes one"):
        LengthIndex.from_dataset(split.to_pandas())
    with pytest.raises(TypeError, match=r"document 0 must be a mapping .* got list"):
        LengthIndex.from_dataset([[1, 2, 3]])


@pytest.mark.parametrize(
    ("lengths", "label_tokens", "error", "message"),
    [
        ([4, 3], [3], ValueError, "2 lengths, but 1 counts"),
        ([4, 3], [3, 3], ValueError, "document 1: 3 label tokens in 3 tokens"),
        ([-1], [0], ValueError, "document 0"),
        ([2.0], [1.0], TypeError, "lengths must hold integers, got float64"),
        ([[2]], [[1]], ValueError, r"shape \(1, 1\)"),
    ],
)
def test_bad_arrays(lengths, label_tokens, error, message):
    with pytest.raises(error, match=message):
        LengthIndex(np.array(lengths), np.array(label_tokens))


def test_a_sample_tells_documents_of_the_same_lengths_apart_where_rows_stay_as_they_are():
    rows: list[dict[str, Any]] = [{"input_ids": [5, number], "labels": None} for number in range(99)]
    rows.append({"input_ids": None, "labels": None})
    table = Dataset.from_list(rows)
    sample = sample_of(table)
    assert sample == sample_of(rows) == sample_of(table.with_format("torch"))
    assert sample_of(table.select(range(99, -1, -1))) != sample
    assert sample_of(table.with_transform(lambda batch: batch)) is None


def test_a_truth_value_among_tokens_is_no_token():
    with pytest.raises(TypeError, match="input_ids of document 0 must be one sequence of integers, got bool"):
        LengthIndex.from_dataset([{"input_ids": [True, 5, 6]}])
