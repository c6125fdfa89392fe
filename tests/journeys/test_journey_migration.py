"""Someone who comes with a file of axolotl, LLaMA-Factory or TRL: every key is answered, and what is written trains."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from hf_longctx.cli import main
from hf_longctx.commands.migrate import migrated, stack_of
from hf_longctx.config import load_config
from hf_longctx.migration import axolotl, llama_factory, trl
from hf_longctx.migration.rules import rule_of
from hf_longctx.settings.training import default_of
from tests.builders.tiny_embedded import write_embedded
from tests.builders.training_runs import fresh_accelerator_state
from tests.journeys.alpaca_chats import alpaca_chats

KEYS = Path(__file__).parents[1] / "builders" / "migration_keys"
"""Names of the keys in the schemas of the released packages."""
TABLES = {"axolotl-0.19": axolotl.TABLE, "llama-factory-0.9.5": llama_factory.TABLE, "trl-1.16": trl.TABLE}
AXOLOTL_CHAT = """
base_model: NousResearch/Meta-Llama-3-8B-Instruct
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: true
load_in_4bit: false
chat_template: llama3
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
"""
"""Keys and values of axolotl's example for Llama 3, LoRA on chats (examples/llama-3/instruct-lora-8b.yml)."""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine
dataset_dir: data
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
overwrite_cache: true
output_dir: saves/lora
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
deepspeed: examples/deepspeed/ds_z3_config.json
val_size: 0.1
"""
INFO = {
    "mine": {
        "file_name": "mine.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "customer", "assistant_tag": "agent"},
    },
    "pairs": {"file_name": "pairs.json", "ranking": True},
}
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
use_peft: true
lora_r: 32
lora_target_modules: all-linear
max_length: 4096
packing: true
assistant_only_loss: true
learning_rate: 2.0e-4
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
num_train_epochs: 1
output_dir: Qwen3-SFT
eos_token: <|im_end|>
"""
MISTAKEN = (
    *("special_tokens: ['<a>']", "tokens: 5", "sequence_len: [1]", "val_set_size: [1]", "saves_per_epoch: 0"),
    *("num_epochs: many", "micro_batch_size: 1.5", "datasets: [5]", "datasets: [{path: a, roles: [b]}]"),
    *("datasets: [{path: a, message_property_mappings: [b]}]", "deepspeed: {zero_optimization: [1]}"),
)
"""Values of axolotl's keys that no rule can read."""
OTHER_TRAINERS = (
    "loss_type: dft",
    "beta: 0.1",
    "num_generations: 8",
    "max_prompt_length: 512",
    "lora_task_type: SEQ_CLS",
)
CHATS = AXOLOTL_CHAT.replace("type: chat_template\n", "type: chat_template\n    {}\n", 1)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))


def typed(capsys: Any, *words: str, code: int = 0) -> str:
    fresh_accelerator_state()
    status = main(list(words))
    shown = capsys.readouterr()
    assert status == code, shown
    return shown.err if code else shown.out


def said_of(shown: str, heading: str) -> str:
    return shown.partition(f"\n{heading}")[2].partition("\n\n")[0]


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


def test_axolotls_chat_example_becomes_a_finished_run_in_three_commands(tmp_path: Path, capsys: Any):
    """The model's path is the only override of what is typed. A tiny model lies where the embedded one would, and twenty chats
    where a hub's data set would."""
    write_embedded(tmp_path / "cache")
    folder = Path("fozziethebeat/alpaca_messages_2k_test")
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in alpaca_chats()))
    Path("instruct-lora-8b.yml").write_text(AXOLOTL_CHAT)

    shown = typed(capsys, *["migrate", "instruct-lora-8b.yml", "--output", "chat.yaml"])
    trained = typed(capsys, *["train", "chat.yaml", "model.path=embedded:smollm2-135m"])
    measured = typed(capsys, *["evaluate", "outputs/lora-out", "--tasks", "position,length"])

    without = said_of(shown, "Without counterpart: what to do instead")
    assert "load_in_8bit: weights of 8 bits are not loaded" in without
    assert "optimizer: training.optim: adamw_torch, for bitsandbytes is not installed here" in without
    assert "  load_in_4bit: off, or empty" in said_of(shown, "Needless here")
    assert "outputs/lora-out: the adapter, report.html, README.md" in trained
    results = json.loads(Path("outputs/lora-out/results.json").read_text())
    assert results["eval_loss_after"] < results["eval_loss_before"]
    assert (results["documents"], results["ranks"]) == (19, 1)
    assert "Documents: what the run outputs/lora-out holds out" in measured
    assert "outputs/lora-out: 1 documents" in measured
    config = load_config("chat.yaml")
    assert config.model.lora is not None
    assert (config.model.lora.r, config.model.lora.alpha, config.model.lora.dropout) == (32, 16.0, 0.05)
    assert (config.longctx.global_batch_documents, config.longctx.longest_document) == (8, 4096)
    assert (config.data.eval_fraction, config.training["eval_steps"]) == (0.05, 1 / 16)
    assert (config.training["warmup_steps"], config.training["save_strategy"]) == (0.1, "epoch")


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
        (TRL, {"data.train_on": None, "training.per_device_train_batch_size": 2, "training.logging_steps": 10}),
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


