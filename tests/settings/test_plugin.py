"""What the plugin and the training arguments refuse, each with the value, the rule and what would be valid."""

import re
from typing import Any

import pytest
import yaml
from datasets import Dataset
from pydantic import ValidationError
from transformers import DefaultDataCollator

from hf_longctx import LengthAwareCollator, LongContextPlugin, LongContextTrainer
from hf_longctx.config import ConfigError, load_config
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.planner import CPU_CORE, PLANNERS, CostModel, Topology
from hf_longctx.settings import longctx
from hf_longctx.settings.longctx import COMPARED, LongctxConfig, PluginError
from hf_longctx.training.arguments import (
    adapted,
    fold_accumulation,
    refuse_arguments,
    warn_of_kept_store,
)
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state


def test_fields_come_from_arguments_then_environment_then_defaults(monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_CAPACITY", "4096")
    monkeypatch.setenv("HF_LONGCTX_GLOBAL_BATCH_TOKENS", "100000")
    monkeypatch.setenv("HF_LONGCTX_KERNEL", "reference")
    monkeypatch.setenv("HF_LONGCTX_STALL_TIMEOUT_SECONDS", "2.5")
    monkeypatch.setenv("HF_LONGCTX_CACHE", "/anywhere")
    monkeypatch.setenv("HF_LONGCTX_BROWSER", "/usr/bin/chromium")
    plugin = LongContextPlugin(capacity=512)
    assert (plugin.capacity, plugin.global_batch_tokens, plugin.kernel) == (512, 100000, "reference")
    assert (plugin.stall_timeout_seconds, plugin.loss_chunk_tokens, plugin.cost) == (2.5, 0, None)
    assert LongContextPlugin().capacity == 4096


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_CAPACITY", "4kb")
    rule = "capacity: must be a valid integer, got '4kb' (environment variable HF_LONGCTX_CAPACITY)"
    with pytest.raises(PluginError, match=re.escape(rule)):
        LongContextPlugin()


def test_a_setting_that_there_is_not_is_named():
    with pytest.raises(PluginError, match=r"capcity: unknown \(value 8\); did you mean 'capacity'\?"):
        LongContextPlugin(capcity=8)


def test_settings_change_by_making_others_that_are_checked_as_well(monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_LONG_DOCUMENTS", "split")
    plugin = LongContextPlugin(capacity=8, overlap_tokens=2)
    monkeypatch.delenv("HF_LONGCTX_LONG_DOCUMENTS")
    assert plugin.changed(capacity=16) == LongContextPlugin(capacity=16, overlap_tokens=2, long_documents="split")
    with pytest.raises(PluginError, match="overlap_tokens: 2 needs long_documents: split, got 'drop'"):
        plugin.changed(long_documents="drop")
    with pytest.raises(ValidationError, match="frozen"):
        plugin.capacity = 4


def test_an_unknown_variable_is_an_error_that_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_CAPACTY", "4096")
    with pytest.raises(
        ValueError, match=r"unknown environment variables HF_LONGCTX_CAPACTY; valid: .*HF_LONGCTX_CAPACITY"
    ):
        LongContextPlugin(capacity=1)


def test_all_problems_of_the_plugin_are_reported_at_once():
    with pytest.raises(ValueError, match="LongContextPlugin: ") as error:
        LongContextPlugin(
            capacity=-1,
            loss_chunk_tokens=-1,
            mlp_tile_tokens=2**40 + 1,
            global_batch_documents=0,
            stall_timeout_seconds=-1,
            grace_seconds=0,
            kernel="best",
        )
    for part in (
        "capacity: must be greater than or equal to 0, got -1",
        "loss_chunk_tokens: must be greater than or equal to 0, got -1",
        "mlp_tile_tokens: must be less than or equal to 1099511627776, got 1099511627777",
        "stall_timeout_seconds: must be greater than 0, got -1",
        "grace_seconds: must be greater than 0, got 0",
        "global_batch_documents: must be greater than 0, got 0",
        "kernel: must be 'auto', ",
    ):
        assert part in str(error.value)


FIELDS = sorted(LongctxConfig.model_fields)
NUMBERS = {"activation_offload", "stall_timeout_seconds", "grace_seconds", "loraplus_lr_ratio", "loraplus_lr_embedding"}
WRONG_TYPES = ({"a": 1}, [3], "no such value", "static_cp", 2.5, True, 3, "2", -1)


def takes(field: str, value: Any) -> bool:
    """Whether the default of a field, or what it may be besides, is of the value's type."""
    kinds = {bool, str, int, float} & {type(getattr(LongContextPlugin(), field))} or {str, int}
    if field in NUMBERS:
        return type(value) in (int, float) and 0 <= value <= (1 if field == "activation_offload" else 9)
    optional_counts = ("global_batch_documents", "global_batch_tokens", "longest_document", "ranks_per_node")
    if getattr(LongContextPlugin(), field) is None:
        kinds = {int} if field in optional_counts else {str}
    named = field in ("profile", "ray_address")
    return type(value) in kinds and value != -1 and (not isinstance(value, str) or named)


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=repr)
def test_every_field_has_one_rule_by_plugin_file_and_environment(wrong, tmp_path, monkeypatch):
    """The same bad value in all fields at once, by Python, by YAML and by variables: the same rules in the same words."""
    asked = {field: wrong for field in FIELDS if not takes(field, wrong)}
    assert asked
    with pytest.raises(PluginError) as plugin:
        LongContextPlugin(**asked)
    path = tmp_path / "run.yaml"
    sections = {"model": {"random_init": {"model_type": "llama"}}, "data": {"path": "embedded:python-sources"}}
    path.write_text(yaml.safe_dump(sections | {"longctx": {"capacity": 8} | asked}))
    with pytest.raises(ConfigError) as file:
        load_config(path)
    rules = dict(plugin.value.problems)
    assert set(rules) == set(asked)
    for field, rule in rules.items():
        assert f" longctx.{field}: {rule}" in str(file.value)
    text = str(wrong)
    # A variable is text: what looks like a number is one where a number is asked for, and none where a name is.
    wrong_fields = {field: rule for field, rule in rules.items() if longctx._read(field, text) == wrong}
    for field in wrong_fields:
        monkeypatch.setenv(f"HF_LONGCTX_{field.upper()}", text)
    if not wrong_fields:
        return
    with pytest.raises(PluginError) as environment:
        LongContextPlugin()
    assert dict(environment.value.problems) == {
        field: f"{rule} (environment variable HF_LONGCTX_{field.upper()})" for field, rule in wrong_fields.items()
    }


@pytest.mark.parametrize("field", FIELDS)
def test_every_variable_is_checked_and_named(field, monkeypatch):
    variable = f"HF_LONGCTX_{field.upper()}"
    monkeypatch.setenv(variable, "" if field in ("profile", "ray_address") else "no such value")
    with pytest.raises(PluginError, match=rf"{field}: .*environment variable {variable}") as refused:
        LongContextPlugin()
    assert [key for key, _ in refused.value.problems] == [field]


def test_every_planner_that_ours_is_compared_with_is_refused():
    assert set(COMPARED) == set(PLANNERS) - {"hdp"}


def test_what_does_not_go_together_is_refused_by_the_plugin_as_in_a_file():
    for asked, rule in (
        ({"overlap_tokens": 8}, "overlap_tokens: 8 needs long_documents: split, got 'error'"),
        ({"ray_servers": 2}, "ray_servers: 2 needs loader: ray, got 'local'"),
        ({"loader": "ray", "ray_address": "here"}, "ray_address: must be host:port, got 'here'"),
        ({"virtual_stages": 2}, "virtual_stages: 2 with pipeline_stages"),
        ({"pipeline_schedule": "gpipe"}, "pipeline_schedule: 'gpipe' with pipeline_stages (1)"),
        ({"plan_offload": True}, "plan_offload: true needs longctx.profile"),
        (
            {"planner": "bytescale_naive"},
            "planner: must be 'hdp', or left out, got 'bytescale_naive', which only ",
        ),
        ({"cost": "a100"}, "cost: must be an instance of CostModel, got 'a100'"),
    ):
        with pytest.raises(PluginError, match=re.escape(rule)):
            LongContextPlugin(capacity=8, **asked)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 .* set it to 0"),
    "compile": ({"torch_compile": True}, "torch_compile=True recompiles for every layout .* set it to False"),
    "batch size finder": (
        {"auto_find_batch_size": True},
        "auto_find_batch_size=True has no .* lower capacity",
    ),
    "dropped batch": ({"dataloader_drop_last": True}, "dataloader_drop_last=True would lose documents"),
    "sampling by length": (
        {"train_sampling_strategy": "group_by_length"},
        "'group_by_length': .* leave it at 'random'",
    ),
    "accelerate's accumulation": (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        r"accelerator_config\.gradient_accumulation_kwargs\.num_steps=2: use gradient_accumulation_steps instead",
    ),
    "a token in what is uploaded": (
        {"push_to_hub": True, "hub_token": "hf_x"},
        "hub_token=\\(hidden\\) with hub_strategy='every_save': .* leave hub_token out",
    ),
    "bf16 undecided": ({"bf16": "auto"}, "bf16='auto' is for YAML files.* valid: True or False"),
    "bf16 evaluation": ({"bf16_full_eval": True}, "bf16_full_eval=True casts .* use bf16=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_honoured_are_refused(name, tmp_path):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        adapted(arguments(tmp_path, **settings), tiny_llama(), LongContextPlugin(capacity=8))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("_n_gpu", 2, "2 GPUs in one process .*accelerate launch"),
        ("deepspeed", "zero.json", "deepspeed='zero.json' shards .* remove it"),
        ("parallelism_config", object(), "parallelism_config=.* cp_size and sp_size .* remove it"),
    ],
)
def test_arguments_that_need_other_machines_are_refused(field, value, message, tmp_path):
    args = arguments(tmp_path)
    assert args.device.type == "cpu"  # transformers sets the number of GPUs when it is first asked for the device
    setattr(args, field, value)
    with pytest.raises(ValueError, match=message):
        adapted(args, tiny_llama(), LongContextPlugin(capacity=8))


