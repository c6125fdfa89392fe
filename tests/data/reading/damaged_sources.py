"""Files of every kind that are read, damaged at random, and a check that nothing of them is lost silently.

`trial` makes a valid file (or directory), damages it, reads it with `check`, and compares with what other readers, the
standard library's, say of the same bytes:

    jsonl        as many rows and refusals as lines that are not blank; json.loads agrees, line by line
    json         as many as there are values, or the last refusal stands for the rest of the file
    csv, tsv     rows and refusals cover all lines that are not blank
    text         one row or refusal for each file; the text is what decoding the bytes gives
    tables       rows, and those that refusals count, are as many as were written; or the file is refused as a whole

Besides: nothing but SourceError is raised; cutting a file into small units changes no row; fingerprints can be taken.
"""

import csv
import io
import json
import pickle
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from hf_longctx.data.reading import Refused, Row, Source, SourceError, Unit
from hf_longctx.data.reading.json_lines import JsonLines

Read = list[Row | Refused]
WORDS = ["the cat", 'a "quoted" word', "Über", "日本語", "line\nbreak", "tab\there", "comma, here", "🙂", "", "x" * 300]
BOM = b"\xef\xbb\xbf"
WHOLE = 1 << 40
"""Bytes of a unit, when a file is to be one."""


@dataclass
class Damaged:
    """A file or directory that is to be damaged."""

    kind: str
    story: list[str]
    """what was done to it"""
    source: Source
    file: Path
    """that is damaged"""
    rows: int
    """that were written; of text, files"""


def rows_of(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "text": " ".join(rng.choices(WORDS, k=rng.randrange(8))),
            "input_ids": [rng.randrange(50_000) for _ in range(rng.randrange(6))],
            "messages": [{"role": rng.choice(["user", "assistant"]), "content": rng.choice(WORDS)}] * rng.randrange(3),
            "score": rng.choice([None, 0.5, -1e300]),
        }
        for _ in range(rng.randrange(1, 14))
    ]


def jsonl(rows: list[dict[str, Any]], rng: random.Random) -> bytes:
    blank = rng.choice(["", "\n", " \n"])
    return "".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) + "\n" + blank for row in rows).encode()


def json_list(rows: list[dict[str, Any]], rng: random.Random) -> bytes:
    return json.dumps(rows, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()


def json_objects(rows: list[dict[str, Any]], rng: random.Random) -> bytes:
    return rng.choice(["", "\n"]).join(json.dumps(row, indent=1) for row in rows).encode()


def separated(rows: list[dict[str, Any]], rng: random.Random, delimiter: str = ",") -> bytes:
    text = io.StringIO()
    plain = rng.random() < 0.5  # without quotes, lines can be counted
    writer = csv.writer(text, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]))
    writer.writerow(["text", "score"])
    for row in rows:
        writer.writerow([re.sub(r'[\n\t,"]', "", row["text"]) + "." if plain else row["text"], row["score"]])
    return text.getvalue().encode()


def text(rows: list[dict[str, Any]], rng: random.Random) -> bytes:
    return "\n".join(row["text"] for row in rows).encode()


def table(rows: list[dict[str, Any]], rng: random.Random) -> pa.Table:
    made = pa.Table.from_pylist(rows, pa.schema([
        ("text", rng.choice([pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])),
        ("input_ids", rng.choice([pa.list_(pa.int32()), pa.large_list(pa.int64())])),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("score", pa.float64()),
    ]))  # fmt: skip
    return made.append_column("day", pa.array([rng.randrange(20_000) for _ in rows], pa.date32()))


def parquet(rows: list[dict[str, Any]], rng: random.Random) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table(rows, rng),
        sink,
        row_group_size=rng.choice([2, 5, 100]),
        compression=rng.choice(["none", "snappy", "zstd"]),
        use_dictionary=rng.random() < 0.5,
        data_page_version=rng.choice(["1.0", "2.0"]),
        write_page_checksum=rng.random() < 0.3,
    )
    return sink.getvalue()


def arrow(rows: list[dict[str, Any]], rng: random.Random) -> bytes:
    sink, made = io.BytesIO(), table(rows, rng).unify_dictionaries()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice([None, "lz4", "zstd"]))
    writer = rng.choice([pa.ipc.new_stream, pa.ipc.new_file])
    with writer(sink, made.schema, options=options) as opened:
        opened.write_table(made, max_chunksize=rng.choice([2, 5, 100]))
    return sink.getvalue()


