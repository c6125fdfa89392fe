"""What preparing and loading documents costs, and whether what comes out is what the tokenizer says.

    python benchmarks/data.py --check

1. Round trip of real text: source files as a folder, plays and the Bible as JSONL, speeches as conversations. Figures:
   documents whose tokens, and conversations whose labels, differ from what the tokenizer itself gives.
2. Throughput of preparing, over that of `datasets.map` with the same tokenizer and processes, interleaved.
3. Most memory of preparing a million short documents, over that of a tenth of them; all processes together.
4. Bytes that a rank reads from disk, of a long document that four ranks share.
5. How long training waits for its next step, over the time of its steps: the quickstart's run.
"""

import itertools
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.books import conversations, read_bible, read_plays  # noqa: E402
from hf_longctx.data.cache import default_cache_dir  # noqa: E402
from hf_longctx.data.embedded.embedded_model import prepare_model  # noqa: E402
from hf_longctx.data.prepare import Part, prepare  # noqa: E402
from hf_longctx.data.prepared import PreparedDataset, load_prepared  # noqa: E402
from hf_longctx.data.reading.source import Source  # noqa: E402
from hf_longctx.data.tokenisation import Tokenisation  # noqa: E402

PACKAGE, PATTERN = "transformers", "models/l*/*.py"
"""Source files of the round trip: of this installed package."""

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
"""The model's own chat format, with the marks by which transformers itself knows what an assistant says."""

MAPPED_CHARACTERS = 64_000_000
"""Of the texts on which throughput is measured: some 20 seconds, beside which starting processes counts little."""

LONG_TOKENS, RANKS = 8_000_000, 4


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare_model(default_cache_dir()))


# 1. Round trip


