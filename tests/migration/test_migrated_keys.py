"""Keys of axolotl, LLaMA-Factory and TRL: each has a rule, becomes settings of ours, and says what differs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from hf_longctx.commands.migrate import migrated, stack_of
from hf_longctx.migration import axolotl, llama_factory, trl
from hf_longctx.migration.rules import rule_of
from hf_longctx.settings.training import default_of
from tests.builders.migrated_files import AXOLOTL_CHAT, LLAMA_FACTORY, TRL

KEYS = Path(__file__).parents[1] / "builders" / "migration_keys"
"""Names of the keys in the schemas of the released packages."""
TABLES = {"axolotl-0.19": axolotl.TABLE, "llama-factory-0.9.5": llama_factory.TABLE, "trl-1.16": trl.TABLE}
CHATS = AXOLOTL_CHAT.replace("type: chat_template\n", "type: chat_template\n    {}\n", 1)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tests lie in a folder of their own, and nothing is looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("stack", TABLES)
def test_every_key_of_their_schemas_has_a_rule(stack: str):
    names = (KEYS / f"{stack}.txt").read_text().split()
    assert len(names) > 50
    assert [name for name in names if rule_of(TABLES[stack], name) is None] == []


@pytest.mark.parametrize(("stack", "text"), [("axolotl", AXOLOTL_CHAT), ("llama-factory", LLAMA_FACTORY), ("trl", TRL)])
def test_each_key_is_answered_and_its_stack_is_found(stack: str, text: str):
    given = yaml.safe_load(text)
    assert stack_of(given) == stack
    migration = migrated(given, stack)
    assert {note.key for note in migration.notes} == given.keys() | migration.by_default


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (
            CHATS.format("message_property_mappings: {role: from, content: value, weight: w}"),
            {"data.columns": {"role": "from", "content": "value"}},
        ),
        (
            CHATS.format("message_property_mappings: {role: from}\n    message_field_content: value"),
            {"data.columns": {"role": "from", "content": "value"}},
        ),
        (
            CHATS.format("split: test\n  - path: b\n    split: train[:10]"),
            {
                "data.sources": [
                    {"path": "fozziethebeat/alpaca_messages_2k_test", "kind": "messages", "train_split": "test"},
                    {"path": "b", "kind": "messages"},
                ]
            },
        ),
        (CHATS.format("split: train_sft"), {"data.train_split": "train_sft", "data.sources": None}),
        (
            TRL.replace("dataset_name: trl-lib/Capybara", "datasets: [{path: a}, {path: b, split: sft}]"),
            {"data.sources": [{"path": "a"}, {"path": "b", "train_split": "sft"}]},
        ),
        (TRL, {"data.train_on": None, "longctx.global_batch_tokens": 2 * 8 * 4096, "training.logging_steps": 10}),
        (
            TRL.replace("assistant_only_loss: true\n", "").replace("learning_rate: 2.0e-4\n", ""),
            {"data.train_on": "all", "training.learning_rate": 2e-5, "model.lora.dropout": 0.05},
        ),
        (TRL.replace("assistant_only", "completion_only"), {"data.train_on": None, "training.bf16": "auto"}),
        (
            TRL.replace("max_length: 4096\n", "fp16: true\n").replace("gradient_checkpointing: true\n", ""),
            {"longctx.longest_document": 1024, "training.gradient_checkpointing": True, "training.bf16": None},
        ),
        (
            LLAMA_FACTORY.replace("cutoff_len: 2048\n", "add_tokens: <a>,<b>\nadd_special_tokens: <c>\n"),
            {"longctx.longest_document": 2048, "model.added_tokens": ["<a>", "<b>", "<c>"]},
        ),
        (
            AXOLOTL_CHAT + "dataloader_pin_memory: false\ngreater_is_better: false\ndeepspeed: /home/liz1/ds.json\n"
            "optim_args: {momentum: 0.9, ns_steps: 3}\n",
            {
                **{"training.dataloader_pin_memory": False, "training.greater_is_better": False},
                **{"longctx.sharding": None, "training.optim_args": "momentum=0.9,ns_steps=3", "training.tf32": False},
            },
        ),
        *(
            (f"{AXOLOTL_CHAT}deepspeed: {given}\n", {"longctx.sharding": sharding})
            for given, sharding in (
                *(
                    ("a/zero3_bf16.json", "zero3"),
                    ("a/ds_z2.json", "zero2"),
                    ("{zero_optimization: {stage: 0}}", "ddp"),
                ),
            )
        ),
        (AXOLOTL_CHAT.replace("sequence_len: 4096", "sequence_len: 1e3"), {"longctx.longest_document": 1000}),
        (
            AXOLOTL_CHAT + "overrides_of_model_config: {attention_dropout: 0.0}\n",
            {"model.config": {"attention_dropout": 0.0}},
        ),
        *(
            (f"{text}{key}: 0.01\n", {"model.config": {"output_router_logits": True, "router_aux_loss_coef": 0.01}})
            for text, key in ((LLAMA_FACTORY, "moe_aux_loss_coef"), (TRL, "router_aux_loss_coef"))
        ),
    ],
)
def test_values_of_theirs_are_ours(text: str, ours: dict[str, Any]):
    given = yaml.safe_load(text)
    migration = migrated(given, stack_of(given))
    assert {key: migration.get(key) for key in ours} == ours


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            CHATS.format("roles_to_train: [user, assistant]"),
            "roles_to_train: labels are what the assistant writes; data",
        ),
        (
            CHATS.format("train_on_eos: all"),
            "train_on_eos: the end of each turn of the assistant is learned; data.train_on",
        ),
        (AXOLOTL_CHAT + "deepspeed: /home/liz1/ds.json\n", "its stage is not in its name"),
        (AXOLOTL_CHAT, "axolotl holds the frozen weights in bfloat16 where it computes in it: model.dtype: bfloat16"),
        (LLAMA_FACTORY, "llama-factory holds the frozen weights in the checkpoint's dtype: model.dtype: bfloat16"),
        (TRL.replace("assistant_only_loss: true", ""), "rows of prompt and completion, where TRL learns completions"),
        (TRL.replace("lora_target_modules: all-linear", ""), "PEFT takes what it does for a model's class"),
    ],
)
def test_what_differs_is_said(text: str, advice: str):
    given = yaml.safe_load(text)
    notes = migrated(given, stack_of(given)).notes
    assert any(note.kind == "without" and advice in note.text for note in notes), notes


ROWS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
"""A batch of Trainer's, for each GPU."""


