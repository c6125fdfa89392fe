"""Parquet, Arrow, and data sets of `datasets`: rows are those that were written, and damage is counted."""

import datetime
import pickle
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_longctx.data.reading import Refused, Row, Source, SourceError, tables
from tests.data.reading.read_sources import read, refusals, values

ROWS = [
    {
        "text": f"row {number} " * number,
        "input_ids": list(range(number % 4)),
        "messages": [{"role": "user", "content": "Ü"}] * (number % 3),
        "day": datetime.date(2020, 1, 1 + number),
        "nothing": None,
    }
    for number in range(20)
]
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("day", pa.date32()),
        ("nothing", pa.null()),
    ]
)


def plain(rows):
    """Values with lists instead of arrays."""
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in values(rows)]


def write(file: Path, table: pa.Table, rows: int = 3, **options) -> Path:
    """A file of the kind that its name says; `rows` in each row group or record batch."""
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=rows, **options)
    else:
        made = pa.ipc.new_stream if "stream" in file.name else pa.ipc.new_file
        with made(file, table.schema, **options) as writer:
            writer.write_table(table, max_chunksize=rows)
    return file


NAMES = ("rows.parquet", "rows.arrow", "stream.arrow")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unit_bytes", [1, 700, 1 << 30])
def test_rows_of_tables_in_units_of_any_size(name, unit_bytes, tmp_path):
    file = write(tmp_path / name, pa.Table.from_pylist(ROWS, SCHEMA))
    units = Source(str(file)).units(unit_bytes)
    rows = [row for unit in pickle.loads(pickle.dumps(units)) for row in unit.rows()]
    assert plain(rows) == ROWS
    assert [(row.place.file, row.place.row) for row in rows] == [(str(file), n) for n in range(1, 21)]
    assert len(units) == (7 if unit_bytes == 1 else 1 if unit_bytes > 700 else len(units))
    assert len({unit.fingerprint() for unit in units}) == len(units)


@pytest.mark.parametrize("name", NAMES)
def test_large_slices_are_cut(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SLICE_BYTES", 100)
    assert plain(read(write(tmp_path / name, pa.Table.from_pylist(ROWS, SCHEMA), rows=1000))) == ROWS


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int64()])
@pytest.mark.parametrize("lists", [pa.list_, pa.large_list])
def test_lists_of_integers_are_arrays(kind, lists, tmp_path):
    column = [[1, 2, 3], [], None, [4]]
    file = write(tmp_path / "rows.parquet", pa.table({"a": pa.array(column, lists(kind))}))
    arrays = [row["a"] for row in values(read(file))]
    assert [None if array is None else array.tolist() for array in arrays] == column
    assert {array.dtype for array in arrays if array is not None} == {np.dtype(kind.to_pandas_dtype())}


def test_a_list_with_a_missing_value_stays_a_list(tmp_path):
    file = write(tmp_path / "rows.arrow", pa.table({"a": pa.array([[1, None], [2]], pa.list_(pa.int32()))}))
    assert values(read(file)) == [{"a": [1, None]}, {"a": [2]}]


def test_columns_that_datasets_keeps_as_json_are_decoded(tmp_path):
    features = datasets.Features(
        {"a": datasets.Json(), "b": datasets.List(datasets.Json()), "c": {"d": datasets.Json(), "e": datasets.Value("string")}}
    )  # fmt: skip
    rows = [
        {"a": {"x": [1, "2"]}, "b": [{"y": 1}, {"z": None}], "c": {"d": 5, "e": "6"}},
        {"a": None, "b": [], "c": {"d": [7], "e": None}},
    ]
    made = datasets.Dataset.from_list(rows, features=features)
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "saved")
    for source in (Source(str(tmp_path / "rows.parquet")), Source(str(tmp_path / "saved")), Source(made)):
        assert values(read(source)) == rows


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_python_cannot_hold_refuses_its_row_alone(name, tmp_path):
    days = pa.array([0, 200_000_000, 1], pa.int32()).cast(pa.date32())
    file = write(tmp_path / name, pa.table({"a": ["x", "y", "z"], "day": days}))
    rows = read(file)
    assert [row["a"] for row in values(rows)] == ["x", "z"]
    (refused,) = refusals(rows)
    assert refused.startswith(f"{file}, row 2: cannot be read: ")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_what_is_no_table_is_refused_as_a_whole(name, tmp_path):
    file = tmp_path / name
    for content in (b"", b"PAR1", b"ARROW1\0\0", b"text", b"\0" * 1000):
        file.write_bytes(content)
        (refused,) = read(file)
        assert isinstance(refused, Refused)
        assert refused.rows is None
        assert str(refused).startswith(f"{file}: is not ")
        assert all(unit.fingerprint() for unit in Source(str(file)).units())


