"""What a run cannot have is refused by `hf-longctx config`, by a dry run and by the trainer alike: one list of checks, and each
bad setting given by all three ways."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.cli import main
from hf_longctx.commands.preflight import run_memory
from hf_longctx.commands.preflight.run_memory import planned_run
from hf_longctx.config import ConfigError, load_config
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.training.arguments import adapted
from hf_longctx.training.memory.capacity import UNKNOWN_MEMORY
from hf_longctx.training.refusals import UNSUPPORTED, problems
from hf_longctx.training.request import Request, stated
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import arguments, fresh_accelerator_state

SIZES = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip

ALIKE: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer's package": ({"training.optim": "adamw_8bit"}, "'adamw_8bit' is not installed here"),
    "another optimizer's": ({"training.optim": "grokadamw"}, "'grokadamw' is not installed here"),
    "in backward": ({"training.optim": "adalomo"}, "'adalomo' changes weights during backward"),
    "a tracker's package": ({"training.report_to": "wandb"}, "'wandb' is not installed here"),
    "one tracker of a list": ({"training.report_to": ["none", "swanlab"]}, "'swanlab' is not installed here"),
    "lengths": ({"training.train_sampling_strategy": "group_by_length"}, "'group_by_length': steps are runs of a random"),
    "smoothing": ({"training.label_smoothing_factor": 0.1}, "0.1 is not supported by the chunked loss"),
    "compile": ({"training.torch_compile_backend": "eager"}, "'eager' turns torch_compile on"),
    "drop last": ({"training.dataloader_drop_last": True}, "True would lose documents"),
    "batch finder": ({"training.auto_find_batch_size": True}, "True has no batch size to find"),
    "cast": ({"training.bf16_full_eval": True}, "True casts weights that training still needs"),
    "a save of each rank's own": ({"training.enable_jit_checkpoint": True}, "True saves on each rank by itself"),
    "an optimizer's arguments": ({"training.optim_args": "momentum"}, "'momentum' holds 'momentum': it must be pairs"),
    "Liger's forward": ({"training.use_liger_kernel": True}, "True replaces the forward of the patched model"),
    "reentrant": (
        {
            "training.gradient_checkpointing": True,
            "training.gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
        "means use_reentrant=True",
    ),
    "offload of a processor": (
        {
            "training.gradient_checkpointing": True,
            "training.gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
        },
        "'offload': True moves what layers keep from a GPU",
    ),
    "accumulation": (
        {"training.accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        "gradient_accumulation_kwargs.num_steps: 2: use gradient_accumulation_steps",
    ),
    "split batches": ({"training.accelerator_config": {"dispatch_batches": True}}, "dispatch_batches: True: accelerate"),
    "FSDP1": ({"training.fsdp": True, "training.fsdp_config": {"version": 1}}, "fsdp_config.version: 1: FSDP1 hangs"),
    "FSDP's checkpoints": (
        {"training.fsdp": True, "training.fsdp_config": {"activation_checkpointing": True}},
        "fsdp_config.activation_checkpointing: True wraps layers",
    ),
    "a token": ({"training.push_to_hub": True, "training.hub_token": "hf_x"}, "(hidden) with hub_strategy='every_save'"),
    "memory": ({"longctx.capacity": 0}, "0 takes what the device's memory holds, and a CPU's is shared"),
    "kernel": ({"longctx.kernel": "flash_attn_2"}, "'flash_attn_2' needs a GPU, and ranks compute on CPUs"),
    "rounds in stages": (
        {"longctx.pipeline_stages": 2, "longctx.sharding": "zero2"},
        "2: ranks of zero2, zero3 and expert parallelism meet in every micro-batch",
    ),
    "float16 on CPUs": ({"training.fp16": True}, "fp16: True: ranks compute on CPUs, where accelerate scales no gradients"),
    "attention kept": ({"longctx.keep_attention": "always"}, "'always' without activation checkpointing"),
    "scaled stages": ({"longctx.pipeline_stages": 2, "training.fp16": True}, "2: fp16 scales gradients by what one"),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 4)
    path = tmp_path / "run.yaml"
    sections = {
        "model": {"random_init": SIZES, "dtype": "float32"},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "longctx": {"capacity": 64},
        "training": {"output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": "none"},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


def test_a_precision_that_was_set_too_late_is_refused(tmp_path):
    args = arguments(tmp_path)
    args.bf16 = True
    with pytest.raises(
        ValueError, match=r"bf16=True was set after .*'no' all the same; valid: TrainingArguments\(bf16=True\)"
    ):
        adapted(args, tiny_llama(), LongContextPlugin(capacity=64))


def test_autocast_of_float64_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"bf16=True, .*: autocast leaves float64 .* valid: weights in float32, or no autocast"
    ):
        adapted(arguments(tmp_path, bf16=True), tiny_llama(torch.float64), LongContextPlugin(capacity=64))


def test_no_clipping_is_said_by_a_number(tmp_path):
    with pytest.raises(
        ValueError, match="max_grad_norm=None would end the first step in an error of Trainer's; valid: 0"
    ):
        adapted(arguments(tmp_path, max_grad_norm=None), tiny_llama(), LongContextPlugin(capacity=64))


def test_attention_is_kept_where_layers_are_computed_again(tmp_path):
    """By Trainer's setting, or a model that checkpoints already."""
    plugin = LongContextPlugin(capacity=64, keep_attention="always")
    adapted(arguments(tmp_path, gradient_checkpointing=True), tiny_llama(), plugin)
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    adapted(arguments(tmp_path), model, plugin)


