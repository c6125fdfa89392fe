"""Sizes with units, versions, held-out documents, and names that are mistyped: as typed, and what is answered."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi

from hf_longctx import LongContextPlugin
from hf_longctx.cli import main
from hf_longctx.commands.evaluate import evaluate
from hf_longctx.config import load_config
from hf_longctx.data.holding_out import hashes
from hf_longctx.run_documents import load_split
from tests.builders.training_runs import documents

EMBEDDED = ("model.path=embedded:smollm2-135m", "model.random_init=null")
LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200] * 5


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in an empty folder: its exit code, and all that it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))

    def typed(line: str) -> tuple[int, str]:
        code = main(line.split())
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return typed


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(*overrides: str) -> Any:
    Path("run.yaml").write_text(
        "model: {random_init: {model_type: llama, vocab_size: 128, hidden_size: 16, intermediate_size: 32, "
        "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}}\n"
        "data: {path: rows.jsonl, eval_fraction: 0.25}\nlongctx: {capacity: 1k}\n"
    )
    return load_config("run.yaml", overrides)


def test_versions_are_shown(run: Any):
    code, output = run("--version")
    assert code == 0
    assert (
        output
        == ", ".join(f"{name} {version(name)}" for name in ("hf_longctx", "torch", "transformers", "accelerate")) + "\n"
    )


def test_the_list_of_verbs_is_not_cut(run: Any):
    listed = run("--help")[1].partition("Commands:")[2]
    assert "..." not in listed
    assert "Tokenise documents once, in parallel, and show how long they are." in " ".join(listed.split())


@pytest.mark.parametrize("size", ["8k", "8K", "8192"])
def test_sizes_may_have_units_everywhere(run: Any, monkeypatch: pytest.MonkeyPatch, size: str):
    np.save("lengths.npy", np.arange(2, 200))
    code, output = run(f"plan lengths.npy --ranks 2 --capacity {size} --tokens {size} --planner hdp --device cpu")
    assert (code, "8,192 tokens per rank" in output) == (0, True), output
    write("rows.jsonl", documents([3, 4]))
    given = [f"longctx.{name}={size}" for name in ("capacity", "global_batch_tokens", "longest_document")]
    config = config_of(*given, f"data.max_tokens={size}")
    assert (config.longctx.capacity, config.longctx.longest_document, config.data.max_tokens) == (8192, 8192, 8192)
    monkeypatch.setenv("HF_LONGCTX_CAPACITY", size)
    assert LongContextPlugin().capacity == 8192
    asked = []
    monkeypatch.setattr("hf_longctx.commands.shared.ranks.on_ranks", lambda work, wanted, **_: asked.append(wanted))
    monkeypatch.setattr("hf_longctx.commands.shared.loading.resolved", lambda name: name)
    evaluate("model", tasks="passkey, position", lengths=f"1k,{size}")
    assert (asked[0].lengths, asked[0].tasks) == ((1024, 8192), ("passkey", "position"))


@pytest.mark.parametrize("size", ["8KB", "-1", "many", "9" * 21])
def test_what_is_no_size_is_refused_with_what_is(run: Any, size: str):
    code, output = run(f"plan github --ranks 2 --capacity {size}")
    assert code == 2
    assert "a whole number from 1 to 1099511627776, as in 262144, 256K or 2M" in " ".join(
        re.sub("[│╭╮╰╯─]", " ", output).split()
    )


# Held-out documents


def test_lists_are_typed_with_commas_everywhere(run: Any):
    write("rows.jsonl", documents([5]))
    write("more.jsonl", documents([6]))
    config = config_of(
        "data.path=rows.jsonl,more.jsonl",
        *EMBEDDED,
        "model.lora.target_modules=q_proj, v_proj",
        "model.lora.modules_to_save=embed_tokens,lm_head",
        "model.added_tokens=<a>,<b>",
        "training.label_names=labels,others",
    )
    assert config.data.path == {"train": ["rows.jsonl", "more.jsonl"]}
    assert (config.model.lora.target_modules, config.model.lora.modules_to_save, config.model.added_tokens) == (
        ["q_proj", "v_proj"],
        ["embed_tokens", "lm_head"],
        ["<a>", "<b>"],
    )
    assert config.training["label_names"] == ["labels", "others"]
    code, output = run(
        "config run.yaml model.lora={} model.lora.target_modules=q_proj|v_proj data.path=rows.jsonl,no.txt"
    )
    assert code == 2
    assert "must be all-linear or a non-empty list of module names, got 'q_proj|v_proj'" in output
    assert "got 'no.txt'" in output


def test_a_share_of_the_documents_is_held_out_by_what_they_hold(run: Any):
    rows = documents(LENGTHS)
    for number, row in enumerate(rows):  # no two alike
        row["input_ids"] = [number % 128, number // 128, *row["input_ids"]]
        row.pop("labels", None)
    write("rows.jsonl", rows)
    data = config_of().data
    train, held_out = (load_split(data, split, None) for split in (data.train_split, data.held_out))
    both = [tuple(ids) for part in (train, held_out) for ids in part["input_ids"]]
    assert sorted(both) == sorted(tuple(row["input_ids"]) for row in rows)
    assert 5 <= len(held_out) <= 25
    assert held_out.index.lengths.tolist() == [len(ids) for ids in held_out["input_ids"]]
    assert (hashes(held_out) < 2**62).all()
    assert (hashes(train) >= 2**62).all()
    write("rows.jsonl", [*rows[::-1], {"input_ids": [1, 2, 3, 4]}])  # another order, and one more
    again = load_split(data, data.held_out, None)
    assert {tuple(ids) for ids in again["input_ids"]} - {(1, 2, 3, 4)} == {tuple(ids) for ids in held_out["input_ids"]}


def test_fractions_that_hold_out_nothing_or_beside_a_split_are_refused(run: Any):
    write("rows.jsonl", documents([3, 4]))
    data = config_of("data.eval_fraction=0.000001").data
    with pytest.raises(ValueError, match=r"eval_fraction=1e-06 holds out none of 2 documents"):
        load_split(data, data.held_out, None)
    code, output = run("train run.yaml --dry-run --ranks 1 data.eval_fraction=0.000001")
    assert (code, "eval_fraction=1e-06 holds out none of 2 documents" in output) == (2, True), output
    code, output = run("config run.yaml data.eval_split=train")
    assert (code, "data.eval_fraction: 0.25 beside eval_split ('train'): keep one" in output) == (2, True), output
    code, output = run("config run.yaml data.eval_fraction=1.5")
    assert code == 2
    assert "less than 1" in output
    assert run("config run.yaml data.eval_fraction=null training.eval_strategy=epoch")[0] == 2
    assert run("config run.yaml training.eval_strategy=epoch")[0] == 0


def test_training_evaluates_what_was_held_out_and_evaluate_takes_it_from_the_run(
    run: Any, monkeypatch: pytest.MonkeyPatch
):
    from tests.builders.training_runs import fresh_accelerator_state

    fresh_accelerator_state()
    write("rows.jsonl", documents(LENGTHS))
    config_of()
    options = (
        "training.use_cpu=true training.max_steps=1 training.save_strategy=no training.report_to=[] training.bf16=false"
    )
    code, output = run(f"train run.yaml --ranks 1 {options} training.output_dir=out longctx.global_batch_documents=8")
    assert code == 0, output
    results = json.loads(Path("out/results.json").read_text())
    assert results["documents"] < len(LENGTHS)
    assert "eval_loss_after" in results
    fresh_accelerator_state()
    code, output = run("evaluate out --tasks position --near 0 --cpu --ranks 1 --output measured")
    assert code == 0, output
    measured = json.loads(Path("measured/evaluation.json").read_text())
    assert measured["environment"]["data"] == "what the run out holds out"
    assert measured["loss"] == pytest.approx(results["eval_loss_after"], rel=1e-5)
    assert "Documents: what the run out holds out\n" in output
    fresh_accelerator_state()
    code, output = run(f"train run.yaml --ranks 1 {options} data.eval_fraction=null training.output_dir=all")
    assert code == 0, output
    fresh_accelerator_state()
    code, output = run("evaluate all --tasks length --near 0 --cpu --ranks 1 --output measured")
    assert code == 0, output
    assert "Documents: some of train of the run all, which holds nothing out: what it trains on" in output
    assert json.loads(Path("measured/evaluation.json").read_text())["documents"] == len(LENGTHS)
    Path("rows.jsonl").unlink()
    code, output = run("evaluate out --tasks position --near 0 --cpu --ranks 1")
    assert code == 2
    assert "the documents of the run out are not here" in output


def test_held_out_documents_that_no_evaluation_holds_are_refused_before_any_step(
    run: Any, monkeypatch: pytest.MonkeyPatch
):
    """A resumed run trained to its end first, and left no model."""
    from tests.builders.training_runs import fresh_accelerator_state

    write("train.jsonl", documents(LENGTHS))
    write("test.jsonl", documents([9, 300, 5]))
    write("rows.jsonl", documents([9] * 20))
    config_of()
    data = "data.path={train:[train.jsonl],test:[test.jsonl]} data.eval_split=test data.eval_fraction=null"
    options = f"{data} training.use_cpu=true training.report_to=[] training.bf16=false training.output_dir=out"
    options += " longctx.global_batch_documents=8 training.save_steps=1 training.resume_from_checkpoint=auto"
    fresh_accelerator_state()
    assert run(f"train run.yaml --ranks 1 {options} training.max_steps=1")[0] == 0
    reason = "to evaluate: document 1 has 300 tokens, but all ranks together hold 1 ranks * 200 tokens"
    for more in ("training.max_steps=2", "--dry-run"):
        fresh_accelerator_state()
        code, output = run(f"train run.yaml --ranks 1 {options} longctx.capacity=200 {more}")
        assert (code, reason in output) == (2, True), output
    assert not Path("out/checkpoint-2").exists()


# Mistyped names


def test_a_mistyped_folder_is_not_asked_of_a_hub(run: Any, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def unreachable(self: Any, name: str, **_: Any) -> None:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    monkeypatch.setattr("hf_longctx.data.reading.layouts.load_dataset_builder", lambda *_: asked.append("datasets"))
    Path("data/documents").mkdir(parents=True)
    np.save("lengths.npy", [3])
    code, output = run("plan data/documets --ranks 1 --capacity 8")
    assert (code, asked) == (2, [])
    assert "'data/documets' is no directory" in output
    assert "did you mean 'data/documents'?" in output
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    code, output = run("plan somebody/documents --ranks 1 --capacity 8")
    assert (code, asked) == (2, ["somebody/documents"])
    assert (
        "the hub cannot be reached (OSError). Valid: a name that is here, or `hf download --repo-type dataset" in output
    )


def test_a_mistyped_run_is_not_looked_for_in_the_hubs_cache(run: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("out7").mkdir()
    write("rows.jsonl", documents([5]))
    code, output = run("evaluate out --data rows.jsonl --tasks length")
    assert code == 2
    assert "'out' is no folder here, nor in the hub's cache, and HF_HUB_OFFLINE is set" in output
    assert "out7" in output
