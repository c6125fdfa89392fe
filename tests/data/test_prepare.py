"""Sources -> a prepared data set: what is in it, what is left out, and what a second run costs."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from hf_longctx.data.length_index import LengthIndex, refuse_tokens_outside
from hf_longctx.data.page_cache import MappedFiles
from hf_longctx.data.prepare import Part, PrepareError, prepare
from hf_longctx.data.prepared import REFUSED, load_prepared
from hf_longctx.data.reading.source import Source
from hf_longctx.data.reading.unit import whole_file
from hf_longctx.data.tokenisation import Tokenisation


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from hf_longctx.data.cache import default_cache_dir
    from hf_longctx.data.embedded.embedded_model import prepare_model

    return AutoTokenizer.from_pretrained(prepare_model(default_cache_dir()))


TEXTS = [f"Document {number} " + "says the same again. " * (number % 7 + 1) for number in range(300)]


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def with_ends(tokenizer, texts) -> list[list[int]]:
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]


def part(tokenizer, path: Path, **limits) -> Part:
    return Part(Source(str(path)), Tokenisation(tokenizer), **limits)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_documents_are_the_tokenizers_own_in_the_order_of_the_rows(tokenizer, texts, tmp_path, workers):
    dataset = load_prepared(prepare([part(tokenizer, texts)], tmp_path / "cache", workers=workers, unit_bytes=2000))
    assert len(dataset.manifest.shards) > 8
    expected = with_ends(tokenizer, TEXTS)
    assert dataset["input_ids"][:] == expected
    assert dataset.column_names == ["input_ids"]
    assert dataset.index.lengths.tolist() == [len(ids) for ids in expected]
    assert dataset.index.label_tokens.tolist() == [len(ids) - 1 for ids in expected]
    assert LengthIndex.from_dataset(dataset) is dataset.index
    assert dataset.manifest.largest_id == max(map(max, expected))
    [counts] = dataset.manifest.sources
    assert (counts.documents, counts.tokens, counts.bad_rows, counts.empty_rows) == (300, sum(map(len, expected)), 0, 0)


@pytest.mark.processes
def test_any_number_of_workers_makes_the_same(tokenizer, texts, tmp_path):
    folders = [
        prepare([part(tokenizer, texts)], tmp_path / f"of {workers}", workers=workers, unit_bytes=2000)
        for workers in (1, 2)
    ]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert folders[0].name == folders[1].name
    for name in names[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_what_is_in_the_cache_is_not_made_again(tokenizer, texts, tmp_path):
    first = prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "documents").iterdir()}
    assert prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "documents").iterdir()} == made


def test_a_changed_source_is_another_data_set_even_with_the_same_size_and_time(tokenizer, texts, tmp_path):
    first = prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1)
    before = texts.stat()
    texts.write_text(texts.read_text().replace("Document 7 ", "Document 8 "))
    os.utime(texts, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert texts.stat().st_size == before.st_size
    second = load_prepared(prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1))
    assert second.directory != first
    assert second[7]["input_ids"] == with_ends(tokenizer, [TEXTS[7].replace("Document 7", "Document 8")])[0]
    assert second.index.fingerprint != load_prepared(first).index.fingerprint  # same lengths, another content
    assert second.index.lengths.tolist() == load_prepared(first).index.lengths.tolist()


def test_an_interrupted_run_leaves_nothing_that_looks_whole(tokenizer, texts, tmp_path):
    first = load_prepared(prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1, unit_bytes=2000))
    for number, index in enumerate(sorted((tmp_path / "cache" / "documents").glob("*.index"))):
        index.unlink() if number % 2 else index.write_bytes(index.read_bytes()[:-9])  # it is written last
    for shard in (tmp_path / "cache" / "documents").glob("*.arrow"):
        shard.chmod(0o644)
        os.truncate(shard, shard.stat().st_size // 2)
    again = load_prepared(
        prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1, unit_bytes=2000, output=tmp_path / "again")
    )
    assert again["input_ids"][:] == with_ends(tokenizer, TEXTS)
    assert again.index.fingerprint == first.index.fingerprint


def test_a_shard_that_was_cut_in_the_cache_is_made_again(tokenizer, texts, tmp_path):
    folder = prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1)
    [shard] = (tmp_path / "cache" / "documents").glob("*.arrow")
    shard.chmod(0o644)
    os.truncate(shard, shard.stat().st_size // 2)  # the prepared folder's too: it is one file
    with pytest.raises(ValueError, match="is damaged"):
        load_prepared(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    again = load_prepared(prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1))
    assert again["input_ids"][:] == with_ends(tokenizer, TEXTS)


def test_flipped_bits_in_what_is_read_at_once_are_seen(tokenizer, texts, tmp_path):
    # Of the index any; of a shard those of its offsets and its metadata. Never a crash.
    folder = prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1, output=tmp_path / "output")
    drawn = np.random.default_rng(0)
    expected = load_prepared(folder).index.lengths
    for name in ("index.arrow", "shard-00000.arrow"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()  # not the cache's
        for place in drawn.integers(0, len(content), 60):
            (folder / name).write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
            try:
                loaded = load_prepared(folder)
            except ValueError as error:
                assert "is damaged" in str(error)  # noqa: PT017 - it may also not matter
                continue
            assert loaded.index.lengths.tolist() == expected.tolist()
            assert [len(row) for row in loaded["input_ids"][:]] == expected.tolist()
        (folder / name).write_bytes(content)


def test_a_folder_inside_its_source_is_refused(tokenizer, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("one two three")
    inside = Part(Source(str(tmp_path / "files"), documents="files"), Tokenisation(tokenizer))
    with pytest.raises(PrepareError, match="lies in the source"):
        prepare([inside], tmp_path / "cache", output=tmp_path / "files" / "prepared")


def test_bad_rows_are_an_error_or_counted_and_listed(tokenizer, tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        '{"text": "one good row"}\n{"text": \n{"body": "no text"}\n{"text": ""}\n\n{"text": "a second one"}\n'
    )
    with pytest.raises(PrepareError, match=r"mixed\.jsonl, line 2: .*mixed\.jsonl, line 3: .*bad_rows='skip'"):
        prepare([part(tokenizer, path)], tmp_path / "cache", workers=1)
    dataset = load_prepared(prepare([part(tokenizer, path)], tmp_path / "cache", workers=1, bad_rows="skip"))
    [counts] = dataset.manifest.sources
    assert (counts.documents, counts.bad_rows, counts.empty_rows) == (2, 2, 1)
    refused = [json.loads(line) for line in (dataset.directory / REFUSED).read_text().splitlines()]
    assert [row["place"].rpartition(", ")[2] for row in refused] == ["line 2", "line 3", "line 4"]


def test_nothing_left_is_an_error_that_says_why(tokenizer, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(PrepareError, match=r"no document is left .*1 with nothing to learn.*empty\.jsonl, line 1"):
        prepare([part(tokenizer, tmp_path / "empty.jsonl")], tmp_path / "cache", workers=1)


def test_limits_take_the_first_documents(tokenizer, texts, tmp_path):
    lengths = [len(ids) for ids in with_ends(tokenizer, TEXTS)]
    limited = part(tokenizer, texts, max_documents=7)
    few = load_prepared(prepare([limited], tmp_path / "cache", workers=1, unit_bytes=2000))
    assert len(list((tmp_path / "cache" / "documents").glob("*.arrow"))) == 1  # what is not wanted is not tokenised
    assert few.index.lengths.tolist() == lengths[:7]
    assert len(few) == 7
    budget = sum(lengths[:9]) + 1
    some = load_prepared(prepare([part(tokenizer, texts, max_tokens=budget)], tmp_path / "cache", workers=1))
    assert some.index.lengths.tolist() == lengths[:9]


def test_sources_with_and_without_labels_stand_side_by_side(tokenizer, texts, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Two and two?", "completion": " Four, as always."}) + "\n")
    dataset = load_prepared(prepare([part(tokenizer, texts), part(tokenizer, pairs)], tmp_path / "cache", workers=1))
    assert dataset[0]["labels"] == dataset[0]["input_ids"]
    learned = [token for token in dataset[300]["labels"] if token != -100]
    assert tokenizer.decode(learned).startswith(" Four, as always.")
    assert dataset.source.tolist() == [0] * 300 + [1]
    assert dataset.index.label_tokens[300] == len(learned)
    scanned = LengthIndex(*_scanned(dataset))
    assert scanned.label_tokens.tolist() == dataset.index.label_tokens.tolist()


def _scanned(dataset) -> tuple[np.ndarray, np.ndarray]:
    rows = dataset[:]
    learned = [sum(label != -100 for label in labels[1:]) for labels in rows["labels"]]
    return np.array([len(ids) for ids in rows["input_ids"]]), np.array(learned)


def test_an_output_folder_that_holds_something_else_is_left_alone(tokenizer, texts, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    with pytest.raises(PrepareError, match="exists and holds something else"):
        prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1, output=output)


def test_a_damaged_folder_is_named(tokenizer, texts, tmp_path):
    folder = prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1, output=tmp_path / "output")
    (folder / "shard-00000.arrow").unlink()
    with pytest.raises(ValueError, match=r"is damaged: .*Remove it and prepare it again"):
        load_prepared(folder)
    with pytest.raises(ValueError, match="is no prepared data set"):
        load_prepared(tmp_path)


def test_a_prepared_data_set_travels_to_other_processes(tokenizer, texts, tmp_path):
    import pickle

    dataset = load_prepared(prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1))
    sent = pickle.dumps(dataset)
    assert len(sent) < 50_000  # its place, not its documents
    assert pickle.loads(sent)[5] == dataset[5]


def test_files_that_folders_share_are_not_to_be_written_and_what_is_written_into_them_is_said(
    tokenizer, texts, tmp_path
):
    folder = prepare([part(tokenizer, texts)], tmp_path / "cache", workers=1, unit_bytes=8000)
    first, second, *_ = sorted(folder.glob("shard-*"))
    assert not first.stat().st_mode & 0o222
    files = MappedFiles(load_prepared(folder))
    assert not files.changed()
    replacement = tmp_path / "replacement"
    replacement.write_bytes(second.read_bytes())
    os.replace(replacement, second)  # who has mapped the other one keeps it
    first.chmod(0o644)
    with first.open("r+b") as file:
        file.seek(first.stat().st_size // 2)
        file.write(b"others")
    os.utime(first, (1, 1))
    assert files.changed() == [str(first)]
    assert not files.changed()
    assert not MappedFiles(["no data set"]).changed()


def test_labels_count_in_what_a_vocabulary_must_hold(tmp_path):
    """One outside of it was found in the middle of a step, or, with tensor parallelism, not at all."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 50000, -100]}\n')
    dataset = load_prepared(prepare([Part(Source(str(path)), Tokenisation(None))], tmp_path / "cache", workers=1))
    assert dataset.manifest.largest_id == 50000
    refuse_tokens_outside(dataset, 50001)
    with pytest.raises(ValueError, match=r"labels.*50000"):
        refuse_tokens_outside(dataset, 50000)


def test_a_wildcard_reads_no_file_twice(tmp_path):
    """`**` matches folders too, and those are read whole."""
    for name in ("a", "sub/b", "sub/deep/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    for pattern in ("**/*", "**", "**/*.jsonl"):
        units = Source(str(tmp_path / pattern)).units()
        assert sorted(row.values["text"] for unit in units for row in unit.rows()) == ["a", "sub/b", "sub/deep/c"]


def test_a_table_that_changed_within_a_process_is_another_whatever_its_date_says(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("text\none\n")
    status, before = path.stat(), whole_file(str(path))
    path.write_text("text\ntwo\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert whole_file(str(path)) != before
