"""LoRA+: the B of adapters learns faster than their A, in any sharding, as a plain loop with two learning rates does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import get_scheduler

from hf_longctx import LongContextPlugin
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.planner import GlobalBatches
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import Run, arguments, documents, step_loss, train
from tests.worlds.rank_pool import RankPool

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]
PLUGIN = {"capacity": 120, "global_batch_documents": 6, "loraplus_lr_ratio": 16, "loraplus_lr_embedding": 2e-3}
SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "num_train_epochs": 2}
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "up_proj", "embed_tokens"]}
TOLERANCE = 1e-4


def model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = add_lora(tiny_llama(), **LORA)
        with torch.no_grad():
            for weight in made.parameters():
                if weight.requires_grad:
                    weight.normal_(std=0.05)
    return made


def trained(plugin: dict[str, Any], settings: dict[str, Any], resume: str | None = None) -> Run:
    run = train(model(), documents(LENGTHS), PLUGIN | plugin, SETTINGS | settings, resume=resume, in_order=True)
    run.weights = {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight for name, weight in run.weights.items()
    }
    return run


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a plain loop over documents, with a learning rate for each kind of weight."""
    made, args = model(), arguments("unused", **SETTINGS)
    groups: dict[float, list[Any]] = {1e-3: [], 16e-3: [], 2e-3: []}
    for name, weight in made.named_parameters():
        if weight.requires_grad:
            groups[2e-3 if "embed_tokens" in name else 16e-3 if "lora_B" in name else 1e-3].append(weight)
    assert [len(weights) for weights in groups.values()] == [4, 4, 2]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "lr": rate} for rate, weights in groups.items()], eps=args.adam_epsilon, weight_decay=0.1
    )
    rows, batches = documents(LENGTHS), GlobalBatches(np.array(LENGTHS), args.seed, documents=6)
    steps = [batch for epoch in range(2) for batch in batches.epoch(epoch)]
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, 0, len(steps))
    losses = []
    for batch in steps:
        loss = step_loss(made, [rows[number] for number in batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), args.max_grad_norm)
        losses.append(float(loss.detach()))
        optimizer.step()
        schedule.step()
        made.zero_grad()
    return losses, made.state_dict()


def assert_same(run: Run, plain: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights = plain
    assert run.series("loss") == pytest.approx(losses, rel=TOLERANCE)
    for name, weight in weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("plugin", [{"sharding": "ddp"}, {"sharding": "zero3"}], ids=str)
def test_two_ranks_train_as_a_plain_loop_does(plugin: dict[str, Any], ranks2: RankPool, plain: Any, tmp_path: Path):
    for run in ranks2.run(trained, plugin, {"output_dir": str(tmp_path)}):
        assert_same(run, plain)


def test_learning_rates_are_kept_in_a_checkpoint(ranks2: RankPool, plain: Any, tmp_path: Path):
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    ranks2.run(trained, {"sharding": "zero2"}, saving)
    resumed = trained({"capacity": 200}, {"output_dir": str(tmp_path)}, str(tmp_path / "checkpoint-2"))
    assert_same(resumed, plain)


def test_without_adapters_or_a_ratio_it_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="loraplus_lr_ratio=16 needs LoRA adapters, and the model has none"):
        train("llama", documents([5, 6]), PLUGIN, {"output_dir": str(tmp_path)})
    with pytest.raises(ValueError, match=r"loraplus_lr_embedding: 0\.01 needs loraplus_lr_ratio"):
        LongContextPlugin(loraplus_lr_embedding=0.01)
    with pytest.raises(ValueError, match="loraplus_lr_ratio: must be greater than or equal to 1"):
        LongContextPlugin(loraplus_lr_ratio=0.5)
    with pytest.raises(ValueError, match="loraplus_lr_ratio: must be less than or equal to 1024, got 20000"):
        LongContextPlugin(loraplus_lr_ratio=20000)
