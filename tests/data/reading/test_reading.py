"""Files of text formats become rows with their places, and what is malformed is refused with its line."""

import csv
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.data.reading import Place, Refused, Row, Source, SourceError, json_lines, json_values, unit
from tests.data.reading.read_sources import read, refusals, values

OBJECTS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)  # fmt: skip


@given(rows=st.lists(OBJECTS, max_size=8), blank=st.sampled_from(["", "\n", " \t\n"]), unit_bytes=st.integers(1, 60))
def test_json_lines_are_read_in_units_of_any_size(rows, blank, unit_bytes, tmp_path_factory):
    file = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n{blank}" for row in rows), encoding="utf-8")
    units = Source(str(file)).units(unit_bytes)
    rows_read = [row for piece in units for row in piece.rows()]
    lines = [number for number, line in enumerate(file.read_text().split("\n"), 1) if line.strip()]
    assert [row.values for row in rows_read] == rows
    assert [row.place for row in rows_read] == [Place(str(file), line=line) for line in lines]
    assert sum(piece.bytes for piece in units) == file.stat().st_size


def test_a_last_line_without_an_end_a_byte_order_mark_and_crlf(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert values(read(file)) == [{"a": 1}, {"a": 2}]
    assert [row.place.line for row in read(file, unit_bytes=4)] == [1, 3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "is not JSON: EOF while parsing an object at column 7"),
        (b'{"a": \xff}', "is not JSON: expected value at column 7"),
        (b'{"a": "\xff"}', "is not JSON: invalid unicode code point at column 8"),
        (b'{"a": "\\ud800"}', "is not JSON: unexpected end of hex escape at column 14"),
        (b'{"a": "\0"}', "is not JSON: control character"),
        (b'{"a": 1} x', "is not JSON: trailing characters at column 10"),
        (b"5", "holds a number (5), but a row is an object: column names and their values"),
        (b"NaN", "holds a number (nan), but"),
        (b"null", "holds null (None), but"),
        (b'["' + b"x" * 100, "is not JSON: EOF while parsing a string"),
        (b'["' + b"x" * 100 + b'"]', "holds a list (['" + "x" * 38 + "), but"),
        (b"[" * 100_000, "is not JSON: recursion limit exceeded"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: number out of range"),
    ],
)
def test_a_malformed_line_is_refused_alone(line, reason, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    before, refused, after = read(file)
    assert isinstance(refused, Refused)
    assert str(refused).startswith(f"{file}, line 3: {reason}")
    assert refused.rows == 1
    assert (before.values, after.values, after.place.line) == ({"a": 1}, {"a": 2}, 4)


def test_what_json_allows_is_read(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1, "a": NaN, "b": -Infinity, "c": 1e999, "d": "\\ud83d\\ude42\\u0000"}\n')
    ((row),) = values(read(file))
    assert repr(row) == "{'a': nan, 'b': -inf, 'c': inf, 'd': '🙂\\x00'}"


def test_a_line_that_is_too_long_is_refused_without_being_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LONGEST_ROW", 20)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' + "x" * 50 + '\n{"a": 2}\n' + "y" * 20 + "\n" + '{"a": 3}')
    for unit_bytes in (1, 30, 1000):
        rows_read = read(file, unit_bytes=unit_bytes)
        assert values(rows_read) == [{"a": 1}, {"a": 2}, {"a": 3}]
        assert refusals(rows_read) == [
            f"{file}, line {n}: has 20 bytes or more, but a line may have fewer only" for n in (2, 4)
        ]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' * 10)
    *_, last = Source(str(file)).units(30)
    file.write_text('{"a": 1}\n')
    for reading in (lambda: list(last.rows()), last.fingerprint):
        with pytest.raises(
            SourceError, match=r"rows.jsonl had 90 bytes or more and is shorter now: it must not change"
        ):
            reading()
    file.unlink()
    with pytest.raises(SourceError, match=r"rows.jsonl cannot be read: .*No such file"):
        list(last.rows())


@given(
    rows=st.lists(OBJECTS, max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    block=st.integers(1, 20),
    as_list=st.booleans(),
    ascii_only=st.booleans(),
)
def test_json_of_any_form_is_read_piece_by_piece(rows, indent, block, as_list, ascii_only, tmp_path_factory):
    file = tmp_path_factory.mktemp("json") / "rows.json"
    texts = [json.dumps(row, indent=indent, ensure_ascii=ascii_only) for row in rows]
    whole = json.dumps(rows, indent=indent, ensure_ascii=ascii_only) if as_list else "\n".join(texts)
    file.write_text(whole, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_values, "BLOCK", block)
        rows_read = read(file)
    assert refusals(rows_read) == []
    assert values(rows_read) == rows


def test_values_of_a_list_are_refused_alone_and_text_that_is_no_json_ends_the_file(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('[{"a": 1},\n 5,\n {"a":\n "\\ud800"},\n {"a": 2}\n {"a": 3}]')
    rows_read = read(file)
    assert values(rows_read) == [{"a": 1}, {"a": 2}]
    assert refusals(rows_read) == [
        f"{file}, row 2, line 2: holds a number (5), but a row is an object: column names and their values",
        f"{file}, row 3, line 3: is not JSON: unexpected end of hex escape at line 2 column 9",
        f"{file}, row 5, line 6: is not JSON: expected `,` or `]` after a list's value, found '{{\"a\": 3}}]'; from here on, "
        "the file is not read",
    ]
    assert [row.rows for row in rows_read if isinstance(row, Refused)] == [1, 1, None]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1}', "expected `,` or `]` after a list's value, found the end"),
        ('[{"a": 1},]', "expected a value after `,`, found `]`"),
        ('[{"a": 1}] 7', "the list has ended, but '7' follows"),
        ('{\n"a": 1', "Expecting ',' delimiter in line 2"),
        ('{\n"a": "x', "Unterminated string starting at in line 2"),
        ('[{"a": tru}]', "Expecting value in line 1"),
        ("[" * 100_000, "values are nested too deep"),
        ("[", "Expecting value in line 1"),
    ],
)
def test_json_that_ends_in_the_middle(text, reason, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(text)
    *_, last = read(file)
    assert isinstance(last, Refused)
    assert last.reason == f"is not JSON: {reason}; from here on, the file is not read"


def test_json_with_a_row_in_each_line_is_cut_into_units(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("\n" + '{"a": 1}\n' * 10)
    assert len(Source(str(file)).units(20)) == 4
    assert values(read(file, unit_bytes=20)) == [{"a": 1}] * 10


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=6), delimiter=st.sampled_from([",", "\t"]))
def test_separated_values(rows, delimiter, tmp_path_factory):
    file = tmp_path_factory.mktemp("csv") / ("rows.csv" if delimiter == "," else "rows.tsv")
    with open(file, "w", newline="", encoding="utf-8") as text:
        csv.writer(text, delimiter=delimiter).writerows([("text", "label"), *rows])
    assert values(read(file)) == [{"text": text, "label": label} for text, label in rows]


