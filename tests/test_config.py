"""Configuration: every mistake is reported, at its line, with what would be valid."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from datasets import Dataset, DatasetDict
from transformers import CONFIG_MAPPING, TrainingArguments

from hf_longctx.attention.kernels import KERNELS
from hf_longctx.cli import main
from hf_longctx.config import Config, ConfigError, load_config
from hf_longctx.settings import DataConfig, LongctxConfig, LoraSection, ModelConfig, RopeScalingSection
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.settings.random_init import check_random_init
from tests.builders.config_files import CONFIGS, ROOT, VALID
from tests.builders.training_runs import fresh_accelerator_state

SLOW = ("gemma-3", "gpt-oss", "qwen3-30b")
"""Beginnings of configurations whose models are counted layer by layer, 5 s each; Qwen3-8B's, another, is always tested."""
PLANNED = [
    pytest.param(path, marks=[pytest.mark.nightly] if path.stem.startswith(SLOW) else [], id=path.name)
    for path in CONFIGS
]


def write(directory: Path, content: str | dict[str, Any]) -> Path:
    path = directory / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def message_of(path: Path, *overrides: str) -> list[str]:
    """The lines of the error below its headline, without indentation."""
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    headline, *lines = str(raised.value).splitlines()
    assert headline.startswith(str(path))
    return [line.strip() for line in lines]


@pytest.mark.parametrize("path", PLANNED)
def test_configurations_of_the_repository_plan_their_first_step_and_say_how_they_are_run(path, capsys, monkeypatch):
    """On a CPU, with a model without weights and drawn lengths: on the ranks that the first line starts, a rank holds no more
    than its device has, and the dry run's command is that line."""
    monkeypatch.chdir(ROOT)
    start = path.read_text().splitlines()[0].removeprefix("# ")
    words = start.split()
    nodes, per_node = (
        int(words[words.index(name) + 1]) if name in words else 1 for name in ("--nnodes", "--nproc-per-node")
    )
    ranks = int(words[words.index("--ranks") + 1]) if "--ranks" in words else nodes * per_node
    config = load_config(path)
    device = [] if config.training.get("use_cpu") else ["--device", "h100"]
    options = ["--dry-run", "--ranks", str(ranks), "--nodes", str(nodes), "--lengths", "github", *device]
    fresh_accelerator_state()
    assert main(["train", f"configs/{path.name}", *options]) == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert "\nfits: " in shown
    assert f"\n  {start}\n" in shown
    assert f"configs/{path.name}" in start


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.name)
def test_configurations_of_accelerate_are_its_own_and_begin_with_a_configuration_that_there_is(path):
    start, settings = path.read_text().splitlines()[0], ClusterConfig.from_yaml_file(path)
    assert start.startswith(f"# accelerate launch --config_file configs/accelerate/{path.name} ")
    assert (ROOT / start.split("--config ")[1]).is_file()
    assert settings.num_processes == 8 * settings.num_machines
    assert settings.mixed_precision == "no", "precision is TrainingArguments' business"
    fsdp = settings.fsdp_config or {}
    assert fsdp.get("fsdp_version", 2) == 2


