"""What a source may name: files, patterns, lists, directories in the layout of the hub; and what it says of anything else."""

import json
from pathlib import Path

import datasets
import pytest

from hf_longctx.data.reading import Source, SourceError
from hf_longctx.data.reading.source import READERS
from hf_longctx.settings import FILE_KINDS
from tests.data.reading.read_sources import read, values


def lines(file: Path, *rows: int) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"a": row}) + "\n" for row in rows))
    return str(file)


def numbers(path, **arguments) -> list[int]:
    return [row["a"] for row in values(read(Source(path, **arguments)))]


def test_files_patterns_and_lists(tmp_path, monkeypatch):
    first, second = lines(tmp_path / "b.jsonl", 1, 2), lines(tmp_path / "sub" / "a.ndjson", 3)
    assert numbers([second, first]) == [3, 1, 2]
    assert numbers((Path(first),)) == [1, 2]
    assert numbers(str(tmp_path / "*.jsonl")) == [1, 2]
    assert numbers(str(tmp_path / "**" / "*.*json*")) == [1, 2, 3]
    assert numbers({"train": [first], "test": second}) == [1, 2]
    assert numbers({"train": [first], "test": second}, split="test") == [3]
    monkeypatch.chdir(tmp_path)
    (row, _) = read(Source("b.jsonl"))
    assert str(row.place) == "b.jsonl, line 1"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert numbers("~/b.jsonl") == [1, 2]
    lines(tmp_path / "odd [1].jsonl", 7)
    assert numbers("odd [1].jsonl") == [7]


def test_a_directory_is_read_by_the_rules_of_load_dataset(tmp_path):
    root = tmp_path / "set"
    lines(root / "data" / "train-00000-of-00002.jsonl", 1)
    lines(root / "data" / "train-00001-of-00002.jsonl", 2)
    lines(root / "data" / "validation-00000-of-00001.jsonl", 3)
    for split in ("train", "validation"):
        expected = list(datasets.load_dataset(str(root), split=split, cache_dir=tmp_path / "cache")["a"])
        assert numbers(str(root), split=split) == expected
    (row, _) = read(Source(str(root)))
    assert row.place.file == str(root / "data" / "train-00000-of-00002.jsonl")
    with pytest.raises(SourceError, match=r"set has no split 'test'; it has 'train', 'validation'"):
        Source(str(root), split="test").units()


def test_a_directory_without_splits_is_the_split_train(tmp_path):
    lines(tmp_path / "set" / "b.jsonl", 2)
    lines(tmp_path / "set" / "a.jsonl", 1)
    (tmp_path / "set" / "notes.txt").write_text("not data")
    assert numbers(str(tmp_path / "set")) == [1, 2]
    with pytest.raises(SourceError, match=r"set has no split 'test'; it has 'train'"):
        Source(str(tmp_path / "set"), split="test").units()


@pytest.mark.parametrize("left_out", ["extra.jsonl", "train.csv"])
def test_a_file_that_load_dataset_would_leave_out_silently_is_named(left_out, tmp_path):
    lines(tmp_path / "train.jsonl", 1)
    lines(tmp_path / "test.jsonl", 2)
    lines(tmp_path / left_out, 3)
    with pytest.raises(SourceError, match=rf"load_dataset would not read \S*{left_out}"):
        Source(str(tmp_path)).units()


CARD = """---
configs:
- config_name: semicolons
  data_files:
  - split: train
    path: first.csv
  sep: ";"
- config_name: commas
  data_files:
  - split: train
    path: [second.csv, third.csv]
- config_name: odd
  data_files: first.csv
  skiprows: 2
- config_name: unseparable
  data_files: first.csv
  sep: "--"
---
"""


def test_a_readme_says_which_files_a_subset_has_and_how_they_are_separated(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "first.csv").write_text("a;b\n1;2\n")
    (tmp_path / "second.csv").write_text("a,b\n3,4\n")
    (tmp_path / "third.csv").write_text("a,b\n5,6\n")
    assert values(read(Source(str(tmp_path), subset="semicolons"))) == [{"a": "1", "b": "2"}]
    assert values(read(Source(str(tmp_path), subset="commas"))) == [{"a": "3", "b": "4"}, {"a": "5", "b": "6"}]
    for subset, message in (
        (None, "Config name is missing"),
        ("none", "'none' not found. Available: .*semicolons"),
        ("odd", "to be read with skiprows=2, which is not known here. Load it with load_dataset"),
        ("unseparable", "fields cannot be separated by '--'"),
    ):
        with pytest.raises(SourceError, match=message):
            Source(str(tmp_path), subset=subset).units()


