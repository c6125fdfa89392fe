"""The embedded corpus: source files of the Python packages that this project runs on, read in place.

One file is one document. What is chosen depends on file names and contents only, never on the machine:

1. The files of a package's second level (torch/optim/..., or a single module) are all training or all held-out files,
   by a hash of that name. So a held-out file has no sibling among the training files.
2. Files are tried in the order of a hash of their names. A file is taken if its number of tokens falls into the band
   that is being filled, and if at most half of its lines are in the corpus already: no near duplicates.
3. Bands are filled from the longest documents to the shortest. What a band leaves of its share goes to the next one.

Documents are never truncated. Nothing is sent between ranks.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from hf_longctx.whole_files import built_whole

SOURCE_PACKAGES = ("torch", "transformers", "accelerate", "datasets")

TRAIN_TOKENS, HELD_OUT_TOKENS, DOCUMENT_TOKENS = 4_500, 1_400, 1_900
"""Default sizes: training split, held-out split, longest document. Two cores without bfloat16 units evaluate, train and evaluate
again in two minutes, and two of the twelve training documents are longer than what a rank of the quickstart holds.

Measured on two idle cores of an EPYC kept to AVX2: a second run of the quickstart took 165 CPU seconds, 94 s and 4.9 GiB. With
3,300 and 1,500 tokens, and no document over 900, it took 139 CPU seconds, 81 s and 4.9 GiB."""

BANDS = ((0.8, 0.4), (0.4, 0.15), (0.1, 0.15), (0.03, 0.18), (0.0, 0.12))
"""Lower end of a band as a fraction of the longest document allowed, and the share of all tokens in it. Most documents
are short and most tokens are in long ones, as in the mixtures that people train on."""

LONG_DOCUMENTS, MOST_IN_LONGEST = 2, 0.85
"""How many documents of the longest kind the first band has room for where it would hold none, and the share of the tokens that
they may take at most. The quickstart's two have 1,713 and 1,592 tokens; its ten others 51 to 216."""

MIN_DOCUMENT_TOKENS = 50
MIN_LONGEST_TOKENS = 1024

BYTES_PER_TOKEN = (1.75, 5.25)
"""Bounds of a source file's bytes per token. A file whose size cannot give the wanted number of tokens is not tokenised. Measured
on 973 files with SmolLM2's tokenizer: 1.80 to 5.13, 99 % of them 2.70 to 4.62."""


def prepare_corpus(
    cache_dir: str | Path,
    tokenizer_dir: str | Path,
    *,
    max_tokens: int = TRAIN_TOKENS,
    held_out_tokens: int = HELD_OUT_TOKENS,
    max_document_tokens: int = DOCUMENT_TOKENS,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> Path:
    """Chooses and tokenises the corpus, or finds it in the cache.

    Args:
        cache_dir: where corpora are kept; made if missing.
        tokenizer_dir: a directory with a fast tokenizer, for instance what `prepare_model` returned.
        max_tokens: size of the training split; never exceeded, and missed by less than one longest document.
        held_out_tokens: size of the held-out split, chosen in the same way from other files.
        max_document_tokens: length of the longest document allowed.
        on_progress: called with the number of tokens of each document taken.

    Returns:
        A directory for `datasets.load_from_disk`: splits `train` and `test` with the columns `input_ids` (list of
        int32) and `name` (path of the file below the folder of installed packages).

    Raises:
        ValueError: a size is too small, or the installed packages do not hold as many documents as asked for.
    """
    for name, tokens in (("max_tokens", max_tokens), ("held_out_tokens", held_out_tokens)):
        if tokens < MIN_DOCUMENT_TOKENS:
            raise ValueError(f"{name} must be at least {MIN_DOCUMENT_TOKENS} (one short document), got {tokens}")
    if max_document_tokens < MIN_LONGEST_TOKENS:
        raise ValueError(
            f"max_document_tokens must be at least {MIN_LONGEST_TOKENS} (with less, there would be little between it and the "
            f"shortest of {MIN_DOCUMENT_TOKENS} tokens), got {max_document_tokens}"
        )
    directory = corpus_directory(cache_dir, tokenizer_dir, max_tokens, held_out_tokens, max_document_tokens)
    if directory.is_dir():
        return directory
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir, "tokenizer.json")))
    selection = _Selection(tokenizer, max_document_tokens, on_progress)
    train, held_out = _source_files()
    splits = {"train": selection.take(train, max_tokens), "test": selection.take(held_out, held_out_tokens)}
    _save(splits, directory)
    return directory