def test_all_problems_of_the_arguments_are_reported_at_once_by_the_trainer(tmp_path):
    fresh_accelerator_state()
    settings = {"label_smoothing_factor": 0.1, "torch_compile": True, "auto_find_batch_size": True}
    with pytest.raises(
        ValueError, match=r"LongContextTrainer: label_smoothing.*; torch_compile.*; auto_find_batch_size"
    ):
        LongContextTrainer(
            tiny_llama(), arguments(tmp_path, **settings), train_dataset=[], plugin=LongContextPlugin(capacity=8)
        )


def test_the_caller_s_arguments_are_left_alone(tmp_path):
    args = arguments(tmp_path, gradient_accumulation_steps=4)
    changed = adapted(args, tiny_llama(), LongContextPlugin(capacity=8))
    fold_accumulation(changed, LongContextPlugin(capacity=8), 1)
    assert args.gradient_accumulation_steps == 4
    assert args.remove_unused_columns
    assert (changed.gradient_accumulation_steps, changed.remove_unused_columns) == (1, False)


def test_accumulation_becomes_part_of_the_global_batch_and_the_user_is_told(tmp_path, caplog):
    args = arguments(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=4)
    plugin = LongContextPlugin(capacity=8)
    assert fold_accumulation(args, plugin, 1) == 12
    assert args.gradient_accumulation_steps == 1
    [message] = caplog.messages  # at transformers' default verbosity
    assert "3 documents * 1 ranks * 4 = 12 documents per optimizer step" in message
    assert fold_accumulation(args, plugin, 1) == 3
    assert caplog.messages == [message]
    args.gradient_accumulation_steps = 4
    fold_accumulation(args, LongContextPlugin(capacity=8, global_batch_tokens=99), 1)
    assert "gradient_accumulation_steps=4 is not used: global_batch_tokens=99" in caplog.messages[1]