@pytest.mark.parametrize("name", NAMES)
def test_a_table_that_names_a_column_twice_is_refused(name, tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert refusals(read(write(tmp_path / name, table))) == [f"{tmp_path / name}: names a column twice: 'a', 'a'"]


def test_a_damaged_row_group_is_refused_with_the_number_of_its_rows(tmp_path):
    table = pa.table({"a": [f"text {number}" for number in range(9)]})
    file = write(tmp_path / "rows.parquet", table, compression="none", use_dictionary=False, write_page_checksum=True)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"text 4", b"test 4", 1))
    for unit_bytes in (1, 1 << 30):
        rows = read(file, unit_bytes=unit_bytes)
        assert [row["a"] for row in values(rows)] == [f"text {number}" for number in (0, 1, 2, 6, 7, 8)]
        (refused,) = (row for row in rows if isinstance(row, Refused))
        assert (refused.place.row, refused.rows) == (4, 3)
        assert refused.reason.startswith("3 rows of row group 1 cannot be read: ")
        assert "CRC" in refused.reason


def test_a_batch_whose_offsets_point_anywhere_is_refused(tmp_path):
    file = write(tmp_path / "stream.arrow", pa.table({"a": ["one", "two", "three"] * 3}))
    offsets = np.array([0, 3, 6, 11], np.int32).tobytes()
    assert file.read_bytes().count(offsets) == 3
    first, second, rest = file.read_bytes().split(offsets, 2)
    file.write_bytes(first + offsets + second + np.array([0, 3, 2**30, 11], np.int32).tobytes() + rest)
    rows = read(file)
    assert [row.place.row for row in rows] == [1, 2, 3, 4, 7, 8, 9]
    (refused,) = (row for row in rows if isinstance(row, Refused))
    assert (refused.place.row, refused.rows) == (4, 3)
    assert refused.reason.startswith("3 rows of a record batch are invalid: In column 0: Invalid: ")


@pytest.mark.parametrize("name", ["rows.arrow", "stream.arrow"])
def test_an_arrow_file_cut_off_between_batches_is_noticed(name, tmp_path):
    file = write(tmp_path / name, pa.Table.from_pylist(ROWS, SCHEMA))
    (unit,) = Source(str(file)).units(1 << 30)
    content = file.read_bytes()
    for span in unit.spans:
        file.write_bytes(content[: span.stop])
        (refused,) = refusals(read(file))
        assert "without the mark of an end" in refused
    file.write_bytes(content + b"more of it")
    (refused,) = refusals(read(file))
    assert "is damaged" in refused


def test_a_file_that_changes_after_it_was_cut_into_units(tmp_path):
    for name in NAMES:
        file = write(tmp_path / name, pa.Table.from_pylist(ROWS, SCHEMA))
        *_, last = Source(str(file)).units(1)
        before = last.fingerprint()
        write(file, pa.Table.from_pylist(ROWS[:6], SCHEMA))
        rows = list(last.rows())
        assert all(isinstance(row, Refused) for row in rows)
        assert sum(row.rows for row in rows) == 2
        if name == "rows.parquet":
            assert last.fingerprint() != before
        else:
            with pytest.raises(SourceError, match="must not change while it is read"):
                last.fingerprint()


def dataset(rows: int = 20) -> datasets.Dataset:
    return datasets.Dataset.from_list(ROWS[:rows])


def test_a_dataset_in_memory_in_files_and_shuffled(tmp_path):
    dataset().save_to_disk(tmp_path / "saved")
    stored = datasets.load_from_disk(tmp_path / "saved")
    order = list(stored.shuffle(seed=1)["text"])
    for given, expected in (
        (dataset(), ROWS),
        (stored, ROWS),
        (stored.shuffle(seed=1), sorted(ROWS, key=lambda row: order.index(row["text"]))),
        (dataset().shuffle(seed=1), sorted(ROWS, key=lambda row: order.index(row["text"]))),
        (stored.with_format("numpy", columns=["input_ids"]), ROWS),
    ):
        for unit_bytes in (1, 1000, 1 << 30):
            rows = read(Source(given), unit_bytes)
            assert plain(rows) == expected
            assert [row.place.row for row in rows] == list(range(1, 21))
            sent = pickle.loads(pickle.dumps(Source(given).units(unit_bytes)))
            assert plain([row for unit in sent for row in unit.rows()]) == expected