def test_all_mistakes_are_shown_at_once_in_the_order_of_the_file(tmp_path):
    path = write(
        tmp_path,
        """\
model:
  path: embedded:smollm
  dtype: fp32
data:
  path: nowhere.jsonl
  eval_splt: test
longctx:
  capcity: 4096
  global_batch_documents: 12
  global_batch_tokens: 40000
  kernel: auto
  kernel: reference
training:
  learning_rat: 1.0e-4
  bf16: perhaps
  lr_scheduler_type: cosin
trainning: {}
""",
    )
    lines = message_of(path, "training.max_steps=many", "longctx", "model.random_init={model_type: lama}")
    expected = [
        ("line 2: model.path: ", "embedded:smollm2-135m"),
        ("line 3: model.dtype: ", "'float32', 'bfloat16' or 'float16', got 'fp32'"),
        ("line 5: data.path: ", "'nowhere.jsonl'"),
        ("line 6: data.eval_splt: ", "did you mean 'eval_split'?"),
        ("line 8: longctx.capcity: ", "did you mean 'capacity'?"),
        ("line 10: longctx.global_batch_tokens: ", "global_batch_documents (12)"),
        ("line 11: longctx.kernel: ", "written twice, here and in line 12"),
        ("line 14: training.learning_rat: ", "did you mean 'learning_rate'?"),
        ("line 15: training.bf16: ", "got 'perhaps'"),
        ("line 16: training.lr_scheduler_type: ", "'cosine'"),
        ("line 17: trainning: ", "did you mean 'training'?"),
        ("override 'training.max_steps=many': training.max_steps: ", "valid integer"),
        ("override 'model.random_init={model_type: lama}': model.random_init.model_type: ", "did you mean 'llama'?"),
        ("override 'longctx': ", "section.key=value"),
    ]
    assert len(lines) == len(expected), lines
    for line, (start, part) in zip(lines, expected):
        assert line.startswith(start), line
        assert part in line


SECTION_KEYS = {
    "model": list(ModelConfig.model_fields),
    "data": list(DataConfig.model_fields),
    "longctx": list(LongctxConfig.model_fields),
    "training": [field.name for field in fields(TrainingArguments)],
    "": list(Config.model_fields),
}


@pytest.mark.parametrize("section", SECTION_KEYS)
def test_every_misspelt_key_is_reported_with_its_line_and_a_neighbour(tmp_path, section):
    for key in SECTION_KEYS[section]:
        misspelt = key[:2] + "_" + key[2:]
        if section:
            lines = message_of(write(tmp_path, {**VALID, section: {**VALID[section], misspelt: 1}}))
        else:
            lines = message_of(write(tmp_path, {**VALID, misspelt: 1}))
        name = f"{section}.{misspelt}" if section else misspelt
        assert len(lines) == 1
        assert f": {name}: unknown key (value 1); did you mean " in lines[0]
        line = int(lines[0].split(":")[0].removeprefix("line "))
        assert (tmp_path / "run.yaml").read_text().splitlines()[line - 1].strip() == f"{misspelt}: 1"


def test_a_missing_key_says_what_it_is(tmp_path):
    lines = message_of(write(tmp_path, {"model": {"path": "a/b"}, "longctx": {}}))
    assert lines == ["data: missing: the documents to train on"]


