"""Deliberate mistakes in a configuration: each gives one line with the file's line, the key, the value, the rule, and what was
probably meant. What is right is in test_config.py."""

import re
from pathlib import Path

import pytest

from hf_longctx.cli import main
from hf_longctx.config import ConfigError, load_config

BASE = """\
model:
  path: embedded:smollm2-135m
  dtype: float32
data:
  path: embedded:python-sources
  eval_split: test
longctx:
  capacity: 4096
  global_batch_documents: 9
training:
  output_dir: runs/x
  learning_rate: 1.0e-4
  eval_strategy: epoch
""".splitlines()

MISTAKES = [
    # line, what stands there instead, line of the mistake, key, parts of the message: value, rule, nearest
    # model
    (2, "  path: /nonexist/Llama", 2, "model.path", "'/nonexist/Llama'", "an existing directory, or a hub's org/name"),
    (2, "  path: configz", 2, "model.path", "'configz'", "an existing directory"),
    (2, "  path: embedded:smollm2", 2, "model.path", "'embedded:smollm2'", "only embedded model is embedded:smollm2-135m"),
    (2, "  paht: a/b", 2, "model.paht", "'a/b'", "did you mean 'path'?"),
    (3, "  dtype: bf16", 3, "model.dtype", "got 'bf16'", "did you mean 'bfloat16'?"),
    (3, "  trust_remote_code: 'yes'", 3, "model.trust_remote_code", "'yes'", "valid boolean"),
    (3, "  lora: true", 3, "model.lora", "True", "must be a mapping"),
    (3, "  lora: {alpha: true}", 3, "model.lora.alpha", "True", "valid number"),
    (3, "  lora: {rank: 8}", 3, "model.lora.rank", "8", "did you mean 'r'?"),
    (3, "  lora: {trainable_token_indices: [-1]}", 3, "model.lora.trainable_token_indices", "[-1]", "at least 0"),
    (5, "  path: embedded:python-sources\n  columns: {messages: 5}", 6, "data.columns.messages", "5", "valid string"),
    (5, "  path: embedded:python-sources\n  columns: {messages:5}", 6, "data.columns.messages:5", "None", "a space after"),
    (3, "  load_in_4bit: true", 3, "model.load_in_4bit", "4 bits cannot be trained", "set model.lora"),
    (3, "  rope_scaling: {rope_type: yarn, factor: '4'}", 3, "model.rope_scaling.factor", "'4'", "valid number"),
    (3, "  random_init: {model_type: llama}", 3, "model.random_init", "got both", "give exactly one"),
    # data
    (5, "  path: sorces.jsonl", 5, "data.path", "'sorces.jsonl'", "did you mean 'sources.jsonl'?"),
    (5, "  path: ''", 5, "data.path", "''", "existing files that end in"),
    (5, "  path: /dev/null", 5, "data.path", "'/dev/null'", "read once, and documents are read at will"),
    (6, "  eval_splt: test", 6, "data.eval_splt", "'test'", "did you mean 'eval_split'?"),
    (6, "  eval_split: tset", 6, "data.eval_split", "'tset'", "only 'train', 'test'"),
    (6, "  train_split: ../x", 6, "data.train_split", "'../x'", "must be the name of a split"),
    (6, "  text_column: ''", 6, "data.text_column", "''", "at least 1 character"),
    (6, "  kind: chat", 6, "data.kind", "'chat'", "'messages'"),
    (6, "  eval_split: test\n  kind: tokens\n  text_column: body", 8, "data.text_column", "'body'", "valid: kind text, or auto"),
    (6, "  weight: '1'", 6, "data.weight.0", "'1'", "valid number"),
    (6, "  weight: true", 6, "data.weight.0", "True", "valid number"),
    (6, "  eval_split: test\n  weight: 0", 7, "data.weight", "weight 0", "leaves no document"),
    (6, "  eval_split: test\n  documents: files", 7, "data.documents", "'files'", "a directory of files"),
    (6, "  max_documents: 0", 6, "data.max_documents", "0", "greater than 0"),
    (5, "  sources:\n  - path: embedded:python-sources\n    wieght: 2", 7, "data.sources.0.wieght", "2", "mean 'weight'?"),
    # longctx
    (8, "  capcity: 4096", 8, "longctx.capcity", "4096", "did you mean 'capacity'?"),
    (8, "  capacity: 32KB", 8, "longctx.capacity", "'32KB'", "integer"),
    (8, "  capacity: 4096.0", 8, "longctx.capacity", "4096.0", "valid integer"),
    (9, "  activation_offload: true", 9, "longctx.activation_offload", "True", "valid number"),
    (9, "  stall_timeout_seconds: .inf", 9, "longctx.stall_timeout_seconds", "inf", "finite number"),
    (9, "  long_documents: truncated", 9, "longctx.long_documents", "'truncated'", "did you mean 'truncate'?"),
    (9, "  overlap_tokens: 64", 9, "longctx.overlap_tokens", "64", "needs long_documents: split, got 'error'"),
    (9, "  ray_address: 10.0.0.1:6379", 9, "longctx.ray_address", "10.0.0.1:6379", "needs loader: ray, got 'local'"),
    (9, "  plan_offload: true", 9, "longctx.plan_offload", "true", "needs longctx.profile"),
    (9, "  profile: profil.json", 9, "longctx.profile", "'profil.json'", "did you mean 'profile.json'?"),
    (9, "  kernel: flash_attn", 9, "longctx.kernel", "'flash_attn'", "did you mean 'flash_attn_"),
    (9, "  sharding: zero", 9, "longctx.sharding", "'zero'", "did you mean 'zero"),
    (9, "  global_batch_documents: 9\n  global_batch_tokens: 5", 10, "longctx.global_batch_tokens", "(5)", "keep one"),
    (9, "  learning_rate: 0.1", 9, "longctx.learning_rate", "0.1", "did you mean 'training.learning_rate'?"),
    (9, "  compile_layers: 1", 9, "longctx.compile_layers", "1", "valid boolean"),
    # training
    (12, "  learning_rate: -1.0e-4", 12, "training.learning_rate", "-0.0001", "at least 0"),
    (12, "  learning_rat: 1.0e-4", 12, "training.learning_rat", "0.0001", "did you mean 'learning_rate'?"),
    (12, "  num_train_epochs: 0", 12, "training.num_train_epochs", "0", "more than 0"),
    (12, "  max_steps: 0", 12, "training.max_steps", "0", "or -1"),
    (12, "  adam_beta2: 1.0", 12, "training.adam_beta2", "1.0", "less than 1"),
    (12, "  optim: adamw", 12, "training.optim", "'adamw'", "did you mean 'adamw_"),
    (12, "  report_to: wandbb", 12, "training.report_to", "'wandbb'", "did you mean 'wandb'?"),
    (12, "  torch_compile: true", 12, "training.torch_compile", "True", "use longctx.compile_layers"),
    (12, "  bf16: true\n  fp16: true", 13, "training.fp16", "true", "keep one"),
    (12, "  load_best_model_at_end: true", 12, "training.load_best_model_at_end", "(epoch)", "to be the same"),
    (12, "  seed: 4294967296", 12, "training.seed", "4294967296", "from 0 to 4294967295"),
    (10, "trainning:", 10, "trainning", "output_dir", "did you mean 'training'?"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write what some of the misspelt names stand beside."""
    monkeypatch.chdir(tmp_path)
    Path("sources.jsonl").write_text('{"input_ids": [1, 2]}\n')
    Path("profile.json").write_text("{}")
    Path("configz").write_text("a file")


@pytest.mark.parametrize(("line", "instead", "where", "key", "value", "rule"), MISTAKES, ids=lambda rule: None)
def test_a_mistake_is_one_line(line: int, instead: str, where: int, key: str, value: str, rule: str, capsys):
    Path("run.yaml").write_text("\n".join([*BASE[: line - 1], instead, *BASE[line:]]) + "\n")
    assert main(["config", "run.yaml"]) == 2
    headline, *lines = capsys.readouterr().err.splitlines()
    assert headline == "error: run.yaml: 1 problem(s)"
    (only,) = lines
    assert only.strip().startswith(f"line {where}: {key}: "), only
    assert value in only
    assert rule in only
    assert len(only) < (800 if key == "training.optim" else 480), only  # that one names all optimizers


def test_there_are_forty_and_all_are_shown_at_once():
    assert len(MISTAKES) >= 40
    text, expected = list(BASE), set()
    for line, instead, _, key, *_ in MISTAKES:
        if text[line - 1] == BASE[line - 1] and "\n" not in instead and key not in ("model.random_init", "trainning"):
            text[line - 1] = instead
            expected.add((line, key))
    Path("run.yaml").write_text("\n".join(text) + "\n")
    with pytest.raises(ConfigError) as raised:
        load_config("run.yaml")
    mistakes = {(int(line), key) for line, key in re.findall(r"line (\d+): ([\w.]+): ", str(raised.value))}
    assert expected <= mistakes, raised.value
    assert len(expected) == 7


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("HF_LONGCTX_CAPACTY", "9", "unknown environment variables HF_LONGCTX_CAPACTY"),
        ("HF_LONGCTX_KERNEL", "fast", "kernel: must be 'auto', 'flash_attn_3'"),
    ],
)
def test_mistakes_of_the_environment_are_shown_too(variable: str, value: str, part: str, monkeypatch, capsys):
    Path("run.yaml").write_text("\n".join(BASE) + "\n")
    assert main(["config", "run.yaml"]) == 0, capsys.readouterr().err
    monkeypatch.setenv(variable, value)
    assert main(["config", "run.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert "longctx" in line
    assert part in line


def test_yaml_that_is_none_is_one_line(capsys):
    Path("run.yaml").write_text("model:\n  path: a\n data: b\n")
    assert main(["config", "run.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run.yaml: line 3: not valid YAML: ")


def test_a_wildcard_of_an_override_is_to_be_quoted(capsys):
    Path("run.yaml").write_text("\n".join(BASE) + "\n")
    assert main(["config", "run.yaml", "data.pattern=**/*.txt"]) == 2
    assert """in quotes: 'data.pattern="**/*.txt"'""" in capsys.readouterr().err


def test_a_value_that_the_shell_has_split_is_to_be_quoted(capsys):
    Path("run.yaml").write_text("\n".join(BASE) + "\n")
    assert main(["config", "run.yaml", "data.path=a.txt", "b.txt"]) == 2
    expected = r"override 'b\.txt': must be section.key=value, .*; a value with spaces or wildcards stands in quotes"
    assert re.search(expected, capsys.readouterr().err)


def test_numbers_that_yaml_takes_for_text_are_numbers():
    Path("run.yaml").write_text("\n".join(BASE).replace("global_batch_documents: 9", "activation_offload: 5e-1") + "\n")
    assert load_config("run.yaml").longctx.activation_offload == 0.5