def test_rows_of_csv_that_are_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b'\xef\xbb\xbftext,label\n"a\nb",1\n\nonly\nc,2,3\n"d"e,4\n\xff,5\nf,6\n"g,7\nh,8\n')
    rows_read = read(file)
    assert values(rows_read) == [{"text": "a\nb", "label": "1"}, {"text": "f", "label": "6"}]
    assert [row.place.line for row in rows_read] == [2, 5, 6, 7, 8, 9, 10]
    assert refusals(rows_read) == [
        f"{file}, line 5: has 1 fields, but the file names 2 columns",
        f"{file}, line 6: has 3 fields, but the file names 2 columns",
        f"{file}, line 7: is not CSV: ',' expected after '\"'",
        f"{file}, line 8: is not UTF-8",
        f"{file}, line 10: is not CSV: unexpected end of data (up to line 11)",
    ]
    assert [row.rows for row in rows_read if isinstance(row, Refused)] == [1, 1, 1, 1, None]


def test_a_long_field_is_read_and_a_header_that_names_a_column_twice_is_refused(tmp_path):
    (tmp_path / "long.csv").write_text("text\n" + "x" * 1_000_000)
    ((row),) = values(read(tmp_path / "long.csv"))
    assert len(row["text"]) == 1_000_000
    (tmp_path / "twice.csv").write_text("text,text\na,b\n")
    (refused,) = read(tmp_path / "twice.csv")
    assert "names a column twice (text, text): without names of columns, no row of the file is read" in str(refused)
    (tmp_path / "broken.csv").write_text('"text"x\na\n')
    assert [refused.rows for refused in read(tmp_path / "broken.csv")] == [1, None]