@pytest.mark.parametrize(
    ("text", "changes", "tokens"),
    [
        (LLAMA_FACTORY, {"packing": True}, 2 * 8 * 2048),
        (LLAMA_FACTORY, {"neat_packing": True, "cutoff_len": "8e3"}, 2 * 8 * 8000),
        (LLAMA_FACTORY, {"packing": True, "per_device_train_batch_size": "left out"}, 2 * 8 * 8 * 2048),
        (LLAMA_FACTORY, {"stage": "pt"}, 2 * 8 * 2048),
        (LLAMA_FACTORY, {"stage": "pt", "packing": False}, None),
        (LLAMA_FACTORY, {}, None),
        (TRL, ROWS, 2 * 8 * 4096),
        (TRL, ROWS | {"packing": False}, None),
        (TRL, ROWS | {"max_length": None}, None),
    ],
)
def test_rows_that_documents_are_packed_into_are_counted_in_tokens(
    text: str, changes: dict[str, Any], tokens: int | None
):
    given = yaml.safe_load(text) | changes
    given = {key: value for key, value in given.items() if value != "left out"}
    migration = migrated(given, stack_of(given), gpus=2)
    assert migration.get("longctx.global_batch_tokens") == tokens
    kept = {key: migration.get(f"training.{key}") for key in ROWS}
    assert kept == (ROWS if tokens is None else dict.fromkeys(ROWS))


def test_weights_that_are_all_trained_or_in_bfloat16_already_are_not_advised_about():
    for text in (AXOLOTL_CHAT.replace("adapter: lora", ""), AXOLOTL_CHAT + "bfloat16: true\n", TRL + "bf16: true\n"):
        given = yaml.safe_load(text)
        assert not [note for note in migrated(given, stack_of(given)).notes if "half the memory" in note.text]