def round_trip(folder: Path) -> tuple[dict[str, float], list[dict[str, str]]]:
    import importlib.util

    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    own = tokenizer()
    plays, bible = read_plays(default_cache_dir()), read_bible(default_cache_dir())
    texts = [*plays.values(), bible]
    (folder / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spoken = conversations(plays)
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in spoken))
    files = [path for path in sorted(package.glob(PATTERN)) if path.stat().st_size]
    sources = prepared(folder, Part(Source(str(package), documents="files", pattern=PATTERN), Tokenisation(own)))
    figures = {
        "source files/documents that differ": differing(
            sources, [[*own(path.read_text())["input_ids"], own.eos_token_id] for path in files]
        ),
        "books/documents that differ": differing(
            prepared(folder, Part(Source(str(folder / "books.jsonl")), Tokenisation(own))),
            [[*ids, own.eos_token_id] for ids in own(texts)["input_ids"]],
        ),
    }
    marked = tokenizer()
    marked.chat_template = GENERATION
    labels = []
    ids = []
    for messages in spoken:
        made = marked.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids.append(made["input_ids"])
        learned = zip(made["input_ids"], made["assistant_masks"])
        labels.append([token if by_assistant else -100 for token, by_assistant in learned])
    chat = Source(str(folder / "chat.jsonl"))
    with_marks = prepared(folder, Part(chat, Tokenisation(marked)))
    figures["conversations/documents that differ"] = differing(with_marks, ids)
    figures["conversations/labels that differ"] = differing(with_marks, labels, "labels")
    by_itself = prepared(folder, Part(chat, Tokenisation(own)))
    answers = [
        [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
        for messages in spoken
    ]
    learned_texts = [[text.removesuffix("\n") for text in learned_runs(own, row["labels"])] for row in by_itself]
    figures["conversations, the model's own template/conversations that differ"] = float(
        sum(a != b for a, b in zip(learned_texts, answers, strict=True))
    )
    counts = {"source files": len(files), "books": len(texts), "conversations": len(spoken)}
    rows = [
        {"what": f"{name}, of {counts[name.split('/')[0].split(',')[0]]:,}", "figure": f"{value:g}"}
        for name, value in figures.items()
    ]
    return figures, rows


def prepared(folder: Path, part: Part, workers: int = 2) -> PreparedDataset:
    return load_prepared(prepare([part], folder / "cache", workers=workers))


def differing(dataset: PreparedDataset, expected: list[list[int]], column: str = "input_ids") -> float:
    """Documents that are not as expected; all of them where their number differs."""
    if len(dataset) != len(expected):
        return float(max(len(dataset), len(expected)))
    return float(sum(row[column] != wanted for row, wanted in zip(dataset, expected)))


def learned_runs(of: Any, labels: list[int]) -> list[str]:
    """The text of each run of tokens that are learned."""
    runs = itertools.groupby(labels, key=lambda label: label != -100)
    return [of.decode(list(run)) for learned, run in runs if learned]


# 2. Throughput


def throughput(folder: Path, rounds: int, workers: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns; each way begins with nothing in its cache."""
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    path = folder / "texts.jsonl"
    write_texts(path, MAPPED_CHARACTERS)
    own = tokenizer()

    def mapped(cache: Path) -> int:
        loaded = load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
        made = loaded.map(
            lambda rows: {"input_ids": own(rows["text"])["input_ids"]},
            batched=True,
            num_proc=workers if workers > 1 else None,
            remove_columns=loaded.column_names,
        )
        return len(made)

    def ours(cache: Path) -> int:
        return len(load_prepared(prepare([Part(Source(str(path)), Tokenisation(own))], cache, workers=workers)))

    ways: dict[str, Callable[[Path], int]] = {"datasets.map": mapped, "prepare": ours}
    seconds_of: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 else reversed(ways):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                began = time.perf_counter()
                ways[name](Path(cache))
                seconds_of[name].append(time.perf_counter() - began)
    return seconds_of


def write_texts(path: Path, characters: int) -> None:
    """Documents of many lengths, cut out of the plays and the Bible."""
    whole = " ".join(read_plays(default_cache_dir()).values()) + read_bible(default_cache_dir())
    drawn = np.random.default_rng(0)
    written = 0
    with path.open("w") as file:
        while written < characters:
            length = int(min(drawn.lognormal(8.0, 1.2), 200_000))
            start = int(drawn.integers(0, len(whole) - length))
            file.write(json.dumps({"text": whole[start : start + length]}) + "\n")
            written += length


# 3. Memory


def memory(folder: Path, documents: int) -> float:
    """Most bytes that preparing so many documents held, in the process that did most and in its parent, together."""
    path = folder / f"{documents}.jsonl"
    with path.open("w") as file:
        for number in range(documents):
            file.write(f'{{"text": "Document {number} is as short as this."}}\n')
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        command = [sys.executable, __file__, "--memory-of", str(path), cache]
        finished = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
    path.unlink()
    return float(finished.stdout.split()[-1])


def print_memory(path: str, cache: str) -> int:
    made = load_prepared(prepare([Part(Source(path), Tokenisation(tokenizer()))], cache, workers=1))
    assert len(made)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return 0


# 4. Bytes read


def bytes_read(folder: Path) -> list[float]:
    """Measure for each of the ranks that share one long document: bytes from disk over the document's."""
    path = folder / "long.jsonl"
    rng = np.random.default_rng(0)
    path.write_text(json.dumps({"input_ids": rng.integers(0, 1000, LONG_TOKENS).tolist()}) + "\n")
    directory = prepare([Part(Source(str(path)), Tokenisation(None, kind="tokens"))], folder / "cache", workers=1)
    (shard,) = directory.glob("shard-*.arrow")
    shares = []
    for rank in (0, *range(RANKS)):  # the first time, libraries come from disk too
        with shard.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            shares.append(pool.apply(read_by_rank, (directory, rank)) / (4 * LONG_TOKENS))
    return shares[1:]


def read_by_rank(directory: Path, rank: int) -> int:
    """Bytes that came from disk while a rank prepared its step."""
    from transformers import LlamaConfig

    from hf_longctx.data.collator import LengthAwareCollator
    from hf_longctx.data.loader import PlannedSteps
    from hf_longctx.data.long_documents import cut_documents
    from hf_longctx.planner import GPU, CostModel, GlobalBatches, Topology
    from hf_longctx.planner.cost.adjustment import Adjustment

    LlamaConfig()  # what is imported is read from disk too, and so is the planner's compiled code
    GlobalBatches(np.ones(1, np.int64), 0, documents=1)
    planning = CostModel.from_config(LlamaConfig(), GPU)
    LengthAwareCollator(Topology(RANKS, LONG_TOKENS), planning, rank).plan(np.array([LONG_TOKENS]))
    before = from_disk()
    dataset = load_prepared(directory)
    topology = Topology(RANKS, LONG_TOKENS // RANKS)
    collator = LengthAwareCollator(topology, CostModel.from_config(LlamaConfig(), GPU), rank)
    pieces = cut_documents(dataset, dataset.index)
    steps = PlannedSteps(dataset, pieces, GlobalBatches(pieces.lengths, 0, documents=1), collator)
    step = steps.prepare(0, 0, Adjustment())
    assert step.tokens == LONG_TOKENS // RANKS
    return from_disk() - before


def from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


# 5. Waiting


def waiting(folder: Path, steps: int) -> float:
    """Time that training waits for its next step, over the time of its steps, the first left out; the rank that waits most."""
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu", "--num_processes", "2"]
    command += ["scripts/train.py", "--config", "configs/quickstart.yaml", f"training.output_dir={folder / 'run'}"]
    command += [f"training.max_steps={steps}", "data.eval_split=null", "training.save_strategy=no"]
    command += ["training.eval_strategy=no"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    logged = [entry for entry in history if "data_wait_seconds" in entry][1:]
    return sum(entry["data_wait_seconds"] for entry in logged) / sum(entry["measured_step_seconds"] for entry in logged)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measure throughput so often in each way")
    parser.add_argument("--documents", type=int, default=1_000_000, help="measure memory with so many documents")
    parser.add_argument("--steps", type=int, default=4, help="train the quickstart for so many steps")
    parser.add_argument(
        "--memory-of", nargs=2, help="measure memory once in this process; the benchmark starts itself so"
    )
    arguments = parser.parse_args()
    if arguments.memory_of:
        return print_memory(*arguments.memory_of)
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp())
    try:
        figures, rows = round_trip(folder)
        seconds = {}
        for workers in (1, 2):
            seconds[workers] = seconds_of = throughput(folder, arguments.rounds, workers)
            name = f"throughput/{workers} processes/over datasets.map's"
            figures[name] = statistics.median(seconds_of["datasets.map"]) / statistics.median(seconds_of["prepare"])
        peaks = {count: memory(folder, count) for count in (arguments.documents // 10, arguments.documents)}
        figures["memory/of all documents over of a tenth"] = (
            peaks[arguments.documents] / peaks[arguments.documents // 10]
        )
        shares = bytes_read(folder)
        figures[f"bytes read/{RANKS} ranks/most of a document"] = max(shares)
        figures["waiting for data/of step time"] = waiting(folder, arguments.steps)
    finally:
        shutil.rmtree(folder)
    rows += [{"what": name, "figure": f"{value:.3f}"} for name, value in list(figures.items())[len(rows) :]]
    return report.conclude(arguments, rows, figures, load, seconds=seconds, peak_bytes=peaks, shares=shares)


if __name__ == "__main__":
    raise SystemExit(main())