@pytest.mark.parametrize("ending", [".txt", ".md"])
@pytest.mark.parametrize("content", ["", "two\nlines\n", "Zeilen\r\nund\rÜ\n🙂"])
def test_a_file_of_text_is_one_document(content, ending, tmp_path):
    file = tmp_path / f"story{ending}"
    file.write_bytes(content.encode())
    assert read(file) == [Row(Place(str(file)), {"text": file.read_text()})]
    file.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert values(read(file)) == [{"text": file.read_text(encoding="utf-8-sig")}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"caf\xe9", "is not UTF-8 text: 'utf-8' codec can't decode byte 0xe9 in position 3: unexpected end of data"),
        (b"\xef\xbb", "is not UTF-8 text"),
        (b"\xff\xfeh\0i\0", "is not UTF-8 text"),
        (b"ab\0\0", "is not text: character 3 is NUL"),
    ],
)
def test_a_file_that_is_no_text_is_refused(content, reason, tmp_path):
    file = tmp_path / "story.txt"
    file.write_bytes(content)
    (refused,) = refusals(read(file))
    assert refused.startswith(f"{file}: {reason}")
    assert "data.pattern" not in refused


@pytest.mark.parametrize("content", [b"\x89PNG\r\n", b"GIF\0"])
def test_a_file_that_is_no_text_by_its_name_either_can_be_passed_over(content, tmp_path):
    (tmp_path / "cat.png").write_bytes(content)
    (refused,) = refusals(read(tmp_path, documents="files"))
    assert 'data.pattern="**/*.txt" takes files of text alone' in refused