def test_a_file_of_deepspeed_that_is_there_says_its_stage_and_two_lists_of_data_are_refused():
    Path("z1.json").write_text('{"zero_optimization": {"stage": 2}}')
    given = yaml.safe_load(AXOLOTL_CHAT) | {"deepspeed": "z1.json"}
    assert migrated(given, "axolotl").get("longctx.sharding") == "zero2"
    with pytest.raises(ValueError, match=r"pretraining_dataset: .*documents come from another key already"):
        migrated(given | {"pretraining_dataset": ["b.jsonl"]}, "axolotl")


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (
            "gradient_accumulation_steps: 4\n",
            {
                **{"longctx.longest_document": 512, "longctx.global_batch_documents": 4, "training.bf16": "auto"},
                **{"training.num_train_epochs": 1.0, "training.lr_scheduler_type": "cosine"},
                **{"training.warmup_steps": 0.03, "training.save_strategy": "epoch", "training.save_total_limit": 4},
                **{"training.logging_steps": 0.005, "model.chat_template": "alpaca", "model.lora": None},
            },
        ),
        (
            "sequence_len: 2048\nnum_epochs: 3\nlr_scheduler: linear\nwarmup_steps: 0\nbf16:\nsaves_per_epoch: 2\n",
            {
                **{"longctx.longest_document": 2048, "training.num_train_epochs": 3.0, "training.bf16": None},
                **{"training.lr_scheduler_type": "linear", "training.warmup_steps": 0},
                "training.save_steps": 1 / 6,
            },
        ),
        ("lr_scheduler:\nfp16: true\n", {"training.lr_scheduler_type": "cosine", "training.bf16": None}),
        ("chat_template: chatml\n", {"model.chat_template": "chatml"}),
        ("tokens: {pad_token: <p>, eos_token: </s>}\n", {"model.eos_token": "</s>", "model.added_tokens": None}),
    ],
    ids=["all", "none", "empty ones", "template", "tokens as before"],
)
def test_what_axolotl_does_by_itself_is_ours_and_marked(text: str, ours: dict[str, Any]):
    given = yaml.safe_load(
        f"base_model: m\nlearning_rate: 1.0e-4\ndatasets: [{{path: org/rows, type: alpaca}}]\n{text}"
    )
    migration = migrated(given, "axolotl")
    assert {key: migration.get(key) for key in ours} == ours
    marked = {note.key for note in migration.notes if note.text.endswith("(axolotl's default, left out in the file)")}
    assert marked == migration.by_default == axolotl.defaults(given).keys()


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("lora_alpha: 16\n", "lora_r: axolotl has no default; here model.lora: r 16"),
        ("lora_r: 8\n", "lora_alpha: axolotl has no default; here model.lora: alpha 32"),
        ("", "lora_r, lora_alpha: axolotl has no default; here model.lora: r 16, alpha 32"),
    ],
)
def test_an_adapter_whose_rank_or_targets_are_left_out_is_noted(given: str, missing: str):
    notes = migrated(yaml.safe_load(f"base_model: m\nadapter: lora\n{given}"), "axolotl").notes
    assert [note.text for note in notes if note.key == "adapter" and note.kind == "without"] == [
        missing,
        "no targets, of which axolotl has no default; here model.lora.target_modules: all-linear",
    ]


def test_defaults_that_are_written_are_those_of_the_released_package_and_not_ours():
    from trl import ModelConfig, SFTConfig

    theirs = {field.name: field.default for kind in (SFTConfig, ModelConfig) for field in dataclasses.fields(kind)}
    # Trainer's batch of 8 decides about longctx; bf16 is auto where neither it nor fp16 is given.
    given = trl.defaults({"use_peft": True})
    assert given == {key: theirs[key] for key in given} | {"bf16": "auto"}
    own = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    assert {
        key for key in own.keys() & theirs.keys() if own[key] != theirs[key] and theirs[key] is not dataclasses.MISSING
    } <= given.keys()
    for key in ("save_strategy", "save_total_limit", "logging_steps"):
        assert default_of(key) != axolotl.DEFAULTS[key]


def test_what_trl_does_by_itself_is_marked_as_its_default():
    given = yaml.safe_load(TRL)
    notes = {note.key: note.text for note in migrated(given, "trl").notes}
    assert notes["logging_steps"] == "training.logging_steps: 10 (trl's default, left out in the file)"
    assert "default" not in notes["max_length"]


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (AXOLOTL_CHAT.replace("adamw_bnb_8bit", "muon"), {"training.optim": "muon"}),
        (AXOLOTL_CHAT + "loraplus_lr_ratio: 16\n", {"longctx.loraplus_lr_ratio": 16.0}),
        (
            AXOLOTL_CHAT.replace("adapter: lora", "loraplus_lr_ratio: 16"),
            {"longctx.loraplus_lr_ratio": None, "model.lora": None},
        ),
        (
            LLAMA_FACTORY.replace("finetuning_type: lora\n", ""),
            {"model.lora.r": 8, "model.lora.target_modules": "all-linear"},
        ),
        (LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: full"), {"model.lora": None}),
        (TRL.replace("use_peft: true\n", ""), {"model.lora": None}),
        (
            LLAMA_FACTORY + "use_muon: true\nloraplus_lr_ratio: 8\nloraplus_lr_embedding: 1.0e-5\n",
            {
                **{"training.optim": "muon", "longctx.loraplus_lr_ratio": 8.0},
                "longctx.loraplus_lr_embedding": 1e-5,
            },
        ),
    ],
    ids=["muon", "LoRA+", "no adapter", "an adapter by default", "full", "no PEFT", "LLaMA-Factory's"],
)
def test_optimizers_and_adapters_of_theirs_are_ours(text: str, ours: dict[str, Any]):
    given = yaml.safe_load(text)
    migration = migrated(given, stack_of(given))
    assert {key: migration.get(key) for key in ours} == ours