def _save(splits: dict[str, dict[str, np.ndarray]], directory: Path) -> None:
    """Writes the corpus as `datasets` saves it. Imported here, because a corpus that is in the cache needs none of it."""
    from datasets import Dataset, DatasetDict, Features, List, Value

    features = Features({"input_ids": List(Value("int32")), "name": Value("string")})
    with built_whole(directory) as partial:
        DatasetDict(
            {
                split: Dataset.from_dict({"input_ids": list(chosen.values()), "name": list(chosen)}, features)
                for split, chosen in splits.items()
            }
        ).save_to_disk(partial)


def corpus_directory(cache_dir: str | Path, tokenizer_dir: str | Path, *sizes: int) -> Path:
    """Return where `prepare_corpus` puts the corpus of these sizes (max_tokens, held_out_tokens, max_document_tokens). Its name
    follows from all that it depends on: what is read, what it is tokenised with, and the code that chooses."""
    versions = {package: importlib.metadata.version(package) for package in SOURCE_PACKAGES}
    files = (Path(tokenizer_dir, "tokenizer.json"), Path(__file__))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    key = hashlib.sha256(json.dumps([versions, digests, sizes]).encode()).hexdigest()[:16]
    return Path(cache_dir) / f"python-sources-{key}"


def _source_files() -> tuple[dict[str, Path], dict[str, Path]]:
    """Training and held-out files, name -> path, each in the order of a hash of the names."""
    train: dict[str, Path] = {}
    held_out: dict[str, Path] = {}
    for name, path in sorted(_installed_files(), key=lambda file: _hash(file[0])):
        group = "/".join(name.split("/")[:2])
        (held_out if _hash(group) % 8 == 0 else train)[name] = path
    return train, held_out


def _installed_files() -> Iterator[tuple[str, Path]]:
    for package in SOURCE_PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec, f"{package} is a dependency of this project"
        assert spec.submodule_search_locations, f"{package} is a package"
        root = Path(spec.submodule_search_locations[0])
        for path in root.rglob("*.py"):
            yield f"{package}/{path.relative_to(root).as_posix()}", path


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _shares(max_tokens: int, max_document_tokens: int) -> list[float]:
    """Divides a split's tokens among the bands: as BANDS says, or with LONG_DOCUMENTS in the first band of a small corpus."""
    (_, usual), *shorter = BANDS
    needed = LONG_DOCUMENTS * max_document_tokens / max_tokens
    first = needed if usual * max_tokens < max_document_tokens and needed <= MOST_IN_LONGEST else usual
    return [first, *(share * (1 - first) / (1 - usual) for _, share in shorter)]


class _Selection:
    """Takes documents of the wanted lengths; remembers what it has read and which lines it has taken."""

    def __init__(self, tokenizer: Tokenizer, max_document_tokens: int, on_progress: Callable[[int], None]) -> None:
        self._tokenizer = tokenizer
        self._max_document_tokens = max_document_tokens
        self._on_progress = on_progress
        self._read: dict[Path, tuple[np.ndarray, set[str]]] = {}
        self._taken_lines: set[str] = set()

    def take(self, files: dict[str, Path], max_tokens: int) -> dict[str, np.ndarray]:
        """name -> tokens, int32 [T], of the documents chosen, at most `max_tokens` in total."""
        chosen: dict[str, np.ndarray] = {}
        upper, budget = self._max_document_tokens, 0.0
        for (fraction, _), share in zip(BANDS, _shares(max_tokens, upper), strict=True):
            lower = max(int(fraction * self._max_document_tokens), MIN_DOCUMENT_TOKENS)
            budget += share * max_tokens
            for name, path in files.items():
                if not lower * BYTES_PER_TOKEN[0] <= path.stat().st_size <= upper * BYTES_PER_TOKEN[1]:
                    continue
                tokens, lines = self._document(path)
                if not lower <= len(tokens) <= upper or 2 * len(lines & self._taken_lines) > len(lines):
                    continue
                if len(tokens) > budget:
                    break
                budget -= len(tokens)
                chosen[name] = tokens
                self._taken_lines |= lines
                self._on_progress(len(tokens))
            upper = lower - 1
        total = sum(map(len, chosen.values()))
        if total < max_tokens - self._max_document_tokens or not chosen:
            raise ValueError(
                f"{max_tokens} tokens were asked for in documents of at most {self._max_document_tokens} tokens; "
                f"{len(files)} source files of {', '.join(SOURCE_PACKAGES)} gave {len(chosen)} documents with {total} "
                f"tokens: ask for {'fewer' if chosen else 'more'}"
            )
        return dict(sorted(chosen.items()))

    def _document(self, path: Path) -> tuple[np.ndarray, set[str]]:
        """Tokens, int32 [T], and the lines that tell whether another document is much the same."""
        if path not in self._read:
            text = path.read_text(encoding="utf-8", errors="replace")
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
            lines = {stripped for line in text.splitlines() if len(stripped := line.strip()) >= 20}
            self._read[path] = (np.array(tokens, np.int32), lines)
        return self._read[path]