@pytest.mark.parametrize(
    ("change", "where", "part"),
    [
        ("model.random_init={model_type: llama}", "model.random_init", "got both"),
        ("model.path=null", "model.random_init", "got neither"),
        ("longctx.capacity=-1", "longctx.capacity", "greater than or equal to 0, got -1"),
        ("longctx={capacity: -1}", "longctx.capacity", "greater than or equal to 0, got -1"),
        ("longctx.capacity=true", "longctx.capacity", "valid integer, got True"),
        ("longctx.kernel=flash", "longctx.kernel", "'cpu_flash'"),
        ("longctx.stall_timeout_seconds=-1", "longctx.stall_timeout_seconds", "greater than 0"),
        ("data.path=embedded:books", "data.path", "embedded:python-sources"),
        ("data.path=''", "data.path", "existing files"),
        ("data.path=[]", "data.path", "non-empty list"),
        ("data.path=3", "data.path", "got 3"),
        ("data=7", "data", "must be a mapping, got 7"),
        ("training=7", "training", "must be a valid dictionary, got 7"),
        ("training.max_steps=true", "training.max_steps", "must be a number, got True"),
        ("training.eval_strategy=epoch", "training.eval_strategy", "set data.eval_split"),
        ("training.seed=-1", "training.seed", "from 0 to 4294967295, got -1"),
        ("training.data_seed=4294967296", "training.data_seed", "got 4294967296"),
        ("data.eval_split=dev", "data.eval_split", "no source has the split 'dev', only 'train', 'test'"),
        ("data.train_split=dev", "data.train_split", "no source has the split 'dev', only 'train', 'test'"),
        ("data.path=null", "data.path", "give path (one source) or sources (a mixture)"),
        ("data.path=data/*.jsonl", "data.path", "existing files"),
        ("data.kind=chat", "data.kind", "'messages'"),
        ("data.weight=-1", "data.weight.0", "greater than or equal to 0, got -1"),
        ("data.sources=[{path: 'embedded:python-sources'}]", "data.path", "give each source its own"),
        ("data={sources: [{path: nowhere.csv}]}", "data.sources.0.path", "got 'nowhere.csv'"),
        ("data={sources: [{path: org/set}], weight: 2}", "data.weight", "give each source its own"),
        ("longctx.activation_offload=1.5", "longctx.activation_offload", "less than or equal to 1, got 1.5"),
        ("longctx.sharding=zero4", "longctx.sharding", "'zero3'"),
        ("model.freeze=[]", "model.freeze", "at least 1 item"),
        ("model.lora={r: 0}", "model.lora.r", "greater than 0, got 0"),
        ("model.lora={rank: 4}", "model.lora.rank", "did you mean 'r'?"),
        ("model.lora={rank_pat: 4}", "model.lora.rank_pat", "did you mean 'rank_pattern'?"),
        ("model.lora={target_modules: q_proj|v_proj}", "model.lora.target_modules", "all-linear or a non-empty list"),
        ("model.lora={dropout: 1.0}", "model.lora.dropout", "less than 1, got 1.0"),
        ("model={path: a, freeze: [b], lora: {}}", "model.lora", "remove model.freeze or model.lora"),
        ("model={random_init: {model_type: llama}, lora: {}}", "model.lora", "give model.path"),
        ("model.load_in_4bit=true", "model.load_in_4bit", "set model.lora"),
        ("model.rope_scaling={rope_type: yarn}", "model.rope_scaling.factor", "missing: context after scaling"),
        ("model.rope_scaling={rope_type: dynamic, factor: 2}", "model.rope_scaling", "differs between the ranks"),
        ("model.rope_scaling={rope_type: yarm, factor: 2}", "model.rope_scaling", "valid: linear, llama3, yarn"),
        ("model.rope_scaling={rope_type: linear, factor: 1}", "model.rope_scaling", "must be more than 1"),
        ("model.rope_scaling={rope_type: linear, factor: 2, beta_fast: 3}", "model.rope_scaling", "beta_fast means"),
    ],
)
def test_each_rule_names_the_key_and_the_override(tmp_path, change, where, part):
    (line,) = message_of(write(tmp_path, VALID), change)
    assert line.startswith(
        (f"override {change!r}: {where}: ", f"line 1: {where}: ", f"line 3: {where}: ", f"line 4: {where}: ")
    ), line
    assert part in line


def test_a_random_model_refuses_unknown_sizes_and_text(tmp_path):
    tiny = {"model_type": "llama", "num_hidden_layer": 2}
    (line,) = message_of(write(tmp_path, {**VALID, "model": {"random_init": tiny}}))
    assert line.startswith("line 4: model.random_init.num_hidden_layer: ")
    assert "'num_hidden_layers'" in line
    (line,) = message_of(write(tmp_path, VALID), "model={random_init: {model_type: llama}}", "data.text_column=text")
    assert "no tokenizer" in line


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ("{model_type: llama, hidden_size: 65, num_attention_heads: 4}", "not a multiple"),
        ("{model_type: llama, hidden_size: big}", "expected int, got str"),
        ("{model_type: llama, num_hidden_layers: 0}", "num_hidden_layers must be at least 1, got 0"),
        ("{model_type: llama, num_key_value_heads: 5}", "num_key_value_heads=5 must divide num_attention_heads=32"),
        ("{model_type: llama, rope_parameters: {rope_type: linear}}", "factor"),
        ("{model_type: mixtral, num_local_experts: 2, num_experts_per_tok: 3}", "num_local_experts=2"),
        ("{model_type: bloom, hidden_size: 65, n_head: 4}", "65 = 16 * 4 + 1"),
    ],
)
def test_a_random_model_of_impossible_sizes_is_refused(tmp_path, sizes, part):
    (line,) = message_of(write(tmp_path, VALID), f"model={{random_init: {sizes}}}")
    assert "model.random_init: " in line
    assert part in line


