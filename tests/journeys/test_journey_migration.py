"""Someone who comes with a file of axolotl, LLaMA-Factory or TRL: every key is answered, and what is written trains."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.cli import main
from hf_longctx.config import load_config
from tests.builders.migrated_files import AXOLOTL_CHAT, INFO, LLAMA_FACTORY, TRL
from tests.builders.tiny_embedded import write_embedded
from tests.builders.training_runs import fresh_accelerator_state
from tests.journeys.alpaca_chats import alpaca_chats

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