def in_section(settings: dict[str, Any], section: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")}


@pytest.mark.parametrize("name", ALIKE)
def test_a_bad_setting_is_refused_by_config_dry_run_and_training_with_one_rule(name: str, file: Path, tmp_path: Path):
    settings, rule = ALIKE[name]
    plugin, args = in_section(settings, "longctx"), in_section(settings, "training")

    overrides = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in settings.items()]
    with pytest.raises(ConfigError) as config:
        load_config(file, overrides)
    [line] = str(config.value).splitlines()[1:]
    assert rule in line
    match = re.search(r": (?:training|longctx)\.([\w.]+): (.*)$", line)
    assert match
    message = f"{match[1]}={match[2]}"
    if name == "compile":  # which TrainingArguments add the other setting to
        message = f"torch_compile=True {UNSUPPORTED['torch_compile']}; {message}"

    right = load_config(file)
    asked = right.model_copy(  # what the dry run would plan, had nothing been said before
        update={
            "longctx": right.longctx.model_copy(update=plugin),
            "training": right.training | args,
        }
    )
    with pytest.raises(ValueError, match="LongContextTrainer: ") as dry_run:
        planned_run(asked, 2)
    assert str(dry_run.value) == f"LongContextTrainer: {message}"

    given: Any = {"report_to": "none"} | args
    trained = arguments(tmp_path, **given)
    with pytest.raises(ValueError, match="LongContextTrainer: ") as training:
        adapted(trained, tiny_llama(), LongContextPlugin(**{"capacity": 64} | plugin), processes=2)
    assert str(training.value) == f"LongContextTrainer: {message}"


@pytest.mark.parametrize(
    ("setting", "rule"), [("capacity=0", UNKNOWN_MEMORY), ("kernel=flash_attn_2", "'flash_attn_2' needs a GPU")]
)
def test_a_dry_run_for_processors_refuses_what_needs_a_gpu(setting: str, rule: str, file: Path, capsys, monkeypatch):
    """By the device that is named, or for want of a GPU here; one for a cluster's GPUs is planned without any."""
    given = [str(file), f"longctx.{setting}", "training.use_cpu=false"]
    config = load_config(given[0], given[1:])
    for device, gpus_here in (("cpu", 1), ("cpu-avx512", 1), (None, 0)):
        monkeypatch.setattr(run_memory, "gpus", lambda count=gpus_here: count)
        with pytest.raises(ValueError, match=re.escape(rule)):
            planned_run(config, 2, device)
    monkeypatch.setattr(run_memory, "gpus", lambda: 1)
    assert not planned_run(config, 2).on_cpu
    monkeypatch.setattr(run_memory, "gpus", lambda: 0)
    fresh_accelerator_state()
    assert main(["train", *given, "--dry-run", "--ranks", "2", "--device", "h100"]) == 0
    assert "planned with the speeds of h100" in capsys.readouterr().out