NO_EQUAL_HEADS = ("mamba", "rwkv", "gemma3", "gemma4_text", "qwen3_5", "dots3_note_text", "reformer", "musicgen")


@pytest.mark.parametrize("model_type", [name for name in NO_EQUAL_HEADS if name in CONFIG_MAPPING])
def test_models_without_heads_or_with_others_in_each_layer_have_no_impossible_sizes(model_type: str):
    """Those of no attention, of a language model inside of another model, and of layers that differ."""
    problems: list[tuple[str, str]] = []
    check_random_init({"model_type": model_type}, lambda *problem: problems.append(problem), lambda key, *_: key)
    assert problems == []


def test_a_type_without_default_sizes_is_refused_in_transformers_words():
    problems: list[tuple[str, str]] = []
    check_random_init(
        {"model_type": "gemma4_assistant"}, lambda *problem: problems.append(problem), lambda key, *_: key
    )
    [(key, rule)] = problems
    assert key == ""
    assert rule.startswith("transformers refuses it: ")


def test_adapters_and_scaling_are_read(tmp_path):
    model = load_config(
        write(tmp_path, VALID),
        ["model.lora={target_modules: [q_proj]}", "model.rope_scaling={rope_type: yarn, factor: 4, beta_fast: 16}"],
    ).model
    assert model.lora == LoraSection(r=16, alpha=32.0, dropout=0.0, target_modules=["q_proj"])
    assert model.rope_scaling == RopeScalingSection(rope_type="yarn", factor=4.0, beta_fast=16.0)


def test_splits_of_a_saved_data_set_are_known(tmp_path):
    documents = Dataset.from_list([{"input_ids": [1, 2]}])
    DatasetDict({"learn": documents, "held": documents}).save_to_disk(tmp_path / "several")
    documents.save_to_disk(tmp_path / "one")
    path = write(tmp_path, VALID)
    several = [f"data.path={tmp_path / 'several'}", "data.train_split=learn"]
    assert load_config(path, [*several, "data.eval_split=held"]).data.path == str(tmp_path / "several")
    (line,) = message_of(path, *several, "data.eval_split=hold")
    assert "data.eval_split: no source has the split 'hold', only 'learn', 'held'" in line
    assert load_config(path, [f"data.path={tmp_path / 'one'}"]).data.path == str(tmp_path / "one")
    (line,) = message_of(path, f"data.path={tmp_path / 'one'}", "data.train_split=learn")
    assert "data.train_split: no source has the split 'learn', only 'train'" in line