@pytest.mark.parametrize(
    "wrong", [{"capacity": 3.5}, {"capacity": True}, {"capacity": "64"}, {"capacity": 8, "global_batch_documents": 2.5}]
)
def test_counts_must_be_integers(wrong):
    with pytest.raises(ValueError, match=r"(capacity|global_batch_documents): must be a valid integer, got "):
        LongContextPlugin(**wrong)
    with pytest.raises(
        PluginError, match=r"stall_timeout_seconds: must be greater than 0, got nan; grace_seconds: .*finite"
    ):
        LongContextPlugin(capacity=8, stall_timeout_seconds=float("nan"), grace_seconds=float("inf"))


@pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics"])
def test_what_needs_gathered_logits_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} needs the logits of all documents .* Valid: eval_loss"):
        refuse_arguments({name: len})


def test_a_loss_over_whole_batches_is_refused():
    with pytest.raises(ValueError, match=r"compute_loss_func is given logits, .* Valid: the token-level cross-entropy"):
        refuse_arguments({"compute_loss_func": len})
    refuse_arguments({"compute_loss_func": None, "compute_metrics": None})


def test_predictions_are_refused(tmp_path):
    fresh_accelerator_state()
    trainer = LongContextTrainer(tiny_llama(), arguments(tmp_path), plugin=LongContextPlugin(capacity=32))
    rows: Any = documents([5, 6])
    with pytest.raises(ValueError, match=r"predict\(\) returns the logits of all documents.*Valid: evaluate\(\)"):
        trainer.predict(rows)


