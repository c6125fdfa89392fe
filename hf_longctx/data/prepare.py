"""Sources -> a prepared data set: tokenised documents in Arrow shards, and an index of their lengths.

1. Each source is cut into units, runs of rows that one process reads at once (reading/source.py).
2. Worker processes make the shards of those units that are not in the cache yet (shards.py). So a run that was
   interrupted goes on where it was, and a source that grew costs only what is new.
3. Shards are taken in the order of the sources, however fast the workers are: what comes out depends on the input
   alone. The prepared folder (prepared.py) holds links to them.

Memory holds a few batches of rows per worker and 18 bytes per document, never the documents. Nothing is sent between
ranks: the first process of each machine prepares, the others find it done.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hf_longctx.data.prepared import INDEX, MANIFEST, REFUSED, SHARD, Manifest, SourceCounts
from hf_longctx.data.reading.source import UNIT_BYTES, Source, Unit
from hf_longctx.data.shards import Shard, shard_of, write_table
from hf_longctx.data.tokenisation import Tokenisation
from hf_longctx.data.tokenizer_state import TokenizerRecord
from hf_longctx.whole_files import built_whole, written_whole

SHOWN = 5
"""Reasons of bad rows that an error names."""

UNITS, SMALLEST_UNIT_BYTES = 32, 1 << 21
"""A source is cut into so many units or more, where they are not smaller than that: what a tokenizer gets at once."""

MOST_UNITS = 1 << 14
"""Units of a source: each becomes a shard, which is mapped into memory when it is read, and Linux allows 65,530 maps."""

POOL_BYTES = 64 << 20

PENDING = 4
"""Units per worker that wait to be taken in order."""


class PrepareError(ValueError):
    """Rows that cannot be trained on, or nothing that can."""


@dataclass(frozen=True)
class Part:
    """One source, how its rows become documents, and how much of it is taken."""

    source: Source
    tokenisation: Tokenisation
    max_documents: int | None = None
    """only its first"""
    max_tokens: int | None = None
    """only its first documents that together have no more"""
    rendered_before: bool = False
    """whether the chat template of the tokenizer decided tokens already when they were prepared for the first time"""

    @property
    def name(self) -> str:
        return self.source.name or str(self.source.path)


@dataclass
class Progress:
    """Counts of what is done so far."""

    total_bytes: int
    """of all sources"""
    bytes: int = 0
    """read, or found in the cache"""
    documents: int = 0
    tokens: int = 0
    refused: int = 0
    """rows that are no document"""


def prepare(
    parts: Sequence[Part],
    cache_dir: str | Path,
    *,
    bad_rows: Literal["error", "skip"] = "error",
    workers: int | None = None,
    output: str | Path | None = None,
    unit_bytes: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Tokenises what is not in the cache yet, and makes one prepared data set of all parts, in their order.

    Args:
        parts: one or more.
        cache_dir: where shards are kept; made if missing.
        bad_rows: what becomes of rows that cannot be read or tokenised: an error; or they are left out, counted and
            listed in the prepared folder, as rows that only have nothing to learn always are.
        workers: processes. 1: this one, with the tokenizer's own threads. None: this one for less than 64 MiB, which other
            processes would take as long to be started for; else as many as this process may use processors.
        output: folder to make; None: one in the cache, named after its content.
        unit_bytes: about how much one process reads at once; other units are other shards. None: 8 MiB, less of a source of
            less than 256 MiB, more of one of more than 128 GiB.
        on_progress: called after each unit.

    Returns:
        A folder for `load_prepared`.

    Raises:
        SourceError: a source holds nothing to read, or changed while it was read.
        PrepareError: a row is bad and `bad_rows` is "error"; no document is left; `output` holds something else.
    """
    if output is not None:
        _refuse_inside(Path(output), parts)
    folder = Path(cache_dir) / "documents"
    folder.mkdir(parents=True, exist_ok=True)
    units = [_units(part.source, unit_bytes) for part in parts]
    progress = Progress(sum(unit.bytes for of_part in units for unit in of_part))
    if workers is None:
        workers = 1 if progress.total_bytes < POOL_BYTES else len(os.sched_getaffinity(0))
    workers = max(1, min(workers, sum(map(len, units))))
    taken: list[list[Shard]] = []
    tokenisations = [part.tokenisation for part in parts]
    for tokenisation in tokenisations:
        tokenisation.fingerprint  # noqa: B018 - computed once, and sent with it
        tokenisation.warn_of_missing_end()
    with _pool(workers, tokenisations) as pool:
        for number, (part, of_part) in enumerate(zip(parts, units)):
            limit, shards = _Limit(part.max_documents, part.max_tokens), list[Shard]()
            jobs = ((unit, number, folder) for unit in of_part)
            for unit, shard in zip(of_part, _in_order(pool, jobs, PENDING * workers)):
                if bad_rows == "error" and shard.bad:
                    raise PrepareError(_bad_rows(shard))
                shards.append(limit.take(shard))
                progress.bytes += unit.bytes
                progress.documents += len(shards[-1].lengths)
                progress.tokens += int(shards[-1].lengths.sum())
                progress.refused += len(shard.refused)
                on_progress(progress)
                if limit.reached:
                    break
            taken.append(shards)
    return _assembled(parts, taken, Path(cache_dir), None if output is None else Path(output))


