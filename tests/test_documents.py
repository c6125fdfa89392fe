"""From the section `data` of a configuration to documents that are trained on."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from hf_longctx import run as run_module
from hf_longctx.data.formats import RowFormat
from hf_longctx.data.prepared import PreparedDataset
from hf_longctx.redaction import without_named_secrets
from hf_longctx.run_documents import load_split
from hf_longctx.settings import DataConfig
from hf_longctx.settings.data import EMBEDDED_DATA
from hf_longctx.training.run_state import RunState, data_version_of
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import RecordingTrainer, arguments, documents, fresh_accelerator_state

WORDS = [f"w{number}" for number in range(100)]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        WordLevel({"<unk>": 0} | {word: 1 + number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))


def texts(path: Path, count: int, first: int = 0) -> Path:
    """Documents of 3 to 9 words; the first word of each tells which it is."""
    lines = [" ".join([WORDS[first + number], *WORDS[: 2 + number % 7]]) for number in range(count)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def test_a_file_is_the_split_it_is_named_as(tmp_path: Path):
    rows = documents([5, 9], labels=True)
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_split(DataConfig(path=str(file)), "train", None).to_list() == rows
    by_split = DataConfig(path={"held": [str(file)]}, train_split="held")
    assert load_split(by_split, "held", None).to_list() == rows
    with pytest.raises(ValueError, match="no source has the split 'test', only 'held'"):
        load_split(by_split, "test", None)


def test_what_is_tokenised_already_is_used_where_it_lies(tmp_path: Path):
    table = Dataset.from_list(documents([5, 9]))
    DatasetDict({"learn": table}).save_to_disk(tmp_path / "several")
    split = load_split(DataConfig(path=str(tmp_path / "several"), train_split="learn"), "learn", None)
    assert split.to_list() == table.to_list()
    assert not isinstance(split, PreparedDataset)
    limited = DataConfig(path=str(tmp_path / "several"), train_split="learn", max_documents=1)
    assert load_split(limited, "learn", None).to_list() == table.to_list()[:1]


def test_texts_are_tokenised_and_never_truncated(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    long = " ".join(WORDS * 300)
    DatasetDict({"train": Dataset.from_dict({"body": ["w1 w2", long], "stars": [1, 2]})}).save_to_disk(
        tmp_path / "saved"
    )
    split = load_split(DataConfig(path=str(tmp_path / "saved"), text_column="body"), "train", tokenizer)
    assert split.column_names == ["input_ids"]
    assert split["input_ids"][:] == tokenizer(["w1 w2", long])["input_ids"]


def test_each_source_of_a_mixture_reads_its_own_split(tmp_path: Path):
    """Saved data sets whose trained splits are called train and train_sft, beside files of one split."""
    rows = documents([3, 4, 5, 6, 7])
    saved = {"a": {"train": rows[:1], "test": rows[3:4]}, "b": {"train_sft": rows[1:2], "train": rows[4:]}}
    for name, splits in saved.items():
        DatasetDict({split: Dataset.from_list(given) for split, given in splits.items()}).save_to_disk(tmp_path / name)
    (tmp_path / "c.jsonl").write_text(json.dumps(rows[2]) + "\n")
    own = [{"path": f"{tmp_path}/b", "train_split": "train_sft"}, {"path": f"{tmp_path}/c.jsonl", "train_split": "all"}]
    data = DataConfig(sources=[{"path": f"{tmp_path}/a"}, *own], eval_split="test")
    assert not list(data.problems())
    assert load_split(data, "train", None).to_list() == rows[:3]
    assert load_split(data, "test", None).to_list() == rows[3:4]
    assert load_split(DataConfig(sources=own[:1]), "train", None).to_list() == rows[1:2]
    wrong = DataConfig(
        sources=[{"path": f"{tmp_path}/a", "train_split": name} for name in ("sft", "test")], eval_split="test"
    )
    assert list(wrong.problems()) == [
        ("sources.0.train_split", "no source has the split 'sft', only 'train', 'test'"),
        ("sources.1.train_split", "'test' is data.eval_split too, and would be learned and measured"),
    ]


def test_what_was_prepared_into_a_folder_is_found_there(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    data = DataConfig(path=str(texts(tmp_path / "texts.jsonl", 20)))
    made = load_split(data, "train", tokenizer, output=tmp_path / "prepared" / "train")
    split = load_split(DataConfig(path=str(tmp_path / "prepared")), "train", None)
    assert isinstance(split, PreparedDataset)
    assert split.to_list() == made.to_list()
    assert split.index.fingerprint == made.index.fingerprint


def mixture(folder: Path, weights: Any) -> DataConfig:
    paths = [texts(folder / f"{number}.jsonl", 10, first) for number, first in enumerate((0, 30))]
    return DataConfig(sources=[{"path": str(path), "weight": weight} for path, weight in zip(paths, weights)])


def run(
    folder: Path, tokenizer: Any, weights: Any, *, epochs: int = 3, resume: str | None = None, **settings: Any
) -> list:
    """First tokens of the documents of each step, sorted."""
    fresh_accelerator_state()
    from hf_longctx import LongContextPlugin

    given = {"num_train_epochs": epochs, "save_strategy": "steps", "save_steps": 5} | settings
    trainer = RecordingTrainer(
        model=tiny_llama(),
        args=arguments(folder / "run", **given),
        train_dataset=load_split(mixture(folder, weights), "train", tokenizer),
        plugin=LongContextPlugin(capacity=64, global_batch_documents=4, grace_seconds=1e6),
    )
    trainer.train(resume_from_checkpoint=resume)
    return [sorted(tokens[0] for _, start, tokens in step if start == 0) for step in trainer.held]


def test_a_mixture_is_trained_on_by_weight_and_resumed_in_its_epoch(tmp_path: Path, tokenizer: Any):
    weights = ([1, 0.5], [2.0])
    steps = run(tmp_path, tokenizer, weights)
    assert [len(step) for step in steps] == [4] * 7 + [2] + 2 * ([4] * 6 + [1])
    counts = []
    begin = 0
    for documents_in_epoch in (30, 25, 25):
        number = -(-documents_in_epoch // 4)
        seen = [token for step in steps[begin : begin + number] for token in step]
        begin += number
        counts.append([sum(token < 30 for token in seen), sum(token >= 30 for token in seen)])
        assert sorted(token for token in seen if token >= 30) == sorted([31 + offset for offset in range(10)] * 2)
    assert counts == [[10, 20], [5, 20], [5, 20]]
    resumed = run(tmp_path, tokenizer, weights, resume=str(tmp_path / "run" / "checkpoint-10"))
    assert resumed == steps[10:]


def test_weights_of_later_epochs_may_change_and_those_of_this_one_may_not(tmp_path: Path, tokenizer: Any):
    run(tmp_path, tokenizer, ([1], [1]), epochs=1)
    checkpoint = str(tmp_path / "run" / "checkpoint-5")
    with pytest.raises(ValueError, match=r"resuming with \{'weights': .*made with \{'weights': None\}"):
        run(tmp_path, tokenizer, ([2], [1]), resume=checkpoint)
    changed = run(tmp_path, tokenizer, ([1, 0], [1, 2]), epochs=2, resume=checkpoint)
    assert sorted(np.concatenate(changed).tolist()) == sorted([31 + offset for offset in range(10)] * 2)


def test_a_run_from_before_texts_had_end_tokens_keeps_none_and_says_so(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from hf_longctx import LongContextPlugin

    tokenizer.eos_token = WORDS[-1]
    section = DataConfig(path=str(texts(tmp_path / "texts.jsonl", 8)))

    def documents_of(resume: str | None, **changed: Any) -> Dataset:
        given: Any = SimpleNamespace(data=section.model_copy(update=changed), longctx=SimpleNamespace(ray_address=None))
        split, _ = run_module._datasets(given, tokenizer, arguments(tmp_path / "run", resume_from_checkpoint=resume))
        return split

    def trained(dataset: Dataset, resume: str | None = None) -> list[list[list[int]]]:
        fresh_accelerator_state()
        trainer = RecordingTrainer(
            model=tiny_llama(),
            args=arguments(tmp_path / "run", num_train_epochs=1, save_strategy="steps", save_steps=1),
            train_dataset=dataset,
            plugin=LongContextPlugin(capacity=64, global_batch_documents=4),
        )
        trainer.train(resume_from_checkpoint=resume)
        return [[list(tokens) for _, _, tokens in step] for step in trainer.held]

    def state_of_before(self: RunState) -> Any:
        return {"args": {k: v for k, v in asdict(self).items() if k != "data_version"}, "attributes": {}}

    before = load_split(section, "train", tokenizer, version=1)
    end = tokenizer.eos_token_id
    assert before.to_list() == [{"input_ids": row["input_ids"][:-1]} for row in documents_of(None).to_list()]
    assert {row["input_ids"][-1] for row in documents_of(None).to_list()} == {end}
    with monkeypatch.context() as patched:
        patched.setattr(RunState, "state", state_of_before)
        steps = trained(before)
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    assert data_version_of(Path(checkpoint)) == 1
    with pytest.raises(
        ValueError, match=r"data.add_eos=true, resuming from .*checkpoint-1, .* Valid: data.add_eos false"
    ):
        documents_of(checkpoint, add_eos=True)
    with pytest.raises(
        ValueError, match=r"fingerprint .*older than the end tokens.* Tokenisation\(\.\.\., version=1\)"
    ):
        trained(documents_of(None), checkpoint)
    with caplog.at_level("WARNING"):
        monkeypatch.setattr(run_module.logger, "warning", logging.getLogger("test").warning)
        kept = documents_of(checkpoint)
    assert f"resuming from {checkpoint}, which was made before texts got an end token: texts get none" in caplog.text
    assert trained(kept, checkpoint) == steps[1:]
    assert data_version_of(tmp_path / "run" / "checkpoint-2") == 1, "and it is remembered from here on"


@pytest.mark.nightly
def test_rows_tokenised_on_the_fly_are_the_documents_that_are_prepared(tmp_path: Path, tokenizer: Any):
    from hf_longctx.data.remote.cluster import disconnect

    Dataset.from_json(str(texts(tmp_path / "texts.jsonl", 20))).save_to_disk(tmp_path / "saved")
    data = DataConfig(path=str(tmp_path / "saved"))
    prepared = load_split(data, "train", tokenizer)
    try:
        raw = load_split(data.model_copy(update={"on_the_fly": True}), "train", tokenizer)
    finally:
        disconnect()
    assert raw.index.lengths.tolist() == prepared.index.lengths.tolist()
    assert [raw[row]["input_ids"].tolist() for row in range(20)] == prepared["input_ids"][:]
    again = load_split(data.model_copy(update={"on_the_fly": True}), "train", tokenizer)
    assert again.index.fingerprint == raw.index.fingerprint
    assert not ray.is_initialized()  # lengths were in the cache


def test_bad_rows_are_left_out_of_a_saved_data_set_too(tokenizer, tmp_path):
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [4, 5]}]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    data = DataConfig(path=str(tmp_path / "saved"), bad_rows="skip")
    assert len(load_split(data, "train", tokenizer)) == 1


def test_a_run_s_record_names_its_documents_again(tmp_path):
    """Files that have no splits stand under a name that no split has; of many files, none is left out."""
    for number in range(25):
        (tmp_path / f"hf_instruct_mixture_{number}.jsonl").write_text('{"text": "w1 w2"}\n')
    given = DataConfig(sources=[{"path": str(tmp_path / "*.jsonl")}, {"path": EMBEDDED_DATA}], eval_fraction=0.1)
    stored = json.loads(json.dumps(without_named_secrets(given.model_dump(mode="json", exclude_unset=True))))
    assert DataConfig(**stored) == given


def test_a_file_is_named_once(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "w2"}\n')
    every, one = str(tmp_path / "*.jsonl"), str(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl is named 2 times, and would be read so often"):
        DataConfig(path=[one, every])
    data = DataConfig(path={"train": every, "test": one}, eval_split="test")
    [(key, rule)] = data.problems()
    assert key == "path"
    assert "a.jsonl is of the split to train on and of data.eval_split, 'test'" in rule
    assert not list(DataConfig(path={"train": every, "test": one}).problems())


def test_what_a_message_holds_under_our_name_beside_theirs_is_no_text():
    """Arrow gives all messages of a column the keys of each."""
    row = {"messages": [{"speaker": "user", "says": "Hi", "role": None, "content": ""}]}
    renamed = RowFormat({"role": "speaker", "content": "says"}, {}).renamed(row)
    assert renamed["messages"] == [{"role": "user", "content": "Hi"}]