def test_training_and_evaluation_without_a_data_set_say_so(tmp_path):
    fresh_accelerator_state()
    trainer = LongContextTrainer(tiny_llama(), arguments(tmp_path), plugin=LongContextPlugin(capacity=32))
    with pytest.raises(ValueError, match="training needs a train_dataset with a column input_ids"):
        trainer.train()
    with pytest.raises(ValueError, match="evaluation needs an eval_dataset with a column input_ids"):
        trainer.evaluate()


def test_a_collator_that_would_not_be_used_is_refused():
    with pytest.raises(
        ValueError, match=r"data_collator=DefaultDataCollator would not be used.* leave data_collator out"
    ):
        refuse_arguments({"data_collator": DefaultDataCollator()})
    refuse_arguments(
        {"data_collator": LengthAwareCollator(Topology(1, 8), CostModel.from_config(tiny_llama().config, CPU_CORE))}
    )


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_masks_without_labels_are_refused(mask):
    row = {"input_ids": [1, 2, 3], mask: [0, 1, 1]}
    with pytest.raises(
        ValueError, match=f"column '{mask}' leaves .* 'labels': masks are not read.*-100 where nothing is learned"
    ):
        LengthIndex.from_dataset(Dataset.from_list([row]))
    LengthIndex.from_dataset(Dataset.from_list([row | {"labels": [-100, 2, 3]}]))


def test_sharding_that_the_launcher_chose_is_refused(monkeypatch, tmp_path):
    for variable, value in {"ACCELERATE_DYNAMO_BACKEND": "inductor", "ACCELERATE_DYNAMO_MODE": "default"}.items():
        monkeypatch.setenv(variable, value)
    fresh_accelerator_state()
    with pytest.raises(ValueError, match=r"accelerate's configuration sets dynamo_backend, .*`accelerate config`"):
        LongContextTrainer(tiny_llama(), arguments(tmp_path), plugin=LongContextPlugin(capacity=32))
    fresh_accelerator_state()