WRITERS: dict[str, tuple[str, Callable[[list[dict[str, Any]], random.Random], bytes]]] = {
    "jsonl": ("rows.jsonl", jsonl),
    "json list": ("rows.json", json_list),
    "json objects": ("rows.json", json_objects),
    "json lines": ("rows.json", jsonl),
    "csv": ("rows.csv", separated),
    "tsv": ("rows.tsv", lambda rows, rng: separated(rows, rng, "\t")),
    "text": ("rows.txt", text),
    "parquet": ("rows.parquet", parquet),
    "arrow": ("rows.arrow", arrow),
}
"""Kind -> name of its file, and what writes one."""
KINDS = [*WRITERS, "files", "directories", "saved"]


def _somewhere(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice([1, 2, 8, 64, 1024]))


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 4, 32]) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def insert(rng: random.Random, data: bytes, what: bytes) -> bytes:
    at, _ = _somewhere(rng, data)
    return data[:at] + what + data[at:]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    start, stop = _somewhere(rng, data)
    return data[:start] + rng.choice([b"\0", b"\xff", b"\x7f", b"\x80"]) * (stop - start) + data[stop:]


def delete(rng: random.Random, data: bytes) -> bytes:
    start, stop = _somewhere(rng, data)
    return data[:start] + data[stop:]


def duplicate(rng: random.Random, data: bytes) -> bytes:
    start, stop = _somewhere(rng, data)
    return data[:stop] + data[start:]


NUMBERS = (b"9" * 400, b"9" * 5000, b"-1e999", b"NaN", b"-Infinity", b"0" * 50)
NOT_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f", b"\\ud800")
NESTED = (b"[" * 100_000, b'{"a":' * 50_000, b"[" * 300 + b"]" * 300, b'{"text":' * 1500 + b"1" + b"}" * 1500)
MAGICS = (b"PAR1", b"ARROW1\0\0", b"\x1f\x8b\x08\0", b"PK\3\4", b"\xff\xfe", b"\x80\4\x95")

DAMAGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "bits flipped": flip,
    "bytes overwritten": overwrite,
    "cut off": lambda rng, data: data[: rng.randrange(len(data) + 1)],
    "beginning cut off": lambda rng, data: data[rng.randrange(len(data) + 1) :],
    "bytes deleted": delete,
    "bytes doubled": duplicate,
    "bytes inserted": lambda rng, data: insert(rng, data, rng.randbytes(rng.choice([1, 3, 17, 400]))),
    "a number inserted": lambda rng, data: insert(rng, data, rng.choice(NUMBERS)),
    "no UTF-8 inserted": lambda rng, data: insert(rng, data, rng.choice(NOT_UTF8)),
    "nested brackets inserted": lambda rng, data: insert(rng, data, rng.choice(NESTED)),
    "NUL inserted": lambda rng, data: insert(rng, data, b"\0" * rng.choice([1, 4, 100])),
    "punctuation inserted": lambda rng, data: insert(rng, data, rng.choice([b'"', b",", b"\n", b"\r", b"{}", b"]", b"\\"])),
    "another magic": lambda rng, data: rng.choice(MAGICS) + data[rng.choice([0, 4, 8]) :],
    "byte order mark": lambda rng, data: BOM + data,
    "CRLF": lambda rng, data: data.replace(b"\n", b"\r\n"),
    "nothing": lambda rng, data: data,
    "emptied": lambda rng, data: b"",
    "blank": lambda rng, data: rng.choice([b" ", b"\n\n", b"\r\n", BOM, b"null", b"[]", b"{}"]),
}  # fmt: skip

OFTEN = {"bits flipped": 8, "bytes overwritten": 4}
"""How many times as often as others: most of what these do leaves a file nearly readable."""


