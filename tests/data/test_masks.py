"""Masks that leave tokens out are refused where there are no labels, in rows as in tables; and what a table is refused for is
what its rows are refused for, however many are looked at at once."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_longctx.data import list_columns, packed
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.masks import KINDS, MASKS, mask_reason
from hf_longctx.data.packed import packed_reason
from hf_longctx.data.tokenisation import Document, Tokenisation
from hf_longctx.inference.evaluation.losses import as_documents

TOKENS = {"input_ids": [1, 2, 3]}


class Rows(torch.utils.data.Dataset):
    """Rows without names of columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: torch.tensor(value) for name, value in self.rows[number].items()}


def data_sets(rows: list[dict[str, Any]]) -> list[Any]:
    table = Dataset.from_list(rows)
    return [rows, Rows(rows), table, table.with_format("torch"), table.with_transform(lambda batch: batch)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("one", [1, True, 1.0])
def test_a_mask_counts_wherever_rows_come_from_and_only_without_labels(name: str, one: Any):
    whole, less = ({**TOKENS, name: [one, one, last]} for last in (one, type(one)(0)))
    for dataset in data_sets([whole, less]):
        with pytest.raises(
            ValueError, match=f" 1: column '{name}' leaves tokens out, .*: masks are not read. Valid: labels"
        ):
            LengthIndex.from_dataset(dataset)
    for dataset in data_sets([whole] * 2) + data_sets([{**less, "labels": [-100, 2, 3]}] * 2):
        assert LengthIndex.from_dataset(dataset).lengths.tolist() == [3, 3]
    table = Dataset.from_list([less, whole])
    assert LengthIndex.from_dataset(table.select([1])).lengths.tolist() == [3]
    with pytest.raises(ValueError, match="document 0: column"):
        as_documents([less])
    document, refused = Tokenisation(None, "tokens")([whole, less])
    assert isinstance(document, Document)
    assert document.input_ids.tolist() == [1, 2, 3]
    assert refused == mask_reason(less)


@pytest.mark.parametrize("name", ["label_ids", "label"])
def test_labels_by_another_name_are_refused_unless_there_are_labels(name: str):
    row: dict[str, Any] = {**TOKENS, name: [-100, 2, 3]}
    for dataset in data_sets([row, row]):
        with pytest.raises(
            ValueError, match=f"column '{name}' holds labels, which are read from a column 'labels' alone"
        ):
            LengthIndex.from_dataset(dataset)
    for dataset in data_sets([{**row, "labels": [-100, 2, 3]}] * 2) + data_sets([{**TOKENS, "label": 1}] * 2):
        assert LengthIndex.from_dataset(dataset).lengths.tolist() == [3, 3]


def test_a_mask_that_is_none_is_none_and_one_that_cannot_be_read_is_refused():
    assert not mask_reason({**TOKENS, "attention_mask": None})
    assert not mask_reason({**TOKENS, "attention_mask": [[1, 1, 1]]})
    for value in ([[1, 1], [1]], "111", [1, 1, 0]):
        assert mask_reason({**TOKENS, "attention_mask": value})


@pytest.mark.parametrize("labels", [{}, {"labels": [1, 2, 3]}])
@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_several_kinds_are_refused_beside_labels_too(name: str, labels: dict[str, Any]):
    row: dict[str, Any] = {**TOKENS, **labels}
    one, several = ({**row, name: kinds} for kinds in ([0, 0, 0], [0, 1, 1]))
    for dataset in data_sets([one, several]):
        with pytest.raises(ValueError, match=f" 1: column '{name}' says that tokens are of several kinds, and is not"):
            LengthIndex.from_dataset(dataset)
    for dataset in data_sets([one, one]):
        assert LengthIndex.from_dataset(dataset).lengths.tolist() == [3, 3]
    assert LengthIndex.from_dataset(Dataset.from_list([one, several, one]).select([0, 2])).lengths.tolist() == [3, 3]
    for value in (None, "text", [0.0, 0.0]):
        assert not mask_reason({**row, name: value})


def test_columns_that_a_format_leaves_out_are_not_read():
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4], "attention_mask": [0, 1, 1, 1]}
    table = Dataset.from_list([row] * 2)
    for columns, learned in ((["input_ids"], 3), (["input_ids", "labels"], 1)):
        index = LengthIndex.from_dataset(table.with_format("torch", columns=columns))
        assert index.lengths.tolist() == [4, 4]
        assert index.label_tokens.tolist() == [learned] * 2
    with pytest.raises(ValueError, match="hides tokens"):
        LengthIndex.from_dataset(table.with_format("torch"))