def test_the_precision_that_the_launcher_chose_is_what_is_counted_with(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    fresh_accelerator_state()
    trainer = LongContextTrainer(tiny_llama(), arguments(tmp_path), plugin=LongContextPlugin(capacity=32))
    precisions = trainer.accelerator.mixed_precision, trainer.args.bf16, trainer.args.fp16
    fresh_accelerator_state()
    assert precisions == ("bf16", True, False)


def test_float16_that_the_launcher_chose_is_refused_on_cpus(monkeypatch, tmp_path):
    """accelerate computes in float32 there, and FSDP2 would in float16 without scaling gradients."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    fresh_accelerator_state()
    with pytest.raises(
        ValueError, match=r"fp16=False, and accelerate's mixed_precision='fp16': ranks .* valid: bf16, or neither"
    ):
        LongContextTrainer(tiny_llama(), arguments(tmp_path), plugin=LongContextPlugin(capacity=32))
    fresh_accelerator_state()


def test_a_degree_of_ulysses_that_does_not_divide_the_heads_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"ulysses_degree=3 times tensor parallelism of 1 .* 4 = 1 \* 3 \+ 1\. Valid degrees: \[1, 2, 4\]",
    ):
        LongContextTrainer(
            model=tiny_llama(), args=arguments(tmp_path), plugin=LongContextPlugin(capacity=100, ulysses_degree=3)
        )


def test_switches_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_KEEP_LAST_SLICE", "true")
    monkeypatch.setenv("HF_LONGCTX_ULYSSES_DEGREE", "4")
    plugin = LongContextPlugin(capacity=100)
    assert (plugin.keep_last_slice, plugin.ulysses_degree) == (True, 4)
    monkeypatch.setenv("HF_LONGCTX_KEEP_LAST_SLICE", "perhaps")
    with pytest.raises(PluginError, match=r"must be a valid boolean, got 'perhaps' .*HF_LONGCTX_KEEP_LAST_SLICE"):
        LongContextPlugin(capacity=100)
    monkeypatch.setenv("HF_LONGCTX_KEEP_LAST_SLICE", "1")
    assert LongContextPlugin(capacity=100).keep_last_slice is True


def test_capacity_follows_from_the_memory_that_a_profile_knows(tmp_path):
    from hf_longctx.hardware.profile import Profile
    from hf_longctx.planner.memory.memory_model import MemoryModel

    measured = Profile(
        speed=CPU_CORE, points=(), predicted_seconds=(), clock="wall", device="some", backend="none", world_size=1,
        ranks_per_node=1, threads=1, precision="float32", device_bytes=200 * 2**20, host_bytes=2**30, model={}, versions={},
    )  # fmt: skip
    measured.save(tmp_path / "profile.json")
    plugin = LongContextPlugin(profile=str(tmp_path / "profile.json"))
    trainer = LongContextTrainer(tiny_llama(), arguments(tmp_path), plugin=plugin)
    memory = MemoryModel.from_config(trainer.model.config, weight_bytes=4, activation_bytes=4)
    capacity = trainer.plugin.capacity
    assert memory.peak(capacity) <= 0.9 * 200 * 2**20 < memory.peak(capacity + 1)
    assert plugin.capacity == 0, "the caller's settings stay as they are"


def test_without_capacity_or_a_known_memory_the_trainer_says_what_to_set(tmp_path):
    with pytest.raises(ValueError, match=r"set capacity .or HF_LONGCTX_CAPACITY. .* or give a profile"):
        LongContextTrainer(tiny_llama(), arguments(tmp_path), plugin=LongContextPlugin())


@pytest.mark.parametrize(
    ("restarts", "kept", "warned"), [("3", "True", True), ("0", "True", False), ("3", "False", False)]
)
def test_a_launcher_whose_restarts_would_hang_is_warned_of(restarts, kept, warned, monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", kept)
    warn_of_kept_store()
    assert ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in message for message in caplog.messages] == [True] * warned