def written(kind: str, rng: random.Random, folder: Path) -> Damaged:
    """A source of a kind, made in a folder, to which nothing is done yet."""
    rows = rows_of(rng)
    if kind in ("parquet", "arrow", "saved"):  # in a small table, most bytes describe it
        rows *= rng.choice([1, 12])
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(folder / "saved", num_shards=min(2, len(rows)))
        file = rng.choice(sorted((folder / "saved").iterdir()))
        return Damaged(kind, [], Source(str(folder / "saved")), file, len(rows))
    if kind in ("files", "directories"):
        files = [folder / "texts" / f"{number % 2}" / f"{number}.txt" for number in range(rng.randrange(1, 5))]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text(rows, rng))
        return Damaged(kind, [], Source(str(folder / "texts"), documents=kind), rng.choice(files), len(files))
    name, write = WRITERS[kind]
    (folder / name).write_bytes(write(rows, rng))
    return Damaged(kind, [], Source(str(folder / name)), folder / name, 1 if kind == "text" else len(rows))


def damage(case: Damaged, names: Iterable[str], rng: random.Random) -> None:
    """Does to a source's file what some of DAMAGES do, one after another."""
    for name in names:
        case.file.write_bytes(DAMAGES[name](rng, case.file.read_bytes()))
        case.story.append(name)


def check(case: Damaged) -> tuple[list[str], Read]:
    """Return what is wrong with how a damaged source is read (nothing, it is hoped), and what was read."""
    try:
        whole = case.source.units(WHOLE)
        read = [row for unit in whole for row in pickle.loads(pickle.dumps(unit)).rows()]
        cut = [row for unit in case.source.units(300) for row in unit.rows()]
        for unit in whole:
            assert re.fullmatch("[0-9a-f]{32}", unit.fingerprint())
    except SourceError as error:
        # A damaged file has rows and refusals. Only what says which files there are can make a source unreadable.
        return ([] if case.file.suffix == ".json" and case.kind == "saved" else [f"SourceError: {error}"]), []
    except Exception as error:
        return [f"{type(error).__name__}: {error}"], []
    problems = [] if repr(cut) == repr(read) else ["cutting the file into small units changed what is read"]
    problems += [
        f"no place or no reason: {row!r}"
        for row in read
        if isinstance(row, Refused) and not (row.place.file and row.reason)
    ]
    return problems + compare(case, read, whole), read


def compare(case: Damaged, read: Read, units: list[Unit]) -> list[str]:
    """Return what differs between what was read and what other readers say of the same bytes."""
    problems = []
    if set(case.story) <= {"nothing"} and case.kind != "directories":
        readable = sum(isinstance(row, Row) for row in read)
        problems += [f"{readable} of {case.rows} rows are read of what is whole"] * (readable != case.rows)
    return problems + ORACLES[case.kind](case, read, units)


def _lines(case: Damaged, read: Read, units: list[Unit]) -> list[str]:
    content = case.file.read_bytes().removeprefix(BOM).split(b"\n")
    lines = {number: line for number, line in enumerate(content, 1) if line.strip(b" \t\r\n")}
    if [row.place.line for row in read] != list(lines):
        return [f"{len(lines)} lines are not blank, but there are {len(read)} rows and refusals"]
    problems = []
    for row, line in zip(read, lines.values()):
        try:
            value = json.loads(line.decode())
            value = value if isinstance(value, dict) else None
        except (ValueError, RecursionError):
            value = None
        if isinstance(row, Row) and repr(row.values) != repr(value):
            problems.append(f"{row.place} is read as {str(row.values)[:200]}, but is {str(value)[:200]}")
        if isinstance(row, Refused) and value is not None and not _beyond_rows(line):
            problems.append(f"{row} is refused, but is {str(value)[:200]}")
    return problems


def _beyond_rows(line: bytes) -> bool:
    """JSON that Python takes and no row can hold: half of a surrogate pair, nesting above 200, above 4300 digits."""
    return bool(re.search(rb"\\u[dD][89a-fA-F]", line)) or max(line.count(b"["), line.count(b"{")) > 90


def _values(case: Damaged, read: Read, units: list[Unit]) -> list[str]:
    if any(isinstance(unit, JsonLines) for unit in units):
        return _lines(case, read, units)
    if read and isinstance(read[-1], Refused) and read[-1].rows is None:
        return []
    content, at, values = case.file.read_bytes().removeprefix(BOM).decode("utf-8", "replace"), 0, 0
    try:
        if content.lstrip(" \t\r\n").startswith("["):
            values = len(json.loads(content, parse_int=float))
        else:
            while content[at:].strip(" \t\r\n"):
                at = len(content) - len(content[at:].lstrip(" \t\r\n"))
                _, at = json.JSONDecoder(parse_int=float).raw_decode(content, at)
                values += 1
    except (ValueError, RecursionError) as error:
        return [f"it is read as {len(read)} rows and refusals, but is no JSON: {error}"]
    return [] if values == len(read) else [f"{values} values, but {len(read)} rows and refusals"]