def folder(root: Path) -> Path:
    for name, content in {
        "b/2.txt": "two\n",
        "b/1.txt": "one",
        "a.py": "print()\n",
        "b/deep/3.txt": "three\n",
        "b/.hidden.txt": "hidden\n",
        ".git/4.txt": "hidden\n",
        "c/empty.txt": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_a_folder_of_files_is_a_document_each(tmp_path):
    root = folder(tmp_path)
    rows_read = read(root, documents="files")
    assert [(row.place.file, row.values["text"]) for row in rows_read] == [
        (str(root / name), (root / name).read_text())
        for name in ("a.py", "b/1.txt", "b/2.txt", "b/deep/3.txt", "c/empty.txt")
    ]
    assert [len(Source(str(root), documents="files").units(size)) for size in (1, 12, 1000)] == [5, 2, 1]
    assert [row.place.file for row in read(root, documents="files", pattern="*")] == [str(root / "a.py")]
    assert [row.place.file for row in read(root, documents="files", pattern="**/.*.txt")] == [
        str(root / "b/.hidden.txt")
    ]


def test_a_document_of_each_directory_names_its_files(tmp_path):
    root = folder(tmp_path)
    assert [(row.place.file, row.values["text"]) for row in read(root, documents="directories")] == [
        (str(root), "==> a.py <==\nprint()\n"),
        (str(root / "b"), "==> b/1.txt <==\none\n==> b/2.txt <==\ntwo\n"),
        (str(root / "b/deep"), "==> b/deep/3.txt <==\nthree\n"),
        (str(root / "c"), "==> c/empty.txt <==\n"),
    ]


def test_links_to_nothing_and_binary_files_in_a_folder_are_refused_and_pipes_are_not_opened(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to("nothing")
    (tmp_path / "c.txt").write_bytes(b"\0\1")
    os.mkfifo(tmp_path / "d.txt")
    for documents in ("files", "directories"):
        source = Source(str(tmp_path), documents=documents)
        assert [r.split(": ")[1] for r in refusals(read(source))] == ["cannot be read", "is not text"]
        assert len(values(read(source))) == 1
        assert all(piece.fingerprint() for piece in source.units())


def test_a_text_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_longctx.data.reading.folders.LONGEST_ROW", 3)
    (tmp_path / "a.txt").write_text("four")
    assert refusals(read(tmp_path / "a.txt")) == [f"{tmp_path}/a.txt: has 4 bytes, but a document may have at most 3"]


WRITTEN = {
    "rows.jsonl": b'{"a": 1}\n{"a": 2}\n',
    "rows.json": b'[{"a": 1},\n{"a": 2}]',
    "rows.csv": b"a\n1\n2\n",
    "rows.txt": b"one two",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_fingerprint_is_of_the_content(name, tmp_path):
    first, second = tmp_path / "here" / name, tmp_path / "there" / f"other-{name}"
    for file in (first, second):
        file.parent.mkdir()
        file.write_bytes(WRITTEN[name])
    os.utime(second, (1, 1))

    def prints(file):
        return [piece.fingerprint() for piece in Source(str(file)).units(4)]

    before = prints(first)
    assert len(set(before)) == len(before)
    assert prints(second) == before
    second.write_bytes(WRITTEN[name].replace(b"2", b"3").replace(b"two", b"six"))
    assert prints(second) != before


def test_a_fingerprint_tells_how_content_is_read(tmp_path):
    (tmp_path / "1.csv").write_text("a,b\tc\n1,2\t3\n")
    (tmp_path / "2.tsv").write_text("a,b\tc\n1,2\t3\n")
    sources = [
        Source(str(tmp_path / "1.csv")),
        Source(str(tmp_path / "2.tsv")),
        Source(str(tmp_path), documents="files"),
        Source(str(tmp_path), documents="directories"),
    ]
    assert len({piece.fingerprint() for source in sources for piece in source.units()}) == 4


def test_a_fingerprint_reads_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(unit, "BLOCK", 3)
    file = tmp_path / "a.bin"
    file.write_bytes(b"0123456789")
    assert unit.fingerprint_of((), [(str(file), 2, 10)]) != unit.fingerprint_of((), [(str(file), 2, 9)])
    monkeypatch.setattr(unit, "BLOCK", 100)
    whole = unit.fingerprint_of((), [(str(file), 2, 10)])
    monkeypatch.setattr(unit, "BLOCK", 3)
    assert unit.fingerprint_of((), [(str(file), 2, 10)]) == whole


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
def test_what_is_appended_after_a_file_was_cut_into_units_is_left_out_or_changes_the_fingerprint(name, tmp_path):
    file = tmp_path / name
    file.write_bytes(WRITTEN[name])
    (whole,) = Source(str(file)).units()
    before, rows_read = whole.fingerprint(), list(whole.rows())
    with open(file, "ab") as more:
        more.write(b'{"a": 3}\n')
    os.utime(file, (1, 1))
    assert (list(whole.rows()) == rows_read) == (whole.fingerprint() == before) == (name == "rows.jsonl")


def test_units_can_be_sent_to_other_processes(tmp_path):
    for name, content in WRITTEN.items():
        (tmp_path / name).write_bytes(content)
        source = Source(str(tmp_path / name))
        assert pickle.loads(pickle.dumps(source)) == source
        sent = pickle.loads(pickle.dumps(source.units(4)))
        assert [row for piece in sent for row in piece.rows()] == read(source)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_memory_is_bounded_by_rows_and_not_by_files(name, tmp_path):
    file, row = tmp_path / name, "x" * 20_000
    with open(file, "w") as text:
        if name == "rows.csv":
            text.write("text\n" + f"{row}\n" * 600)
        else:
            text.write("[" * (name == "rows.json"))
            text.write((",\n" if name == "rows.json" else "\n").join([json.dumps({"text": row})] * 600))
            text.write("]" * (name == "rows.json"))
    tracemalloc.start()
    try:
        assert (
            sum(len(row.values["text"]) for piece in Source(str(file)).units(1 << 18) for row in piece.rows())
            == 12_000_000
        )
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 6_000_000
