"""Model cards: metadata that the hub takes and that is true, for models and adapters; a user's card stays."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from hf_longctx.report.training_runs.model_card import MARK, hub_id, write_model_card
from hf_longctx.report.training_runs.run_log import duration
from tests.builders.training.run_records import LOG, MODEL, RECORD


def directory(folder: Path, **changes: Any) -> Path:
    """Return what a run leaves; changes are of its model."""
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": LOG}))
    (folder / "results.json").write_text(json.dumps({"eval_loss_before": 3.0}))
    (folder / "run.json").write_text(json.dumps(RECORD | {"model": MODEL | changes}))
    return folder


def written(folder: Path) -> ModelCard:
    path = write_model_card(folder)
    assert path == folder / "README.md"
    return ModelCard.load(path)  # raises where metadata or model index are invalid


def test_a_model_says_where_it_comes_from_and_how_well_it_predicts(tmp_path):
    card = written(directory(tmp_path))
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("org/base-7b", "finetune")
    assert (data["license"], data["datasets"], data["library_name"]) == ("apache-2.0", ["org/books"], "transformers")
    assert data["pipeline_tag"] == "text-generation"
    (index,) = data["model-index"]
    assert index["name"] == "long-7b"
    assert [metric["value"] for result in index["results"] for metric in result["metrics"]] == [2.0, 7.3891]
    assert {result["dataset"]["name"] for result in index["results"]} == {"org/books, held out"}
    for line in (
        "| Before training | 3.0000 | 20.09 |",
        "| After training | 2.0000 | 7.389 |",
        "| Longest document trained on | 120,000 tokens |",
        "| Rotary positions | yarn, stretched 4.0 times |",
        "| Longer documents | split |",
        "| Global batch | 250,000 tokens |",
        "| Devices | 8 x NVIDIA H100 |",
        "| Time | 1 min 15 s |",
        "| Throughput | 1,234 tokens/s |",
        "| Exactness | exact over layouts: largest difference 1e-15 |",
        'AutoModelForCausalLM.from_pretrained("long-7b")',
    ):
        assert line in card.text
    assert "None" not in card.text


def test_an_adapter_is_one_of_peft(tmp_path):
    adapter = {"kind": "LORA", "r": 16, "alpha": 32}
    card = written(directory(tmp_path, adapter=adapter, trained_parameters=70_000))
    assert (card.data.library_name, card.data.base_model) == ("peft", "org/base-7b")
    assert card.data.to_dict()["base_model_relation"] == "adapter"
    assert "lora" in card.data.tags
    assert "| Adapter | LORA, r 16, alpha 32 |" in card.text
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("org/base-7b"), "long-7b")' in card.text


def test_an_adapter_is_loaded_with_the_positions_and_tokens_it_was_trained_with(tmp_path):
    """Those of its base give other logits, or do not fit."""
    folder = directory(tmp_path, adapter={"kind": "LORA", "r": 16, "alpha": 32}, trained_parameters=70_000)
    (folder / "config.json").write_text("{}")
    text = written(folder).text
    assert 'config = AutoConfig.from_pretrained("long-7b")\n' in text
    assert 'AutoModelForCausalLM.from_pretrained("org/base-7b", config=config), "long-7b")' in text
    record = json.loads((folder / "run.json").read_text()) | {"configuration": {"model": {"added_tokens": ["<|end|>"]}}}
    (folder / "run.json").write_text(json.dumps(record))
    text = written(folder).text
    assert "`hf-longctx merge` adds rows for new tokens" in text
    assert 'AutoModelForCausalLM.from_pretrained("merged")' in text
    assert "PeftModel" not in text
    compile(text.partition("```python\n")[2].partition("```")[0], "snippet", "exec")


def test_all_sources_of_a_mixture_are_named(tmp_path):
    """Metadata has those of a hub alone."""
    folder = directory(tmp_path)
    data = RECORD["data"] | {"sources": ["org/books", "own.jsonl"], "datasets": ["org/books"]}
    (folder / "run.json").write_text(json.dumps(RECORD | {"data": data}))
    card = written(folder)
    assert "| Sources | org/books, own.jsonl |" in card.text
    assert card.data.to_dict()["datasets"] == ["org/books"]
    assert {result.dataset_name for result in card.data.eval_results} == {"org/books, own.jsonl, held out"}


def test_the_time_is_that_of_all_starts_where_the_run_knows_it(tmp_path):
    folder = directory(tmp_path)
    for seconds, shown in ((3600.0, "| Time | 1 h 0 min |"), (None, "")):
        training = RECORD["training"] | {"seconds": seconds}
        (folder / "run.json").write_text(json.dumps(RECORD | {"training": training}))
        assert re.findall(r"\| Time .*", written(folder).text) == [shown][: len(shown)]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0073, "7.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (42.14, "42.1 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 0 s"),
        (192, "3 min 12 s"),
        (3599.7, "1 h 0 min"),
        (18420, "5 h 7 min"),
    ],
)
def test_durations_are_rounded_before_their_unit_is_chosen(seconds, words):
    assert duration(seconds) == words


def test_pipeline_stages_are_said(tmp_path):
    folder, batch = directory(tmp_path), ", 16,384 tokens on a rank at a time"
    assert f"{batch} |" in written(folder).text
    parallelism = RECORD["parallelism"] | {"pipeline_stages": 4}
    (folder / "run.json").write_text(json.dumps(RECORD | {"parallelism": parallelism}))
    assert f"{batch}, 4 pipeline stages |" in written(folder).text


def test_what_is_not_known_is_not_said(tmp_path):
    """A base that lies in a directory, without a licence; a run without evaluation."""
    (tmp_path / "org" / "base").mkdir(parents=True)
    directory(tmp_path, base=str(tmp_path / "org" / "base"), licence=None)
    (tmp_path / "results.json").unlink()
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": LOG[:1]}))
    card = written(tmp_path)
    assert not {"base_model", "base_model_relation", "license", "model-index"} & set(card.data.to_dict())
    assert str(tmp_path) not in str(card)
    assert "## Evaluation" not in card.text


@pytest.mark.parametrize(
    ("name", "hub_name"),
    [
        ("org/name", "org/name"),
        ("/data/org/name", None),
        ("a/b/c", None),
        ("org/na me", None),
        (None, None),
        ("gpt2", None),
    ],
)
def test_hub_ids(name, hub_name):
    assert hub_id(name) == hub_name


def test_a_card_that_somebody_wrote_stays(tmp_path):
    directory(tmp_path)
    own = "---\nlicense: mit\n---\n# Mine\n"
    (tmp_path / "README.md").write_text(own)
    assert write_model_card(tmp_path) is None
    assert (tmp_path / "README.md").read_text() == own


def test_cards_that_were_generated_are_written_anew(tmp_path):
    directory(tmp_path)
    template = ModelCard.from_template(ModelCardData(library_name="peft"))  # what PEFT begins with
    template.save(tmp_path / "README.md")
    assert MARK in str(written(tmp_path))
    (tmp_path / "results.json").write_text(json.dumps({"eval_loss_before": 4.0}))
    assert "| Before training | 4.0000 |" in written(tmp_path).text, "our own too"
    changed = (tmp_path / "README.md").read_text().replace(MARK, "")
    (tmp_path / "README.md").write_text(changed)
    assert write_model_card(tmp_path) is None


def test_names_are_shown_as_they_are_and_cannot_be_anything_else(tmp_path):
    name = 'a"<script>alert(1)</script> [b](javascript:c) `d` | e\n## f'
    folder = directory(tmp_path)
    changed = {"name": name, "data": RECORD["data"] | {"sources": [f"<img src=x onerror=y> {name}"], "datasets": []}}
    (folder / "run.json").write_text(json.dumps(RECORD | changed))
    text = written(folder).text
    assert '# a"&lt;script&gt;alert(1)&lt;/script&gt; \\[b\\](javascript:c) \\`d\\` \\| e ## f\n' in text
    assert "\n## f" not in text
    assert "<img" not in text
    code = text.partition("```python\n")[2].partition("```")[0]
    compile(code, "snippet", "exec")
    assert repr(name) in repr(ast.literal_eval(code.rpartition("from_pretrained(")[2].strip().removesuffix(")")))
    row = next(line for line in text.splitlines() if line.startswith("| Sources |"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 3, "a cell stays one cell"