def test_an_adapter_whose_rank_or_targets_are_left_out_is_noted():
    notes = migrated(yaml.safe_load("base_model: m\nadapter: lora\nlora_alpha: 16\n"), "axolotl").notes
    assert [note.text for note in notes if note.key == "adapter" and note.kind == "without"] == [
        "lora_r: axolotl has no default; here model.lora: r 16, alpha 32",
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


def test_llama_factorys_data_sets_are_found_with_columns_tags_and_template(capsys: Any):
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(INFO))
    Path("data/mine.jsonl").write_text('{"dialog": []}\n')
    Path("llama3.yaml").write_text(LLAMA_FACTORY)
    shown = typed(capsys, "migrate", "llama3.yaml")
    assert "train:  hf-longctx train llama3-hf_longctx.yaml" in shown
    config = load_config("llama3-hf_longctx.yaml")
    assert config.data.path == {"train": ["data/mine.jsonl"]}
    assert config.data.columns == {"messages": "dialog", "role": "who", "content": "says"}
    assert config.data.roles == {"customer": "user", "agent": "assistant"}
    assert config.model.chat_template == "llama3"
    assert (config.longctx.sharding, config.longctx.long_documents) == ("zero3", "truncate")
    assert config.training["gradient_accumulation_steps"] == 8


def test_trls_file_trains_on_packed_documents_and_answers(capsys: Any):
    Path("sft.yaml").write_text(TRL)
    shown = typed(capsys, "migrate", "sft.yaml", "--gpus", "2")
    assert "  packing: documents are always packed" in said_of(shown, "Needless here")
    config = load_config("sft-hf_longctx.yaml")
    assert (config.data.path, config.model.eos_token, config.longctx.longest_document) == (
        "trl-lib/Capybara",
        "<|im_end|>",
        4096,
    )
    assert config.model.lora is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AXOLOTL_CHAT + "rl: dpo\n", "nothing is written: rl: 'dpo': another objective than next-token loss"),
        (LLAMA_FACTORY.replace("stage: sft", "stage: kto"), "stage: 'kto': another objective"),
        (LLAMA_FACTORY.replace("dataset: mine", "dataset: pairs"), "pairs holds preferences"),
        (
            "model: m\nmodel_class: llm\ntrain_dataset: data/demo.yaml\ncutoff_len: 2048\npeft_config: {name: lora, r: 16}\n",
            "a key of LLaMA-Factory's v1, whose files have another schema",
        ),
        ("learning_rate: 1\n", "whose file it is cannot be told by its keys"),
        ("- a\n", "holds no mapping of keys, but list"),
        ("# empty\n", "holds no mapping of keys, but nothing"),
        ("a: [", "not valid YAML"),
        (AXOLOTL_CHAT + "learning_rate: 1\n", "line 28: learning_rate: written twice, here and in line 41"),
        *((f"base_model: m\n{text}\n", f"{text.partition(':')[0]}: ") for text in MISTAKEN),
        *((TRL + f"{text}\n", f"{text.partition(':')[0]}: ") for text in OTHER_TRAINERS),
    ],
)
def test_what_cannot_be_translated_is_refused_and_nothing_is_written(text: str, message: str, capsys: Any):
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(INFO))
    Path("theirs.yaml").write_text(text)
    shown = typed(capsys, "migrate", "theirs.yaml", code=2)
    assert message in shown
    assert "Traceback" not in shown
    assert not Path("theirs-hf_longctx.yaml").exists()


def test_keys_that_nobody_knows_and_what_is_left_to_do_are_said(capsys: Any):
    Path("theirs.yaml").write_text(
        "base_model: org/model\ndatasets: [{path: rows.csv, type: completion, shards: 2}]\nnonsense: 3\n"
    )
    shown = typed(capsys, "migrate", "theirs.yaml")
    assert "nonsense: no key that axolotl is known to have" in said_of(shown, "Without counterpart: what to do instead")
    assert re.search(r"what is left to do:\n.*\n.*data\.path: must be .* got 'rows.csv'", shown)
    assert "theirs-hf_longctx.yaml exists" in typed(capsys, "migrate", "theirs.yaml", code=2)