def test_a_transform_of_a_dataset_counts():
    transformed = dataset().with_transform(lambda rows: {"length": [len(text) for text in rows["text"]]})
    assert values(read(Source(transformed), 100)) == [{"length": len(row["text"])} for row in ROWS]


def test_units_of_a_dataset_are_small_when_they_are_sent(tmp_path):
    large = datasets.Dataset.from_dict({"text": ["x" * 1000] * 10_000})
    units = Source(large).units(100_000)
    assert len(units) > 50
    assert len(pickle.dumps(units[3])) < 2 * units[3].bytes
    large.save_to_disk(tmp_path / "saved")
    stored = Source(datasets.load_from_disk(tmp_path / "saved")).units(100_000)
    assert len(pickle.dumps(stored[3])) < 5_000


def test_fingerprints_of_datasets():
    given = dataset()
    prints = [unit.fingerprint() for unit in Source(given).units(500)]
    assert len(set(prints)) == len(prints) > 1
    assert [unit.fingerprint() for unit in Source(given).units(500)] == prints
    assert not set(prints) & {unit.fingerprint() for unit in Source(given.select(range(1, 20))).units(500)}


def test_a_mapping_of_splits():
    splits = datasets.DatasetDict({"train": dataset(3), "test": dataset(2)})
    assert len(read(Source(splits))) == 3
    assert len(read(Source(splits, split="test"))) == 2
    with pytest.raises(SourceError, match=r"DatasetDict has no split 'dev'; it has 'train', 'test'"):
        Source(splits, split="dev").units()


def test_a_stream_is_one_unit():
    def generate(count):
        yield from ({"text": f"row {number}", "ids": np.arange(number)} for number in range(count))

    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"count": 5})
    (unit,) = Source(stream, name="made up").units(1)
    rows = list(unit.rows())
    assert [str(row.place) for row in rows] == [f"made up, row {n}" for n in range(1, 6)]
    assert [row["text"] for row in values(rows)] == [f"row {n}" for n in range(5)]
    (longer,) = Source(datasets.IterableDataset.from_generator(generate, gen_kwargs={"count": 6})).units()
    assert unit.fingerprint() == unit.fingerprint() != longer.fingerprint()


def test_a_stream_that_fails_is_an_error_that_names_the_row():
    def generate():
        yield {"text": "a"}
        raise KeyError("b")

    (unit,) = Source(datasets.IterableDataset.from_generator(generate), name="made up").units()
    with pytest.raises(SourceError, match=r"made up, row 2: the stream ended with KeyError: 'b'"):
        list(unit.rows())


@pytest.mark.parametrize("kind", ["one", "several"])
def test_what_save_to_disk_wrote(kind, tmp_path):
    saved = tmp_path / "saved"
    if kind == "one":
        dataset().save_to_disk(saved, num_shards=3)
    else:
        datasets.DatasetDict({"train": dataset(), "test": dataset(2)}).save_to_disk(saved)
        assert plain(read(Source(str(saved), split="test"))) == ROWS[:2]
    rows = read(Source(str(saved)), 1000)
    assert plain(rows) == ROWS
    assert all(isinstance(row, Row) and row.place.file.endswith(".arrow") for row in rows)
    with pytest.raises(SourceError, match=r"saved has no split 'dev'; it has 'train'"):
        Source(str(saved), split="dev").units()


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("{", "which save_to_disk writes, cannot be read: Expecting property name"),
        ("[]", "it has no list '_data_files'"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        (
            '{"_data_files": [{"filename": "../other.arrow"}]}',
            "names the file '../other.arrow', which is not beside it",
        ),
        ('{"_data_files": [5]}', "names the file 5, which is not beside it"),
        (
            '{"_data_files": [{"filename": "lost\\ud800.arrow"}]}',
            "names the file 'lost\\ud800.arrow', which is not beside it",
        ),
        ('{"_data_files": [{"filename": "state.json"}, {"filename": "state.json"}]}', "the file 'state.json', twice"),
        ('{"_data_files": []}', "holds nothing to read"),
    ],
)
def test_what_save_to_disk_wrote_is_damaged(state, expected, tmp_path):
    dataset().save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(SourceError, match=r"state\.json|nothing") as raised:
        Source(str(tmp_path / "saved")).units()
    assert expected in str(raised.value)
