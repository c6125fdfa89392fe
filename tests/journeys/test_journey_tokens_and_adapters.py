"""A base model that learns a chat: a template, tokens of its own, embeddings beside LoRA; trained, loaded again, merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.cli import main
from hf_longctx.commands.shared.loading import load_model
from hf_longctx.data.chats.shipped_templates import TEMPLATES, prepare_tokenizer
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.models.loss.own_logits import hidden_width
from hf_longctx.settings import model as model_settings
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import fresh_accelerator_state

CHAT = [
    {"role": "user", "content": "Say hello"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "hello hello"},
]
MARKS = ["<|im_start|>", "<|im_end|>"]
LORA = {"r": 2, "modules_to_save": ["embed_tokens", "lm_head"], "use_rslora": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base model without a template, and chats."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained("base")
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained("base")
    Path("chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 6)
    return tmp_path


def typed(*words: str, code: int = 0) -> None:
    fresh_accelerator_state()
    assert main(list(words)) == code


def config(lora: Any, **model: Any) -> str:
    settings = {
        "model": {
            "path": "base",
            "chat_template": "chatml",
            "added_tokens": MARKS,
            "eos_token": "<|im_end|>",
            "lora": lora,
        },
        "data": {"path": "chats.jsonl"},
        "longctx": {"capacity": 512, "global_batch_documents": 2},
        "training": {
            **{"output_dir": "out", "max_steps": 2, "learning_rate": 0.01, "use_cpu": True, "bf16": False},
            **{"report_to": [], "save_strategy": "no", "disable_tqdm": True},
        },
    }
    settings["model"] |= model  # type: ignore[attr-defined]
    Path("run.yaml").write_text(json.dumps(settings))
    return "run.yaml"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(60)[None]).logits


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "one matrix"])
def test_hidden_states_are_as_wide_as_what_a_trained_head_takes(tied: bool):
    """PEFT's copy of a tied head says the vocabulary's size where a Linear says how wide its inputs are."""
    model = tiny_llama(vocab_size=300, tie_word_embeddings=tied)
    added = add_lora(model, r=2, modules_to_save=["embed_tokens", "lm_head"])
    assert hidden_width(added.get_base_model()) == model.config.hidden_size


@pytest.mark.parametrize(
    "lora", [LORA, None, {"r": 2, "init_lora_weights": "pissa", "trainable_token_indices": "added"}]
)
def test_tokens_and_template_are_learned_loaded_again_and_merged(folder: Path, lora: Any):
    added = [len(byte_tokenizer()), len(byte_tokenizer()) + 1]
    if lora and "trainable_token_indices" in lora:
        lora = lora | {"trainable_token_indices": added}
    typed("train", config(lora), "--dry-run", "--ranks", "2")
    typed("train", "run.yaml")
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer.convert_tokens_to_ids(MARKS) == added
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template(CHAT[:1], tokenize=False) == "<|im_start|>user\nSay hello<|im_end|>\n"
    again = load_model("out", "float32", torch.device("cpu"))
    typed("merge", "out", "merged") if lora else Path("out").rename("merged")
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert merged.config.eos_token_id == added[1]
    for model in (again, merged):  # transformers 5.17's Trainer makes a list of it
        assert model.generation_config.eos_token_id in (added[1], [added[1]])
    assert merged.get_input_embeddings().weight.shape[0] == len(tokenizer)
    torch.testing.assert_close(logits(merged), logits(again), rtol=0, atol=1e-4)
    before, after = (
        AutoModelForCausalLM.from_pretrained(name).get_input_embeddings().weight for name in ("base", "merged")
    )
    assert not torch.allclose(after[added], before.mean(0), atol=1e-4), "new embeddings have learned"
    if lora and "trainable_token_indices" in lora:
        torch.testing.assert_close(after[: added[0]], before)


def test_tokens_that_would_not_be_trained_and_templates_that_are_none_are_refused(folder: Path, capsys: Any):
    typed("config", config({"r": 2}), code=2)
    assert "beside lora, which would not train their embeddings" in capsys.readouterr().err
    typed("config", config(None, chat_template="chatlm"), code=2)
    assert (
        "must be one of chatml, llama3, gemma, qwen, alpaca, or a file with a jinja template" in capsys.readouterr().err
    )
    typed("config", config({"r": 2, "loftq_config": {}, "modules_to_save": ["lm_head"]}), code=2)
    assert "loftq_config ({}) begins from weights that are quantised" in capsys.readouterr().err
    typed("prepare", config(None, eos_token="ab"), code=2)
    assert "eos_token 'ab' is 2 tokens of this tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("name", TEMPLATES)
def test_shipped_templates_write_what_their_models_read(name: str):
    assert tuple(TEMPLATES) == model_settings.TEMPLATES
    tokenizer = byte_tokenizer()
    if name != "alpaca":
        with pytest.warns(UserWarning, match="which are several tokens here"):
            prepare_tokenizer(tokenizer, chat_template=name)
    tokenizer = prepare_tokenizer(byte_tokenizer(), chat_template=name, added_tokens=["<|im_start|>"])
    text = tokenizer.apply_chat_template(CHAT[:2], tokenize=False)
    assert text.startswith(tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True))
    expected = {
        "chatml": "<|im_start|>user\nSay hello<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n",
        "llama3": "<|start_header_id|>user<|end_header_id|>\n\nSay hello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nhello<|eot_id|>",
        "gemma": "<start_of_turn>user\nSay hello<end_of_turn>\n<start_of_turn>model\nhello<end_of_turn>\n",
        "alpaca": f"### Instruction:\nSay hello\n\n### Response:\nhello{tokenizer.eos_token or ''}\n\n",
    }
    expected["qwen"] = expected["chatml"]
    assert text.removeprefix(tokenizer.bos_token or "") == expected[name]


def test_qwens_template_writes_tools_and_calls():
    tokenizer = prepare_tokenizer(byte_tokenizer(), chat_template="qwen", added_tokens=MARKS)
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
    messages = [CHAT[0], call, {"role": "tool", "content": "2"}]
    text = tokenizer.apply_chat_template(messages, tools=[{"name": "f"}], tokenize=False)
    assert '# Tools\n\n<tools>\n{"name": "f"}\n</tools>' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n2\n</tool_response>" in text