def test_parquet_that_datasets_wrote_in_the_layout_of_the_hub(tmp_path):
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "messages": [[{"role": "user", "content": "c"}]] * 2})
    (tmp_path / "data").mkdir()
    made.to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    assert values(read(Source(str(tmp_path)))) == list(made)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lost.jsonl", "there is no file or directory 'lost.jsonl'"),
        ("lost/*.jsonl", "there is no file or directory 'lost/"),
        ("/lost", "there is no file or directory '/lost'"),
        ("here.pkl", r"here.pkl ends in .pkl; valid are .jsonl, .ndjson, .json, .*pickles are never read"),
        ("here.jsonl.gz", r"ends in .gz; valid are .*Compressed files are to be unpacked first"),
        ("here", "here ends in nothing; valid are"),
        ("link.jsonl", "link.jsonl is no file, or a link to nothing"),
        ("empty", "finds no data set 'empty'"),
        ([], "holds nothing to read"),
        (5, "5 is no path, Dataset or IterableDataset, nor a list or a mapping of them"),
        ({"test": []}, "dict has no split 'train'; it has 'test'"),
    ],
)
def test_what_cannot_be_read_is_explained(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("here.pkl", "here.jsonl.gz", "here"):
        Path(name).write_bytes(b"\x80\4\x95")
    Path("link.jsonl").symlink_to("nothing")
    Path("empty").mkdir()
    with pytest.raises(SourceError, match=message):
        Source(path).units()


def test_what_documents_may_be(tmp_path, monkeypatch):
    file = lines(tmp_path / "a.jsonl", 1)
    assert values(read(Source(file, documents="files"))) == [{"text": '{"a": 1}\n'}]
    for arguments, message in (
        ({"path": file, "documents": "lines"}, "documents is 'lines'; valid are rows, files, directories"),
        ({"path": file, "documents": "directories"}, "is a file, but with documents='directories'"),
        ({"path": str(tmp_path), "documents": "files", "pattern": "*.py"}, r"holds nothing to read: .*'\*\.py'"),
        ({"path": str(tmp_path), "documents": "files", "pattern": "a**/b"}, "the pattern 'a\\*\\*/b' cannot be used"),
        ({"path": "owner/name", "documents": "files"}, "there is no file or directory 'owner/name'"),
    ):
        with pytest.raises(SourceError, match=message):
            Source(**arguments).units()


def test_a_name_that_is_a_kind_of_file_for_load_dataset_is_no_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", 1)
    for name in ("json", "text"):
        with pytest.raises(SourceError, match=f"there is no file or directory '{name}'"):
            Source(name).units()


def test_a_name_that_the_hub_does_not_have(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        SourceError, match=r"no file or directory 'owner/name' .*, and datasets finds no data set 'owner/name'"
    ):
        Source("owner/name").units()


def test_a_data_set_of_the_hub_that_is_only_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    lines(tmp_path / "pets" / "train.jsonl", 1, 2, 3)
    datasets.load_dataset(str(tmp_path / "pets"))  # leaves what loading "pets" from the hub would leave
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert numbers("pets") == [1, 2, 3]
    with pytest.raises(SourceError, match=r"pets cannot be loaded from the cache: ValueError: Unknown split \"test\""):
        Source("pets", split="test").units()


def test_a_text_beside_a_split_of_texts_is_no_silent_loss(tmp_path):
    for name in ("train.txt", "extra.txt"):
        (tmp_path / name).write_text(name)
    with pytest.raises(SourceError, match=r"load_dataset would not read \S*extra\.txt"):
        Source(str(tmp_path)).units()
    assert len(list(read(Source(str(tmp_path), documents="files")))) == 2


def test_a_configuration_may_name_every_kind_of_file_that_is_read():
    assert set(FILE_KINDS) == READERS.keys()


def test_texts_of_two_endings_are_read_by_their_names_and_none_is_left_out_silently(tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    with pytest.raises(
        SourceError,
        match=r'load_dataset would not read \S*c\.md.*of several kinds \["directory/\*\.txt", .*documents=files',
    ):
        Source(str(tmp_path)).units()
    assert len(list(read(Source([str(tmp_path / "*.txt"), str(tmp_path / "*.md")])))) == 3