def test_what_needs_more_ranks_or_a_model_is_refused_as_soon_as_it_is_known():
    args = stated({"optim": "adafactor"})
    plugin = LongContextPlugin(capacity=8, sharding="zero1")
    assert not problems(Request(args, plugin))
    assert not problems(Request(args, plugin, processes=1))
    ((key, rule),) = problems(Request(args, plugin, processes=2))
    assert key == "optim"
    assert "'adafactor' takes means of whole rows" in rule
    three = LongContextPlugin(capacity=8, ulysses_degree=3)
    assert not problems(Request(stated({}), three))
    ((key, rule),) = problems(Request(stated({}), three, tiny_llama()))
    assert (key, "Valid degrees: [1, 2, 4]" in rule) == ("ulysses_degree", True)


def test_models_whose_layers_cannot_be_computed_again_refuse_checkpointing():
    config = AutoConfig.for_model("openai-gpt", vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    model, plugin = AutoModelForCausalLM.from_config(config), LongContextPlugin(capacity=8)
    assert not problems(Request(stated({}), plugin, model))
    ((key, rule),) = problems(Request(stated({"gradient_checkpointing": True}), plugin, model))
    assert (key, "OpenAIGPTLMHeadModel has no layers" in rule) == ("gradient_checkpointing", True)
    assert not problems(Request(stated({"gradient_checkpointing": True}), plugin, tiny_llama()))


def test_mistakes_of_the_sections_hide_none_of_training_s(file: Path):
    with pytest.raises(ConfigError) as refused:
        load_config(file, ["longctx.ray_servers=0", "training.optim=adamw_8bit", "training.seed=-1"])
    for part in ("longctx.ray_servers: ", "training.optim: 'adamw_8bit'", "training.seed: "):
        assert part in str(refused.value)


@pytest.mark.parametrize("column", ["completion_mask", "attention_mask"])
def test_masks_of_saved_documents_are_refused_by_config_and_dry_run(column: str, file: Path, tmp_path: Path, capsys):
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], column: [0, 1, 1]}] * 4)
    DatasetDict(train=rows).save_to_disk(str(tmp_path / "saved"))
    capsys.readouterr()
    with pytest.raises(ValueError, match=column) as training:
        LengthIndex.from_dataset(rows)
    reason = str(training.value).removeprefix("row 0: ")
    # Attention masks are mostly ones: a configuration, which reads no row, cannot tell.
    for verb in (["config"] if column == "completion_mask" else None, ["train", "--dry-run"]):
        if verb is not None:
            assert main([*verb, str(file), f"data.path={tmp_path / 'saved'}"]) == 2
            assert reason in " ".join(capsys.readouterr().err.split())


def test_a_configuration_reads_no_row_and_says_where_saved_files_are_missing(file: Path, tmp_path: Path):
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}] * 4)
    DatasetDict(train=rows).save_to_disk(str(tmp_path / "saved"))
    path = f"data.path={tmp_path / 'saved'}"
    load_config(file, [path])  # training refuses the values: they were not looked at
    for shard in (tmp_path / "saved" / "train").glob("*.arrow"):
        shard.unlink()
    with pytest.raises(ConfigError, match=r"data\.path: .*saved.*No such file"):
        load_config(file, [path])


def test_what_transformers_refuses_late_is_refused_in_the_file(file: Path):
    for setting, rule in (
        ("training.save_strategy=best", "save_strategy: 'best' needs metric_for_best_model"),
        ("training.logging_steps=0", "logging_steps: 0 with logging_strategy: steps"),
        ("training.save_steps=2.5", "save_steps: 2.5 must be an integer where it is more than 1"),
    ):
        with pytest.raises(ConfigError, match=rule):
            load_config(file, [setting])


def test_a_trainer_says_what_a_model_and_a_plugin_must_be(tmp_path: Path):
    args = stated({"output_dir": str(tmp_path)})
    with pytest.raises(TypeError, match=r"model is 'some/where': .*Valid: hf_longctx\.from_pretrained\(path\)"):
        LongContextTrainer(model="some/where", args=args)
    with pytest.raises(
        TypeError, match=r"plugin=\{'capacity': 4\} is a dict\. Valid: .*Plugin\(\*\*\{'capacity': 4\}\)"
    ):
        LongContextTrainer(tiny_llama(), args, plugin={"capacity": 4})