@pytest.mark.parametrize("one", [1, True, 1.0])
def test_a_mask_that_hides_tokens_from_later_ones_is_refused_beside_labels_too(one: Any):
    zero = type(one)(0)
    row: dict[str, Any] = {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]}
    padded, left, inside = (
        {**row, "attention_mask": mask}
        for mask in ([one, one, zero, zero], [zero, zero, one, one], [one, zero, one, one])
    )
    for hidden in (left, inside):
        for dataset in data_sets([padded, hidden]):
            with pytest.raises(ValueError, match=r" 1: column 'attention_mask' hides tokens .* padding at their end"):
                LengthIndex.from_dataset(dataset)
        with pytest.raises(ValueError, match="document 0: column"):
            as_documents([hidden])
    for dataset in data_sets([padded, {**row, "attention_mask": [zero] * 4}, padded]):
        assert LengthIndex.from_dataset(dataset).lengths.tolist() == [4] * 3
    for value in ([[1, 1], [1]], "1111", [[0, 1], [1, 1]]):
        assert mask_reason({**row, "attention_mask": value})


def drawn_row(name: str, random: np.random.Generator) -> dict[str, Any]:
    """One document or several, of 1 to 4 tokens each, and a column that says so, is missing, or says something else."""
    lengths = random.integers(1, 5, random.choice([1, 1, 2]))
    tokens, bounds = int(lengths.sum()), np.cumsum([0, *lengths])
    which = np.repeat(np.arange(len(lengths)), lengths)
    column: Any = which + 1
    if name in packed.POSITIONS:
        column = np.arange(tokens) - bounds[which]
    elif name in packed.LENGTHS:
        column = lengths
    elif name in packed.BOUNDS:
        column = bounds
    elif name in MASKS:
        column = (
            random.choice([which + 1, random.integers(0, 2, tokens)]) if random.random() < 0.3 else np.ones(tokens, int)
        )
    elif name in KINDS:
        column = which
    damaged = column.tolist()[: -1 if random.random() < 0.1 else None]
    return {"input_ids": [5] * tokens, name: None if random.random() < 0.1 else damaged}


def refusal_of(dataset: Dataset) -> str:
    try:
        LengthIndex.from_dataset(dataset)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:.*documents are dropped")
@pytest.mark.parametrize("name", ["position_ids", "seq_lengths", "cu_seqlens", "segment_ids", *MASKS, *KINDS])
def test_tables_are_refused_for_what_their_rows_are(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(list_columns, "VALUES_AT_ONCE", 7)
    random, refused = np.random.default_rng(len(name)), 0
    for _ in range(20):
        rows = [drawn_row(name, random) for _ in range(random.integers(1, 6))] + [{"input_ids": [5, 5], name: None}]
        if random.random() < 0.3:
            rows = [row | {"labels": row["input_ids"]} for row in rows]
        several = [packed_reason(row, len(row["input_ids"])) for row in rows]
        reasons = several if any(several) else list(map(mask_reason, rows))
        expected = next((f"row {number}: {reason}" for number, reason in enumerate(reasons) if reason), "")
        refused += bool(expected)
        assert refusal_of(Dataset.from_list(rows)) == expected
    assert 0 < refused < 20


def test_rows_that_say_that_they_are_one_document_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed, "_reason", lambda *row: pytest.fail("a row was looked at"))
    columns: dict[str, Any] = {
        "attention_mask": [True] * 3,
        "segment_ids": [0.5] * 3,
        "seq_lengths": [3],
        "cu_seqlens": [0, 3],
    }
    for name, value in columns.items():
        table = Dataset.from_list([{**TOKENS, name: value}] * 3)
        assert LengthIndex.from_dataset(table).lengths.tolist() == [3] * 3
