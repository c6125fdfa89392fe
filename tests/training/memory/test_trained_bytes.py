"""Bytes of weights, gradients and optimizer, against the tensors of the model that is trained: what adapters add, modules that
are trained whole beside them, embeddings of some tokens, rows for new tokens, and Muon's one state of a matrix."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.other import ModulesToSaveWrapper

from hf_longctx.commands.preflight.run_memory import planned_run
from hf_longctx.config import load_config
from hf_longctx.models.adapters.new_rows import add_rows
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.training.memory.capacity import adapted_projections, trained_weights
from hf_longctx.training.muon import hidden_matrices
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import tiny_llama

LORA: dict[str, dict[str, Any]] = {
    "projections": {"target_modules": ["q_proj", "up_proj"]},
    "embeddings and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "rows of tokens": {"trainable_token_indices": [3, 5]},
    "adapters of the head, DoRA": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "ranks by module": {"rank_pattern": {"q_proj": 2}},
}
RANKS = 4


def counted(model: Any, optim: str, sharding: str) -> MemoryModel:
    adapters = adapted_projections(model)
    weight = 2 if next(model.parameters()).dtype is torch.bfloat16 else 4
    return MemoryModel.from_config(
        model.config,
        sharding=sharding,
        world_size=RANKS,
        weight_bytes=weight,
        activation_bytes=weight,
        optimizer_bytes=8 if adapters else 2 * weight,
        lora_rank=max(adapters.values(), default=0),
        lora_targets=[name for name in adapters if name != "lm_head"] or None,
        trained=trained_weights(model, optim),
    )


def assert_counted(model: Any, optim: str) -> None:
    """Compare with the bytes of the model's own tensors, whole on every rank, and in parts."""
    of_muon = {id(weight) for weight in hidden_matrices(model)} if optim == "muon" else set()
    learns = [weight for weight in model.parameters() if weight.requires_grad]
    states = sum((1 if id(weight) in of_muon else 2) * weight.nbytes for weight in learns)
    memory = counted(model, optim, "ddp")
    assert memory.weights == sum(weight.nbytes for weight in model.parameters())
    assert memory.optimizer == states
    once_more = memory.gradients - sum(weight.nbytes for weight in learns)
    # The gradient of one weight as it is computed, and that of a tied head, which waits for the embeddings'.
    tied = model.config.tie_word_embeddings
    assert 0 <= once_more <= (1 + tied) * max(weight.nbytes for weight in model.parameters())
    assert counted(model, optim, "zero2").optimizer == pytest.approx(states / RANKS, abs=64)


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", LORA)
def test_what_is_trained_beside_frozen_weights_is_counted_exactly(case: str, tied: bool, optim: str):
    for dtype in (torch.float32, torch.bfloat16):
        model = add_lora(tiny_llama(dtype, tie_word_embeddings=tied), r=4, **LORA[case])
        assert_counted(model, optim)
        counts = trained_weights(model, optim)
        trained_head = isinstance(model.get_output_embeddings(), ModulesToSaveWrapper)
        assert counts.head == (trained_head or (case == "rows of tokens" and tied))
        assert counts.merged_head == (case == "rows of tokens" and tied)


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_all_weights_and_rows_of_new_tokens_are_counted_exactly(optim: str):
    model = tiny_llama()
    before = counted(model, optim, "ddp")
    add_rows(model, 135)
    assert_counted(model, optim)
    assert counted(model, optim, "ddp").weights - before.weights == 2 * 7 * 64 * 4


def test_a_dry_run_counts_what_its_file_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained("base")
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained("base")
    Path("rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
    lora = {"r": 2, "modules_to_save": ["embed_tokens", "lm_head"]}
    settings: dict[str, Any] = {
        "model": {"path": "base", "added_tokens": ["<a>", "<b>"], "lora": lora},
        "data": {"path": "rows.jsonl"},
        "longctx": {"capacity": 512},
        "training": {"use_cpu": True, "bf16": False, "optim": "muon"},
    }
    Path("run.yaml").write_text(json.dumps(settings))
    run = planned_run(load_config("run.yaml"), 1)
    assert run.memory is not None
    copies = 2 * (len(tokenizer) + 2) * 64 * 4
    learns = sum(weight.nbytes for weight in run.model.parameters() if weight.requires_grad)
    assert run.memory.weights == sum(weight.nbytes for weight in run.model.parameters())
    assert run.memory.optimizer == 2 * copies + (learns - copies)


def test_weights_that_are_frozen_stay_half_as_large_where_fsdp2_computes_in_bfloat16(tmp_path: Path):
    """accelerate makes float32 of those alone that are trained."""
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
    tiny_llama().config.save_pretrained(tmp_path / "base")
    settings: dict[str, Any] = {
        "model": {"path": str(tmp_path / "base"), "dtype": "bfloat16", "lora": {"r": 2}},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "longctx": {"capacity": 512, "sharding": "zero2"},
        "training": {"use_cpu": True, "output_dir": str(tmp_path / "out")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))

    def weights_with(*overrides: str) -> int:
        run = planned_run(load_config(tmp_path / "run.yaml", overrides), RANKS)
        assert run.memory is not None
        return run.memory.weights

    in_bfloat16 = weights_with("training.bf16=true")
    assert in_bfloat16 == weights_with("training.bf16=false")
    copies = "model.lora.modules_to_save=[embed_tokens, lm_head]"
    assert weights_with("training.bf16=true", copies) > weights_with("training.bf16=false", copies)