def _units(source: Source, unit_bytes: int | None) -> list[Unit]:
    """Cut a source into enough units to keep all processes busy to the end.

    Their size depends on the source alone and seldom changes as it grows.
    """
    units = source.units(unit_bytes or UNIT_BYTES)
    if unit_bytes is not None:
        return units
    total = sum(unit.bytes for unit in units)
    smallest, largest = (1 << (total // most).bit_length() for most in (MOST_UNITS, UNITS))
    wanted = max(min(UNIT_BYTES, largest >> 1), smallest, SMALLEST_UNIT_BYTES)
    return units if wanted == UNIT_BYTES else source.units(wanted)


def _refuse_inside(output: Path, parts: Sequence[Part]) -> None:
    for part in parts:
        path = part.source.path
        if isinstance(path, str) and Path(path).is_dir() and output.resolve().is_relative_to(Path(path).resolve()):
            raise PrepareError(
                f"{output} lies in the source {path}, and would be read as a part of it: name another folder"
            )


class _Limit:
    """Takes documents until there are as many, or as many tokens, as wanted."""

    def __init__(self, documents: int | None, tokens: int | None) -> None:
        self._documents, self._tokens = documents, tokens
        self.reached = False

    def take(self, shard: Shard) -> Shard:
        """The first of the shard's documents, as many as are wanted."""
        kept = len(shard.lengths)
        if self._documents is not None:
            kept = min(kept, self._documents)
        if self._tokens is not None:
            kept = min(kept, int(np.searchsorted(np.cumsum(shard.lengths), self._tokens, side="right")))
            self._tokens -= int(shard.lengths[:kept].sum())
        if self._documents is not None:
            self._documents -= kept
        self.reached = kept < len(shard.lengths) or self._documents == 0
        return replace(shard, lengths=shard.lengths[:kept], label_tokens=shard.label_tokens[:kept])


def _bad_rows(shard: Shard) -> str:
    alike: dict[str, list[str]] = {}
    for place, reason, _ in shard.bad:
        alike.setdefault(reason, []).append(place)
    shown = "; ".join(
        f"{places[0]}{f' and {len(places) - 1:,} more rows like it' if len(places) > 1 else ''}: {reason}"
        for reason, places in list(alike.items())[:SHOWN]
    )
    more = f"; and {len(alike) - SHOWN} other reasons near them" if len(alike) > SHOWN else ""
    return (
        f"{shown}{more}. Valid: mend the rows, or bad_rows='skip', which leaves them out, counted and listed in "
        f"{REFUSED}"
    )


_tokenisations: Sequence[Tokenisation] = ()
"""Tokenisations of the parts, in the process that makes shards: a tokenizer is megabytes, and sent once, not with each unit."""


def _begin(tokenisations: Sequence[Tokenisation]) -> None:
    global _tokenisations
    _tokenisations = tokenisations
    if (parent := parent_process()) is not None:  # a worker whose parent is killed would wait for work for ever
        Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _shard(unit: Unit, number: int, folder: Path) -> Shard:
    return shard_of(unit, _tokenisations[number], folder)


@contextmanager
def _pool(workers: int, tokenisations: Sequence[Tokenisation]) -> Iterator[Executor | None]:
    """Yield a pool of `workers` processes; None for one worker, which is this process."""
    if workers == 1:
        _begin(tokenisations)
        yield None
        return
    context = get_context("spawn")  # a fork of this process would inherit its threads' locks
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process for each processor is enough
    pool = ProcessPoolExecutor(workers, context, _begin, (tokenisations,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _in_order(pool: Executor | None, jobs: Iterable[tuple[Any, ...]], pending: int) -> Iterator[Shard]:
    """Shards in the order of the jobs, of which `pending` are worked on ahead."""
    if pool is None:
        yield from (_shard(*job) for job in jobs)
        return
    remaining = iter(jobs)
    ahead: deque[Future[Shard]] = deque(pool.submit(_shard, *job) for job in islice(remaining, pending))
    while ahead:
        shard = ahead.popleft().result()
        ahead.extend(pool.submit(_shard, *job) for job in islice(remaining, 1))
        yield shard
    # Where a limit is reached before, the pool's end cancels what is ahead.


def _nothing_left(parts: Sequence[Part], taken: list[list[Shard]], sources: list[SourceCounts]) -> str:
    """Return the message where no document is left, with all that was left out and the first reason."""
    tally = ", ".join(
        f"{counts.name}: {counts.bad_rows} bad rows, {counts.empty_rows} with nothing to learn" for counts in sources
    )
    refused = [refusal for shards in taken for shard in shards for refusal in shard.refused]
    first = f". The first row refused is {refused[0][0]}: {refused[0][1]}" if refused else ""
    limits = "".join(
        f". The first document of {part.name} has more than max_tokens={part.max_tokens}"
        for part, shards in zip(parts, taken)
        if part.max_tokens is not None and shards and not any(shard.refused for shard in shards)
    )
    return f"no document is left ({tally}){first}{limits}"


def _assembled(parts: Sequence[Part], taken: list[list[Shard]], cache_dir: Path, output: Path | None) -> Path:
    """Return the folder of all documents that were taken, which is made if it is not there yet."""
    sources = [_counts(part.name, shards) for part, shards in zip(parts, taken)]
    kept = [(number, shard) for number, shards in enumerate(taken) for shard in shards if len(shard.lengths)]
    if not kept:
        raise PrepareError(_nothing_left(parts, taken, sources))
    shards = [(shard.path.stem, len(shard.lengths)) for _, shard in kept]
    largest, labels = max(shard.largest_id for _, shard in kept), any(shard.labels for _, shard in kept)
    manifest = Manifest(sources, shards, largest, labels)
    name = hashlib.blake2b(manifest.to_json().encode(), digest_size=8).hexdigest()
    directory = output or cache_dir / f"prepared-{name}"
    if directory.exists():
        if (known := _manifest_in(directory)) != manifest:
            raise PrepareError(f"{directory} exists and holds something else: remove it, or name another folder")
        records = _tokenizers(parts, taken)
        if output is not None and known.tokenizers != records:  # older folders know less
            with written_whole(directory / MANIFEST) as partial:
                partial.write_text(replace(manifest, tokenizers=records).to_json())
        return directory
    numbers, of_kept = [number for number, _ in kept], [shard for _, shard in kept]
    index = {
        "length": np.concatenate([shard.lengths for shard in of_kept]),
        "label_tokens": np.concatenate([shard.label_tokens for shard in of_kept]),
        "source": np.repeat(np.array(numbers, np.uint16), [len(shard.lengths) for shard in of_kept]),
    }
    with built_whole(directory) as partial:
        for number, shard in enumerate(of_kept):
            _link(shard.path, partial / SHARD.format(number))
        write_table(pa.table(index), partial / INDEX)
        with (partial / REFUSED).open("w") as file:
            for part, of_part in zip(parts, taken):
                for place, reason, rows in (refusal for shard in of_part for refusal in shard.refused):
                    left_out = {"source": part.name, "place": place, "reason": reason, "rows": rows}
                    file.write(json.dumps(left_out) + "\n")
        (partial / MANIFEST).write_text(replace(manifest, tokenizers=_tokenizers(parts, taken)).to_json())
    return directory


def _manifest_in(directory: Path) -> Manifest | None:
    """Read what a folder was made of; None: it is no prepared one."""
    try:
        return Manifest.read(directory)
    except ValueError:
        return None


def _tokenizers(parts: Sequence[Part], taken: Sequence[Sequence[Shard]]) -> list[TokenizerRecord]:
    """Record the tokenizers of all parts, each once, and whether its chat template decided tokens."""
    rendered: dict[int, bool] = {}
    tokenizers = {id(part.tokenisation.tokenizer): part.tokenisation.tokenizer for part in parts}
    for part, shards in zip(parts, taken):
        key = id(part.tokenisation.tokenizer)
        by_template = (part.rendered_before or shard.rendered for shard in shards if len(shard.lengths))
        rendered[key] = rendered.get(key, False) or any(by_template)
    return [
        TokenizerRecord.of(tokenizer, rendered[key]) for key, tokenizer in tokenizers.items() if tokenizer is not None
    ]


def _counts(name: str, shards: Sequence[Shard]) -> SourceCounts:
    bad, refused = (
        sum(1 if rows is None else rows for shard in shards for _, _, rows in of_shard(shard))
        for of_shard in (lambda shard: shard.bad, lambda shard: shard.refused)
    )
    return SourceCounts(
        name=name,
        documents=sum(len(shard.lengths) for shard in shards),
        tokens=sum(int(shard.lengths.sum()) for shard in shards),
        label_tokens=sum(int(shard.label_tokens.sum()) for shard in shards),
        longest=max((int(shard.lengths.max()) for shard in shards if len(shard.lengths)), default=0),
        bad_rows=bad,
        empty_rows=refused - bad,
    )


def _link(shard: Path, name: Path) -> None:
    """One file under two names, where the file system can; else a copy."""
    try:
        os.link(shard, name)
    except OSError:
        shutil.copyfile(shard, name)