def _records(case: Damaged, read: Read, units: list[Unit]) -> list[str]:
    if read and isinstance(read[-1], Refused) and read[-1].rows is None:
        return []
    content = case.file.read_bytes().removeprefix(BOM).decode("utf-8", "surrogateescape")
    lines = io.StringIO(content, newline=None).read().split("\n")
    blank = {number for number, line in enumerate(lines, 1) if not line}
    covered = set()
    for row, after in zip(read, [*read[1:], None]):
        first = row.place.line or 0
        text = "".join(row.values.values()) if isinstance(row, Row) else ""
        inside = io.StringIO(text, newline=None).read().count("\n")
        last = first + inside if isinstance(row, Row) else after.place.line - 1 if after else len(lines)
        covered |= set(range(first, last + 1))
    header = set(range(1, min(covered, default=len(lines) + 1)))
    left = set(range(1, len(lines) + 1)) - blank - covered - header
    problems = [f"lines {sorted(left)[:5]} are in no row or refusal"] if left else []
    if '"' not in content and len(lines) - len(blank) - 1 != len(read) and len(lines) != len(blank):
        problems.append(f"{len(lines) - len(blank) - 1} lines after the header, but {len(read)} rows and refusals")
    return problems


def _texts(case: Damaged, read: Read, units: list[Unit]) -> list[str]:
    documents = case.rows if case.kind == "files" else 1
    if len(read) != documents:
        return [f"{documents} files, but {len(read)} rows and refusals"]
    data = case.file.read_bytes()
    (row,) = [row for row in read if row.place.file == str(case.file)]
    try:
        text = io.StringIO(data.removeprefix(BOM).decode(), newline=None).read()
    except UnicodeDecodeError:
        text = None
    text = None if text is not None and "\0" in text else text
    value = row.values["text"] if isinstance(row, Row) else None
    return [] if value == text else [f"read as {str(value)[:100]!r}, but is {str(text)[:100]!r}"]


def _directories(case: Damaged, read: Read, units: list[Unit]) -> list[str]:
    headers = sum(
        row.values["text"].count("\n==> ") + row.values["text"].startswith("==> ")
        for row in read
        if isinstance(row, Row)
    )
    refused = sum(isinstance(row, Refused) for row in read)
    return [] if headers + refused == case.rows else [f"{case.rows} files, but {headers} read and {refused} refused"]


def _table(case: Damaged, read: Read, units: list[Unit]) -> list[str]:
    if any(isinstance(row, Refused) and row.rows is None for row in read):
        return [] if case.kind == "saved" or len(read) == 1 else ["rows are read of a file that is refused as a whole"]
    counted = sum(row.rows or 0 if isinstance(row, Refused) else 1 for row in read)
    return [] if counted == case.rows else [f"{case.rows} rows were written, {counted} are read or refused"]


ORACLES: dict[str, Callable[[Damaged, Read, list[Unit]], list[str]]] = {
    "jsonl": _lines,
    "json list": _values,
    "json objects": _values,
    "json lines": _values,
    "csv": _records,
    "tsv": _records,
    "text": _texts,
    "files": _texts,
    "directories": _directories,
    "parquet": _table,
    "arrow": _table,
    "saved": _table,
}


def trial(kind: str, rng: random.Random, folder: Path) -> tuple[Damaged, list[str], Read, float]:
    """One damaged source made, read and checked in a folder that is made anew; with the CPU seconds that reading took."""
    shutil.rmtree(folder, ignore_errors=True)
    case = written(kind, rng, folder)
    often = [OFTEN.get(name, 1) for name in DAMAGES]
    damage(case, rng.choices(list(DAMAGES), often, k=rng.choice([1, 1, 1, 2, 3])), rng)
    began = time.process_time()
    problems, read = check(case)
    return case, problems, read, time.process_time() - began