def test_overrides_replace_what_the_file_says(tmp_path):
    path = write(tmp_path, {**VALID, "model": {"random_init": {"model_type": "llama"}}})
    config = load_config(
        path,
        [
            "model.random_init=null",
            "model.path=some/model",
            "longctx.capacity=1",
            "longctx.capacity=8192",
            "training.lr_scheduler_kwargs={num_cycles: 2}",
            "training.run_name=a=b",
        ],
    )
    assert (config.model.path, config.model.random_init) == ("some/model", None)
    assert config.longctx.capacity == 8192
    assert config.training["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert config.training["run_name"] == "a=b"
    (line,) = message_of(path, "longctx.capacity.tokens=3")
    assert line == "override 'longctx.capacity.tokens=3': longctx.capacity is 4096, which holds no keys"


def test_training_values_arrive_in_the_types_of_training_arguments(tmp_path):
    given = "{learning_rate: 2e-4, save_strategy: no, max_steps: 3, bf16: true, report_to: [], optim: adamw_torch}"
    path = write(tmp_path, yaml.safe_dump({**VALID, "training": None}).replace("null", given))
    training = load_config(path).training
    assert training == {
        "learning_rate": 2e-4,
        "save_strategy": "no",
        "max_steps": 3,
        "bf16": True,
        "report_to": [],
        "optim": "adamw_torch",
    }
    assert type(training["learning_rate"]) is float


@pytest.mark.parametrize("value", [True, "auto", "runs/a/checkpoint-3", None])
def test_a_run_is_resumed_as_train_resumes_it(tmp_path, value):
    path = write(tmp_path, {**VALID, "training": {"output_dir": "out", "resume_from_checkpoint": value}})
    assert load_config(path).training["resume_from_checkpoint"] == value


def test_files_are_given_per_split(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "held.json"):
        (tmp_path / name).write_text(json.dumps({"input_ids": [1, 2]}) + "\n")
    a, b, held_out = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "held.json"))
    path = write(tmp_path, VALID)
    assert load_config(path, [f"data.path={a}"]).data.path == {"train": [a]}
    assert load_config(path, [f"data.path=[{a}, {b}]", "data.train_split=x"]).data.path == {"x": [a, b]}
    splits = f"data.path={{train: [{a}, {b}], test: {held_out}}}"
    assert load_config(path, [splits, "data.eval_split=test"]).data.path == {"train": [a, b], "test": [held_out]}
    (line,) = message_of(path, splits, "data.eval_split=dev")
    assert "data.eval_split: no source has the split 'dev', only 'train', 'test'" in line
    (line,) = message_of(path, f"data.path=[{a}, {tmp_path / 'missing.jsonl'}]")
    assert "missing.jsonl" in line


def test_a_mixture_names_its_sources(tmp_path):
    for name in ("a.jsonl", "b.csv"):
        (tmp_path / name).write_text("")
    (tmp_path / "books").mkdir()
    sources = (
        f"[{{path: {tmp_path}/*.jsonl, weight: [2, 0.5]}}, {{path: {tmp_path / 'books'}, documents: files}}, "
        f"{{path: {{test: {tmp_path / 'b.csv'}}}}}]"
    )
    data = load_config(write(tmp_path, VALID), [f"data={{sources: {sources}, eval_split: test}}"]).data
    assert data.sources is not None
    assert [source.weight for source in data.sources] == [[2.0, 0.5], [1.0], [1.0]]
    assert [source.splits for source in data.sources] == [["(all)"], ["(all)"], ["test"]]
    assert data.sources[0].path == {"(all)": [str(tmp_path / "a.jsonl")]}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("model: [", "line 1"),
        ("- model", "must hold a mapping with the keys model, data, longctx, training"),
        ("model: 2020-13-45", "not valid YAML"),
        ("model: {[1]: 2}", "not valid YAML"),
        ("model: !!python/object:os.system {}", "not valid YAML"),
        ("", "model: missing"),
        ("model: &all {random_init: *all}", "data: missing"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path, content, part):
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, content))
    assert part in str(raised.value)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_the_longctx_section_is_the_plugin(tmp_path):
    assert set(LongctxConfig.model_fields) == set(LongContextPlugin.model_fields) - {"cost"}
    for kernel in ("auto", *KERNELS):
        section = load_config(write(tmp_path, VALID), [f"longctx.kernel={kernel}"]).longctx
        assert LongContextPlugin(**section.given()).kernel == kernel


@pytest.mark.processes
def test_importing_the_configuration_loads_neither_torch_nor_transformers():
    # By its path: what `import hf_longctx` itself loads is another question.
    check = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    path = sys.modules["hf_longctx.config"].__file__
    assert subprocess.run([sys.executable, "-c", check, path], check=False).returncode == 0
