"""Where documents come from: a folder of `datasets`, files, or the embedded corpus -> tokenised splits.

A split has a column `input_ids` and optionally `labels`; a text column is tokenised once, through `datasets`' own
cache, with the special tokens that the tokenizer itself adds (for Llama a first token and no last one: where a model
must learn to stop, add an end token to the text, or give input_ids). Nothing is sent between ranks.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""File ending -> loader of `datasets`."""


def load_splits(
    path: str | Path | dict[str, list[str]],
    splits: Iterable[str],
    text_column: str | None = None,
    tokenizer: Any = None,
) -> dict[str, Dataset]:
    """Loads the named splits and tokenises them where a text column is named.

    Args:
        path: a directory made by `save_to_disk` (with splits, or one data set that counts as the split "train"), or
            split -> files.
        splits: names of splits to load.
        text_column: column to tokenise with `tokenizer`; None: there is a column `input_ids` already.
        tokenizer: a transformers tokenizer.

    Raises:
        ValueError: a split or column is missing, or files are of another kind; says what there is.
    """
    if isinstance(path, dict):
        file = Path(next(iter(path.values()))[0])
        if file.suffix not in READERS:
            raise ValueError(
                f"{file} is of a kind that is not read: valid are {', '.join(READERS)}. Pickles are never read, they run code"
            )
        loaded = load_dataset(READERS[file.suffix], data_files=path)
    else:
        loaded = load_from_disk(str(path))
    if not isinstance(loaded, DatasetDict):
        loaded = DatasetDict({"train": loaded})
    found = {}
    for split in splits:
        if split not in loaded:
            raise ValueError(f"{path} has no split {split!r}; its splits are {', '.join(map(repr, loaded))}")
        found[split] = loaded[split] if text_column is None else _tokenised(loaded[split], text_column, tokenizer)
    return found


def _tokenised(dataset: Dataset, text_column: str, tokenizer: Any) -> Dataset:
    if text_column not in dataset.column_names:
        raise ValueError(
            f"there is no column {text_column!r} to tokenise; the columns are {', '.join(map(repr, dataset.column_names))}"
        )

    def tokenise(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # A document may be longer than the length that a tokenizer was told to warn about; it is never truncated.
        return {"input_ids": tokenizer(rows[text_column], verbose=False)["input_ids"]}

    return dataset.map(tokenise, batched=True, remove_columns=dataset.column_names, desc="tokenising")
