"""`hf-longctx config`: what a file comes to and where from, the schema for editors, and the tables of docs/settings.md."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from hf_longctx.cli import main
from hf_longctx.commands.shared.overrides import complete_key
from hf_longctx.commands.shared.reference import json_schema, tables
from hf_longctx.config import load_config
from hf_longctx.settings import DataConfig, LongctxConfig, ModelConfig
from tests.builders.config_files import CONFIGS, ROOT, VALID

BEGIN, END = "<!-- hf-longctx config --reference -->", "<!-- end of reference -->"


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    made = json_schema()
    Draft202012Validator.check_schema(made)
    return Draft202012Validator(made)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[str, str]]:
    """Dotted key -> value as YAML, and where it is from; also checks that what is printed is a configuration again."""
    assert main(["config", *arguments]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    values, path = {}, []
    for line in text.splitlines()[1:]:
        content, _, source = line.partition("  # ")
        depth = (len(content) - len(content.lstrip())) // 2
        key, _, value = content.strip().partition(":")
        path = [*path[:depth], key]
        values[".".join(path)] = (value.strip(), source)
    again = Path(arguments[0]).with_suffix(".again.yaml")
    again.write_text(text)
    before, after = (load_config(file, arguments[1:]) for file in (arguments[0], again))
    assert (after.model, after.data, after.training) == (before.model, before.data, before.training)
    given = before.longctx.given().items()
    assert given <= after.longctx.model_dump().items()
    return values


def test_every_value_is_shown_with_where_it_is_from(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n')
    file = tmp_path / "run.yaml"
    file.write_text(
        "model:\n  path: embedded:smollm2-135m\n  lora: {r: 4}\n"
        + f"data:\n  path: {tmp_path / 'a.jsonl'}\n"
        + "longctx:\n  <<: {capacity: 512, sharding: ddp}\n  ulysses_degree: 1\n"
        + "training:\n  gradient_checkpointing: true\n  lr_scheduler_kwargs: {num_cycles: 2}\n"
        + "  logging_steps: 1\n  save_steps: 0.25\n"
    )
    monkeypatch.setenv("HF_LONGCTX_KERNEL", "cpu_flash")
    values = printed(capsys, str(file), "longctx.sharding=zero1", "training.warmup_steps=3")
    assert values["model.path"] == ("embedded:smollm2-135m", "line 2")
    assert values["model.lora.r"] == ("4", "line 3")
    assert values["model.lora.alpha"] == ("32.0", "default")
    assert values["data.path"][1] == "line 5"
    assert values["longctx.capacity"] == ("512", "line 7")
    assert values["longctx.sharding"] == ("zero1", "override 'longctx.sharding=zero1'")
    assert values["longctx.kernel"] == ("cpu_flash", "environment HF_LONGCTX_KERNEL")
    assert values["longctx.loss_chunk_tokens"] == ("0", "default")
    assert values["training.warmup_steps"][1] == "override 'training.warmup_steps=3'"
    assert values["training.lr_scheduler_kwargs.num_cycles"] == ("2", "line 11")
    assert [values[f"training.{name}"][0] for name in ("logging_steps", "save_steps")] == ["1", "0.25"]
    (checkpointing,) = [
        key for key in values if key.endswith("tion_checkpointing") or key.endswith("ent_checkpointing")
    ]
    assert values[checkpointing] == ("true", "line 10")
    assert not {"model", "data", "longctx"} & {key for key, (value, _) in values.items() if value}


def test_sources_of_a_mixture_are_shown_each(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"input_ids": [1, 2]}\n')
    sources = [{"path": str(tmp_path / "a.jsonl"), "weight": 0.5}, {"path": str(tmp_path / "b.jsonl")}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**VALID, "data": {"sources": sources}}))
    assert "data.sources" in printed(capsys, str(tmp_path / "run.yaml"))


def test_a_file_or_what_is_of_all_files(capsys):
    assert main(["config"]) == 2
    assert "give a FILE to check, or --schema, or --reference" in capsys.readouterr().err
    assert main(["config", "run.yaml", "--schema"]) == 2
    assert "leave run.yaml out" in capsys.readouterr().err


def test_secrets_are_not_shown_wherever_they_are_from(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    address = "https://somebody:pass-word@example.org/x?signature=abc123"
    file.write_text(yaml.safe_dump(VALID | {"training": {"hub_token": "of-the-file", "run_name": address}}))
    assert main(["config", str(file)]) == 0
    output = capsys.readouterr().out
    assert "hub_token: (hidden)" in output
    assert "of-the-file" not in output
    assert "pass-word" not in output
    assert "abc123" not in output
    assert main(["config", str(file), "training.hub_token=of-the-command", "training.run_name=plain"]) == 0
    output = capsys.readouterr().out
    assert "of-the-command" not in output
    assert "# override 'training.hub_token=(hidden)'" in output
    assert "# override 'training.run_name=plain'" in output


def test_the_schema_takes_what_we_take(schema, tmp_path, capsys):
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema.schema
    for path in CONFIGS:
        schema.validate(yaml.safe_load(path.read_text()))
    schema.validate({**VALID, "training": None})
    (tmp_path / "nothing.yaml").write_text(yaml.safe_dump({**VALID, "training": None}))
    assert load_config(tmp_path / "nothing.yaml").training == {}
    schema.validate({**VALID, "data": {"path": {"train": ["a", "b"], "test": "c"}, "weight": 2}})
    for wrong in (
        {**VALID, "longctx": {"capcity": 1}},
        {**VALID, "longctx": {"capacity": "32KB"}},
        {**VALID, "model": {"path": "a", "dtype": "bf16"}},
        {**VALID, "training": {"learning_rat": 1}},
        {**VALID, "training": {"optim": "adamw"}},
        {**VALID, "data": {"path": "a", "weight": -1}},
        {"model": {"path": "a"}},
    ):
        assert not schema.is_valid(wrong), wrong
    keys = schema.schema["$defs"]
    for section in (ModelConfig, DataConfig, LongctxConfig):
        assert all(field.get("description") for field in keys[section.__name__]["properties"].values())


def test_the_reference_is_up_to_date():
    """After a change:  hf-longctx config --reference, between the two comments of docs/settings.md."""
    text = (ROOT / "docs" / "settings.md").read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == tables().strip()


def test_keys_are_completed():
    assert complete_key("longctx.cap") == ["longctx.capacity="]
    assert complete_key("tr") == ["training."]
